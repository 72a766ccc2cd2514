"""torch.compile gives what eager gives: values, class, writes and gradients; and compiles no more often than it must."""

from __future__ import annotations

from subclass_testkit import oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._compilation_cases import (
    ALIAS,
    BACKENDS,
    CHANGES,
    FAKE,
    FORMULAS,
    OTHERS,
    PRODUCTS,
    READS,
    RETURNED,
    SPY,
    TANGENTS,
    WRITES,
    times,
)
from subclass_testkit.checks._fake import FakeGroup
from subclass_testkit.checks._traced import compile_text, definition, module_text, renamed, same_context
from subclass_testkit.checks.slicing import shares_memory
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Finding, Refused
from subclass_testkit.script import Script, execute

_WHY = "people compile their models; what only eager gets right is wrong in production"
_FIX = "make __tensor_flatten__/__tensor_unflatten__ complete, keep handlers traceable (no .item(), no data_ptr), and give custom ops a fake implementation"


class CompilationTests(FakeGroup):
    """Torch.compile gives what eager gives."""

    group = "compilation"

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
        if self._is_kept_view(script) and not shares_memory(script["w"], script["got"]):
            script.fail(
                f"{text} shares memory with w in eager, and is a copy when compiled: a write into it is lost.",
                kind="alias",
                assertion=ALIAS,
            )

    def _is_kept_view(self, script: Script) -> bool:
        return isinstance(script["want"], self.subject.cls) and shares_memory(script["w"], script["want"])

    def _stale(self, script: Script, text: str) -> str:
        """What a wrong returned view is: the whole tensor, or rows from its beginning."""
        try:
            got, want, d = self.subject.plain(script["got"]), self.subject.plain(script["want"]), script["d"]
            at_zero = {"w[8:16]": d[0:8], "w[:, 8:16]": d[:, 0:8], "w[3]": d[0], "w.chunk(2)[1]": d.chunk(2)[0]}
        except Exception:
            return ""
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

    # --- recompiles and guards

    @over(
        ("the same call", "f(x, w)"),
        ("a second instance", "f(x, v)"),
        ("another batch of the same size", "f(y, w)"),
        ("a detached alias", "f(x, w.detach())"),
    )
    @check(
        tier="standard",
        needs=("compile",),
        axes="one",
        why="a recompile for each layer or call takes seconds to minutes each, and ends in the recompile limit",
        fix="let the flatten context of equal tensors compare equal: primitives, not objects without __eq__, ids or counters",
        upstream="pytorch#118896",
    )
    def test_no_recompile(self, what: str, second: str) -> None:
        """A second call, another tensor with equal metadata, and another batch of the same size use the code that is compiled."""
        self.matrix()
        script = self.script(x=self.x(), y=self.x(seed=3))
        script.run(f"v = {self.subject.make_text}")
        self._count(script, self.linear())
        self.traced(script, f"f(x, w)\n{second}", self.linear())
        script.expect(
            "counter.frame_count == 1",
            f"{what} compiled again: {{counter.frame_count}} compilations, expected 1.",
            kind="recompile",
            likely=self._unequal_context(script),
        )

    def _count(self, script: Script, code: str, options: str = "fullgraph=True") -> None:
        script.run("from torch._dynamo.testing import CompileCounterWithBackend\ncounter = CompileCounterWithBackend('eager')")
        text = compile_text("lambda x, w: " + code, "counter", options=options).replace("'counter'", "counter")
        script.run(f"f = {text}")

    def _unequal_context(self, script: Script) -> str:
        if not hasattr(script["w"], "__tensor_flatten__"):
            return ""
        one, two = script["w"].__tensor_flatten__()[1], script["v"].__tensor_flatten__()[1]
        text = f"two tensors made from the same values have unequal flatten contexts: {one!r:.100} and {two!r:.100}."
        return "" if same_context(script["w"], script["v"]) else text

    @over("automatic", "dynamic=True")
    @check(
        tier="standard",
        needs=("compile",),
        axes="one",
        why="batch sizes vary; a recompile for each is as slow as no compile",
        fix="don't specialize on sizes: no int(size), no python branch on the batch",
    )
    def test_dynamic_batch(self, mode: str) -> None:
        """Batches of different sizes compile once more at most, and each gives what eager gives."""
        self.matrix()
        script = self.script(x=self.x())
        self._count(
            script, self.linear(), options="fullgraph=True, dynamic=True" if mode == "dynamic=True" else "fullgraph=True"
        )
        for n in (5, 7, 9, 12):
            script.run(f"x = {self.x(n)}")
            self.eager(script, f"want = {self.linear()}")
            self.traced(script, "got = f(x, w)", f"linear of a batch of {n}")
            self.same(script, f"linear of a batch of {n}", bound=self.product_bound(script, "F.linear(x, w)"))
        script.expect(
            "counter.frame_count <= 2",
            "batches of 5, 7, 9 and 12 rows compiled {counter.frame_count} times, expected 2 at most.",
            kind="recompile",
        )

    @over(*times(("eager", "aot_eager"), ("F.linear(x, w[:n])", "to_plain")))
    @check(
        tier="standard",
        needs=("compile",),
        axes="one",
        why="slices of varying length (vocabulary, ranks) reach compiled code as symbolic sizes",
        fix="pass sizes on as they come, without int()",
        upstream="pytorch#128649",
    )
    def test_dynamic_weight(self, case: str, backend: str, text: str) -> None:
        """With symbolic sizes, a compiled function of weights of different sizes gives what eager gives, or refuses."""
        self.matrix()
        script = self.script(x=self.x())
        code = self.operation(text)
        script.run(definition("f", "w, x, n", code))
        script.run(f"compiled = {compile_text('f', backend, options='dynamic=True')}")
        for n in (8, 12, 16):
            self.eager(script, f"n = {n}; part = w[:n]; want = f({'w' if 'n]' in code else 'part'}, x, n)")
            self.traced(script, f"got = compiled({'w' if 'n]' in code else 'part'}, x, n)", code)
            bound = None if text == "to_plain" else self.product_bound(script, code)
            self.same(script, f"{code} with {n} rows", bound=bound)

    @over(*OTHERS)
    @check(
        tier="standard",
        needs=("compile",),
        axes="one",
        why="guards that don't see what a tensor's behaviour depends on reuse code compiled for another one: wrong values without an error",
        fix="put every attribute that handlers read into the flatten context, and let contexts compare by value",
        upstream="pytorch#114405, pytorch#129601",
    )
    def test_guard_on_other_tensor(self, what: str, text: str, first: str, second: str) -> None:
        """Code compiled for one tensor isn't reused for one with another context, dtype, shape or class."""
        self.matrix()
        script = self.script(x=self.x())
        self._guard(script, what, self.operation(text), first, second)

    def _guard(self, script: Script, what: str, code: str, first: str, second: str) -> None:
        script.run(definition("f", "w, x", code))
        self.eager(script, f"one, other = {first}, {second}\nwant = f(other, x)")
        self.traced(
            script,
            f"compiled = {compile_text('f', 'aot_eager', options='dynamic=False')}\n_ = compiled(one, x)\ngot = compiled(other, x)",
            code,
        )
        bound = self.product_bound(script, "F.linear(x, other)") if code == self.linear() else None
        self.same(
            script,
            f"{code} of {what}, after it was compiled for {first}",
            bound=bound,
            likely="a guard compares equal for tensors that differ, so that the first one's graph was reused.",
        )

    @check(
        tier="standard",
        needs=("compile",),
        axes="one",
        why="models mix variants of a class (layers with other group sizes or modes)",
        fix="put every attribute that handlers read into the flatten context, and let contexts compare by value",
        upstream="pytorch#114405",
    )
    def test_guard_on_other_variant(self) -> None:
        """Code compiled for one variant of the class isn't reused for another one."""
        self.matrix()
        others = {n: s for n, s in self.case.others.items() if isinstance(s.make, str) and self.shape in (s.shapes or ())}
        if not others:
            raise CheckSkipped("the subject has no other variant of this shape (Subject(variants=...))")
        for name, other in others.items():
            script = self.script(x=self.x())
            script.run("\n".join(other.import_lines))
            self._guard(script, f"variant {name!r}", self.linear(), "w", str(other.make))

    @over(*times(BACKENDS, CHANGES))
    @check(
        tier="standard",
        needs=("compile",),
        axes="one",
        why="models are compiled first and loaded or converted after",
        fix="write into the existing inner tensors on copy_, and let swap_tensors exchange them",
        upstream="pytorch#129362",
    )
    def test_module_changed_after_compile(self, case: str, backend: str, what: str, change: str) -> None:
        """After load_state_dict, a dtype move or a new parameter, a compiled module gives what eager gives."""
        self.matrix()
        script = self.script(x=self.x(), source=self.hp(seed=3))
        script.run(f"v = {self.made('source')}")
        script.run(module_text(self.linear(w="self.w"), "w", "self.w = nn.Parameter(w, False)") + "\nm = M(w)")
        self.eager(script, "_ = m(x)")
        self.traced(script, f"f = {compile_text('m', backend)}\n_ = f(x)", "the module")
        self.eager(script, change)
        self.eager(script, "want = m(x)")
        self.traced(script, "got = f(x)", f"the module after {what}")
        bound = self.product_bound(script, "F.linear(x, w)", w=script["m"].w.detach())
        self.same(script, f"the module's output after {what}", bound=bound, likely="the graph holds the old parameter.")

    @check(
        tier="standard",
        needs=("compile", "inference"),
        axes="variant",
        why="an operator whose schema, fake or autograd formula is wrong fails, or gives wrong results, under compile and export",
        fix="torch.library.opcheck(op, args) says which part: schema (mutation, aliasing), fake implementation, or autograd registration",
    )
    def test_custom_operators(self) -> None:
        """Every custom operator that linear calls passes torch.library.opcheck."""
        script = self.script(**self.inputs())
        script.run("from torch.utils._python_dispatch import TorchDispatchMode\ncalls = []")
        script.run(SPY)
        self.eager(script, f"with Spy():\n    _ = {self.linear(b='b')}")
        if not script["calls"]:
            raise CheckSkipped("linear calls no custom operator")
        for i, call in enumerate(script["calls"]):
            try:
                execute(f"torch.library.opcheck(*calls[{i}])", script.ns)
            except Exception as error:
                if "not implemented for" in str(error):
                    raise CheckSkipped(
                        f"opcheck can't judge {call[0]}: it compares arguments by operators that torch lacks ({str(error)[:200]})"
                    ) from None
                text = str(error).strip().splitlines()
                message = f"{call[0]} fails torch.library.opcheck: {' '.join(text[:3])[:500]}"
                raise CheckFailed(
                    Finding("opcheck", message, reproduction=script.text(f"torch.library.opcheck(*calls[{i}])"))
                ) from error

    # --- fake tensors

    @check(
        tier="standard",
        needs=("compile", "wrapper"),
        axes="one",
        why="every compile and export starts from fake copies of its inputs",
        fix="make __tensor_flatten__ name all inner tensors and __tensor_unflatten__ honour outer_size and outer_stride",
    )
    def test_fake_copy(self) -> None:
        """FakeTensorMode.from_tensor of the subclass, and of views of it, has the same class, context and metadata, and fake inner tensors."""
        self.matrix()
        for text in ("w", "w.t()", "w[8:16]", "nn.Parameter(w)"):
            script = self.script()
            self.eager(script, f"want = {text}")
            self.fake_copy(script, text)
            self.same_metadata(script, f"the fake copy of {text}")
            script.expect(
                "got.requires_grad == want.requires_grad",
                f"the fake copy of {text} has requires_grad {{got.requires_grad}}.",
                kind="requires_grad",
            )
            for name, inner in oracle.inner_tensors(script["got"]).items():
                script.expect(
                    f"isinstance(got.{name}, torch._subclasses.FakeTensor)",
                    f"inner tensor {name!r} of the fake copy of {text} is a real {type(inner).__name__}.",
                    kind="not-fake",
                )

    @over(*FAKE)
    @check(
        tier="standard",
        needs=("compile", "wrapper"),
        axes="one",
        why="compile and export run every handler on fake tensors first; one that reads values, or whose fake output differs, breaks the graph or gives it wrong shapes",
        fix="compute in handlers with torch operations on the inner tensors only, and register a fake implementation for every custom op",
        upstream="",
    )
    def test_fake_operation(self, case: str, text: str) -> None:
        """An operation on a fake copy gives the class, shape, strides, dtype and device of eager, without reading values."""
        self.matrix()
        code = self.operation(text)
        script = self.script(**self.inputs(), source=self.hp(seed=3))
        script.run(
            f"mode = FakeTensorMode()\nfw, fx, fb, fsource = map(mode.from_tensor, (w, x, b, source))\nrun = lambda w, x, b, source: {code}"
        )
        self.eager(script, "with torch.no_grad():\n    want = run(w, x, b, source)")
        self.on_fake(script, code)
        self.same_metadata(script, f"{code} of fake tensors")
