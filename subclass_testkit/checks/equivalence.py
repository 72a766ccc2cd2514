"""Every operation equals the one on the dequantized values, or is refused."""

from __future__ import annotations

import re

import torch

from subclass_testkit import inputs, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks import _equivalence_ops as ops
from subclass_testkit.checks._equivalence_base import EquivalenceGroup, near_source, swapped, wrong_rows
from subclass_testkit.checks._operator_sweep import operators, sweep
from subclass_testkit.oracle import Snapshot, Tolerance, multilinear
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Finding, Refused

_LARGE = ("F.linear(x, w)", "F.linear(x, w, b)", "x @ w.t()", "torch.addmm(b, x, w.t())")
_WHY = "the class stands in for its values; a wrong result goes on into the model, without an error"
_FIX = "compute from the dequantized values, or from the codes with every scale and zero point, or raise NotImplementedError"
_FIX_ARGUMENTS = "bind the arguments by the operator's schema in one place, so that positional and keyword calls can't differ"
_FIX_WRITE = (
    "quantize the new values into the inner tensors (data and scales) in place, or raise NotImplementedError before any write"
)
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


class EquivalenceTests(EquivalenceGroup):
    """Every operation equals the one on the dequantized values."""

    group = "equivalence"

    # --- linear

    @over(*((f"x {list(lead)}{' with bias' * bias}", lead, bias) for bias in (False, True) for lead in ops.LEADS))
    @check(needs=("inference",), requires=("inference",), why=_WHY, fix=_FIX)
    def test_linear(self, name: str, lead: tuple[int, ...], bias: bool) -> None:
        """A linear layer equals the dense one on the dequantized weight: shape, dtype and values, for every shape of input."""
        self.need_shape(len(self.shape) == 2, "linear takes a matrix")
        self.takes_packed = self.subject.linear is not None
        x = inputs.activation((*lead, self.in_features), self.dtype)
        texts = {"x": x, "b": self.bias()} if bias else {"x": x}
        suspects = {"the result without the bias": self.linear()} if bias else {}
        if len(lead) == 1 and lead[0] > 1:
            suspects.update(wrong_rows(self.linear(b="b" if bias else None)))
        self.agree(self.linear(b="b" if bias else None), tolerance=self.linear_tolerance(), suspects=suspects, operands=texts)

    @over(*ops.LINEAR_KEYWORDS)
    @check(
        axes="dtype",
        needs=("inference",),
        why="nn modules and model code pass weight and bias by keyword; a dropped bias gives wrong outputs, without an error",
        fix=_FIX_ARGUMENTS,
    )
    def test_linear_by_keyword(self, operation: str) -> None:
        """F.linear means the same with its arguments by keyword."""
        self.matrix()
        texts = self.operands(operation)
        self.agree(operation, tolerance=self.linear_tolerance(), suspects=_NO_BIAS if "b" in texts else {}, operands=texts)

    @over(*ops.LAYOUTS)
    @check(
        axes="dtype",
        needs=("inference",),
        why="activations come transposed, sliced and expanded; a kernel that assumes contiguous rows reads the wrong elements",
        fix="use the strides of the input, or make it contiguous",
    )
    def test_linear_of_a_non_contiguous_input(self, name: str, layout: str) -> None:
        """A linear layer doesn't depend on how its input lies in memory."""
        self.need_shape(len(self.shape) == 2, "linear takes a matrix")
        x = self.x()
        suspects = {
            "the result of the input's memory read as if contiguous": self.linear("x.as_strided(x.shape, (x.shape[1], 1))")
        }
        self.agree(self.linear(), tolerance=self.linear_tolerance(), suspects=suspects, x=layout.format(x, x))

    @over(*((f"{kind}: {path}", kind, path) for kind in ops.WEIGHTS for path in ops.PATHS))
    @check(
        axes="variant",
        why="real weights have dead rows, outliers and offsets; each path must honour scales and zero points like to_plain",
        fix="keep scales finite for a row of zeros, and use the zero point in every path",
    )
    def test_unusual_weight(self, name: str, kind: str, path: str) -> None:
        """Every path to the values (linear, products, look-up, arithmetic) agrees with to_plain for unusual weights too."""
        self.matrix()
        hp = _WEIGHT_TEXTS[kind](self.shape, self.dtype)
        if not self.script(hp)["d"].isfinite().all():
            raise CheckSkipped(f"{kind}: make gives values that are not finite (the protocol group reports it)")
        suspects = {"the result that ignores what the row's mean adds": path.replace("w", "(w - w.mean(-1, keepdim=True))")}
        self.product(path, suspects, hp)

    @over(
        ("130 rows", 130, 1, "F.linear(x, w, b)"),
        ("130 rows, x @ w.t()", 130, 1, "x @ w.t()"),
        ("1 row and 8 times as many columns", 1, 8, "F.linear(x, w, b)"),
        ("8 times as many columns", 5, 8, "F.linear(x, w, b)"),
        ("17 rows and 8 times as many columns", 17, 8, "F.linear(x, w, b)"),
    )
    @check(
        axes="variant",
        needs=("inference",),
        why="kernels are chosen by the number of rows and columns: prefill takes another path than decoding, and large layers tile",
        fix="try each kernel on sizes below, at and beyond the border at which it takes over; mask what is left over",
    )
    def test_linear_of_other_sizes(self, name: str, rows: int, times: int, operation: str) -> None:
        """A linear of many rows, and one of a weight with many columns, equals that of the values."""
        self.need_shape(len(self.shape) == 2, "linear takes a matrix")
        shape = (self.shape[0], self.shape[1] * times)
        x = inputs.activation((rows, shape[1]), self.dtype)
        operation = self.linear(b="b") if "F.linear" in operation else operation
        texts = {"b": self.bias()} if re.search(r"\bb\b", operation) else {}
        suspects = {"the result without the bias": self.linear()} if texts else {}
        hp = inputs.weight(shape, self.dtype)
        try:
            self.script(hp)
        except Refused as refusal:
            raise CheckSkipped(f"the subject takes no source of {shape[0]}x{shape[1]}: {refusal}") from None
        self.agree(operation, hp=hp, tolerance=multilinear(shape[1]), suspects=suspects, x=x, operands=texts)

    @over(
        *((operation, operation, False) for operation in _LARGE),
        *((f"{operation} under no_grad", operation, True) for operation in _LARGE),
    )
    @check(
        axes="variant",
        why="a product of large codes and activations exceeds 65504 before the scale brings it down: infinity in the output",
        fix="accumulate in float32 and scale before the result is rounded to float16",
    )
    def test_no_overflow_through_scaling(self, name: str, operation: str, no_grad: bool) -> None:
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
        self.agree(
            f"with torch.no_grad():\n    out = {operation}\nout" if no_grad else operation,
            hp=hp,
            tolerance=self.linear_tolerance(),
            likely="the product is rounded to float16 before it is scaled.",
            operands=texts,
        )

    @check(
        level="should",
        axes="dtype",
        needs=("inference",),
        why="mixed-precision training and inference expect the output in the autocast dtype, as from a plain weight",
        fix="let F.linear reach autocast (no __torch_function__ override of it), or cast input and weight as autocast does",
    )
    def test_linear_under_autocast(self) -> None:
        """Under autocast a linear gives what it gives with a plain weight: bfloat16."""
        self.need_shape(len(self.shape) == 2, "linear takes a matrix")
        self.agree(
            f"with torch.autocast('cpu', dtype=torch.bfloat16):\n    out = {self.linear()}\nout",
            tolerance=self.linear_tolerance(),
            likely="an override of F.linear bypasses autocast.",
            x=self.x(),
        )

    @over(
        ("no_grad", "torch.no_grad()"),
        ("inference_mode", "torch.inference_mode()"),
        ("deterministic", "torch.random.fork_rng()"),
    )
    @check(
        axes="one",
        needs=("inference",),
        why="evaluation runs in these modes, where other operators reach the class",
        fix="handle the composite operators (linear, matmul, reshape) too",
    )
    def test_linear_in_mode(self, name: str, mode: str) -> None:
        """A linear gives the same under no_grad and inference_mode."""
        self.need_shape(len(self.shape) == 2, "linear takes a matrix")
        self.agree(
            f"with {mode}:\n    out = {self.linear(b='b')}\nout", tolerance=self.linear_tolerance(), x=self.x(), b=self.bias()
        )

    @check(
        level="should",
        axes="variant",
        needs=("inference", "quantized"),
        why="a quantized output is rounded once more, and the next layer gets a class that it may not know",
        fix="return the plain product from linear",
    )
    def test_linear_gives_a_plain_tensor(self) -> None:
        """The output of a linear is a plain tensor."""
        script = self.script(x=self.x())
        script.run(f"out = {self.linear()}")
        script.expect("not isinstance(out, type(w))", f"{self.linear()} gives a {{type(out).__name__}}.", kind="class")

    @over("torch.enable_grad()", "torch.no_grad()", "torch.inference_mode()")
    @check(
        axes="variant",
        needs=("inference",),
        depends=("equivalence/linear",),
        why="a cached dequantized weight goes stale: the model doesn't learn, or serves the weights of before the update",
        fix="don't cache values, or drop the cache at every write",
    )
    def test_linear_after_an_update(self, mode: str) -> None:
        """A linear after a write into the weight uses the written values."""
        self.need_shape(len(self.shape) == 2, "linear takes a matrix")
        script = self.script(x=self.x(), o=self.other())
        script.run(f"with {mode}:\n    _ = {self.linear()}")
        script.run("with torch.no_grad():\n    w.copy_(o)")
        script.run(f"with {mode}:\n    out = {self.linear()}")
        want = script.value(self.linear(w="plain(w)"), extend=False)
        script.ns["d"] = script.value("plain(w).clone()", extend=False)
        bound = self._bound(self.linear_tolerance(), script, self.linear(), want)
        stale = (
            "the output is that of the values before the write."
            if near_source(script.value("out", extend=False), script["hp"], script)
            else ""
        )
        script.equal("out", self.linear(w="plain(w)"), label=f"{self.linear()} after w.copy_(o)", bound=bound, likely=stale)

    # --- the other operations

    @over(*ops.PRODUCTS)
    @check(why=_WHY, fix=_FIX)
    def test_matrix_product(self, operation: str) -> None:
        """A matrix product with the subclass in any place equals that of its values, positional and by keyword."""
        self.matrix()
        without = re.sub(r", (alpha|beta)=[\d.]+", "", operation)
        self.product(operation, {"the result with alpha and beta left out": without} if without != operation else {})

    @over(*ops.EXPERT_PRODUCTS)
    @check(
        axes="experts",
        why="mixture-of-experts weights are 3-D: batched products use each expert's own scales",
        fix="count the dims of scales from the end, and keep the expert dim apart",
    )
    def test_expert_product(self, operation: str) -> None:
        """A batched product, a convolution or a bilinear form with a 3-D subclass equals that of its values."""
        self.product(operation)

    @over(*ops.MIXED)
    @check(
        axes="variant",
        why="two operands of the class, or one where a handler expects a plain tensor, reach the same handler",
        fix="look at every argument's type; dequantize those that the kernel doesn't take",
    )
    def test_product_of_mixed_operands(self, operation: str) -> None:
        """A product gives the same whichever of its operands are of the class."""
        self.matrix()
        self.product(operation)

    @over(*ops.LOOKUPS)
    @check(
        axes="variant",
        why="embeddings and expert choice index rows; a row with another row's scale is wrong in every element",
        fix="index the scales with the same rows as the data",
    )
    def test_lookup(self, operation: str) -> None:
        """A look-up by index gives the rows of the values, each under its own scale."""
        self.matrix()
        self.agree(operation, tolerance=_LOOSE, requantized=True, operands=self.operands(operation))

    @over(*ops.ARITHMETIC)
    @check(axes="dtype", why=_WHY, fix="dequantize for arithmetic; mind alpha=, value= and the order of the operands")
    def test_arithmetic(self, operation: str, magnitude: str) -> None:
        """Arithmetic with numbers, plain tensors and the class, in both orders, equals that of the values; dtypes promote alike."""
        self.matrix()
        suspects = {
            "the result with the operands swapped": swapped(operation),
            "the result without alpha or value": re.sub(r", (alpha|value)=[-\d.]+", "", operation),
        }
        tolerance = multilinear(1) if magnitude else _LOOSE
        self.agree(
            operation,
            tolerance=tolerance,
            magnitude=magnitude,
            requantized=True,
            suspects=suspects,
            operands=self.operands(operation),
        )

    @over(*ops.REDUCTIONS)
    @check(
        axes="dtype", why="weight decay, norms and calibration reduce weights; sums of codes are not sums of values", fix=_FIX
    )
    def test_reduction(self, operation: str, kind: str) -> None:
        """A reduction equals that of the values: dim by number, keyword and from the end."""
        self.matrix()
        tolerance = multilinear(torch.Size(self.shape).numel()) if kind == "sum" else _LOOSE
        fixed_range = "torch.ones_like(d)" if "softmax" in operation else True
        self.agree(operation, tolerance=tolerance, requantized=fixed_range, operands=self.operands(operation))

    @over(*ops.POINTWISE)
    @check(axes="dtype", why=_WHY, fix=_FIX)
    def test_pointwise(self, operation: str) -> None:
        """A pointwise or rearranging operation equals that of the values."""
        self.matrix()
        self.agree(operation, tolerance=_LOOSE, requantized=True, operands=self.operands(operation))

    @over(*ops.COMPARISONS)
    @check(
        axes="variant",
        why="tests and loaders compare weights; codes that are equal don't make values equal",
        fix="compare dequantized values; torch.equal must look at scales too",
    )
    def test_comparison(self, operation: str) -> None:
        """A comparison (also torch.equal and allclose) compares values."""
        self.matrix()
        self.agree(operation, operands=self.operands(operation))

    @over(*ops.JOINS)
    @check(
        axes="variant",
        why="fused projections and sharded checkpoints are joined; each part has its own scales",
        fix="join the scales along with the data, or dequantize, or raise NotImplementedError",
    )
    def test_join(self, operation: str) -> None:
        """cat and stack of tensors of the class, alone and mixed with plain ones, equal those of the values, along every dim."""
        self.matrix()
        self.agree(
            operation,
            tolerance=_LOOSE,
            requantized=True,
            suspects={"the parts under the first one's scales, or in another order": "torch.cat([w, w])"},
            operands=self.operands(operation),
        )

    @over(*ops.RANDOM)
    @check(
        axes="variant",
        why="a run isn't reproducible when a layer draws more or fewer random numbers than a plain one",
        fix="draw once, for the outer shape, and nothing for inner tensors",
    )
    def test_random_operation(self, operation: str) -> None:
        """A random operation gives what it gives on the values, and leaves the generator where it leaves it there."""
        self.matrix()
        hp = f"({self.hp()}).abs() / 16"
        after = "" if self.twins() or self.stochastic() else ", torch.rand(2)"
        self.agree(
            f"(torch.manual_seed(3), {operation}{after})[1:]",
            hp=hp,
            tolerance=self.linear_tolerance(),
            requantized=True,
            operands=self.operands(operation),
        )

    # --- writes

    @over(*ops.OUT)
    @check(
        axes="dtype",
        why="a buffer that isn't written holds what was there before, and nobody looks at the returned tensor",
        fix="copy the result into out, or raise NotImplementedError",
    )
    def test_out(self, operation: str, shape: str) -> None:
        """out= and in-place operations on plain tensors leave the result in the buffer, and return it; or are refused."""
        self.matrix()
        if operation == "r.add_(w)" and self.twins():
            raise CheckSkipped("each of several full copies is added")
        lines = f"r = torch.full({shape}, 7.0, dtype=w.dtype)\nreturned = {operation}\nr, returned"
        buffer = f"torch.full({shape}, 7.0, dtype=w.dtype)"
        suspects = {"what the buffer held before: out= was ignored": f"({buffer}, {buffer})"}
        if ", out=r" in operation:
            suspects["a right result that isn't in the buffer: out= was ignored"] = (
                f"({buffer}, {operation.replace(', out=r', '')})"
            )
        texts = self.operands(operation)
        rounded = tuple(n for n in texts if n in ("x", "z", "v")) if re.search("mm|mv|matmul", operation) else ()
        self.agree(lines, tolerance=multilinear(max(self.shape)), rounded=rounded, suspects=suspects, operands=texts)

    @over(*ops.IN_PLACE)
    @check(
        axes="each",
        why="an update that does nothing, or writes into a temporary, leaves training and loading without effect, and without an error",
        fix=_FIX_WRITE,
    )
    def test_in_place(self, operation: str) -> None:
        """An in-place operation leaves the functional result in the tensor, within one quantization of it; or is refused with nothing changed."""
        self.matrix()
        texts = self.operands(operation)
        script = self.script(**texts)
        self.run_on_plain(script, operation)
        snapshots = {name: Snapshot.of(script[name]) for name in ("w", *texts)}
        script.run("v_ = w") if re.match(r"w [-+*/]=", operation) else None
        original = script["w"]
        try:
            script.run(f"with torch.no_grad():\n    {operation}")
        except Refused:
            self.nothing_changed(script, operation, snapshots)
            raise
        if script["w"] is not original:
            script.fail(
                f"{operation} gives another object ({{type(w).__name__}}) and not the tensor itself.",
                kind="identity",
                assertion="assert w is v_",
            )
        bound = (
            self.requantization(script, script["want"])
            + oracle.elementwise_bound(script["want"], 2)
            + oracle.elementwise_bound(script["d"], 2)
        )
        unchanged = snapshots.pop("w").changes(script["w"]) == ""
        likely = "w is as it was before: the write went into a temporary." if unchanged else self.inner_changes(script)
        script.equal("plain(w)", "want", label=f"w after {operation}", bound=bound, likely=likely)
        self.nothing_changed(script, operation, snapshots)

    # --- errors

    @over(*ops.MISFITS)
    @check(
        axes="one",
        why="a packed or padded weight hides a wrong size: the product is computed from whatever is there",
        fix="compare the sizes before the kernel is called, and raise an error with both",
    )
    def test_misfit_is_an_error(self, operation: str, dim: str) -> None:
        """An operation whose operands don't fit raises, as with plain tensors, and changes nothing."""
        self.misfit(operation)

    @over(*ops.MISFITS)
    @check(
        level="should",
        axes="one",
        why="'shape mismatch' without the shapes sends people to a debugger",
        fix="name both sizes in the error",
    )
    def test_misfit_names_the_sizes(self, operation: str, dim: str) -> None:
        """The error about operands that don't fit names one of the sizes."""
        try:
            error = self.misfit(operation)
        except CheckFailed as failure:
            raise CheckSkipped(f"misfit-is-an-error fails: {failure}") from failure
        size = self.shape[0] if dim == "rows" else self.shape[1]
        numbers = {int(n) for n in re.findall(r"\d+", str(error))}
        if isinstance(error, NotImplementedError) or numbers & {size, size - 1, 2 * size}:
            return
        message = f"{operation} doesn't fit, but the error names no size (of {size}): {oracle.describe(error)}"
        script = self.script(**self.operands(operation))
        end = f"text = ''\ntry:\n    {operation}\nexcept Exception as error:\n    text = str(error)\nassert '{size}' in text or '{size - 1}' in text, text"
        raise CheckFailed(Finding("no-sizes", message, reproduction=script.text(end)))

    @over("torch.float64", "torch.bfloat16", "torch.float32")
    @check(
        axes="variant",
        needs=("inference",),
        depends=("equivalence/linear",),
        why="with an input of another dtype a plain linear raises; what a subclass computes instead must at least be right",
        fix="raise an error that names both dtypes, or compute in the wider one",
    )
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
        call = f"out = {self.linear()}"
        script.lines[script.lines.index(call)] = f"try: {call}\nexcept Exception: raise SystemExit  # as with a plain weight"
        script.equal("out.double()", want, label=f"{self.linear()} with x in {dtype}", bound=bound)

    # --- all operators

    @check(
        tier="full",
        axes="one",
        own_process=True,
        timeout=300,
        why="an operator that nobody thought of gives wrong values, without an error",
        fix=_FIX,
    )
    def test_operator_sweep(self) -> None:
        """Every operator of torch that has sample inputs gives, with one argument of the class, what it gives with its values."""
        found = sweep(self.subject, operators())
        self.case.facts.setdefault("operator_sweep", {}).update(found.counts)
        if not found.wrong:
            return
        name, sample, position, text = found.wrong[0]
        names = ", ".join(dict.fromkeys(w[0] for w in found.wrong))
        script = self.script(hp="")
        script.note(
            f"from torch.testing._internal.common_methods_invocations import op_db\n"
            f"op = next(o for o in op_db if {name!r} in (o.name, f'{{o.name}}.{{o.variant_test_name}}'))\n"
            f"sample = list(op.sample_inputs('cpu', torch.float32))[{sample}]\n"
            f"values = [sample.input, *sample.args]\n"
            f"hp = values[{position}].detach()\n"
            f"w = {self.subject.make_text}\n"
            f"run = lambda v: op.op(*values[:{position}], v, *values[{position + 1}:], **sample.kwargs)\n"
            f"torch.manual_seed(0); got = run(w)\n"
            f"torch.manual_seed(0); want = run(plain(w).clone())"
        )
        message = f"{name} with argument {position} of the class: {text} Wrong: {names}. Operators: {found.table()}."
        end = "torch.testing.assert_close(plain(got), plain(want), rtol=0, atol=1e-3 * float(want.abs().max()))"
        raise CheckFailed(Finding("sweep", message, reproduction=script.text(end)))
