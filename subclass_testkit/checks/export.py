"""torch.export gives a program that computes what eager computes."""

from __future__ import annotations

from subclass_testkit.check import check, over
from subclass_testkit.checks._traced import TracedGroup, module_text, renamed
from subclass_testkit.script import Script

_MODES = ("non-strict", "strict")
_HOLDERS = {
    "parameter": "self.w = nn.Parameter(w, False)",
    "buffer": "self.register_buffer('w', w)",
}
_WHY = "deployment runs the exported program; what it computes must be what was trained"
_FIX = "keep handlers traceable, give custom ops a fake implementation, and make flatten/unflatten complete"


class ExportTests(TracedGroup):
    """Torch.export gives a program that computes what eager computes."""

    group = "export"

    def module(self, forward: str | None = None, *, holder: str = "parameter") -> Script:
        """A script with a module ``m`` of the subclass, and ``want``: what it gives in eager."""
        script = self.script(x=self.x())
        script.run(module_text(forward or self.linear(w="self.w"), "w", _HOLDERS[holder]) + "\nm = M(w)")
        self.eager(script, "want = m(x)")
        return script

    def plain_module(self) -> Script:
        """As ``module``, with a plain output: a decomposed program can't give a subclass."""
        script = self.module()
        if not isinstance(script["want"], self.subject.cls):
            return script
        return self.module(renamed(self.subject.to_plain_text, "t", f"({self.linear(w='self.w')})"))

    def export(
        self, script: Script, mode: str = "non-strict", *, args: str = "(x,)", more: str = "", label: str = "the module"
    ) -> None:
        """Run torch.export.export into ``ep``."""
        self.traced(script, f"ep = torch.export.export(m, {args}, strict={mode == 'strict'}{more})", f"exporting {label}")

    def compare(self, script: Script, call: str, label: str, formula: str | None = "F.linear(x, w)") -> None:
        """Run the exported program; its result is ``want``."""
        self.traced(script, f"got = {call}", label)
        bound = self.product_bound(script, formula) if formula else None
        if "wrapper" in self.case.found:
            self.same(script, f"the output of {label}", how="exported", bound=bound)
        else:
            script.equal("got", "want", label=f"the output of {label}", bound=bound)

    @over(*[(f"{mode}: {holder}", mode, holder) for mode in _MODES for holder in _HOLDERS])
    @check(tier="standard", needs=("export",), requires=("export",), axes="one", why=_WHY, fix=_FIX, upstream="pytorch#129682")
    def test_linear_module(self, case: str, mode: str, holder: str) -> None:
        """A module with the subclass as its weight exports, and the program gives the module's output."""
        self.matrix()
        script = self.module(holder=holder)
        self.export(script, mode)
        self.compare(script, "ep.module()(x)", "the exported linear")

    @check(tier="standard", needs=("export",), axes="variant", why=_WHY, fix=_FIX)
    def test_variant(self) -> None:
        """A linear with bias exports for every variant of the class."""
        self.matrix()
        script = self.module(self.linear(w="self.w", b="x.new_ones(self.w.shape[0])"))
        self.export(script)
        self.compare(script, "ep.module()(x)", "the exported linear with bias", "F.linear(x, w, x.new_ones(w.shape[0]))")

    @over(*_MODES)
    @check(
        tier="standard",
        needs=("export",),
        axes="one",
        why="functions that take the weight as an argument (functional_call, adapters) are exported too",
        fix=_FIX,
        upstream="pytorch#153387",
    )
    def test_subclass_as_input(self, mode: str) -> None:
        """A module that takes the subclass as an input exports, and the program gives the right output for another instance."""
        self.matrix()
        script = self.script(x=self.x(), source=self.hp(seed=3))
        script.run(f"v = {self.made('source')}")
        script.run(f"class M(nn.Module):\n    def forward(self, x, w):\n        return {self.linear()}\nm = M()")
        self.eager(script, "want = m(x, v)")
        self.export(script, mode, args="(x, w)", label="a module that takes the tensor as an input")
        self.compare(script, "ep.module()(x, v)", "the exported function for another weight", "F.linear(x, v)")

    @over(
        "to_plain",
        "F.linear(x, self.w[8:16])",
        "x @ self.w.t()",
        "F.embedding(torch.tensor([3, 1, 3]), self.w)",
        "F.linear(x[:, 8:16], self.w[:, 8:16])",
    )
    @check(tier="standard", needs=("export",), axes="one", why=_WHY, fix=_FIX)
    def test_operation_inside(self, text: str) -> None:
        """Slices, matmul, embedding and reading the values inside an exported module give what eager gives."""
        self.matrix()
        code = renamed(self.subject.to_plain_text, "t", "self.w") if text == "to_plain" else text
        script = self.module(f"x.sum() * 0 + {code}" if text == "to_plain" else code)
        self.export(script, label=code)
        formula = code.replace("self.w", "w") if "x" in code and text != "to_plain" else None
        self.compare(script, "ep.module()(x)", f"the exported {code}", formula)

    @over(*_MODES)
    @check(
        tier="standard",
        needs=("export",),
        axes="one",
        why="served batches vary in size",
        fix="don't specialize on sizes: no int(size), no python branch on the batch",
    )
    def test_dynamic_batch(self, mode: str) -> None:
        """A program exported with a dynamic batch gives the right output for another batch size."""
        self.matrix()
        script = self.module()
        self.export(
            script, mode, more=", dynamic_shapes=({0: torch.export.Dim('batch', min=2, max=64)},)", label="a dynamic batch"
        )
        for n in (9, 2):
            script.run(f"x = {self.x(n)}")
            self.eager(script, "want = m(x)")
            self.compare(script, "ep.module()(x)", f"the exported linear for a batch of {n}")

    @check(
        tier="standard",
        needs=("export",),
        axes="one",
        why="every backend decomposes the program before it compiles it",
        fix="let handlers run under functionalization: views through return_and_correct_aliasing, custom ops functional",
        upstream="pytorch#129682",
    )
    def test_decompositions(self) -> None:
        """The program still gives the module's output after run_decompositions."""
        self.matrix()
        script = self.plain_module()
        self.export(script)
        self.traced(script, "ep = ep.run_decompositions()", "run_decompositions")
        self.compare(script, "ep.module()(x)", "the decomposed program")

    @check(
        tier="standard",
        needs=("export", "serialization"),
        axes="one",
        why="an exported program is saved by one process and run by another",
        fix="decompose to plain tensors at export, or make the class loadable with weights_only (torch.serialization.add_safe_globals)",
        upstream="pytorch#153387",
    )
    def test_save_and_load(self) -> None:
        """The program gives the module's output after torch.export.save and load."""
        self.matrix()
        script = self.plain_module()
        self.export(script)
        self.traced(script, "ep = ep.run_decompositions()", "run_decompositions")
        self.traced(
            script,
            "f = io.BytesIO()\ntorch.export.save(ep, f)\n_ = f.seek(0)\nep = torch.export.load(f)",
            "saving and loading the program",
        )
        self.compare(script, "ep.module()(x)", "the loaded program")
