"""Every operation equals the one on the dequantized values, or is refused."""

from __future__ import annotations

import re

import torch

from subclass_testkit import inputs, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks import _equivalence_ops as ops
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.oracle import Snapshot, Tolerance, multilinear
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Finding, Refused
from subclass_testkit.script import Script

_WHY = "the class stands in for its values; a wrong result goes on into the model, without an error"
_FIX = "compute from the dequantized values, or from the codes with every scale and zero point, or raise NotImplementedError"
_FIX_ARGUMENTS = "bind the arguments by the operator's schema in one place, so that positional and keyword calls can't differ"
_FIX_WRITE = "quantize the new values into the inner tensors (data and scales) in place, or raise NotImplementedError before any write"
_LOOSE = Tolerance("elementwise", roundings=8)
_NO_BIAS = {"the result without the bias": "F.linear(x, w)"}
_WEIGHT_TEXTS = {
    "zero row": inputs.with_zero_row,
    "outlier": inputs.with_outlier,
    "all positive": inputs.positive,
    "all negative": lambda shape, dtype: f"-({inputs.positive(shape, dtype)})",
    "constant": inputs.constant,
    "tiny row": inputs.tiny,
}


class EquivalenceTests(CheckGroup):
    """Every operation equals the one on the dequantized values."""

    group = "equivalence"

    # --- operands

    def operands(self, operation: str) -> dict[str, str]:
        """The source texts of the plain operands that an operation names (see `_equivalence_ops`)."""
        *lead, rows, columns = self.shape
        numel = torch.Size(self.shape).numel()

        def plain(*shape: int, seed: int) -> str:
            return inputs.activation((*lead, *shape), self.dtype, seed)

        texts = {
            "x": plain(5, columns, seed=0),
            "y": inputs.activation(self.shape, self.dtype, 3),
            "v": inputs.activation((columns,), self.dtype, 1),
            "u": inputs.activation((rows,), self.dtype, 2),
            "z": plain(columns, 4, seed=4),
            "a": plain(5, rows, seed=6),
            "b": self.bias(),
            "c": inputs.activation((2, rows, columns + 3), self.dtype, 8),
            "m": f"torch.arange({numel}).reshape({', '.join(map(str, self.shape))}) % 3 == 0",
            "i": f"torch.tensor([1, 0, {min(rows, columns) - 1}])",
            "o": self.other(),
        }
        used = set(re.findall(r"\b[a-z]\b", operation))
        return {name: text for name, text in texts.items() if name in used}

    def matrix(self) -> None:
        """Skip where the case isn't a matrix of at least 4 x 4."""
        self.need_shape(len(self.shape) == 2 and min(self.shape) >= 4, "this operation is one of a matrix")

    def product(self, operation: str, suspects: dict[str, str] | None = None, hp: str | None = None) -> None:
        """A sum of products equals that of the values; a class that rounds activations may round each operand."""
        texts = self.operands(operation)
        length = torch.Size(self.shape).numel() if "conv" in operation or "bilinear" in operation else max(self.shape)
        rounded = tuple(n for n in ("w", *texts) if n not in ("b", "i", "m"))
        self.agree(operation, hp=hp, tolerance=multilinear(length), rounded=rounded, requantized=True, suspects=suspects, **texts)

    # --- linear

    @over(*((f"x {list(lead)}{' with bias' * bias}", lead, bias) for bias in (False, True) for lead in ops.LEADS))
    @check(needs=("inference",), requires=("inference",), why=_WHY, fix=_FIX)
    def test_linear(self, _: str, lead: tuple[int, ...], bias: bool) -> None:
        """A linear layer equals the dense one on the dequantized weight: shape, dtype and values, for every shape of input."""
        self.need_shape(len(self.shape) == 2, "linear takes a matrix")
        x = inputs.activation((*lead, self.in_features), self.dtype)
        texts = {"x": x, "b": self.bias()} if bias else {"x": x}
        suspects = {"the result without the bias": self.linear()} if bias else {}
        if len(lead) == 1 and lead[0] > 1:
            suspects.update(_wrong_rows(self.linear(b="b" if bias else None)))
        self.agree(self.linear(b="b" if bias else None), tolerance=self.linear_tolerance(), suspects=suspects, **texts)

    @over(*ops.LINEAR_KEYWORDS)
    @check(axes="dtype", needs=("inference",), why="nn modules and model code pass weight and bias by keyword; a dropped bias gives wrong outputs, without an error", fix=_FIX_ARGUMENTS)
    def test_linear_by_keyword(self, operation: str) -> None:
        """F.linear means the same with its arguments by keyword."""
        self.matrix()
        texts = self.operands(operation)
        self.agree(operation, tolerance=self.linear_tolerance(), suspects=_NO_BIAS if "b" in texts else {}, **texts)

    @over(*ops.LAYOUTS)
    @check(axes="dtype", needs=("inference",), why="activations come transposed, sliced and expanded; a kernel that assumes contiguous rows reads the wrong elements", fix="use the strides of the input, or make it contiguous")
    def test_linear_of_a_non_contiguous_input(self, _: str, layout: str) -> None:
        """A linear layer doesn't depend on how its input lies in memory."""
        self.need_shape(len(self.shape) == 2, "linear takes a matrix")
        x = self.x()
        suspects = {"the result of the input's memory read as if contiguous": self.linear("x.as_strided(x.shape, (x.shape[1], 1))")}
        self.agree(self.linear(), tolerance=self.linear_tolerance(), suspects=suspects, x=layout.format(x, x))

    @over(*((f"{kind}: {path}", kind, path) for kind in ops.WEIGHTS for path in ops.PATHS))
    @check(axes="variant", why="real weights have dead rows, outliers and offsets; each path must honour scales and zero points like to_plain", fix="keep scales finite for a row of zeros, and use the zero point in every path")
    def test_unusual_weight(self, _: str, kind: str, path: str) -> None:
        """Every path to the values (linear, products, look-up, arithmetic) agrees with to_plain for unusual weights too."""
        self.matrix()
        hp = _WEIGHT_TEXTS[kind](self.shape, self.dtype)
        if not self.script(hp)["d"].isfinite().all():
            raise CheckSkipped(f"{kind}: make gives values that are not finite (the protocol group reports it)")
        suspects = {"the result that ignores what the row's mean adds": path.replace("w", "(w - w.mean(-1, keepdim=True))")}
        self.product(path, suspects, hp)

    @over("F.linear(x, w)", "F.linear(x, w, b)", "x @ w.t()", "torch.addmm(b, x, w.t())")
    @check(axes="variant", why="a product of large codes and activations exceeds 65504 before the scale brings it down: infinity in the output", fix="accumulate in float32 and scale before the result is rounded to float16")
    def test_no_overflow_through_scaling(self, operation: str) -> None:
        """In float16, a result that is in range isn't lost to an intermediate that isn't."""
        self.matrix()
        if torch.float16 not in self.subject.dtypes:
            raise CheckSkipped("the subject doesn't take float16")
        texts = self.operands(operation)
        scale = 30000 / (6 * self.in_features)
        texts["x"] = f"(torch.linspace(0.5, 1, 5)[:, None] * torch.full((5, {self.in_features}), {scale:.1f})).half()"
        if "b" in texts:
            texts["b"] = inputs.bias(self.out_features, torch.float16)
        hp = inputs.positive(self.shape, torch.float16)
        self.agree(operation, hp=hp, tolerance=self.linear_tolerance(), likely="the product is rounded to float16 before it is scaled.", **texts)

    @check(level="should", axes="dtype", needs=("inference",), why="mixed-precision training and inference expect the output in the autocast dtype, as from a plain weight", fix="let F.linear reach autocast (no __torch_function__ override of it), or cast input and weight as autocast does")
    def test_linear_under_autocast(self) -> None:
        """Under autocast a linear gives what it gives with a plain weight: bfloat16."""
        self.need_shape(len(self.shape) == 2, "linear takes a matrix")
        self.agree(f"with torch.autocast('cpu', dtype=torch.bfloat16):\n    out = {self.linear()}\nout", tolerance=self.linear_tolerance(), likely="an override of F.linear bypasses autocast.", x=self.x())

    @over(("no_grad", "torch.no_grad()"), ("inference_mode", "torch.inference_mode()"), ("deterministic", "torch.random.fork_rng()"))
    @check(axes="one", needs=("inference",), why="evaluation runs in these modes, where other operators reach the class", fix="handle the composite operators (linear, matmul, reshape) too")
    def test_linear_in_mode(self, _: str, mode: str) -> None:
        """A linear gives the same under no_grad and inference_mode."""
        self.need_shape(len(self.shape) == 2, "linear takes a matrix")
        self.agree(f"with {mode}:\n    out = {self.linear(b='b')}\nout", tolerance=self.linear_tolerance(), x=self.x(), b=self.bias())

    @check(level="should", axes="variant", needs=("inference", "quantized"), why="a quantized output is rounded once more, and the next layer gets a class that it may not know", fix="return the plain product from linear")
    def test_linear_gives_a_plain_tensor(self) -> None:
        """The output of a linear is a plain tensor."""
        script = self.script(x=self.x())
        script.run(f"out = {self.linear()}")
        script.expect("not isinstance(out, type(w))", f"{self.linear()} gives a {{type(out).__name__}}.", kind="class")

    @check(axes="variant", needs=("inference",), depends=("equivalence/linear",), why="a cached dequantized weight goes stale: the model doesn't learn, or serves the weights of before the update", fix="don't cache values, or drop the cache at every write")
    def test_linear_after_an_update(self) -> None:
        """A linear after a write into the weight uses the written values."""
        self.need_shape(len(self.shape) == 2, "linear takes a matrix")
        script = self.script(x=self.x(), o=self.other())
        script.run(f"_ = {self.linear()}")
        script.run("with torch.no_grad():\n    w.copy_(o)")
        script.run(f"out = {self.linear()}")
        want = script.value(self.linear(w="plain(w)"), extend=False)
        script.ns["d"] = script.value("plain(w).clone()", extend=False)
        bound = self._bound(self.linear_tolerance(), script, self.linear(), want)
        stale = "the output is that of the values before the write." if _near(script.value("out", extend=False), script["hp"], script) else ""
        script.equal("out", self.linear(w="plain(w)"), label=f"{self.linear()} after w.copy_(o)", bound=bound, likely=stale)

    # --- the other operations

    @over(*ops.PRODUCTS)
    @check(why=_WHY, fix=_FIX)
    def test_matrix_product(self, operation: str) -> None:
        """A matrix product with the subclass in any place equals that of its values, positional and by keyword."""
        self.matrix()
        self.product(operation, {"the result with alpha and beta left out": re.sub(r", (alpha|beta)=[\d.]+", "", operation)})

    @over(*ops.EXPERT_PRODUCTS)
    @check(axes="experts", why="mixture-of-experts weights are 3-D: batched products use each expert's own scales", fix="count the dims of scales from the end, and keep the expert dim apart")
    def test_expert_product(self, operation: str) -> None:
        """A batched product, a convolution or a bilinear form with a 3-D subclass equals that of its values."""
        self.product(operation)

    @over(*ops.MIXED)
    @check(axes="variant", why="two operands of the class, or one where a handler expects a plain tensor, reach the same handler", fix="look at every argument's type; dequantize those that the kernel doesn't take")
    def test_product_of_mixed_operands(self, operation: str) -> None:
        """A product gives the same whichever of its operands are of the class."""
        self.matrix()
        self.product(operation)

    @over(*ops.LOOKUPS)
    @check(why="embeddings and expert choice index rows; a row with another row's scale is wrong in every element", fix="index the scales with the same rows as the data")
    def test_lookup(self, operation: str) -> None:
        """A look-up by index gives the rows of the values, each under its own scale."""
        self.matrix()
        self.agree(operation, tolerance=_LOOSE, requantized=True, **self.operands(operation))

    @over(*ops.ARITHMETIC)
    @check(why=_WHY, fix="dequantize for arithmetic; mind alpha=, value= and the order of the operands")
    def test_arithmetic(self, operation: str, magnitude: str) -> None:
        """Arithmetic with numbers, plain tensors and the class, in both orders, equals that of the values; dtypes promote alike."""
        self.matrix()
        suspects = {"the result with the operands swapped": _swapped(operation), "the result without alpha or value": re.sub(r", (alpha|value)=[-\d.]+", "", operation)}
        tolerance = multilinear(1) if magnitude else _LOOSE
        self.agree(operation, tolerance=tolerance, magnitude=magnitude, requantized=True, suspects=suspects, **self.operands(operation))

    @over(*ops.REDUCTIONS)
    @check(axes="dtype", why="weight decay, norms and calibration reduce weights; sums of codes are not sums of values", fix=_FIX)
    def test_reduction(self, operation: str, kind: str) -> None:
        """A reduction equals that of the values: dim by number, keyword and from the end."""
        self.matrix()
        tolerance = multilinear(torch.Size(self.shape).numel()) if kind == "sum" else _LOOSE
        self.agree(operation, tolerance=tolerance, requantized=True, **self.operands(operation))

    @over(*ops.POINTWISE)
    @check(axes="dtype", why=_WHY, fix=_FIX)
    def test_pointwise(self, operation: str) -> None:
        """A pointwise or rearranging operation equals that of the values."""
        self.matrix()
        self.agree(operation, tolerance=_LOOSE, requantized=True, **self.operands(operation))

    @over(*ops.COMPARISONS)
    @check(axes="variant", why="tests and loaders compare weights; codes that are equal don't make values equal", fix="compare dequantized values; torch.equal must look at scales too")
    def test_comparison(self, operation: str) -> None:
        """A comparison (also torch.equal and allclose) compares values."""
        self.matrix()
        self.agree(operation, **self.operands(operation))

    @over(*ops.JOINS)
    @check(why="fused projections and sharded checkpoints are joined; each part has its own scales", fix="join the scales along with the data, or dequantize, or raise NotImplementedError")
    def test_join(self, operation: str) -> None:
        """cat and stack of tensors of the class, alone and mixed with plain ones, equal those of the values, along every dim."""
        self.matrix()
        self.agree(operation, tolerance=_LOOSE, requantized=True, suspects={"the parts under the first one's scales, or in another order": "torch.cat([w, w])"}, **self.operands(operation))

    @over(*ops.RANDOM)
    @check(axes="variant", why="a run isn't reproducible when a layer draws more or fewer random numbers than a plain one", fix="draw once, for the outer shape, and nothing for inner tensors")
    def test_random_operation(self, operation: str) -> None:
        """A random operation gives what it gives on the values, and leaves the generator where it leaves it there."""
        self.matrix()
        hp = f"({self.hp()}).abs() / 16"
        after = "" if self._twins() or self.stochastic() else ", torch.rand(2)"
        self.agree(f"(torch.manual_seed(3), {operation}{after})[1:]", hp=hp, tolerance=self.linear_tolerance(), requantized=True, **self.operands(operation))

    def _twins(self) -> bool:
        """Whether the class carries several full copies (TwoTensor), each of which an operation is run on, random and in-place ones too."""
        w = self.subject.build(torch.zeros(self.shape, dtype=self.dtype))
        return sum(t.shape == w.shape and t.dtype == w.dtype for t in oracle.inner_tensors(w).values()) > 1

    # --- writes

    @over(*ops.OUT)
    @check(axes="dtype", why="a buffer that isn't written holds what was there before, and nobody looks at the returned tensor", fix="copy the result into out, or raise NotImplementedError")
    def test_out(self, operation: str, shape: str) -> None:
        """out= and in-place operations on plain tensors leave the result in the buffer, and return it; or are refused."""
        self.matrix()
        if operation == "r.add_(w)" and self._twins():
            raise CheckSkipped("each of several full copies is added")
        lines = f"r = torch.full({shape}, 7.0, dtype=w.dtype)\nreturned = {operation}\nr, returned"
        buffer = f"torch.full({shape}, 7.0, dtype=w.dtype)"
        suspects = {"what the buffer held before: out= was ignored": f"({buffer}, {buffer})"}
        if ", out=r" in operation:
            suspects["a right result that isn't in the buffer: out= was ignored"] = f"({buffer}, {operation.replace(', out=r', '')})"
        texts = self.operands(operation)
        rounded = tuple(n for n in texts if n in ("x", "z", "v")) if re.search("mm|mv|matmul", operation) else ()
        self.agree(lines, tolerance=multilinear(max(self.shape)), rounded=rounded, suspects=suspects, **texts)

    @over(*ops.IN_PLACE)
    @check(axes="each", why="an update that does nothing, or writes into a temporary, leaves training and loading without effect, and without an error", fix=_FIX_WRITE)
    def test_in_place(self, operation: str) -> None:
        """An in-place operation leaves the functional result in the tensor, within one quantization of it; or is refused with nothing changed."""
        self.matrix()
        texts = self.operands(operation)
        script = self.script(**texts)
        self._on_plain(script, operation)
        snapshots = {name: Snapshot.of(script[name]) for name in ("w", *texts)}
        script.run("v_ = w") if re.match(r"w [-+*/]=", operation) else None
        original = script["w"]
        try:
            script.run(f"with torch.no_grad():\n    {operation}")
        except Refused:
            self._nothing_changed(script, operation, snapshots)
            raise
        if script["w"] is not original:
            script.fail(f"{operation} gives another object ({{type(w).__name__}}) and not the tensor itself.", kind="identity", assertion="assert w is v_")
        bound = self.requantization(script, script["want"]) + oracle.elementwise_bound(script["want"], 2) + oracle.elementwise_bound(script["d"], 2)
        unchanged = snapshots.pop("w").changes(script["w"]) == ""
        likely = "w is as it was before: the write went into a temporary." if unchanged else self._inner_changes(script)
        script.equal("plain(w)", "want", label=f"w after {operation}", bound=bound, likely=likely)
        self._nothing_changed(script, operation, snapshots)

    def _on_plain(self, script: Script, operation: str) -> None:
        """``want``: the operation on plain values."""
        script.note("want = d.clone()")
        script.ns["want"] = script["d"].clone()
        text = self._plainly(re.sub(r"\bw\b", "want", operation), script)
        try:
            script.run(text)
        except Exception as error:
            raise CheckSkipped(f"torch itself can't: {operation} on plain {self.dtype}: {error}") from error

    def _nothing_changed(self, script: Script, operation: str, snapshots: dict[str, Snapshot]) -> None:
        for name, snapshot in snapshots.items():
            change = snapshot.changes(script[name])
            if change:
                script.fail(f"{operation} was refused or done, but {name} changed: {change}.", kind="mutated", assertion=f"raise AssertionError('{name} changed')")

    def _inner_changes(self, script: Script) -> str:
        """Which inner tensors a write changed."""
        script.ns["w_before"] = self.subject.build(script["hp"])
        before, after = oracle.inner_tensors(script["w_before"]), oracle.inner_tensors(script["w"])
        same = [n for n in before if n in after and oracle.same_bits(before[n], after[n])]
        changed = [n for n in after if n not in same]
        return f"inner tensors written: {', '.join(changed) or 'none'}; left as they were: {', '.join(same) or 'none'}."

    # --- errors

    @over(*ops.MISFITS)
    @check(axes="one", why="a packed or padded weight hides a wrong size: the product is computed from whatever is there", fix="compare the sizes before the kernel is called, and raise an error with both")
    def test_misfit_is_an_error(self, operation: str, _: str) -> None:
        """An operation whose operands don't fit raises, as with plain tensors, and changes nothing."""
        self._misfit(operation)

    @over(*ops.MISFITS)
    @check(level="should", axes="one", why="'shape mismatch' without the shapes sends people to a debugger", fix="name both sizes in the error")
    def test_misfit_names_the_sizes(self, operation: str, dim: str) -> None:
        """The error about operands that don't fit names one of the sizes."""
        try:
            error = self._misfit(operation)
        except CheckFailed as failure:
            raise CheckSkipped(f"misfit-is-an-error fails: {failure}") from failure
        size = self.shape[0] if dim == "rows" else self.shape[1]
        numbers = {int(n) for n in re.findall(r"\d+", str(error))}
        if isinstance(error, NotImplementedError) or numbers & {size, size - 1, 2 * size}:
            return
        raise CheckFailed(Finding("no-sizes", f"{operation} doesn't fit, but the error names no size (of {size}): {oracle.describe(error)}"))

    def _misfit(self, operation: str) -> BaseException:
        self.matrix()
        texts = self.operands(operation)
        script = self.script(**texts)
        snapshots = {name: Snapshot.of(script[name]) for name in ("w", *texts)}
        with torch.no_grad():
            error = self.refuses_or_raises(script, operation, f"{operation} gives a result although the sizes don't fit.")
        self._nothing_changed(script, operation, snapshots)
        return error

    @over("torch.float64", "torch.bfloat16", "torch.float32")
    @check(axes="variant", needs=("inference",), depends=("equivalence/linear",), why="with an input of another dtype a plain linear raises; what a subclass computes instead must at least be right", fix="raise an error that names both dtypes, or compute in the wider one")
    def test_input_of_another_dtype(self, dtype: str) -> None:
        """A linear of an input of another dtype raises, or gives the right values."""
        self.need_shape(len(self.shape) == 2, "linear takes a matrix")
        self.need_shape(dtype != str(self.dtype), "the dtype is the weight's own")
        script = self.script(x=f"({self.x()}).to({dtype})")
        try:
            script.run(f"out = {self.linear()}")
        except Refused:
            return  # as a plain weight does
        coarse = max((script["x"].dtype, self.dtype), key=lambda t: torch.finfo(t).eps)
        bound = self._bound(self.linear_tolerance(), script, self.linear(), torch.empty(0, dtype=coarse))
        want = self.linear("x.double()", "d.double()")
        script.equal("out.double()", want, label=f"{self.linear()} with x in {dtype}", bound=bound)


def _near(out: torch.Tensor, hp: torch.Tensor, script: Script) -> bool:
    """Whether a linear's output is nearer to that of the source values than to that of the new ones."""
    x = script["x"].double()
    old, new = x @ hp.double().t(), x @ script["d"].double().t()
    out = out.detach().double()
    return old.shape == out.shape and bool((out - old).norm() < (out - new).norm())


def _wrong_rows(linear: str) -> dict[str, str]:
    """What a linear's result may be if the weight's rows are wrong, as fits of ``got`` to these (over two rows of x or more)."""
    s = "x.sum(-1, keepdim=True)"
    return {
        "a linear in which each row of the weight is shifted by a number of its own, as by a zero point that is left out": f"{linear} + {s} * ((got - {linear}) * {s}).sum(0) / ({s} ** 2).sum()",
        "the right one with each output feature times a number of its own, as by a scale that is missing or another row's": f"{linear} * (got * {linear}).sum(0) / ({linear} ** 2).sum(0)",
    }


def _swapped(operation: str) -> str:
    """``a - b`` as ``b - a``."""
    match = re.fullmatch(r"(.+) ([-/]) (.+)", operation)
    return f"({match[3]}) {match[2]} ({match[1]})" if match else operation
