"""The machine-readable report; its schema is docs/report.schema.json."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subclass_testkit.outcome import Result, totals

if TYPE_CHECKING:
    from subclass_testkit.suite import Run

SCHEMA_VERSION = 1


def report(runs: Iterable[tuple[Run, Sequence[Result]]], *, interrupted: bool = False) -> dict[str, Any]:
    """The report of one session: one run a subject, in the order in which they were asked for."""
    import torch

    from subclass_testkit import __version__

    runs = list(runs)
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "subclass-testkit", "version": __version__},
        "torch": torch.__version__,
        "platform": {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()},
        "seed": runs[0][0].options.seed if runs else 0,
        "interrupted": interrupted,
        "runs": [_run(run, results) for run, results in runs],
    }


def _run(run: Run, results: Sequence[Result]) -> dict[str, Any]:
    failed = not results or any(r.fails_run(run.options.strict) for r in results)
    return {
        "subject": run.subject.title,
        "spec": run.spec or run.subject.title,
        "inferred": list(run.subject.inferred),
        "claims": [{"name": c.name, "declared": c.declared, "found": c.found, "reason": c.reason} for c in run.claims.values()],
        "tier": run.options.tier,
        "strict": run.options.strict,
        "totals": totals(results),
        "verdict": "fail" if failed else "pass",
        "checks": [_check(r) for r in results],
    }


def _check(result: Result) -> dict[str, Any]:
    data = result.to_json()
    data["seconds"] = round(data["seconds"], 6)
    return data


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a report, as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)
