"""Copies keep everything, and are independent: clone, copy, deepcopy, pickle."""

from __future__ import annotations

import re

import torch

from subclass_testkit.check import check, over
from subclass_testkit.checks import _kept
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Refused

_CLONES = (
    "w.clone()",
    "torch.clone(w)",
    "w.clone(memory_format=torch.contiguous_format)",
    "w.clone(memory_format=torch.preserve_format)",
)
_COPIES = ("copy.deepcopy(w)", "copy.copy(w)", *(f"pickle.loads(pickle.dumps(w, {p}))" for p in range(6)))
_VIEWS = ("w.t()", "w[8:16]", "w[:, 8:16]", "w[3]", "w.t()[4:]", "w[8:16].t()")
_COPIES_OF_VIEWS = ("v.clone()", "copy.deepcopy(v)", "pickle.loads(pickle.dumps(v))", "v.contiguous()", "v.detach().clone()")
_MAKERS = ("w.clone()", "copy.deepcopy(w)", "pickle.loads(pickle.dumps(w))", "w.to(w.dtype, copy=True)", "w.detach().clone()")
_WRITES = ("v.copy_(source)", "v.zero_()", "v.mul_(-1)", "v.add_(1)")
_WHY_COPY = "a model that is copied, sent or averaged must be the same model, and a separate one"
_FIX_COPY = "build the copy from copies of all inner tensors and of every attribute"


class CloneChecks(CheckGroup):
    """Clones and copies of a tensor, its views and its Parameters."""

    def source(self) -> str:
        """Values to write: other signs than the standard weight's, and rows of other magnitudes."""
        return f"({self.hp(seed=3)}).flip(-2) * -2" if len(self.shape) > 1 else f"({self.hp(seed=3)}) * -2"

    @over(*_CLONES, *_COPIES)
    @check(why=_WHY_COPY, fix=_FIX_COPY)
    def test_copy_is_kept(self, expression: str) -> None:
        """clone, deepcopy, copy and pickle (all protocols) keep class, shape, strides (or the asked format), dtype, device, context, values."""
        script = self.script()
        _kept.need_pickle(script, expression)
        script.run(f"v = {expression}")
        wrapper = "wrapper" in self.case.found
        asked = "contiguous_format" in expression
        if asked:
            strides = "{v.stride()} for shape {tuple(v.shape)}"
            script.expect("v.is_contiguous()", f"{expression} is not contiguous: strides {strides}.", kind="stride")
        klass = wrapper or "copy" in expression or "pickle" in expression
        _kept.expect_kept(script, label=expression, klass=klass, strides=not asked)

    @over(*[(f"{copy} of {view}", copy, view) for view in _VIEWS for copy in _COPIES_OF_VIEWS])
    @check(
        axes="one",
        why="a slice is what a rank saves",
        fix="copy the inner tensors as they are in the view, with its offset and strides",
    )
    def test_copy_of_a_view(self, case: str, copy: str, view: str) -> None:
        """A copy of a slice or a transpose has the values, shape, dtype and class of that view."""
        self.need_shape(len(self.shape) == 2, "views of a matrix")
        script = self.script()
        _kept.take(script, "v", view)
        _kept.need_pickle(script, copy)
        script.run(f"c = {copy}")
        script.expect(
            "c.shape == v.shape and c.dtype == v.dtype",
            f"{copy} with v = {view} is {{c.shape}} {{c.dtype}}, expected {{v.shape}} {{v.dtype}}.",
            kind="shape",
        )
        script.equal("c", "v", label=f"{copy} with v = {view}")
        script.equal("c", re.sub(r"\bw\b", "d", view), label=f"{copy} with v = {view}")

    @over(*[(f"{write} into v = {made}", made, write) for made in _MAKERS for write in _WRITES])
    @check(axes="variant", why=_WHY_COPY, fix=_FIX_COPY)
    def test_copy_is_independent(self, case: str, made: str, write: str) -> None:
        """A copy shares no memory with the original: a write into one leaves the other alone."""
        script = self.script(source=self.source())
        _kept.need_pickle(script, made)
        script.run(f"v = {made}")
        script.ns["other"] = self.subject.build(script["source"].clone())
        _kept.expect_independent(script, "v", "w", "other", f"v = {made}")
        try:
            script.run(f"with torch.no_grad():\n    _ = {write}")
        except (Refused, CheckFailed):
            return  # other checks are about writes; no memory is shared
        script.equal(
            "w",
            "d",
            label=f"after {write} into v = {made}, the original",
            likely="the copy shares an inner tensor with it.",
        )

    @over("copy.deepcopy(w)", "pickle.loads(pickle.dumps(w))", "copy.copy(w)")
    @check(
        axes="variant",
        why="modules are copied for EMA, and saved whole",
        fix="handle requires_grad, the Parameter's mark and .grad in __deepcopy__ and __reduce_ex__",
        requires=("serialization",),
    )
    def test_parameter_is_kept(self, template: str) -> None:
        """A copied Parameter is a Parameter of the class, with its requires_grad; frozen or not."""
        script = self.script()
        _kept.need_pickle(script, template)
        for grad in (True, False):
            expression = template.replace("(w)", f"(nn.Parameter(w, {grad}))")
            script.run(f"v = {expression}")
            script.expect("isinstance(v, nn.Parameter)", f"{expression} is no nn.Parameter.", kind="class")
            script.expect(
                "isinstance(v, type(w))", f"{expression} is a {{type(v).__name__}}, no {{type(w).__name__}}.", kind="class"
            )
            script.expect(f"v.requires_grad is {grad}", f"{expression}.requires_grad is {not grad}.", kind="requires_grad")
            script.equal("v", "d", label=expression)

    @check(axes="variant", why="tied weights must stay tied in the copy", fix="look up and fill the memo in __deepcopy__")
    def test_deepcopy_uses_its_memo(self) -> None:
        """deepcopy of a container that holds the tensor twice gives one copy, twice, which is another object."""
        script = self.script()
        script.run("v = copy.deepcopy([w, w])")
        script.expect("v[0] is v[1]", "copy.deepcopy([w, w]) gives two different copies.", kind="identity")
        script.expect("v[0] is not w", "copy.deepcopy([w, w]) gives w itself.", kind="identity")

    @check(
        axes="variant",
        needs=("training",),
        why="training that goes on from a deep copy loses or shares its gradient",
        fix="copy .grad in __deepcopy__",
    )
    def test_deepcopy_copies_the_gradient(self) -> None:
        """deepcopy of a Parameter copies its .grad, which is then independent; or leaves it out, as that of a plain Parameter does."""
        self.need_shape(len(self.shape) == 2, "a linear")
        script = self.script(x=self.x())
        try:
            script.run(f"p = nn.Parameter(w)\n{self.linear(w='p')}.sum().backward()")
        except CheckFailed as failure:
            raise CheckSkipped(f"backward fails by itself: {failure}") from failure
        if script["p"].grad is None:
            raise CheckSkipped("a linear gives it no gradient")
        script.run("v = copy.deepcopy(p)")
        if script["v"].grad is None:
            return  # as deepcopy of a plain Parameter does
        script.expect("v.grad is not p.grad", "copy.deepcopy(p).grad is p.grad itself.", kind="shared")
        script.equal("v.grad", "p.grad", label="copy.deepcopy(p).grad")

    @check(
        needs=("training",),
        axes="one",
        why="a training state that is copied in the middle of accumulation loses a part of the gradient, without an error",
        fix="copy .grad as torch.Tensor.__deepcopy__ does, or leave deepcopy to it",
    )
    def test_deepcopy_of_a_leaf_copies_its_gradient(self) -> None:
        """deepcopy of a leaf that isn't a Parameter copies its .grad, as that of a plain tensor does."""
        self.need_shape(len(self.shape) == 2, "a linear")
        script = self.script(x=self.x())
        script.run(f"_ = w.requires_grad_()\n{self.linear()}.sum().backward()")
        if script["w"].grad is None:
            raise CheckSkipped("a linear gives it no gradient")
        script.run("v = copy.deepcopy(w)")
        script.expect("v.grad is not None", "w.grad is set, and copy.deepcopy(w).grad is None.", kind="grad")
        script.equal("v.grad", "w.grad", label="copy.deepcopy(w).grad")

    @over(
        "w.t().contiguous()", "w.t().clone(memory_format=torch.contiguous_format)", "w[:, 8:16].contiguous()", "w.contiguous()"
    )
    @check(
        axes="one",
        why="kernels ask for contiguous data, and read memory in that order",
        fix="honour memory_format in clone, and report the strides that the data then has",
    )
    def test_contiguous_is_contiguous(self, expression: str) -> None:
        """What contiguous() and clone(memory_format=torch.contiguous_format) give reports that it is contiguous, with the same values."""
        self.need_shape(len(self.shape) == 2, "a matrix")
        script = self.script()
        script.run(f"v = {expression}")
        script.expect(
            "v.is_contiguous()",
            f"{expression} is not contiguous: strides {{v.stride()}} for shape {{tuple(v.shape)}}.",
            kind="stride",
        )
        script.equal("plain(v)", re.sub(r"\bw\b", "d", expression), label=expression)

    @over("copy.deepcopy(w)", "pickle.loads(pickle.dumps(w))", "copy.copy(w)")
    @check(
        level="should",
        axes="one",
        why="libraries mark parameters (weight_loader, tensor parallel attributes); the mark is lost in the copy",
        fix="copy what else is in __dict__",
        upstream="pytorch#117275",
    )
    def test_copy_keeps_attributes_of_users(self, expression: str) -> None:
        """An attribute that a user has set on the tensor is on its copy too."""
        script = self.script()
        _kept.need_pickle(script, expression)
        if type(script["w"]) is torch.nn.Parameter:
            raise CheckSkipped("torch's own Parameter.__deepcopy__ drops attributes")
        script.run("w.note = ['mine']")
        script.run(f"v = {expression}")
        script.expect("getattr(v, 'note', None) == ['mine']", f"{expression} lost the attribute `note`.", kind="attribute")
        if expression.startswith("copy.deepcopy"):
            script.expect("v.note is not w.note", "copy.deepcopy(w) shares the attribute `note` with w.", kind="shared")
