"""Making the tensor: from ugly values, from any memory layout, in unusual shapes, within the declared error."""

from __future__ import annotations

import math
import re

import torch

from subclass_testkit import inputs, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks import _sources
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Refused
from subclass_testkit.script import Script

_WHY_BUILD = "real checkpoints hold pruned rows, constant rows and outliers; one NaN spoils every output"
_FIX_BUILD = "clamp the scale to the smallest normal number before dividing by it, and compute it in float32"
# What torch itself says of a reduction over nothing: an IndexError, but one that names the dimension and the rule.
_OF_EMPTY = re.compile(r"Expected reduction dim .* to have non-zero size")
_DRAWS = 64


class ConstructionChecks(CheckGroup):
    """What ``make`` gives."""

    def data(self, kind: str) -> str:
        """The source text of a weight of a kind of ``_sources.KINDS``."""
        self.need_shape(len(self.shape) >= 2 and self.shape[-2] > 2 and self.shape[-1] > 3, "this data needs a matrix of 3 x 4")
        return _sources.kind(kind, self.shape, self.dtype)

    @over(*_sources.KINDS)
    @check(why=_WHY_BUILD, fix=_FIX_BUILD)
    def test_ugly_values(self, kind: str) -> None:
        """A zero row, a constant, an outlier, a subnormal row, one-sided rows give finite values that resemble the source's."""
        script = self.script(self.data(kind))
        self._resembles(script, f"made from a source of the kind `{kind}`")
        if kind == "constant":
            self._constant_is_near(script)

    def _constant_is_near(self, script: Script) -> None:
        """A constant tensor is the easiest there is: its relative error is no more than twice the standard weight's."""
        usual = self.script()
        relative = float(self._error(usual).amax()) / float(usual["hp"].double().abs().amax())
        bound = (2 * relative + 4 * torch.finfo(self.dtype).eps) * float(script["hp"].double().abs().amax())
        worst = float(self._error(script).amax())
        if worst > bound:
            script.fail(
                f"made from a constant of {float(script['hp'].flatten()[0]):.4g}, a value is {worst:.4g} away from it; other sources give "
                f"errors of {relative:.2%} of their largest magnitude.",
                kind="value",
                likely="the range of a constant row is empty, so that its scale or zero point collapses; let the range include 0.",
                assertion=f"assert (d.double() - hp.double()).abs().max() <= {bound:.4g}",
            )

    def _resembles(self, script: Script, label: str) -> None:
        """Right shape and dtype, finite, and no element further from its source than the largest magnitude there is."""
        script.expect(
            "d.shape == hp.shape",
            f"{label}, the values have shape {{list(d.shape)}}, expected {{list(hp.shape)}}.",
            kind="shape",
        )
        script.expect(
            "w.shape == hp.shape", f"{label}, it reports shape {{list(w.shape)}}, expected {{list(hp.shape)}}.", kind="shape"
        )
        wrong = ~script["d"].isfinite()
        if bool(wrong.any()):
            first = wrong.nonzero()[0].tolist()
            value = float(script["d"][tuple(first)])
            script.fail(
                f"{label}, {int(wrong.sum())} of {wrong.numel()} values are not finite; first at {first}: {value}, its source is "
                f"{float(script['hp'][tuple(first)]):.6g}.",
                kind="not finite",
                likely="a scale of zero, or one that underflows or overflows in its dtype.",
                assertion="assert d.isfinite().all()",
            )
        error, largest = (
            self._error(script),
            script["hp"].detach().double().abs().amax() if script["hp"].numel() else torch.tensor(0.0),
        )
        if error.numel() and float(error.amax()) > float(largest) * (1 + torch.finfo(self.dtype).eps):
            script.fail(
                f"{label}, a value is {float(error.amax()):.4g} away from its source, whose largest magnitude is {float(largest):.4g}.",
                kind="value",
                assertion="assert (d.double() - hp.double()).abs().max() <= hp.double().abs().max()",
            )

    def _error(self, script: Script) -> torch.Tensor:
        error: torch.Tensor = (script["d"].double() - script["hp"].detach().double()).abs()
        return error

    @over("standard", *_sources.KINDS, "its own values")
    @check(
        axes="all",
        why="an error beyond the format's own is a wrong scale, zero point or rounding",
        fix="compare with the format's formula: half a step of the element's own row, group or block",
    )
    def test_quantization_error(self, kind: str) -> None:
        """Every element is within the declared error of its source (`max_error`; none at all for a lossless class)."""
        recipe = self.subject.max_error
        if recipe is None and "quantized" in self.case.found:
            raise CheckSkipped("the subject declares no max_error")
        script = self.script(self.data("standard" if kind == "its own values" else kind))
        if kind == "its own values":
            script.run(f"hp = d\nw = {self.subject.make_text}\nd = plain(w).clone()")
        if callable(recipe):
            script.ns["max_error"] = recipe
        script.run(f"bound = {'max_error(hp, d)' if callable(recipe) else recipe or 'torch.zeros_like(hp)'}")
        bound = torch.as_tensor(script["bound"]).double().expand(script["hp"].shape)
        found = oracle.value_finding(script["d"], script["hp"], bound, f"made from a source of the kind `{kind}`, it")
        if found:
            script.fail(
                found.message,
                kind="value",
                likely=self._of_bound(script, bound),
                assertion="assert ((d.double() - hp.double()).abs() <= bound).all()",
            )

    def _of_bound(self, script: Script, bound: torch.Tensor) -> str:
        """How far beyond the bound, and in which rows."""
        error = self._error(script)
        if not bool(error.isfinite().all()):
            return "some values are not finite."
        rows = (error > bound).flatten(0, -2).any(-1) if error.dim() > 1 else torch.ones(1, dtype=torch.bool)
        over_by = float((error - bound).amax())
        return f"beyond the bound by up to {over_by:.3g}, in {int(rows.sum())} of {rows.numel()} rows."

    @over(*_sources.LAYOUTS)
    @check(
        axes="one",
        why="weights arrive transposed, sliced and as Parameters; a kernel that assumes contiguous memory permutes them",
        fix="call contiguous() first, or use strides; quantize under no_grad",
    )
    def test_source_layout(self, layout: str) -> None:
        """The memory layout of the source makes no difference: transposed, partial, with an offset, expanded, requiring grad."""
        self.need_shape(len(self.shape) >= 2, "a matrix")
        script = Script(self.subject, "", {})
        script.run(f"hp = {self.hp()}\nhp = {_sources.LAYOUTS[layout]}\nw = {self.subject.make_text}")
        script.run(f"v, hp = w, hp.detach().clone(memory_format=torch.contiguous_format)\nw = {self.subject.make_text}")
        label = f"made from a source that is {layout}, it"
        script.expect("v.shape == w.shape", f"{label} has shape {{list(v.shape)}}, expected {{list(w.shape)}}.", kind="shape")
        # a tie may round the other way, when a reduction ran in another order: as near to the source, then, as made from contiguous memory
        script.run("d = plain(w)")
        slack = 8 * torch.finfo(self.dtype).eps * float(script["hp"].double().abs().amax())
        bound = (
            self._error(script) + slack
            if "quantized" in self.case.found
            else torch.zeros(script["hp"].shape, dtype=torch.float64)
        )
        if self.subject.stochastic:
            bound = bound + 2 * self._error(script).amax()
        found = oracle.compare(script.read(script["v"], "v"), script["hp"], bound, label)
        if found:
            script.fail(found.message, kind=found.kind, assertion="torch.testing.assert_close(plain(v), plain(w))")

    @check(
        why="the caller's weight is changed, or bound to the copy", fix="work on a copy: no in-place operation on the source"
    )
    def test_source_is_left_alone(self) -> None:
        """`make` and `to_plain` change nothing in the source or the tensor, and don't make the source require grad."""
        script = Script(self.subject, "", {})
        script.run(f"hp = {self.hp()}\nbefore = hp.clone()\nw = {self.subject.make_text}\nd = plain(w).clone()")
        script.equal("hp", "before", label="after `make`, its source")
        script.expect("not hp.requires_grad", "after `make`, its source requires grad.", kind="requires_grad")
        snapshot = oracle.Snapshot.of(script["w"])
        if "wrapper" in self.case.found:
            script.run("context = repr(w.__tensor_flatten__()[1])")
        script.run("_ = to_plain(w)")
        change = snapshot.changes(script["w"])
        if change:
            of_context = "context" in script.ns and "context" in change
            same = "repr(w.__tensor_flatten__()[1]) == context" if of_context else "torch.equal(plain(w), d)"
            script.fail(f"reading its values changed the tensor: {change}.", kind="mutated", assertion=f"assert {same}")
        script.run("with torch.no_grad():\n    _ = plain(w).clone()")
        script.equal("w", "d", label="a second reading of its values")

    @check(
        why="two ranks, or a test and its rerun, must quantize alike",
        fix="don't use the random generator, uninitialised memory or dict order; or declare stochastic=True",
    )
    def test_make_is_deterministic(self) -> None:
        """The same source gives the same tensor, bit for bit, whatever the random generator's state."""
        if self.subject.stochastic:
            raise CheckSkipped("the subject is stochastic")
        script = self.script()
        script.run(f"_ = torch.manual_seed(1234)\nv = {self.subject.make_text}")
        script.equal("v", "d", label="made a second time, it")
        first, second = oracle.inner_tensors(script["w"]), oracle.inner_tensors(script["v"])
        for name in first.keys() & second.keys():
            if not oracle.same_bits(first[name], second[name]):
                script.fail(
                    f"made a second time, its inner tensor {name!r} differs.",
                    kind="value",
                    assertion=f"assert torch.equal(v.{name}, w.{name})",
                )

    @check(
        axes="variant",
        why="stochastic rounding is used because it is right on average; a bias accumulates over steps",
        fix="round down, and up with the probability of the fraction: floor(x + rand)",
    )
    def test_stochastic_make_is_unbiased(self) -> None:
        """Rounding at random is right on average: no drift, neither up nor away from zero, over many draws."""
        if not self.subject.stochastic:
            raise CheckSkipped("the subject is not stochastic")
        script = self.script()
        script.run(
            f"draws = torch.stack([(torch.manual_seed(i), plain({self.subject.make_text}))[1].double() - hp.double() for i in range({_DRAWS})])"
        )
        if not script.value("bool((draws[0] != draws[1]).any())", extend=False):
            raise CheckSkipped("make doesn't round at random: two seeds give the same values (writes may)")
        for text, what in (("draws", "upwards"), ("draws * hp.double().sign()", "away from zero")):
            errors = script.value(text, extend=False)
            mean, limit = float(errors.mean()), 4 * float(errors.std()) / math.sqrt(errors.numel())
            limit += torch.finfo(self.dtype).eps * float(script["hp"].double().abs().mean())
            if abs(mean) > limit:
                script.fail(
                    f"over {_DRAWS} draws the mean error {what} is {mean:.3g}; rounding without bias stays within {limit:.3g}.",
                    kind="bias",
                    assertion=f"assert ({text}).mean().abs() <= {limit!r}",
                )

    @check(
        why="saving, loading and resharding requantize; an error that grows at each round is a wrong scale",
        fix="make the range that is chosen for the dequantized values the range that they were made with",
    )
    def test_requantizing_stays_near(self) -> None:
        """`make(to_plain(w))` is no further from w than quantizing put w from its source."""
        script, moved, first = self._again()
        quantized = "quantized" in self.case.found
        limit = (
            1.25 * float(first.amax()) * (2 if self.subject.stochastic else 1) + self._roundings(script) if quantized else 0.0
        )
        if float(moved.amax()) > limit:
            script.fail(
                f"made again from its own values, a value moved by {float(moved.amax()):.4g}; the first quantization moved none by more than {float(first.amax()):.4g}.",
                kind="value",
                assertion=f"assert (plain(v).double() - d.double()).abs().max() <= {limit!r}",
            )

    @check(
        level="should",
        why="weights that are loaded and saved again drift, and comparisons with the original fail",
        fix="choose the scale so that the largest code decodes to the largest value, and compute it in float32",
    )
    def test_requantizing_is_idempotent(self) -> None:
        """`make(to_plain(w))` reproduces the values of w, but for the rounding of the values and of the scale to the dtype."""
        if self.subject.stochastic:
            raise CheckSkipped("the subject is stochastic")
        script, moved, _ = self._again()
        limit = self._roundings(script)
        if float(moved.amax()) > limit:
            script.fail(
                f"made again from its own values, {int((moved > limit).sum())} of {moved.numel()} values moved, by up to {float(moved.amax()):.4g}; "
                f"rounding alone explains {limit:.4g}.",
                kind="value",
                likely="the scale isn't chosen by the largest value that a code can take (a range of 2**bits - 1 steps, an unused code), or is itself quantized.",
                assertion=f"assert (plain(v).double() - d.double()).abs().max() <= {limit!r}",
            )

    def _again(self) -> tuple[Script, torch.Tensor, torch.Tensor]:
        """The tensor made again from its own values as ``v``; how far each value moved, and how far the first time."""
        script = self.script()
        first = self._error(script)
        script.run(f"hp = d.clone()\nv = {self.subject.make_text}")
        script.expect("v.shape == w.shape", "made again from its own values, it has shape {list(v.shape)}.", kind="shape")
        moved = (script.read(script["v"], "v").double() - script["d"].double()).abs()
        return script, moved.nan_to_num(math.inf), first

    def _roundings(self, script: Script) -> float:
        """Values rounded to the dtype give a scale that is off by one rounding (or two, if it is stored in that dtype): four in all."""
        if "quantized" not in self.case.found:
            return 0.0
        return 4 * torch.finfo(self.dtype).eps * float(script["d"].double().abs().amax())

    @over("one row", "fewest columns", "smallest", "odd", "many rows")
    @check(
        axes="variant",
        why="models have layers of one row, odd sizes and tiny heads",
        fix="derive counts of groups by division that rounds up, or raise ValueError with the sizes",
    )
    def test_unusual_shape(self, name: str) -> None:
        """One row, the fewest columns, odd sizes: right, or refused with a clear error."""
        self.need_shape(len(self.shape) >= 2, "a matrix")
        shape = _sources.unusual_shapes(self.shape, self.subject.multiples_of)[name]
        script = self.script(inputs.weight(shape, self.dtype))
        self._resembles(script, f"made from {'x'.join(map(str, shape))}")

    @over(*_sources.ILLEGAL)
    @check(
        axes="variant",
        why="what can't be represented must be said, not approximated",
        fix="check dtype, number of dimensions and divisibility first, and raise ValueError with the sizes",
    )
    def test_illegal_source(self, name: str) -> None:
        """A source that the format can't take (0-D, empty, integers, an odd column) raises, or is right."""
        script, error = self._illegal(name)
        if error is None:
            self._resembles(script, f"made from a source of the kind `{name}`")

    @over(*_sources.ILLEGAL)
    @check(
        level="should",
        axes="variant",
        why="an IndexError from inside the library doesn't tell people what to change",
        fix="check dtype, number of dimensions and divisibility first, and raise ValueError with the sizes",
    )
    def test_illegal_source_has_a_clear_error(self, name: str) -> None:
        """A source that the format can't take raises an error of its own (ValueError, TypeError, NotImplementedError), no accident."""
        _, error = self._illegal(name)
        if error is not None and not _OF_EMPTY.search(str(error)):
            raise error

    def _illegal(self, name: str) -> tuple[Script, Exception | None]:
        text = _sources.illegal(name, self.shape, self.dtype, self.subject.multiples_of)
        if text is None:
            raise CheckSkipped("every number of columns is legal for this subject")
        self.script()  # where its own shape means nothing, so do these
        script = Script(self.subject, "", {})
        try:
            script.run(f"hp = {text}")
            script.run(f"w = {self.subject.make_text}")
            script.run("d = plain(w)")
        except (Refused, CheckFailed) as error:
            if _raised_by_the_recipe(error):
                raise CheckSkipped(f"the subject's recipe doesn't take it: {error}") from error
            return script, error
        return script, None


def _raised_by_the_recipe(error: Exception) -> bool:
    """Whether the text of ``make`` itself raised (``hp.shape[-1]``), and not the library that it calls."""
    tb = error.__cause__.__traceback__ if error.__cause__ is not None else None
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and tb.tb_frame.f_code.co_filename.startswith("<")
