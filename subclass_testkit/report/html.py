"""The report as one HTML file: matrix, findings with their scripts, claims, durations; it loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from subclass_testkit.outcome import Outcome, Result
from subclass_testkit.report import model
from subclass_testkit.report.model import SIGNS, Cell, Finding, RunView

_TEMPLATES = Path(__file__).parent / "templates"
_INSTANCES, _WORST, _SLOWEST = 24, 6, 8
_QUIET = (Outcome.REFUSED, Outcome.BLOCKED, Outcome.NOT_CLAIMED, Outcome.TORCH_LIMIT, Outcome.SKIPPED)


def render(report: Mapping[str, Any]) -> str:
    """The page. All text from outside is escaped by the template."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["seconds"] = seconds
    views = model.runs(report)
    return environment.get_template("report.html.j2").render(
        report=report,
        failed=model.failed(report),
        signs=SIGNS,
        outcomes={o.value: sum(v.whole.counts[o.value] for v in views) for o in Outcome},
        groups=model.group_names(views),
        runs=[_run(view, f"s{i}", report["rules"]) for i, view in enumerate(views)],
        style=(_TEMPLATES / "report.css").read_text(encoding="utf-8"),
        code=(_TEMPLATES / "report.js").read_text(encoding="utf-8"),
    )


def seconds(value: float) -> str:
    """``0.4 ms``, ``12 ms``, ``3.4 s``."""
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms" if value >= 0.001 else f"{value * 1000:.1f} ms"


def _run(view: RunView, anchor: str, rules: Mapping[str, Any]) -> dict[str, Any]:
    findings: dict[str, list[Finding]] = {}
    for finding in view.findings():
        findings.setdefault(finding.results[0].id, []).append(finding)
    checks = view.checks()
    groups = []
    for name, cell in view.groups().items():
        members = [
            _check(view, i, c, findings.get(i, []), rules.get(i, {}), anchor) for i, c in checks.items() if _group(i) == name
        ]
        order = list(SIGNS)
        members.sort(key=lambda m: order.index(m["cell"].status))
        groups.append({"name": name, "anchor": f"{anchor}-{name}", "cell": cell, "checks": members})
    bad = [f for f in view.findings() if f.status in ("fail", "should")]
    told = {f.results[0].gate or (f.results[0].id, f.results[0].kind): f for f in reversed(bad)}  # a stale entry once
    worst = [f for f in bad if f in told.values()][:_WORST]
    slowest = sorted(checks.items(), key=lambda item: -item[1].seconds)[:_SLOWEST]
    longest = max((c.seconds for _, c in slowest), default=0) or 1
    return {
        "view": view,
        "data": view.data,
        "anchor": anchor,
        "cells": {g["name"]: g["cell"] for g in groups},
        "groups": groups,
        "worst": [{"finding": f, "anchor": _anchor(anchor, f.results[0].id)} for f in worst],
        "findings": len(bad),
        "slowest": [(i, c.seconds, 100 * c.seconds / longest) for i, c in slowest],
    }


def _group(check_id: str) -> str:
    return check_id.partition("/")[0]


def _anchor(run: str, check_id: str) -> str:
    return f"{run}-{check_id.replace('/', '-')}"


def _check(
    view: RunView, check_id: str, cell: Cell, findings: Sequence[Finding], rule: Mapping[str, Any], anchor: str
) -> dict[str, Any]:
    return {
        "id": check_id,
        "anchor": _anchor(anchor, check_id),
        "cell": cell,
        "level": cell.results[0].level,
        "rule": rule,
        "findings": [_finding(f) for f in findings],
        "remarks": _remarks(cell.results),
        "rerun": f"pytest --subclass={view.spec} '--subclass-checks={check_id}'",
    }


def _finding(finding: Finding) -> dict[str, Any]:
    labels = [", ".join(r.params.values()) for r in finding.results]
    return {
        "first": finding.first,
        "status": finding.status,
        "stale": finding.stale,
        "count": len(labels),
        "instances": labels[:_INSTANCES],
        "more": max(0, len(labels) - _INSTANCES),
        "known": next((r.known for r in finding.results if r.known), ""),
        "gate": next((r.gate for r in finding.results if r.gate and r.gate != r.message), ""),
    }


def _remarks(results: Sequence[Result]) -> list[tuple[str, int, str]]:
    """Of each quiet outcome: its name, how often, and the first message."""
    told = []
    for outcome in _QUIET:
        same = [r for r in results if r.outcome is outcome]
        if same:
            told.append((outcome.value, len(same), same[0].message))
    return told
