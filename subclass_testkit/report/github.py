"""GitHub's annotations: a line a check, since GitHub shows few of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subclass_testkit.report import model
from subclass_testkit.report.sarif import relative


def render(report: Mapping[str, Any], root: Path | None = None) -> str:
    """``::error file=mypkg/tensor.py,line=120,title=slicing/select::...`` for each check of each subject that fails, worst first."""
    lines = [f"::error title=conformance::{_text(p)}" for p in report["problems"]]
    for view in model.runs(report):
        lines += [f"::error title={_value(view.short)}::{_text(p)}" for p in view.problems]
        seen = set()
        for finding in view.findings():
            first = finding.first
            if finding.status == "known" or first.id in seen:
                continue
            seen.add(first.id)
            place = model.place(first.where) or model.place(view.data["source"])
            where = f"file={_value(relative(place[0], root or Path.cwd()))},line={place[1]}," if place else ""
            kind = "error" if finding.status == "fail" else "warning"
            lines.append(f"::{kind} {where}title={_value(f'{view.short} {first.id}')}::{_text(first.message)}")
    return "".join(line + "\n" for line in lines)


def _text(text: str) -> str:
    """As workflow commands want it: https://docs.github.com/actions/reference/workflow-commands-for-github-actions"""
    return " ".join(text.split()).replace("%", "%25")


def _value(text: str) -> str:
    return _text(text).replace(":", "%3A").replace(",", "%2C")
