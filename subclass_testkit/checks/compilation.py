"""torch.compile gives what eager gives: values, class, writes and gradients; and compiles no more often than it must."""

from __future__ import annotations

from subclass_testkit import oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._compilation_cases import (
    BACKENDS,
    CHANGES,
    FAKE,
    OTHERS,
    SPY,
    times,
)
from subclass_testkit.checks._compiled_values import CompiledValueChecks
from subclass_testkit.checks._parts import with_checks_of_its_parts
from subclass_testkit.checks._traced import compile_text, definition, module_text, same_context
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Finding
from subclass_testkit.script import Script, execute


@with_checks_of_its_parts
class CompilationTests(CompiledValueChecks):
    """Torch.compile gives what eager gives."""

    group = "compilation"

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
        if second == "v":
            script.run(f"v = {self.made(f'({self.hp(3)}) * 3')}")
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
