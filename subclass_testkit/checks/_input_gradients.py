"""The graph isn't cut, and the gradient of the input is the dense one."""

from __future__ import annotations

import torch

from subclass_testkit import inputs
from subclass_testkit.check import check, over
from subclass_testkit.checks import _gradient_ops as ops
from subclass_testkit.checks._gradient_base import FIX, FIX_CUT, WHY, WHY_CUT, GradientGroup
from subclass_testkit.outcome import NotClaimed
from subclass_testkit.script import Script

_NO_SCALE = "the gradient times a number of its own for each column, as by a scale that is missing"


class InputGradientChecks(GradientGroup):
    """Outputs require grad, and inputs get the gradients that they get from the plain weight."""

    # --- the graph isn't cut

    @over(*ops.CONNECTED)
    @check(axes="variant", needs=("inference",), why=WHY_CUT, fix=FIX_CUT)
    def test_linear_output_requires_grad(self, operand: str) -> None:
        """The output of a linear requires grad when its input, its bias or its weight does; or the linear is refused."""
        self.matrix()
        script = self.script(x=self.x(), b=self.bias())
        script.run("p = nn.Parameter(w)" if operand == "p" else f"{operand}\np = nn.Parameter(w, False)")
        script.run(f"out = {self.linear(w='p', b='b')}")
        name = {"x": "input", "b": "bias", "p": "weight"}[operand[0]]
        if name == "weight":
            self._frozen_by_design(script)
        script.expect(
            "out.requires_grad",
            f"the {name} requires grad, but the output of the linear doesn't: its gradient is lost.",
            kind="cut",
            likely="a path without autograd formula (a custom kernel, an integer product, no_grad) computes the output.",
        )

    @over(*ops.PARAMETER_OPERATIONS)
    @check(axes="one", why=WHY_CUT, fix=FIX_CUT)
    def test_output_requires_grad(self, operation: str) -> None:
        """The output of an operation on a Parameter of a class that trains requires grad; or the operation is refused."""
        self.matrix()
        script = self.script(**self._operands(operation))
        script.run("p = nn.Parameter(w)")
        if "to_plain(" in operation and "(" not in self.subject.to_plain_text:
            raise NotClaimed(f"{self.subject.to_plain_text} reads an attribute, which autograd doesn't see")
        script.run(f"out = {operation}")
        self._frozen_by_design(script)
        if "to_plain(" in operation and "quantized" not in self.case.found and not script["out"].requires_grad:
            raise NotClaimed(
                f"a wrapper without loss; {self.subject.to_plain_text} reads its inner tensor, which autograd doesn't see"
            )
        script.expect("out.requires_grad", f"p requires grad, but {operation} doesn't: the gradient is lost.", kind="cut")

    def _frozen_by_design(self, script: Script) -> None:
        """A weight for inference may give no gradient: only a class that trains must not lose one."""
        if "training" not in self.case.found and not script["out"].requires_grad:
            raise NotClaimed(
                f"training is not found, so the weight may be frozen: {self.case.facts.get('claims', {}).get('training', '')}"
            )

    # --- gradient of the input

    @over(*((f"x {list(lead)}{' with bias' * bias}", lead, bias) for bias in (False, True) for lead in ops.LEADS))
    @check(needs=("inference",), requires=("training",), why=WHY, fix=FIX)
    def test_gradient_of_input(self, name: str, lead: tuple[int, ...], bias: bool) -> None:
        """The gradient of a linear's input, with a frozen weight, equals the dense one, for every shape of input."""
        self.matrix()
        texts = {"b": self.bias()} if bias else {}
        linear = self.linear(b="b" if bias else None)
        suspects = {"no gradient at all: zeros": "torch.zeros_like(x)"}
        if self.shape[0] == self.shape[1]:
            suspects["the gradient through the transposed weight"] = f"torch.autograd.grad({self.linear(w='w.t()')}, x, g)[0]"
        suspects[_NO_SCALE] = _fit(f"torch.autograd.grad({linear}, x, g)[0]", lead)
        self.same_gradient(
            f"torch.autograd.grad({linear}, x, g)[0]",
            suspects=suspects,
            x=self._lead_x(lead) + ".requires_grad_()",
            g=self._lead_grad(lead),
            operands=texts,
        )

    @over(*ops.LAYOUTS)
    @check(
        axes="one",
        needs=("inference",),
        why="gradients come transposed and expanded; .view on one raises, and a kernel that assumes contiguous rows reads wrong elements",
        fix="use reshape, or make the tensor contiguous before the kernel",
    )
    def test_gradient_of_input_layout(self, name: str, x: str, g: str) -> None:
        """The input's gradient doesn't depend on how input and output gradient lie in memory."""
        self.matrix()
        texts = {"x": self.x(), "g": self.grad(), "n": str(self.out_features)}
        x, g = x.format(**texts), g.format(**texts)
        self.same_gradient(f"torch.autograd.grad({self.linear()}, x, g)[0]", x=f"({x}).requires_grad_()", g=g)

    @over(
        "F.linear(x, w)",
        "F.linear(x, weight=w)",
        "F.linear(input=x, weight=w, bias=b)",
        "x @ w.t()",
        "torch.mm(x, w.t())",
        "torch.addmm(b, x, w.t(), alpha=2)",
        "torch.einsum('sk,nk->sn', x, w)",
    )
    @check(axes="variant", needs=("inference",), why=WHY, fix=FIX)
    def test_gradient_of_input_through(self, operation: str) -> None:
        """Every way to write a linear gives the input the same gradient."""
        self.matrix()
        texts = {"b": self.bias()} if "b" in operation.replace("bias", "b").split("(", 1)[1] else {}
        self.same_gradient(f"torch.autograd.grad({operation}, x, g)[0]", x=self.leaf(), g=self.grad(), operands=texts)

    @over("a_", "c_")
    @check(axes="variant", needs=("inference",), why="LoRA and adapters train beside a frozen quantized weight", fix=FIX)
    def test_adapter_beside_frozen_weight(self, which: str) -> None:
        """Low-rank adapters beside and behind a frozen weight get the dense gradients; the weight gets none."""
        self.matrix()
        a = f"{inputs.activation((4, self.in_features), self.dtype, 11)}.requires_grad_()"
        c = f"{inputs.activation((self.out_features, 4), self.dtype, 12)}.requires_grad_()"
        operation = f"""
            p = nn.Parameter(w, False)
            h = {self.linear(w="p")} + F.linear(F.linear(x, a_), c_)
            torch.autograd.grad(h, {which}, g)[0]
        """
        self.same_gradient(operation, x=self.leaf(), a_=a, c_=c, g=self.grad())
        script = self.script(x=self.leaf(), g=self.grad())
        script.run(f"p = nn.Parameter(w, False)\n{self.linear(w='p')}.backward(g)")
        script.expect("p.grad is None", "a frozen weight (requires_grad=False) got a gradient.", kind="frozen")

    @over("use_reentrant=False", "use_reentrant=True")
    @check(
        axes="one",
        needs=("inference",),
        why="large models train with activation checkpointing",
        fix="keep no state between forward and backward but what is saved in ctx",
    )
    def test_checkpointed_gradient(self, how: str) -> None:
        """Under activation checkpointing (both kinds) the input's gradient is the same."""
        self.matrix()
        run = f"torch.utils.checkpoint.checkpoint(lambda x, w: {self.linear()}, x, w, {how})"
        self.same_gradient(f"x = x.detach().requires_grad_()\n{run}.backward(g)\nx.grad", x=self.x(), g=self.grad())

    @over(*ops.SAVED_TENSOR_CONTEXTS)
    @check(
        axes="one",
        needs=("inference",),
        why="offloading and checkpointing pack what autograd saves",
        fix="save tensors with save_for_backward, not as attributes, and keep the class in clone and detach",
    )
    def test_saved_tensor_hooks(self, name: str, context: str) -> None:
        """With hooks that pack what autograd saves, the input's gradient is the same."""
        self.matrix()
        self.same_gradient(
            f"with {context}:\n    out = {self.linear()}\ntorch.autograd.grad(out, x, g)[0]", x=self.leaf(), g=self.grad()
        )

    @over(*ops.TRANSFORMS)
    @check(
        axes="one",
        needs=("inference",),
        why="torch.func differentiates and batches by transforms of its own",
        fix="give the autograd.Function setup_context, and vmap or generate_vmap_rule, or raise NotImplementedError",
    )
    def test_function_transform(self, name: str, text: str) -> None:
        """torch.func's grad, vjp, jvp and vmap give the dense results, or are refused."""
        self.matrix()
        operation = text.format(linear=self.linear())
        texts = {
            name: t
            for name, t in (("g", self.grad()), ("z", self.x(seed=9)))
            if f"{name})" in operation or f"{name}," in operation
        }
        self.same_gradient(operation, x=self.x(), operands=texts)

    @check(axes="variant", needs=("inference",), why=WHY, fix="compute in float64 where the class is given float64")
    def test_gradcheck(self) -> None:
        """In float64 the input's gradient equals finite differences (torch.autograd.gradcheck)."""
        self.matrix()
        if torch.float64 not in self.subject.dtypes or self.case.rounding:
            raise NotClaimed("needs float64, and a linear that doesn't round its operands")
        x = inputs.activation((2, self.in_features), torch.float64)
        script = self.script(inputs.weight(self.shape, torch.float64), x=f"{x}.requires_grad_()")
        script.run(
            f"ok = torch.autograd.gradcheck(lambda x: {self.linear()}, (x,), raise_exception=False, atol=1e-6, rtol=1e-6)"
        )
        script.expect("ok", "gradcheck of the input's gradient fails.", kind="gradcheck")

    @over(
        ("of grad", "gx = torch.autograd.grad({linear}, x, g, create_graph=True)[0]\ntorch.autograd.grad(gx, g, z)[0]"),
        (
            "of weight",
            "p = nn.Parameter(w)\ngx = torch.autograd.grad({linear_p}, x, g, create_graph=True)[0]\ntorch.autograd.grad(gx, p, z)[0]",
        ),
    )
    @check(
        axes="one",
        needs=("inference",),
        why="gradient penalties and second-order methods differentiate gradients",
        fix="make the backward differentiable, or mark it once_differentiable, which raises",
    )
    def test_second_derivative(self, name: str, text: str) -> None:
        """The gradient of a gradient equals the dense one, or is refused."""
        self.matrix()
        operation = text.format(linear=self.linear(), linear_p=self.linear(w="p"))
        self.same_gradient(operation, x=self.leaf(), g=self.grad() + ".requires_grad_()", z=self.x(seed=9))

    @check(
        level="should",
        axes="variant",
        needs=("inference",),
        depends=("equivalence/linear-under-autocast",),
        why="mixed-precision training runs the backward of bfloat16 products",
        fix="cast input and weight as autocast does, by operations that autograd sees",
    )
    def test_gradient_under_autocast(self) -> None:
        """Under autocast the input's gradient has the input's dtype and the dense value at bfloat16's precision."""
        self.matrix()
        operation = f"""
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = {self.linear()}
            grad = torch.autograd.grad(out, x, g.to(out.dtype))[0]
            grad.bfloat16(), str(grad.dtype)[-2:]
        """
        self.same_gradient(operation, x=self.leaf(), g=self.grad())

    @over("x", "p")
    @check(
        tier="standard",
        axes="one",
        needs=("inference", "compile"),
        why="training runs compiled",
        fix="see the compilation group; the backward must trace too",
        timeout=60,
    )
    def test_gradient_under_compile(self, leaf: str) -> None:
        """Compiled (aot_eager), the gradients of input and weight are the dense ones."""
        self.matrix()
        if leaf == "p" and "training" not in self.case.found:
            raise NotClaimed("training is not found")
        torch._dynamo.reset()
        operation = f"""
            p = nn.Parameter(w, {leaf == "p"})
            f = lambda x, p: {self.linear(w="p")}
            f = f if type(w) is torch.Tensor else torch.compile(f, backend="aot_eager")
            torch.autograd.grad(f(x, p), {leaf}, g)[0]
        """
        self.same_gradient(operation, x=self.leaf(), g=self.grad())


def _fit(gradient: str, lead: tuple[int, ...]) -> str:
    """``got`` as the gradient with each column times a number of its own; nothing for one row, where that always fits."""
    if len(lead) != 1 or lead[0] < 2:
        return "None"
    return f"{gradient} * (got * {gradient}).sum(0) / ({gradient} ** 2).sum(0)"
