"""Gradients flow through every operation, and equal the dense ones."""

from __future__ import annotations

import re

import torch

from subclass_testkit import inputs, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks import _gradient_ops as ops
from subclass_testkit.checks._gradient_base import FIX_CUT, WHY
from subclass_testkit.checks._input_gradients import InputGradientChecks
from subclass_testkit.checks._parts import with_checks_of_its_parts
from subclass_testkit.oracle import multilinear
from subclass_testkit.outcome import NotClaimed

_FIX_WEIGHT = (
    "flatten the batch dims of grad and input before grad.t() @ input, and return the result in the weight's shape and dtype"
)


@with_checks_of_its_parts
class GradientFlowTests(InputGradientChecks):
    """Gradients flow, and equal the dense ones."""

    group = "gradients"

    # --- gradients of weight and bias

    @over(*((f"x {list(lead)}{' with bias' * bias}", lead, bias) for bias in (False, True) for lead in ops.LEADS))
    @check(needs=("training",), requires=("training",), why=WHY, fix=_FIX_WEIGHT)
    def test_gradient_of_weight(self, name: str, lead: tuple[int, ...], bias: bool) -> None:
        """The gradient of the weight equals the dense one, with all batch dims reduced, in the weight's shape and dtype."""
        self.matrix()
        texts = {"b": self.bias() + ".requires_grad_()"} if bias else {}
        operation = f"p = nn.Parameter(w)\ntorch.autograd.grad({self.linear(w='p', b='b' if bias else None)}, p, g)[0]"
        suspects = {
            "no gradient at all: zeros": "torch.zeros_like(d)",
            "twice the gradient": "2 * g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])",
        }
        if self.shape[0] == self.shape[1]:
            suspects["the transposed gradient"] = "x.reshape(-1, x.shape[-1]).t() @ g.reshape(-1, g.shape[-1])"
        if lead and lead[0] > 1:
            suspects["the gradient of the first batch entry alone"] = (
                "g[:1].reshape(-1, g.shape[-1]).t() @ x[:1].reshape(-1, x.shape[-1])"
            )
            suspects["the mean over the batch in place of the sum"] = (
                f"g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1]) / {torch.Size(lead).numel()}"
            )
        self.same_gradient(operation, suspects=suspects, x=self._lead_x(lead), g=self._lead_grad(lead), operands=texts)

    @over(*((f"x {list(lead)}", lead) for lead in ops.LEADS))
    @check(
        axes="dtype", needs=("inference",), requires=("training",), why=WHY, fix="sum the output gradient over all batch dims"
    )
    def test_gradient_of_bias(self, name: str, lead: tuple[int, ...]) -> None:
        """The gradient of the bias equals the dense one, with all batch dims reduced."""
        self.matrix()
        self._same_bias_gradient(self.linear(b="b"), lead)

    def _same_bias_gradient(self, linear: str, lead: tuple[int, ...]) -> None:
        self.same_gradient(
            f"torch.autograd.grad({linear}, b, g)[0]",
            x=self.leaf(*lead) if lead else self._lead_x(lead),
            b=self.bias() + ".requires_grad_()",
            g=self._lead_grad(lead),
        )

    @over(
        "F.linear(x, w, bias=b)",
        "F.linear(x, weight=w, bias=b)",
        "F.linear(input=x, weight=w, bias=b)",
        "torch.addmm(b, x, w.t())",
    )
    @check(
        axes="one", needs=("inference",), why=WHY, fix="normalise arguments in one place, so that keywords take the same path"
    )
    def test_gradient_of_bias_by_keyword(self, linear: str) -> None:
        """The gradient of the bias is the same where the bias is given by keyword, or added by addmm."""
        self.matrix()
        self._same_bias_gradient(linear, (5,))

    @over(*ops.LAYOUTS)
    @check(
        axes="one",
        needs=("training",),
        why="gradients come transposed and expanded; .view on one raises, and a kernel that assumes contiguous rows reads wrong elements",
        fix="use reshape, or make the tensor contiguous before the kernel",
    )
    def test_gradient_of_weight_layout(self, name: str, x: str, g: str) -> None:
        """The weight's gradient doesn't depend on how input and output gradient lie in memory."""
        self.matrix()
        texts = {"x": self.x(), "g": self.grad(), "n": str(self.out_features)}
        x, g = x.format(**texts), g.format(**texts)
        self.same_gradient(f"p = nn.Parameter(w)\ntorch.autograd.grad({self.linear(w='p')}, p, g)[0]", x=x, g=g)

    @over(*(op for op in ops.PARAMETER_OPERATIONS if "to_plain" not in op))
    @check(axes="variant", needs=("training",), why=WHY, fix=FIX_CUT)
    def test_gradient_of_weight_through(self, operation: str) -> None:
        """The weight's gradient through any other operation equals the dense one, or the operation is refused."""
        self.matrix()
        texts = self._operands(operation)
        ns = {**self.script(**texts).ns}
        ns["p"] = ns["d"]
        shape = tuple(eval(operation, ns).shape)  # noqa: S307  # our own text
        dtype = torch.float64 if "float64" in operation else self.dtype
        g = inputs.activation(shape, dtype, 7) if shape else inputs.cast("torch.tensor(1.5)", dtype)
        self.same_gradient(f"p = nn.Parameter(w)\ntorch.autograd.grad({operation}, p, g)[0]", g=g, operands=texts)

    @over(*ops.SEQUENCES)
    @check(
        axes="variant",
        needs=("training",),
        why="accumulation, tied weights and zero_grad are how training loops work",
        fix="give the gradient as a plain tensor (or a class that adds and zeroes rightly)",
    )
    def test_accumulated_gradient(self, name: str, text: str) -> None:
        """After this sequence, the weight's .grad equals the dense one."""
        self.matrix()
        steps = text.format(self.linear(w="p"), self.linear(x="z", w="p"))
        texts = {"z": self.x(seed=9)} if "z, p" in steps else {}
        self.same_gradient(f"p = nn.Parameter(w)\n{steps}\np.grad", x=self.x(), g=self.grad(), operands=texts)

    @check(
        axes="one",
        needs=("inference",),
        why="debugging and distillation read gradients of intermediate results",
        fix="return the output as it is from the autograd.Function",
    )
    def test_retained_gradient_and_hooks(self) -> None:
        """A linear's output retains its gradient, and hooks on it change what flows back."""
        self.matrix()
        operation = f"""
            x = x.detach().requires_grad_()
            out = {self.linear()}
            out.retain_grad()
            out.register_hook(lambda t: t * 3)
            (out * 2).backward(g)
            x.grad, out.grad
        """
        self.same_gradient(operation, x=self.x(), g=self.grad())

    # --- into and out of the class

    @over("to_plain(w)", "linear")
    @check(
        axes="each",
        why="quantization-aware training needs the straight-through gradient of the plain weight",
        fix="build the class in an autograd.Function whose backward returns the gradient as it is",
    )
    def test_gradient_through_make(self, through: str) -> None:
        """Where make keeps the graph, the plain source gets the straight-through gradient."""
        self.matrix()
        script = self.script(
            hp="", x=self.x(), g=self.grad() if through == "linear" else inputs.activation(self.shape, self.dtype, 7)
        )
        script.run(f"hp = ({self.hp()}).requires_grad_()")
        script.run(f"w = {self.subject.make_text}")
        if script["w"].grad_fn is None:
            raise NotClaimed("make gives a tensor without graph")
        script.run("d = plain(w).clone()")
        out = self.linear() if through == "linear" else "to_plain(w)"
        if not script.value(f"{out}.requires_grad", extend=False):
            raise NotClaimed(f"{out} has no graph")
        script.run(f"{out}.backward(g)")
        bound = None
        if through == "linear":
            bound = self._bound(multilinear(5), script, "g.t() @ x", script["hp"], ("x", "g"))
        script.expect(
            "hp.grad is not None", f"{out}.backward(g) gives the source no gradient, although w has a grad_fn.", kind="cut"
        )
        script.equal(
            "hp.grad",
            "g.t() @ x" if through == "linear" else "g",
            label=f"the source's gradient through make and {through}",
            bound=bound,
        )

    @check(
        level="should",
        axes="one",
        needs=("training",),
        why="quantization-aware training needs the straight-through gradient of the plain weight; here it gets none, without an error",
        fix="build the class in an autograd.Function whose backward returns the gradient as it is, or, if it detaches on purpose, leave it: nothing else depends on it",
    )
    def test_make_keeps_the_graph(self) -> None:
        """The class made from a tensor that requires grad is connected to it."""
        make = self.subject.make_text
        if re.match(rf"(\w+\.)*{self.subject.cls.__name__}\(", make):
            raise NotClaimed("a constructor doesn't take part in autograd")
        script = self.script(hp="")
        script.run(f"hp = ({self.hp()}).requires_grad_()\nw = {make}")
        script.expect(
            "w.grad_fn is not None", f"{make} of a tensor that requires grad has no graph: hp gets no gradient.", kind="cut"
        )

    @check(
        axes="each",
        why="losses on the weight itself (regularizers, exports under autograd) go through it",
        fix="dequantize in an autograd.Function whose backward returns the gradient as it is",
    )
    def test_gradient_through_to_plain(self) -> None:
        """Where reading the values keeps the graph, the gradient arrives as it is."""
        script = self.script(g=inputs.activation(self.shape, self.dtype, 7))
        script.run("p = nn.Parameter(w)\nv = to_plain(p)")
        if not script["v"].requires_grad:
            raise NotClaimed(f"{self.subject.to_plain_text} has no graph")
        script.run("v.backward(g)")
        script.expect("p.grad is not None", "to_plain(p).backward(g) leaves p.grad None.", kind="cut")
        script.equal("p.grad", "g", label="the gradient of p through to_plain(p)")

    # --- flags, and what is saved

    @over(*ops.FLAGS)
    @check(
        axes="one",
        why="optimizers, fine-tuning and torch.nn rely on these flags",
        fix="handle detach (a new object of the class) and leave requires_grad to torch",
    )
    def test_flags(self, name: str, lines: str, condition: str) -> None:
        """requires_grad, is_leaf, grad_fn and the class are as for a plain tensor, after requires_grad_, Parameter and detach."""
        if "C)" in condition and self.decays_by_design:
            raise NotClaimed("the class switches __torch_function__ off: what comes of it is plain")
        script = self.script()
        script.ns["C"] = self.subject.cls
        condition = condition.replace("C)", f"{self.subject.cls.__name__})")
        script.run(lines)
        states = {
            n: f"{n}: {{type({n}).__name__}}, requires_grad={{{n}.requires_grad}}, is_leaf={{{n}.is_leaf}}"
            for n in ("w", "p", "v")
            if n in script.ns
        }
        script.expect(
            condition,
            f"after `{lines.splitlines()[-1].strip()}`, not all of this holds: {condition.replace('{', '').replace('}', '')} ({'; '.join(states.values())}).",
            kind="flags",
        )

    @check(
        axes="one",
        why="detach is how EMA, logging and state_dict look at a weight: a copy costs its memory, and goes stale",
        fix="pass the inner tensors on, detached, not cloned",
    )
    def test_detach_shares_memory(self) -> None:
        """detach() of the class shares its inner tensors' memory, and equals it."""
        script = self.script()
        script.run("p = nn.Parameter(w)\nv = p.detach()")
        if not script.value("isinstance(v, type(w))", extend=False):
            raise NotClaimed("detach gives a plain tensor (see flags)")
        script.equal("plain(v)", "d", label="p.detach()")
        if oracle.inner_tensors(script["v"]) and not oracle.shares_memory(script["p"], script["v"]):
            script.fail(
                "p.detach() has inner tensors in memory of their own: a write into it doesn't reach p.",
                kind="copy",
                assertion="homes = lambda t: {getattr(t, n).untyped_storage().data_ptr() for n in t.__tensor_flatten__()[0]}\nassert homes(p) & homes(v)",
            )

    @over("p.mul_(-1)", "p.add_(1)", "p.copy_(o)", "p.zero_()", "x.mul_(-1)", "p.neg_()")
    @check(
        axes="variant",
        needs=("inference",),
        why="an optimizer step between forward and backward silently gives gradients of other values",
        fix="save tensors with save_for_backward, so that torch checks their versions",
    )
    def test_write_after_save(self, write: str) -> None:
        """A write between forward and backward makes the backward raise, or the gradients are those of the values of the forward."""
        self.matrix()
        train = "training" in self.case.found
        leaf, frozen = ("p", "") if write.startswith("x") else ("x", ".requires_grad_()")
        if leaf == "p" and not train:
            raise NotClaimed("only the weight's gradient depends on the input, and training is not found")
        script = self.script(x=self.x() + frozen, g=self.grad(), o=self.other())
        script.run(f"p = nn.Parameter(w, {train})\nbefore = x.detach().clone()\nout = {self.linear(w='p')}")
        script.run(f"with torch.no_grad():\n    {write}")
        script.note(
            f"try: got = torch.autograd.grad(out, {leaf}, g)[0]\nexcept RuntimeError: raise SystemExit  # as with a plain weight"
        )
        try:
            script.ns["got"] = torch.autograd.grad(script["out"], script[leaf], script["g"])[0]
        except Exception as error:
            if oracle.judge_exception(error, self.subject.refusals) == "accident":
                script.blame(error, f"backward after {write}")
            return
        want = "g @ d" if leaf == "x" else "g.t() @ before"
        bound = self._bound(
            multilinear(max(*self.shape, 5)),
            script,
            want.replace("d", "w").replace("before", "x"),
            script["got"],
            ("x", "g", "w"),
        )
        script.equal(
            "got",
            want,
            label=f"the gradient of {leaf} after forward, {write}, backward",
            bound=bound,
            likely="the backward read the values of after the write.",
        )
