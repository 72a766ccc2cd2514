"""Weights that are served and fine-tuned: shards loaded by narrow and copy_, and LoRA adapters on a frozen weight."""

from __future__ import annotations

from subclass_testkit import inputs, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._layers import LayerChecks
from subclass_testkit.outcome import CheckSkipped

_SOURCES = {"w": "the subclass", "hp2": "plain values"}


class ServingChecks(LayerChecks):
    """Loading by shards, and LoRA."""

    # --- serving

    def _parts(self, dim: int) -> list[tuple[int, int]]:
        """Two shards of a dimension, as (start, size), of legal sizes."""
        factors = self.subject.multiples_of
        unit = factors if isinstance(factors, int) else (1, *factors)[-1 if dim % 2 else -2]
        size = self.shape[dim]
        first = max(size // 2 // unit, 1) * unit
        self.need_shape(first < size, "too small for two shards")
        return [(0, first), (first, size - first)]

    def _load_shards(self, dim: int, target: str, loaded: str) -> None:
        """Fill a parameter shard by shard, as vLLM's and SGLang's loaders do; then the whole equals what was loaded."""
        self.only_matrices()
        s = self.script()
        self.second_subject(s)
        s.run(f"p = nn.Parameter({'v' if loaded != 'v' else 'w'}, requires_grad=False)")
        begin = self.watch(s, "p")
        for start, size in self._parts(dim):
            before = self.watch(s, "p")
            part = f"narrow({dim}, {start}, {size})"
            self.attempt(s, f"with torch.no_grad(): _ = {target}.{part}.copy_({loaded}.{part})", before)
        self.written(
            s, begin, f"plain({loaded})", f"the parameter after loading shards of dim {dim} from {_SOURCES[loaded]}", writes=2
        )
        s.run("m = nn.Linear(1, 1); m.weight, m.bias = p, nn.Parameter(d[:, 0] * 0)")
        self.forward(s, "m", "after loading the shards")

    @check(
        axes="dtype",
        needs=("serving",),
        requires=("serving",),
        why="a class that inference servers can load takes at least a shard of rows of its own class",
        fix="let narrow share the inner tensors, and copy_ write data and scales of exactly these rows",
    )
    def test_serving_works(self) -> None:
        """Shards of rows of the same class, copied into the narrowed parameter, give the loaded weight."""
        self._load_shards(0, "p", "w")

    @over(
        *(
            (f"{target} from {source}", target, name)
            for target in ("p", "p.data")
            for name, source in (("w", "the subclass"), ("hp2", "plain"))
        )
    )
    @check(
        needs=("serving",),
        why="inference servers load a checkpoint shard by shard into narrowed parameters; a lost or shifted shard gives a wrong model, without an error",
        fix="let narrow share the inner tensors, and copy_ write data and scales of exactly these rows",
    )
    def test_shards_of_rows(self, name: str, target: str, loaded: str) -> None:
        """narrow(0, start, size) of the parameter and copy_ of the same part of the loaded weight, part by part, give the loaded weight."""
        self._load_shards(0, target, loaded)

    @over(
        *(
            (f"{target} from {source}", target, name)
            for target in ("p", "p.data")
            for name, source in (("w", "the subclass"), ("hp2", "plain"))
        )
    )
    @check(
        needs=("serving",),
        why="row-parallel layers are sharded along the input dimension",
        fix="write the columns only where that leaves the scales of the others alone, or refuse",
    )
    def test_shards_of_columns(self, name: str, target: str, loaded: str) -> None:
        """narrow(1, start, size) and copy_, part by part, give the loaded weight, or are refused before a part is changed."""
        self._load_shards(1, target, loaded)

    @over(("rank 0 of rows", 0, 0), ("rank 1 of rows", 0, 1), ("rank 0 of columns", 1, 0), ("rank 1 of columns", 1, 1))
    @check(
        needs=("serving",),
        why="each rank holds a parameter of its shard's size, and copies its part of the loaded weight into it",
        fix="let a narrowed weight be a legal source of copy_",
    )
    def test_shard_of_a_rank(self, name: str, dim: int, rank: int) -> None:
        """A rank's own parameter, filled with its narrow of the loaded weight, holds that part of the values, and computes with it."""
        self.only_matrices()
        start, size = self._parts(dim)[rank]
        s = self.script()
        part = f"narrow({dim}, {start}, {size})"
        s.run(f"hp2 = ({self.second()}).{part}.contiguous()\np = nn.Parameter({self.made('hp2')}, requires_grad=False)")
        before = self.watch(s, "p")
        self.attempt(s, f"with torch.no_grad(): _ = p.copy_(w.{part})", before)
        self.written(s, before, f"d.{part}", f"the parameter of {name}")
        if dim == 0:
            s.run("m = nn.Linear(1, 1); m.weight, m.bias = p, nn.Parameter(plain(p)[:, 0] * 0)")
            self.forward(s, "m", f"of {name}")

    @over(
        ("the first expert's rows", "p[0].narrow(0, 8, 8)", "{}[0].narrow(0, 8, 8)", "[0, 8:16]"),
        ("a whole expert", "p[1]", "{}[1]", "[1]"),
        ("a narrow of experts", "p.narrow(0, 1, 1)", "{}.narrow(0, 1, 1)", "[1:2]"),
        ("a narrow of data", "p.data[1].narrow(0, 0, 8)", "{}[1].narrow(0, 0, 8)", "[1, :8]"),
    )
    @check(
        axes="experts",
        needs=("serving",),
        why="mixture-of-experts weights are loaded expert by expert",
        fix="count dims from the end for scales and blocks, and let p[e] share memory",
    )
    def test_shard_of_an_expert(self, name: str, target: str, loaded: str, index: str) -> None:
        """A copy_ into one expert's part changes exactly that part, to the loaded values; or it is refused."""
        for source, values in (("v", "source"), ("hp2", "hp2")):
            s = self.script()
            self.second_subject(s)
            s.run(f"p = nn.Parameter(w, requires_grad=False); want = d.clone(); want{index} = {values}{index}")
            before = self.watch(s, "p")
            self.attempt(s, f"with torch.no_grad(): _ = {target}.copy_({loaded.format(source)})", before)
            self.written(
                s,
                before,
                "want",
                f"the parameter after loading {name} from {'the subclass' if source == 'v' else 'plain values'}",
            )

    # --- LoRA

    def _adapters(self) -> dict[str, str]:
        """Source texts of the adapters A (4, in_features) and B (out_features, 4)."""
        return {
            "A": inputs.weight((4, self.in_features), self.dtype, 2),
            "B": inputs.weight((self.out_features, 4), self.dtype, 6),
        }

    @over("beside the frozen weight", "before the frozen weight")
    @check(
        needs=("inference",),
        requires=("inference",),
        why="adapters are trained on a frozen quantized base: a cut or wrong gradient trains nothing, or the wrong thing",
        fix="give linear a backward for its input that doesn't need the weight's gradient",
    )
    def test_adapters_train(self, place: str) -> None:
        """Adapters beside, or before, the frozen weight get the gradients that they get with a dense one."""
        self.only_matrices()
        adapters = self._adapters()
        a, b = f"({adapters['A']}).requires_grad_()", f"({adapters['B']}).requires_grad_()"
        tolerance = oracle.multilinear(self.in_features + self.out_features)
        if place.startswith("beside"):
            beside = f"y = {self.linear()} + F.linear(F.linear(x, A), B)\ntorch.autograd.grad(y, (A, B), grad)"
            self.agree(beside, tolerance=tolerance, x=self.x(), grad=self.grad(), A=a, B=b)
            return
        if self.case.rounding:
            raise CheckSkipped("a linear that rounds its operands has no derived bound behind another layer")
        u = inputs.activation((5, 4), self.dtype, 1)
        forward = f"y = {self.linear(x='F.linear(u, A.t())')}"
        s = self.script(u=u, A=a)
        s.run(forward)
        likely = "linear runs on detached tensors, or outside of autograd."
        s.expect(
            "y.requires_grad",
            "linear gives a result without gradient for an input that requires one.",
            kind="cut",
            likely=likely,
        )
        self.agree(f"{forward}\ntorch.autograd.grad(y, A, grad)", tolerance=tolerance, u=u, grad=self.grad(), A=a)

    @over(
        ("re-made", "merged = {made_sum}", "merged = {made_difference}"),
        ("copy_", "merged.copy_(plain(merged) + B @ A)", "merged.copy_(plain(merged) - B @ A)"),
        ("add_", "merged.add_(B @ A)", "merged.sub_(B @ A)"),
        ("data.add_", "merged.data.add_(B @ A)", "merged.data.sub_(B @ A)"),
    )
    @check(
        needs=("inference",),
        why="merged adapters are what is served: a merge that changes nothing serves the base model",
        fix="support copy_ from plain values and add_, by quantizing anew; or refuse them",
    )
    def test_adapters_merge(self, name: str, merge: str, unmerge: str) -> None:
        """Merging adapters into the frozen weight gives the sum, unmerging gives the weight back, each up to requantization; or they are refused."""
        self.only_matrices()
        s = self.script(**self._adapters())
        s.run("merged = nn.Parameter(w, requires_grad=False)")
        made = {"made_sum": self.made("(plain(merged) + B @ A)"), "made_difference": self.made("(plain(merged) - B @ A)")}
        for step, text in (("merging", merge), ("unmerging", unmerge)):
            before = self.watch(s, "merged")
            s.run(f"aim = plain(merged) {'+' if step == 'merging' else '-'} B @ A")
            self.attempt(s, "with torch.no_grad(): " + text.format(**made), before)
            self.written(s, before, "aim", f"the weight after {step} ({name})")
