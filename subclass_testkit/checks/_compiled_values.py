"""Compiled code gives what eager gives: values, class, writes and gradients."""

from __future__ import annotations

from subclass_testkit import oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._compilation_cases import (
    ALIAS,
    BACKENDS,
    FORMULAS,
    PRODUCTS,
    READS,
    RETURNED,
    TANGENTS,
    WRITES,
    times,
)
from subclass_testkit.checks._fake import FakeGroup
from subclass_testkit.checks._traced import compile_text, definition, module_text, renamed
from subclass_testkit.outcome import CheckSkipped, Refused
from subclass_testkit.script import Script

_WHY = "people compile their models; what only eager gets right is wrong in production"
_FIX = "make __tensor_flatten__/__tensor_unflatten__ complete, keep handlers traceable (no .item(), no data_ptr), and give custom ops a fake implementation"


class CompiledValueChecks(FakeGroup):
    """Operations, returned tensors, writes and training steps, compiled and in eager."""

    def operation(self, text: str) -> str:
        """The code of a named operation (``linear``, ``to_plain``); other texts are code already."""
        if text == "to_plain":
            return renamed(self.subject.to_plain_text, "t", "w")
        return {"linear": self.linear(), "linear-bias": self.linear(b="b")}.get(text, text)

    def inputs(self) -> dict[str, str]:
        return {"x": self.x(), "b": self.bias()}

    # --- values

    @over(*times(BACKENDS, PRODUCTS))
    @check(tier="standard", needs=("compile",), requires=("compile",), axes="one", why=_WHY, fix=_FIX)
    def test_product_equals_eager(self, case: str, backend: str, text: str) -> None:
        """A compiled linear or matmul, of a slice of the weight too, is one graph and gives what eager gives."""
        self.matrix()
        code = self.operation(text)
        script = self.script(**self.inputs())
        script.run(definition("f", "w, x, b", code))
        self.eager(script, "want = f(w, x, b)")
        bound = self.product_bound(script, FORMULAS.get(text, text))
        self.traced(script, f"got = {compile_text('f', backend)}(w, x, b)", code)
        self.same(script, code, bound=bound)

    @over("linear-bias", "F.linear(x, w[8:16])", "to_plain", "w[8:16]", "w.t()")
    @check(tier="standard", needs=("compile",), axes="variant", why=_WHY, fix=_FIX)
    def test_variant_equals_eager(self, text: str) -> None:
        """For every variant of the class, compiled linear, slices and reads give what eager gives."""
        self.matrix()
        code = self.operation(text)
        script = self.script(**self.inputs())
        script.run(definition("f", "w, x, b", code))
        self.eager(script, "want = f(w, x, b)")
        bound = self.product_bound(script, FORMULAS.get(text, text)) if "linear" in text else None
        self.traced(script, f"got = {compile_text('f', 'aot_eager')}(w, x, b)", code)
        self.same(script, code, bound=bound, likely=self._stale(script, text))

    @over(*times(BACKENDS, READS))
    @check(tier="standard", needs=("compile",), axes="one", why=_WHY, fix=_FIX)
    def test_read_equals_eager(self, case: str, backend: str, text: str) -> None:
        """Reading the values, an embedding and plain arithmetic are one graph and give what eager gives."""
        self.matrix()
        code = self.operation(text)
        script = self.script()
        script.run(definition("f", "w", code))
        self.eager(script, "want = f(w)")
        bound = self.product_bound(script, "w.sum(-1)") if ".sum" in code else None
        self.traced(script, f"got = {compile_text('f', backend)}(w)", code)
        self.same(script, code, bound=bound)

    @over(*times(BACKENDS, RETURNED))
    @check(
        tier="standard",
        needs=("compile",),
        axes="one",
        why="AOTAutograd replays an output that aliases an input through as_strided on the subclass: a class whose as_strided dequantizes, or ignores its arguments, loses its class or returns other rows without an error",
        fix="implement aten.as_strided for what view operators give (report the storage offset in _make_wrapper_subclass), or raise NotImplementedError",
        upstream="pytorch#184367",
    )
    def test_returned_tensor_keeps_everything(self, case: str, backend: str, text: str) -> None:
        """A compiled function that returns its input, a view, a detach, a clone or a move of it gives the class, shape, strides and values of eager."""
        self.matrix()
        script = self.script()
        script.run(definition("f", "w", text))
        self.eager(script, "want = f(w)")
        self.traced(script, f"got = {compile_text('f', backend)}(w)", text)
        if text == "w":
            script.expect("got is w", "a compiled function that returns its input gives another object.", kind="identity")
        self.same(script, text, strides=self._is_kept_view(script), likely=self._stale(script, text))
        if self._is_kept_view(script) and not oracle.shares_memory(script["w"], script["got"]):
            script.fail(
                f"{text} shares memory with w in eager, and is a copy when compiled: a write into it is lost.",
                kind="alias",
                assertion=ALIAS,
            )

    def _is_kept_view(self, script: Script) -> bool:
        return isinstance(script["want"], self.subject.cls) and oracle.shares_memory(script["w"], script["want"])

    def _stale(self, script: Script, text: str) -> str:
        """What a wrong returned view is: the whole tensor, or rows from its beginning."""
        try:
            got, want, d = self.subject.plain(script["got"]), self.subject.plain(script["want"]), script["d"]
            at_zero = {"w[8:16]": d[0:8], "w[:, 8:16]": d[:, 0:8], "w[3]": d[0], "w.chunk(2)[1]": d.chunk(2)[0]}
        except Exception:
            return ""
        if got.dtype != want.dtype:
            return "the dtype isn't in the flatten context, or __tensor_unflatten__ ignores it."
        if oracle.same_bits(got, d) and not oracle.same_bits(want, d):
            return "the result equals the whole tensor: the view was lost on the way out of the graph."
        if text in at_zero and oracle.same_bits(got, at_zero[text]):
            return "the result equals the part at offset 0: the wrapper doesn't report its storage offset, or as_strided ignores it."
        if isinstance(script["want"], self.subject.cls) and not isinstance(script["got"], self.subject.cls):
            return "aten.as_strided (or alias) of the class falls back to plain values."
        return ""

    @over("eager", "aot_eager")
    @check(
        tier="standard",
        needs=("compile",),
        axes="one",
        why="models that quantize on the fly (training, activations) construct the subclass inside the graph",
        fix="let the constructor be traceable: no data-dependent python, no lookup by id",
    )
    def test_constructed_inside(self, backend: str) -> None:
        """A subclass that compiled code makes and returns has the class, context and values of the one that eager makes."""
        script = self.script()
        script.run(definition("f", "hp", self.subject.make_text))
        self.eager(script, "want = f(hp)")
        self.traced(script, f"got = {compile_text('f', backend, options='')}(hp)", "making the tensor")
        self.same(script, "the tensor made inside the graph")

    @over(*BACKENDS)
    @check(tier="standard", needs=("compile",), requires=("compile",), axes="one", why=_WHY, fix=_FIX)
    def test_two_layer_model(self, backend: str) -> None:
        """A compiled module with two subclass parameters and a residual gives what eager gives, as one graph."""
        self.matrix()
        script = self.script(**self.inputs())
        script.run(f"source = {self.hp(seed=3)}\nv = {self.made('source')}")
        body = f"({self.linear(w='self.w', b='self.b')}) * ({self.linear(w='self.v')})"
        script.run(module_text(body, "w, v, b", *(f"self.{n} = nn.Parameter({n}, False)" for n in "wvb")) + "\nm = M(w, v, b)")
        self.eager(script, "want = m(x)")
        bound = 2 * self.product_bound(script, "F.linear(x, w, b) * F.linear(x, v)")
        self.traced(script, f"got = {compile_text('m', backend)}(x)", "a model of two layers")
        self.same(script, "the output of a model of two layers", bound=bound)

    @over(*times(BACKENDS, (("no_grad", "torch.no_grad()"), ("inference_mode", "torch.inference_mode()"))))
    @check(
        tier="standard",
        needs=("compile",),
        axes="one",
        why="servers compile under no_grad or inference_mode",
        fix=_FIX,
        upstream="pytorch#164872, pytorch#170419",
    )
    def test_without_grad(self, case: str, backend: str, name: str, context: str) -> None:
        """Compiled linear and view under no_grad and inference_mode give what eager gives there."""
        self.matrix()
        script = self.script(**self.inputs())
        script.run(definition("f", "w, x, b", self.linear(b="b")))
        self.eager(script, f"with {context}:\n    want = f(w, x, b)")
        bound = self.product_bound(script, "F.linear(x, w, b)")
        self.traced(script, f"with {context}:\n    got = {compile_text('f', backend)}(w, x, b)", f"linear under {context}")
        self.same(script, f"linear under {context}", bound=bound)

    @over(*BACKENDS)
    @check(
        tier="standard",
        needs=("compile",),
        axes="one",
        why="model code asks tensors for their shape, dtype and class",
        fix="hold attributes in __tensor_flatten__'s context, so that fake copies have them",
    )
    def test_attributes_in_the_graph(self, backend: str) -> None:
        """Outer metadata, isinstance, inner tensors and methods read inside compiled code are those of eager."""
        script = self.script(x=self.x())
        name = self.subject.cls.__name__
        facts = f"w.shape, w.dim(), w.numel(), w.stride(), w.dtype, w.device, w.requires_grad, w.is_contiguous(), isinstance(w, {name})"
        script.run(f"def f(w, x):\n    return x + w.shape[0], {facts}")
        self.eager(script, "want = f(w, x)")
        self.traced(script, f"got = {compile_text('f', backend)}(w, x)", "reading attributes")
        script.expect(
            "got[1:] == want[1:]", "attributes read in the graph are {got[1:]}, in eager {want[1:]}.", kind="attributes"
        )
        for inner in oracle.inner_tensors(script["w"]):
            script.run(f"f = lambda w: w.{inner}.clone()")
            self.traced(script, f"got = {compile_text('f', backend)}(w)", f"reading w.{inner}")
            script.equal("got", f"w.{inner}", label=f"w.{inner} read in the graph")

    # --- writes and gradients

    @over(*times(BACKENDS, WRITES))
    @check(
        tier="standard",
        needs=("compile",),
        axes="one",
        why="weight updates inside a graph (optimizers, EMA, caches) that stay inside it are lost without an error",
        fix="implement copy_ so that it writes into the existing inner tensors: functionalization ends in copy_",
        upstream="pytorch#114415",
    )
    def test_write_is_visible_after(self, case: str, backend: str, text: str) -> None:
        """An in-place operation in compiled code leaves the tensor, and an alias taken before, as the same operation in eager does."""
        self.matrix()
        script = self.script(source=self.hp(seed=3))
        script.run(f"v = {self.subject.make_text}\nalias_w, alias_v = w.detach(), v.detach()")
        script.run(definition("f", "w, source", f"{text}\nNone"))
        self.eager(script, "with torch.no_grad():\n    torch.manual_seed(0); f(v, source)")
        self.traced(script, f"with torch.no_grad():\n    torch.manual_seed(0); {compile_text('f', backend)}(w, source)", text)
        if self.subject.stochastic:
            raise CheckSkipped("a compiled write may round with other random numbers than an eager one")
        unchanged = oracle.same_bits(self.subject.plain(script["w"]), script["d"])
        likely = "the tensor is unchanged: the write stayed inside the graph." if unchanged else ""
        script.equal("plain(w)", "plain(v)", label=f"w after a compiled {text}", likely=likely)
        if oracle.same_bits(self.subject.plain(script["alias_v"]), self.subject.plain(script["v"])):
            script.equal(
                "plain(alias_w)",
                "plain(w)",
                label=f"w.detach(), taken before a compiled {text},",
                likely="the write replaced the inner tensors.",
            )

    @over(*times(BACKENDS, ("w.detach()", "w[8:16]", "w.t()")))
    @check(
        tier="standard",
        needs=("compile",),
        axes="one",
        why="two arguments may alias (tied weights); compiled code that takes them for independent uses old values",
        fix="let torch see the aliasing: views must be made with return_and_correct_aliasing",
        upstream="pytorch#114415",
    )
    def test_aliased_inputs_and_a_write(self, case: str, backend: str, text: str) -> None:
        """A compiled function that writes into one of two aliased inputs reads the other one right, or raises."""
        self.matrix()
        script = self.script(source=self.hp(seed=3))
        script.run(f"v = {self.subject.make_text}")
        read = renamed(self.subject.to_plain_text, "t", "other")
        script.run(definition("f", "w, other, source", f"w.copy_(source)\n{read}"))
        self.eager(script, f"with torch.no_grad():\n    torch.manual_seed(0); want = f(v, {renamed(text, 'w', 'v')}, source)")
        try:
            self.traced(
                script,
                f"with torch.no_grad():\n    torch.manual_seed(0); got = {compile_text('f', backend)}(w, {text}, source)",
                "a write to an aliased input",
            )
        except Refused as refusal:  # any error is better than an old value, also torch's own
            raise Refused(str(refusal), kind=refusal.kind, reproduction=refusal.reproduction) from None
        if self.subject.stochastic:
            raise CheckSkipped("a compiled write may round with other random numbers than an eager one")
        self.same(script, f"{text} after w.copy_(source) in the same graph")

    @over(*times(BACKENDS, TANGENTS))
    @check(
        tier="standard",
        needs=("compile", "training"),
        requires=("training",),
        axes="one",
        why=_WHY + "; a gradient that is lost or wrong only in compiled code shows as a model that doesn't learn",
        fix="make the linear an autograd.Function (or custom op with an autograd formula) that saves the subclass itself",
        upstream="pytorch#124397",
    )
    def test_training_step(self, case: str, backend: str, name: str, backward: str) -> None:
        """Output and gradients of input, weight and bias are those of eager, for any layout of the output's gradient."""
        self.matrix()
        script = self.script(**self.inputs(), g=self.grad())
        self._step(script, backend, backward, trainable=True)

    @over("aot_eager")
    @check(
        tier="standard",
        needs=("compile", "inference"),
        axes="variant",
        why="adapters (LoRA) train through a frozen quantized weight",
        fix="make the linear differentiable in its input",
    )
    def test_frozen_weight(self, backend: str) -> None:
        """Through a frozen weight, the gradients of input and bias are those of eager."""
        self.matrix()
        script = self.script(**self.inputs(), g=self.grad())
        self._step(script, backend, "out.backward(g)", trainable=False)

    def _step(self, script: Script, backend: str, backward: str, *, trainable: bool) -> None:
        script.run(f"p = nn.Parameter(w, {trainable})")
        script.run(definition("f", "p, x, b", f"{self.linear(w='p', b='b')}, x * 2"))
        step = f"x, b, p.grad = x.detach().requires_grad_(), b.detach().requires_grad_(), None\n    out, unused = f(p, x, b)\n    {backward}\n    return out.detach(), x.grad, b.grad, p.grad"
        script.run(f"def step(f, p, x, b, g):\n    {step}")
        self.eager(script, "want = step(f, p, x, b, g)")
        self.traced(script, f"got = step({compile_text('f', backend)}, p, x, b, g)", "a training step")
        if script["want"][1] is None:
            raise CheckSkipped("the input gets no gradient in eager already, which gradients checks report")
        g = {"out.backward(g[:1].expand_as(out))": "g[:1].expand_as(g)", "out.sum().backward()": "torch.ones_like(g)"}.get(
            backward, "g"
        )
        formulas = ("F.linear(x, w, b)", f"({g}) @ w", f"({g}).sum(0)", f"({g}).t() @ x")
        names = ("the output", "the gradient of the input", "the gradient of the bias", "the gradient of the weight")
        for i, (what, formula) in enumerate(zip(names, formulas, strict=True)):
            if script["want"][i] is not None:
                bound = self.product_bound(script, formula)
                script.equal(f"got[{i}]", f"want[{i}]", label=f"{what}, compiled,", bound=bound)
            else:
                script.expect(f"got[{i}] is None", f"{what} is a tensor when compiled, and None in eager.", kind="grad")

    @over(*BACKENDS)
    @check(
        tier="standard",
        needs=("compile", "training"),
        axes="one",
        why="compiled optimizers are the fast ones",
        fix="implement the in-place operators by which optimizers write (add_, addcdiv_, lerp_, their _foreach_ forms) so that they write into the inner tensors",
    )
    def test_compiled_optimizer(self, backend: str) -> None:
        """A compiled SGD step changes the parameter as an eager one does."""
        script = self.script(source=self.hp(seed=3))
        script.run(
            f"v = {self.subject.make_text}\np, q = nn.Parameter(w), nn.Parameter(v)\np.grad, q.grad = source.clone(), source.clone()"
        )
        script.run("def step(p):\n    return torch.optim.SGD([p], lr=0.5, momentum=0.9).step")
        self.eager(script, "torch.manual_seed(0); step(q)()")
        self.traced(
            script, f"torch.manual_seed(0); {compile_text('step(p)', backend, options='')}()", "a compiled optimizer step"
        )
        if self.subject.stochastic:
            raise CheckSkipped("a compiled write may round with other random numbers than an eager one")
        unchanged = oracle.same_bits(self.subject.plain(script["p"]), script["d"])
        script.equal(
            "plain(p)",
            "plain(q)",
            label="the parameter after a compiled SGD step",
            likely="it is unchanged." if unchanged else "",
        )
