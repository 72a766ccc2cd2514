"""What checks there are, and what each demands."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def explanation(check_id: str) -> str:
    """Everything that a check knows of itself.

    Raises:
        ValueError: no such check; names the nearest.
    """
    from subclass_testkit.check import CLAIMS, did_you_mean, registry

    checks = registry()
    if check_id not in checks:
        raise ValueError(f"there is no check {check_id!r}{did_you_mean(check_id, checks)}")
    info = checks[check_id]
    lines = [f"{info.id}   ({info.level}, tier {info.tier}, since {info.since})", ""]
    for label, text in (("Rule", info.rule), ("Why", info.why), ("Fix", info.fix)):
        lines += textwrap.wrap(text, 100, initial_indent=f"{label:<9} ", subsequent_indent=" " * 10)
    for claim in info.needs:
        lines.append(f"{'Needs':<9} the claim {claim!r}: {CLAIMS[claim]}")
    for claim in info.requires:
        lines.append(f"{'Required':<9} by the claim {claim!r} where it is declared: a refusal then fails")
    for other in info.depends:
        lines.append(f"{'After':<9} {other}: blocked where that fails")
    if info.own_process:
        lines.append(f"{'Process':<9} runs in a process of its own")
    if info.upstream:
        lines.append(f"{'Upstream':<9} {info.upstream}")
    return "\n".join(lines)


def catalogue(globs: Sequence[str]) -> str:
    """A line a check."""
    from subclass_testkit.check import registry, select

    checks = registry()
    kept = select(checks, globs) if globs else list(checks)
    width = max((len(i) for i in kept), default=0)
    lines = [f"{i:<{width}}  {checks[i].level:<7} {checks[i].tier:<9} {checks[i].rule}" for i in kept]
    return "\n".join([*lines, f"{len(kept)} checks"])
