"""Gradients flow through every operation, and equal the dense ones."""

from __future__ import annotations

import re

import torch

from subclass_testkit import inputs, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks import _gradient_ops as ops
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.checks.slicing import shares_memory
from subclass_testkit.oracle import multilinear
from subclass_testkit.outcome import CheckFailed, Finding, NotClaimed, Refused
from subclass_testkit.script import Script, last_line

_WHY_CUT = "parameters before the operation get no gradient and never learn, without an error"
_FIX_CUT = "compute in a torch.autograd.Function with a backward for every differentiable input, or raise NotImplementedError"
_WHY = "a wrong gradient trains another model; nobody sees it but in the loss"
_FIX = "compute the gradient from the dequantized weight, in the dtype of the input, for every number of batch dims"
_FIX_WEIGHT = (
    "flatten the batch dims of grad and input before grad.t() @ input, and return the result in the weight's shape and dtype"
)
_NO_SCALE = "the gradient times a number of its own for each column, as by a scale that is missing"
_CUT = re.compile("does not require grad|to not have been used in the graph")


class GradientFlowTests(CheckGroup):
    """Gradients flow, and equal the dense ones."""

    group = "gradients"

    def matrix(self) -> None:
        """Skip where the case isn't a matrix of at least 4 x 4."""
        self.need_shape(len(self.shape) == 2 and min(self.shape) >= 4, "a linear takes a matrix")

    def same_gradient(
        self,
        operation: str,
        *,
        suspects: dict[str, str] | None = None,
        operands: dict[str, str] | None = None,
        **texts: str,
    ) -> None:
        """What ``operation`` returns (gradients of ``x``, ``p``, ... for the output gradient ``g``) equals that of the values.

        A class that rounds activations may round all operands of the products of the backward.
        """
        texts = {**(operands or {}), **texts}
        lengths = (*self.shape, *(n for name in texts if name in "xg" for n in self._size(texts[name])))
        rounded = tuple(n for n in ("w", "x", "z", "g", "y") if n in ("w", *texts))
        try:
            self.agree(operation, tolerance=multilinear(max(lengths)), rounded=rounded, suspects=suspects, operands=texts)
        except Refused as refusal:
            if _CUT.search(str(refusal)) and "create_graph" not in operation:
                message = f"{last_line(operation)}: the result doesn't depend on what requires grad ({refusal})"
                likely = "a path without autograd formula computes the result."
                raise CheckFailed(Finding("cut", message, likely, refusal.reproduction)) from refusal
            raise

    def _size(self, text: str) -> torch.Size:
        return eval(text, {"torch": torch}).shape  # type: ignore[no-any-return]  # noqa: S307  # our own text

    def leaf(self, *lead: int) -> str:
        """The source text of an activation that requires grad."""
        return self._lead_x(lead or (5,)) + ".requires_grad_()"

    def _lead_x(self, lead: tuple[int, ...]) -> str:
        return inputs.activation((*lead, self.in_features), self.dtype)

    def _lead_grad(self, lead: tuple[int, ...]) -> str:
        return inputs.activation((*lead, self.out_features), self.dtype, 7)

    # --- the graph isn't cut

    @over(*ops.CONNECTED)
    @check(axes="variant", needs=("inference",), why=_WHY_CUT, fix=_FIX_CUT)
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
    @check(axes="one", why=_WHY_CUT, fix=_FIX_CUT)
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

    def _operands(self, operation: str) -> dict[str, str]:
        texts = {
            "x": self.x(),
            "y": inputs.activation(self.shape, self.dtype, 3),
            "b": self.bias(),
            "i": f"torch.tensor([1, 0, {min(self.shape) - 1}, 1])",
            "m": f"torch.arange({torch.Size(self.shape).numel()}).reshape({', '.join(map(str, self.shape))}) % 3 == 0",
        }
        words = (
            operation.replace("(", " ")
            .replace(")", " ")
            .replace(",", " ")
            .replace("[", " ")
            .replace("]", " ")
            .replace("=", " ")
            .replace(".", " ")
            .split()
        )
        return {name: text for name, text in texts.items() if name in words}

    # --- gradient of the input

    @over(*((f"x {list(lead)}{' with bias' * bias}", lead, bias) for bias in (False, True) for lead in ops.LEADS))
    @check(needs=("inference",), requires=("training",), why=_WHY, fix=_FIX)
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
    @check(axes="variant", needs=("inference",), why=_WHY, fix=_FIX)
    def test_gradient_of_input_through(self, operation: str) -> None:
        """Every way to write a linear gives the input the same gradient."""
        self.matrix()
        texts = {"b": self.bias()} if "b" in operation.replace("bias", "b").split("(", 1)[1] else {}
        self.same_gradient(f"torch.autograd.grad({operation}, x, g)[0]", x=self.leaf(), g=self.grad(), operands=texts)

    @over("a_", "c_")
    @check(axes="variant", needs=("inference",), why="LoRA and adapters train beside a frozen quantized weight", fix=_FIX)
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

    @check(axes="variant", needs=("inference",), why=_WHY, fix="compute in float64 where the class is given float64")
    def test_gradcheck(self) -> None:
        """In float64 the input's gradient equals finite differences (torch.autograd.gradcheck)."""
        self.matrix()
        if torch.float64 not in self.subject.dtypes or self.case.activation_bits:
            raise NotClaimed("needs float64, and a linear that doesn't round its input")
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

    # --- gradients of weight and bias

    @over(*((f"x {list(lead)}{' with bias' * bias}", lead, bias) for bias in (False, True) for lead in ops.LEADS))
    @check(needs=("training",), requires=("training",), why=_WHY, fix=_FIX_WEIGHT)
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
        axes="dtype", needs=("inference",), requires=("training",), why=_WHY, fix="sum the output gradient over all batch dims"
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
        axes="one", needs=("inference",), why=_WHY, fix="normalise arguments in one place, so that keywords take the same path"
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
    @check(axes="variant", needs=("training",), why=_WHY, fix=_FIX_CUT)
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
        if oracle.inner_tensors(script["v"]) and not shares_memory(script["p"], script["v"]):
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


def _fit(gradient: str, lead: tuple[int, ...]) -> str:
    """``got`` as the gradient with each column times a number of its own; nothing for one row, where that always fits."""
    if len(lead) != 1 or lead[0] < 2:
        return "None"
    return f"{gradient} * (got * {gradient}).sum(0) / ({gradient} ** 2).sum(0)"
