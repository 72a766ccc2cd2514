"""Subject x checks x axes -> check instances, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from subclass_testkit.check import CLAIMS, Check, did_you_mean, group_checks, registry, select
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import Outcome, Result, instance_label
from subclass_testkit.subject import Subject

TIERS = ("quick", "standard", "full")
ISOLATE = ("hazardous", "all", "none")


@dataclass(frozen=True)
class Options:
    """How a run is made.

    ``claims`` are demanded in addition to what the subject declares; ``checks`` are globs of ids; ``rules`` is the newest rule set
    whose checks run.
    """

    claims: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    tier: str = "standard"
    strict: bool = False
    isolate: str = "hazardous"
    seed: int = 0
    rules: str = ""

    def has(self, info: Check) -> bool:
        """Whether the rule set has this check; without ``rules``, all are had."""
        return not self.rules or info.since <= self.rules


@dataclass(frozen=True)
class Instance:
    """A check at one point of its own axis and the subject's. ``method`` is the mixin's (with its case bound)."""

    check: Check
    mixin: type[CheckGroup]
    method: Callable[..., Any]
    argument: str
    variant: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None

    @property
    def params(self) -> dict[str, str]:
        params = {"case": self.argument} if self.argument else {}
        if self.variant != "default":
            params["variant"] = self.variant
        params["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.shape is not None:
            params["shape"] = "x".join(map(str, self.shape))
        return params

    @property
    def label(self) -> str:
        return instance_label(self.check.id, self.params)

    def result(self, outcome: Outcome, **fields: Any) -> Result:
        """A result of this instance."""
        return Result(self.check.id, self.check.level, self.params, outcome, **fields)


def expand(subject: Subject, options: Options, mixins: tuple[type[CheckGroup], ...]) -> Iterator[Instance]:
    """The instances that the options select, in the order of the mixins and their methods."""
    tiers = TIERS[: TIERS.index(options.tier) + 1]
    ids = [info.id for mixin in mixins for info, _, _ in group_checks(mixin)]
    kept = set(select(dict.fromkeys(ids), options.checks)) if options.checks else set(ids)
    for mixin in mixins:
        for info, method, argument in group_checks(mixin):
            if info.id in kept and info.tier in tiers and options.has(info):
                yield from _at_points(subject, info, mixin, method, argument)


def dependencies(
    subject: Subject, options: Options, instances: list[Instance], mixins: tuple[type[CheckGroup], ...]
) -> Iterator[Instance]:
    """The instances of all checks that a selected one depends on, selected themselves or not."""
    wanted = {other for instance in instances for other in instance.check.depends}
    while more := {other for name in wanted for other in registry()[name].depends} - wanted:
        wanted |= more
    for mixin in mixins:
        for info, method, argument in group_checks(mixin):
            if info.id in wanted and options.has(info):
                yield from _at_points(subject, info, mixin, method, argument)


def _at_points(
    subject: Subject, info: Check, mixin: type[CheckGroup], method: Callable[..., Any], argument: str
) -> Iterator[Instance]:
    for variant, dtype, shape in axis_points(subject, info.axes):
        yield Instance(info, mixin, method, argument, variant, dtype, shape)


def axis_points(subject: Subject, axes: str) -> Iterator[tuple[str, torch.dtype, tuple[int, ...] | None]]:
    """The points of the subject's axes that a check runs at.

    ``all``: dtypes x shapes of the default variant, and of every other variant its own default point and each other dtype and shape. ``each``: the default point, and from it each other dtype, shape and variant. ``dtype``,
    ``variant``: that axis alone. ``one``: the default point. ``experts``: the 3-D shapes, each dtype.
    """
    assert subject.shapes is not None
    first, dtype = subject.shapes[0], subject.dtypes[0]
    shapes = [s for s in subject.shapes if len(s) == len(first)]
    if axes == "experts":
        deep = [s for s in subject.shapes if len(s) == 3]
        yield from (("default", d, s) for s in deep for d in subject.dtypes)
        if not deep:
            yield "default", dtype, None
        return
    points: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    for variant in subject.variant_names() if axes in ("all", "each", "variant") else ("default",):
        at = subject.at(variant)
        own_shapes = shapes if at.shapes == subject.shapes else [s for s in (at.shapes or ()) if len(s) == len(first)]
        for d in at.dtypes if axes in ("all", "each", "dtype") else (at.dtypes[0],):
            for s in own_shapes if axes in ("all", "each") else (own_shapes[0],):
                changed = (variant != "default") + (d != at.dtypes[0]) + (s != own_shapes[0])
                if changed <= 1 or (axes == "all" and (variant == "default" or changed == 2)):
                    points.append((variant, d, s))
    yield from points


def validated(options: Options) -> Options:
    """The options, if all values are known.

    Raises:
        ValueError: names the value, the option and the nearest valid value.
    """
    for name, value, allowed in (("tier", options.tier, TIERS), ("isolate", options.isolate, ISOLATE)):
        if value not in allowed:
            raise ValueError(f"{name}: {value!r} is none of {', '.join(allowed)}{did_you_mean(value, allowed)}")
    known = sorted({info.since for info in registry().values()})
    if options.rules and options.rules not in known:
        raise ValueError(f"rules: there is no rule set {options.rules!r}{did_you_mean(options.rules, known)}")
    for claim in options.claims:
        if claim not in CLAIMS:
            raise ValueError(f"claims: unknown claim {claim!r}{did_you_mean(claim, CLAIMS)}")
    if options.checks:
        select(registry(), options.checks)
    return options
