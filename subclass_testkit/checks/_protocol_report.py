"""What a wrapper holds and reports: inner tensors, nothing hidden, shape, dtype, device and strides."""

from __future__ import annotations

import torch

from subclass_testkit import oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks import _kept, _sources
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import CheckFailed, Refused
from subclass_testkit.script import Script


class ReportChecks(CheckGroup):
    """Inner tensors are plain, in one place and all named; the outer report is true."""

    @over("w", "nn.Parameter(w)", "w.detach().requires_grad_()", "w.clone()")
    @check(
        needs=("wrapper",),
        why="gradients then flow to an inner tensor, which no optimizer sees; mixed devices fail in the first kernel",
        fix="detach what you keep, and move all inner tensors together",
        upstream="pytorch#162964",
    )
    def test_inner_tensors(self, expression: str) -> None:
        """Inner tensors are plain (or wrappers themselves), require no gradient, and lie on the device that the tensor reports."""
        script = self.script()
        script.run(f"s = {expression}")
        self._inner_tensors(script, expression)

    @check(
        needs=("wrapper", "quantized"),
        why="the scale then keeps the graph and the high precision weight alive",
        fix="make the constructor an autograd.Function, or detach the source first",
        upstream="pytorch#162964",
    )
    def test_inner_tensors_of_a_source_with_gradient(self) -> None:
        """Made from a source that requires grad, the inner tensors still require none."""
        script = self.script(f"({self.hp()}).requires_grad_()")
        script.run("s = w")
        self._inner_tensors(script, "make(hp)")

    def _inner_tensors(self, script: Script, label: str) -> None:
        _kept.need_wrapper(script, "s", label)
        for name, inner in oracle.inner_tensors(script["s"]).items():
            if inner.requires_grad:
                script.fail(
                    f"the inner tensor {name!r} of {label} requires grad.",
                    kind="requires_grad",
                    assertion=f"assert not s.{name}.requires_grad",
                )
            if inner.device != script["s"].device:
                script.fail(
                    f"the inner tensor {name!r} of {label} is on {inner.device}, the tensor reports {script['s'].device}.",
                    kind="device",
                    assertion=f"assert s.{name}.device == s.device",
                )
            if inner.is_meta is False and _storage_pointer(inner) == 0 and inner.numel() and type(inner) is not torch.Tensor:
                script.fail(
                    f"the inner tensor {name!r} of {label} is a {type(inner).__name__}, which has neither memory nor __tensor_flatten__.",
                    kind="inner",
                    assertion=f"assert is_traceable_wrapper_subclass(s.{name})",
                )

    @check(
        needs=("wrapper",),
        axes="variant",
        why="a tensor that flatten doesn't list is left behind by .to(device), copies, save and compile",
        fix="list it in __tensor_flatten__, or compute it when needed",
    )
    def test_no_hidden_tensor(self) -> None:
        """The instance holds no tensor that __tensor_flatten__ doesn't list, neither fresh nor after a linear."""
        script = self.script(x=self.x())
        _kept.need_wrapper(script, "w", "make(hp)")
        self._hidden(script, "")
        try:
            script.run(f"y = {self.linear()}")
        except (Refused, CheckFailed):
            return
        self._hidden(script, " after a linear")

    @check(
        level="preview",
        axes="one",
        needs=("wrapper",),
        why="an attribute hides the method of the same name from every caller: w.t() or w.data is then another thing",
        fix="give the inner tensor a name that torch.Tensor doesn't have (qdata, scale)",
    )
    def test_inner_names_hide_no_method(self) -> None:
        """No inner tensor has the name of an attribute or method of torch.Tensor."""
        script = self.script()
        script.run("names = w.__tensor_flatten__()[0]")
        script.expect(
            "not set(names) & set(dir(torch.Tensor))",
            "the inner tensors {sorted(set(names) & set(dir(torch.Tensor)))} hide what torch.Tensor has under that name.",
            kind="hidden",
        )

    def _hidden(self, script: Script, when: str) -> None:
        listed = set(script["w"].__tensor_flatten__()[0])
        for name, value in vars(script["w"]).items():
            path = next(_kept.tensors_in(value, f"w.{name}"), "")
            if path and name not in listed:
                script.fail(
                    f"{path} is a tensor{when}, and not among the flattened names {sorted(listed)}.",
                    kind="hidden",
                    assertion=f"assert {name!r} not in vars(w) or {name!r} in w.__tensor_flatten__()[0]",
                )

    @check(
        axes="all",
        needs=("wrapper",),
        why="allocation, sharding and shape checks trust what the tensor reports",
        fix="pass shape, dtype, device and layout of the source to _make_wrapper_subclass, and return the outer dtype from dequantize",
    )
    def test_reports_its_source(self) -> None:
        """Shape, dim, numel, dtype, device, layout are the source's, and the dtype and shape of its plain values."""
        script = self.script()
        for what in (
            "shape",
            "dim()",
            "numel()",
            "dtype",
            "device",
            "layout",
            "size(-1)",
            "is_floating_point()",
            "element_size()",
            "nelement()",
        ):
            script.expect(
                f"w.{what} == hp.{what}", f"w.{what} is {{w.{what}}}, its source's is {{hp.{what}}}.", kind=what.strip("()")
            )
        for what in ("shape", "dtype", "device"):
            script.expect(
                f"to_plain(w).{what} == w.{what}",
                f"to_plain(w).{what} is {{to_plain(w).{what}}}, w.{what} is {{w.{what}}}.",
                kind=what,
            )
        script.expect("len(w) == len(hp)", "len(w) is {len(w)}, its source's is {len(hp)}.", kind="shape")

    @over(*_sources.LAYOUTS)
    @check(
        needs=("wrapper",),
        axes="one",
        why="kernels and compiled code compute addresses from the reported strides",
        fix="make the data contiguous first, or report the strides of the data",
        upstream="pytorch#68265",
    )
    def test_strides_are_true(self, layout: str) -> None:
        """Made from a transposed or partial source, the reported strides and offset are those of an inner tensor with one code an element."""
        self.rows_and_columns()
        script = self.script(self._source(layout))
        w = script["w"]
        alike = {n: t for n, t in oracle.inner_tensors(w).items() if t.shape == w.shape}
        if not alike or any((t.stride(), t.storage_offset()) == (w.stride(), w.storage_offset()) for t in alike.values()):
            return
        name, inner = next(iter(alike.items()))
        what = "stride()" if inner.stride() != w.stride() else "storage_offset()"
        script.expect(
            f"w.{what} == w.{name}.{what}",
            f"made from a source that is {layout}, w.{what} is {{w.{what}}}, that of its inner tensor {name!r} is {{w.{name}.{what}}}.",
            kind="stride",
            likely="_make_wrapper_subclass was given no strides (or offset), so it assumed a contiguous tensor.",
        )

    @over(
        *[
            (f"{view}, {layout}", view, layout)
            for layout in ("transposed", "a part with an offset")
            for view in ("w.contiguous()", "w.reshape(-1)", "w.t()", "w.as_strided(w.size(), w.stride(), w.storage_offset())")
        ]
    )
    @check(
        axes="one",
        why="a layout that is reported wrong gives permuted values, without an error",
        fix="report the strides of the data",
        upstream="pytorch#68265",
    )
    def test_views_of_a_strided_source(self, case: str, view: str, layout: str) -> None:
        """Made from a transposed or partial source, contiguous, reshape, transpose and as_strided give the right values, or are refused."""
        self.rows_and_columns()
        self.need_shape(len(self.shape) == 2, "a transpose")
        self.agree(view, hp=self._source(layout))

    def _source(self, layout: str) -> str:
        """The standard weight in another memory layout, as one expression."""
        return f"(lambda hp: {_sources.LAYOUTS[layout]})({self.hp()})"


def _storage_pointer(t: torch.Tensor) -> int:
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
