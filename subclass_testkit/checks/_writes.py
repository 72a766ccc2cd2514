"""How a write into a subject is judged: near the wanted values by its own rounding, or refused with nothing changed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from subclass_testkit import oracle
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import CheckFailed, Finding, Refused
from subclass_testkit.script import Script

# Rounding to nearest errs by h/sqrt(3) in the mean square, rounding at random by sqrt(2) times that, cutting off by twice that.
_NORM_FACTOR = 1.7


@dataclass(frozen=True)
class Watched:
    """What a tensor was before a write: its plain values, and its inner tensors."""

    name: str
    values: torch.Tensor
    snapshot: oracle.Snapshot


@dataclass(frozen=True)
class Rounding:
    """How far a written tensor may be from the wanted values: element by element, and in the norm."""

    bound: torch.Tensor
    norm: float
    half_step: float


class WriteChecks(CheckGroup):
    """What groups share whose checks write into a subject (optimizers, modules)."""

    def made(self, name: str) -> str:
        """The text that makes a subject from the plain tensor called ``name``."""
        return re.sub(r"\bhp\b(?!\s*=[^=])", lambda _: name, self.subject.make_text)

    def second(self, seed: int = 3) -> str:
        """The text of a second plain weight, whose rows have other magnitudes than the first one's: with equal ones, lost scales don't show."""
        return f"({self.hp(seed=seed)}).flip({-2 if len(self.shape) > 1 else 0}) * 0.6"

    def only_matrices(self) -> None:
        """Skip where the case is no matrix: a linear layer's weight is one."""
        self.need_shape(len(self.shape) == 2, "the weight of a linear layer is a matrix")

    # --- bounds

    def rounding(self, before: torch.Tensor, wanted: torch.Tensor, writes: int) -> Rounding:
        """The bound for ``writes`` requantizations on the way from ``before`` to ``wanted``.

        The step h of the format isn't known, so its error is measured: on the wanted values, on values beside them (where these lie on the
        grid by chance) and, for several writes, half-way. The largest of a row's K errors, which spread evenly over +-h/2, is below h/4 with
        chance 2**-K: twice that error bounds the half step, and rounding at random errs by a whole step. ``subject.max_error`` raises it.
        To that come the roundings of the arithmetic in the tensor's own dtype.
        """
        points = [wanted, wanted * self._ripple(wanted)]
        if writes > 1:
            points.append((before + (wanted - before) / 2).to(wanted.dtype) * self._ripple(wanted))
        largest = torch.zeros(1, dtype=torch.float64)
        norm = 0.0
        for point in points:
            made = self.subject.plain(self.subject.build(point.clone()))
            error = (oracle.widen(made) - oracle.widen(point)).abs()
            half = torch.maximum(2 * self._rows(error), self._rows(self._declared_error(point, made)))
            largest = torch.maximum(largest, half)
            norm = max(norm, float(error.norm()))
        eps = torch.finfo(wanted.dtype).eps if wanted.dtype.is_floating_point else 0.0
        arithmetic = (
            (oracle.widen(before).abs() + oracle.widen(wanted).abs()) * eps * (2 + writes)
        )  # 4 + 2 * writes roundings, each by half an ulp
        at_random = 2 if self.case.facts.get("random_writes") or self.subject.stochastic else 1
        return Rounding(
            largest * writes * at_random + arithmetic,
            norm * writes * _NORM_FACTOR + float(arithmetic.norm()),
            float(largest.max()),
        )

    @staticmethod
    def _ripple(t: torch.Tensor) -> torch.Tensor:
        """Factors between 0.95 and 1, which move values off the grid of a format and leave their magnitude."""
        return (1 - 0.05 * torch.arange(t.numel(), dtype=torch.float64).sin().abs()).reshape(t.shape).to(t.dtype)

    @staticmethod
    def _rows(error: torch.Tensor) -> torch.Tensor:
        return error.amax(-1, keepdim=True) if error.dim() and error.numel() else error

    def _declared_error(self, hp: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        """``subject.max_error`` at these values; zero where it isn't declared."""
        recipe = self.subject.max_error
        if recipe is None:
            return torch.zeros(hp.shape, dtype=torch.float64)
        value = recipe(hp, d) if callable(recipe) else eval(recipe, dict(self.subject.namespace), {"hp": hp, "d": d})  # noqa: S307
        return oracle.widen(torch.as_tensor(value)).expand(hp.shape)

    def half_step(self, s: Script) -> float:
        """Half of the largest quantization step of ``s``'s subject, measured."""
        d = s["d"]
        return self.rounding(d, d, 1).half_step

    # --- writing and judging

    def watch(self, s: Script, name: str) -> Watched:
        """Remember a tensor of the script as it is before a write."""
        return Watched(name, self.subject.plain(s[name]).clone(), oracle.Snapshot.of(s[name]))

    def attempt(self, s: Script, source: str, *watched: Watched) -> Any:
        """Run a write; if it is refused, nothing that is watched may have changed by then."""
        try:
            return s.run(source)
        except Refused as refusal:
            for before in watched:
                change = before.snapshot.changes(s[before.name])
                if change:
                    message = f"{refusal}; but by then {before.name} had been changed: {change}."
                    likely = "an earlier operation of the same update is supported: support both, or refuse both."
                    raise CheckFailed(Finding("half-done", message, likely, refusal.reproduction)) from refusal
            raise

    def _found_random(self) -> bool:
        """Whether writes turn out to round at random, which the subject hasn't declared; asked once a run, when a bound is exceeded."""
        if self.subject.stochastic or "random_writes" in self.case.facts:
            return False
        again = False
        for write in ("t.add_((hp + 1).sin())", "t.copy_((hp + 1).sin() + hp)"):
            results = []
            try:
                s = self.script()
                for seed in (0, 1, 0):
                    s.run(f"torch.manual_seed({seed}); t = {self.made('hp.clone()')}\nwith torch.no_grad(): _ = {write}")
                    results.append(self.subject.plain(s["t"]).clone())
            except (Refused, CheckFailed):
                continue
            again |= oracle.same_bits(results[0], results[2]) and not oracle.same_bits(results[0], results[1])
        self.case.facts["random_writes"] = again
        return again

    def written(self, s: Script, before: Watched, want: str, label: str, *, writes: int = 1) -> None:
        """Fail unless the watched tensor holds the values of ``want`` now, as near as its rounding allows."""
        got, wanted = s.read(s[before.name], before.name), s.read(s.value(want, extend=False), want)
        rounding = self.rounding(before.values, wanted, writes)
        found = oracle.compare(got, wanted, rounding.bound, label) or _norm_finding(got, wanted, rounding, label)
        if found and self._found_random():
            rounding = self.rounding(before.values, wanted, writes)
            found = oracle.compare(got, wanted, rounding.bound, label) or _norm_finding(got, wanted, rounding, label)
        if found and found.kind == "value":
            found = _explain(found, before, s[before.name], got, wanted, rounding.bound, label)
        if found is not None:
            found.reproduction = s.text(_assertion(before.name, want, got, wanted, rounding, found))
            raise CheckFailed(found)


def _norm_finding(got: torch.Tensor, wanted: torch.Tensor, rounding: Rounding, label: str) -> Finding | None:
    distance = float((oracle.widen(got) - oracle.widen(wanted)).norm())
    if distance <= rounding.norm:
        return None
    message = f"{label} is {distance:.4g} away from the wanted values (norm of the difference), rounding to nearest explains {rounding.norm:.4g}."
    return Finding("coarse", message, "values are cut off instead of rounded, or an old, larger scale is kept.")


def _assertion(name: str, want: str, got: torch.Tensor, wanted: torch.Tensor, rounding: Rounding, found: Finding) -> str:
    """The line that fails in the reproduction: at the element that is furthest beyond its bound."""
    if found.kind in ("shape", "dtype", "device"):
        return f"assert {name}.{found.kind} == {want}.{found.kind}"
    if found.kind == "coarse":
        return f"assert (plain({name}) - plain({want})).double().norm() <= {rounding.norm:.4g}"
    excess = ((oracle.widen(got) - oracle.widen(wanted)).abs() - rounding.bound).nan_to_num(torch.inf, torch.inf)
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    limit = float(rounding.bound.expand(got.shape)[at])
    limit = 0.0 if math.isnan(limit) else limit  # the subject gives NaN on these values: no error is explained
    return f"assert (plain({name}) - plain({want}))[{', '.join(map(str, at))}].abs() <= {limit:.4g}"


def _explain(
    found: Finding, before: Watched, now: torch.Tensor, got: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor, label: str
) -> Finding:
    """Name the fault if one of the known ones gives exactly these values."""
    if oracle.same_bits(got, before.values):
        return Finding("no-op", f"{label}: nothing has changed, and no error was raised. {found.message}", _no_op_story(label))
    frozen = _unchanged_codes(before.snapshot, now)
    if frozen:
        likely = f"only the scale was rewritten: the codes ({frozen}) are what they were."
        return Finding("codes-unchanged", found.message, likely)
    g, w, b = oracle.widen(got), oracle.widen(wanted), oracle.widen(before.values)
    if not b.dim() or not b.numel() or b.shape != w.shape:
        return found
    wrong = (g - w).abs() > bound
    for kind, guess, slack, likely in _guesses(b, w):
        explains = bool(((guess - w).abs() > bound / 2)[wrong].all()) or kind == "old-step"
        if explains and bool(((g - guess).abs() <= bound * slack).all()):
            return Finding(kind, found.message, likely)
    found.likely = _inner_story(before.snapshot, now)
    return found


def _no_op_story(label: str) -> str:
    if "foreach" in label or "fused" in label:
        return "these operators pass lists: an item of the list that is of the class was updated in a copy, or passed over."
    return "nothing reached the inner tensors: the operation ran on a copy, or replaced the inner tensors by others."


def _guesses(b: torch.Tensor, w: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, str]]:
    """Known faults: kind, the values that it gives, how many times the bound they are uncertain, and the sentence."""
    tiny = torch.finfo(torch.float64).tiny
    one = torch.ones(1, dtype=torch.float64)
    for where, dims in (("row", (-1,)), ("tensor", tuple(range(b.dim())))):
        old, new = b.abs().amax(dims, keepdim=True), w.abs().amax(dims, keepdim=True)
        coarser = (old / new.clamp(min=tiny)).clamp(min=1)  # an old, larger scale has larger steps
        limits = f"values are clipped to the range that each {where} had before"
        yield "clipped", w.clamp(-old, old), coarser, f"{limits}: the scale isn't refreshed."
        lo, hi = b.amin(dims, keepdim=True), b.amax(dims, keepdim=True)
        yield "clipped", w.clamp(lo, hi), coarser, f"{limits}: scale and zero point aren't refreshed."
        yield (
            "stale-scale",
            w * (old / new.clamp(min=tiny)),
            coarser,
            f"the new codes are read with the old scale of each {where}.",
        )
        yield (
            "codes-unchanged",
            b * (new / old.clamp(min=tiny)),
            one,
            f"the old codes are read with the new scale of each {where}.",
        )
        yield (
            "old-step",
            w,
            coarser,
            f"values are rounded to the steps of the larger scale that each {where} had before: it isn't refreshed.",
        )
    yield "direction", 2 * b - w, one, "the step was made in the opposite direction."
    yield "twice", 2 * w - b, one, "the step was made twice."


def _unchanged_codes(before: oracle.Snapshot, now: torch.Tensor) -> str:
    """The names of the narrowest inner tensors, if all of them kept their bits while another inner tensor changed."""
    after = oracle.inner_tensors(now)
    if len(after) < 2 or after.keys() != before.inner.keys():
        return ""
    width = min(t.element_size() for t in after.values())
    codes = [n for n, t in after.items() if t.element_size() == width]
    same = {n for n in after if oracle.same_bits(before.inner[n], after[n])}
    return ", ".join(codes) if same.issuperset(codes) and len(same) < len(after) else ""


def _inner_story(before: oracle.Snapshot, now: torch.Tensor) -> str:
    after = oracle.inner_tensors(now)
    same = sorted(n for n in after if n in before.inner and oracle.same_bits(before.inner[n], after[n]))
    changed = sorted(after.keys() - set(same))
    if not same or not changed:
        return ""
    return f"inner tensors: {', '.join(changed)} changed, {', '.join(same)} did not."
