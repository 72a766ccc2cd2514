"""What changed between two reports: of two commits, or two versions of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from subclass_testkit.outcome import Outcome, Result

_SHOWN = 10
_FINE = (Outcome.PASSED,)
_KINDS = {
    "fails now": True,
    "no longer passes": True,
    "no longer checked": True,
    "fails differently": False,
    "no failure any more": False,
    "newly checked": False,
    "other outcome": False,
}


@dataclass
class Comparison:
    """Changes by kind; the first kinds are regressions."""

    changes: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in _KINDS})
    notes: list[str] = field(default_factory=list)

    @property
    def regressed(self) -> bool:
        return any(self.changes[kind] for kind, bad in _KINDS.items() if bad)

    def __str__(self) -> str:
        lines = [*self.notes]
        for kind, found in self.changes.items():
            if found:
                lines.append(f"{kind} ({len(found)}):")
                lines += [f"  {text}" for text in found[:_SHOWN]]
                lines += [f"  and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        lines.append("REGRESSION." if self.regressed else "No regression.")
        return "\n".join(lines)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """What changed from one JSON report to another, instance by instance.

    A regression is an instance that fails and didn't, that passed and no longer does (it is refused, not claimed, blocked or torch's
    limit), or that passed and isn't there. What this machine lacks (`skipped`) is none.
    """
    found = Comparison()
    if before["torch"] != after["torch"]:
        found.notes.append(f"torch {before['torch']} -> {after['torch']}")
    if before["interrupted"] or after["interrupted"]:
        found.notes.append("one of the runs was interrupted: what it didn't reach counts as no longer checked")
    old, new = _runs(before), _runs(after)
    for spec in dict.fromkeys((*old, *new)):
        a, b = old.get(spec), new.get(spec)
        if a is not None and b is not None and a["tier"] != b["tier"]:
            found.notes.append(f"{spec}: tier {a['tier']} -> {b['tier']}")
        _compare_run(found, spec, _results(a), _results(b), strict=bool(b and b["strict"]))
    return found


def _compare_run(found: Comparison, spec: str, old: Mapping[str, Result], new: Mapping[str, Result], *, strict: bool) -> None:
    for label in dict.fromkeys((*old, *new)):
        kind, text = _change(old.get(label), new.get(label), strict)
        if kind:
            found.changes[kind].append(f"{spec} {label}: {text}")


def _change(a: Result | None, b: Result | None, strict: bool) -> tuple[str, str]:
    """The kind of a change and what it is; empty where there is none."""
    if b is None:
        return ("no longer checked", "passed") if a is not None and a.outcome in _FINE else ("", "")
    if a is None:
        return ("fails now", _brief(b)) if b.fails_run(strict) else ("newly checked", b.outcome.value)
    change = f"{a.outcome.value} -> {_brief(b)}"
    if b.fails_run(strict):
        if not a.fails_run(strict):
            return "fails now", change
        return ("fails differently", f"{a.message} -> {b.message}") if a.kind != b.kind else ("", "")
    if a.outcome is b.outcome:
        return "", ""
    if a.outcome in _FINE and b.outcome is not Outcome.SKIPPED:
        return "no longer passes", change
    return ("no failure any more" if a.broken else "other outcome"), change


def _brief(result: Result) -> str:
    return " ".join(f"{result.outcome.value}: {result.message}".split())[:160] if result.message else result.outcome.value


def _runs(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {run["spec"]: run for run in report["runs"]}


def _results(run: Mapping[str, Any] | None) -> dict[str, Result]:
    checks: Sequence[Mapping[str, Any]] = run["checks"] if run else ()
    return {r.label: r for r in map(Result.from_json, map(dict, checks))}
