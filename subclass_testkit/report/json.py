"""The machine-readable report, from which all others are made; its schema is docs/report.schema.json."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subclass_testkit.outcome import Result, totals

if TYPE_CHECKING:
    from subclass_testkit.finished import Finished
    from subclass_testkit.known_failures import KnownFailure

SCHEMA_VERSION = 1


def report(ends: Iterable[Finished], *, interrupted: bool = False, problems: Sequence[str] = ()) -> dict[str, Any]:
    """The report of one session: one run a subject, in the order in which they were asked for.

    Args:
        ends: the runs and their results.
        interrupted: the session was stopped before every selected check had run.
        problems: what fails the session besides its runs.
    """
    import torch

    from subclass_testkit import __version__

    ends = list(ends)
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "subclass-testkit", "version": __version__},
        "torch": torch.__version__,
        "platform": {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()},
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seed": ends[0].run.options.seed if ends else 0,
        "rule_set": ends[0].run.options.rules if ends else "",
        "interrupted": interrupted,
        "problems": list(problems),
        "rules": _rules(r.id for end in ends for r in end.results),
        "runs": [_run(end) for end in ends],
    }


def _rules(ids: Iterable[str]) -> dict[str, Any]:
    """What the checks demand, so that a report explains itself wherever it is read."""
    from subclass_testkit.check import registry

    rules = {}
    for info in (registry()[i] for i in dict.fromkeys(ids) if i in registry()):
        names = ("level", "tier", "since", "rule", "why", "fix", "upstream")
        rules[info.id] = {**{n: getattr(info, n) for n in names}, "needs": list(info.needs)}
    return rules


def _run(end: Finished) -> dict[str, Any]:
    from subclass_testkit.locate import SubjectCode

    run = end.run
    claims = run.claims.values()
    return {
        "subject": run.subject.title,
        "spec": run.spec or run.subject.title,
        "source": SubjectCode(run.subject.cls).definition_of(run.subject.cls),
        "inferred": list(run.subject.inferred),
        "claims": [{"name": c.name, "declared": c.declared, "found": c.found, "reason": c.reason} for c in claims],
        "tier": run.options.tier,
        "strict": run.options.strict,
        "totals": totals(end.results),
        "deselected": end.deselected,
        "verdict": "fail" if end.failed else "pass",
        "problems": list(end.problems),
        "known_failures": [_entry(e) for e in (*run.expectations.entries, *run.expectations.idle)],
        "checks": [_check(r) for r in end.results],
    }


def _entry(entry: KnownFailure) -> dict[str, Any]:
    params = {axis: [v] if isinstance(v, str) else list(v) for axis, v in entry.params.items()}
    texts = {n: str(getattr(entry, n)) for n in ("source", "subclass", "check", "reason", "when", "issue", "expires", "match")}
    return {**texts, "params": params, "in_force": entry.active, "expired": entry.expired}


def _check(result: Result) -> dict[str, Any]:
    data = result.to_json()
    data["seconds"] = round(data["seconds"], 6)
    return data


def render(data: dict[str, Any]) -> str:
    """The report as text."""
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read(path: Path) -> dict[str, Any]:
    """A report from its file.

    Raises:
        ValueError: there is no such file, or it is no report of this version; says how one is written.
    """
    remedy = "write one with pytest --subclass=... --subclass-report=report.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"there is no report {str(path)!r}; {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON report ({error}); {remedy}") from None
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION or "runs" not in data:
        raise ValueError(f"{str(path)!r} is no report of schema version {SCHEMA_VERSION}; {remedy}")
    return data
