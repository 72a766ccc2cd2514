"""The summary page of a CI run: short, most severe first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from subclass_testkit.report import model
from subclass_testkit.report.model import Finding, RunView

_SHOWN, _ALL = 10, 30  # findings of one subject, and of all together
_LONG = 180
_COLUMNS = ("passed", "failed", "known", "refused", "blocked", "not claimed", "torch limit", "skipped")


def render(report: Mapping[str, Any]) -> str:
    """A table of subjects, what fails the gate, and the worst findings of each subject."""
    views = model.runs(report)
    lines = [f"## Conformance: {'failed' if model.failed(report) else 'passed'}", "", *_table(views), ""]
    if report["interrupted"]:
        lines += ["**Interrupted:** not every selected check ran.", ""]
    lines += [f"- **Gate** {_text(p)}" for p in (*report["problems"], *(f"{v.short}: {p}" for v in views for p in v.problems))]
    shown = max(3, min(_SHOWN, _ALL // max(1, sum(v.failed for v in views))))
    for view in views:
        lines += _findings(view, shown)
    python = report["platform"]["python"]
    lines += ["", f"torch {report['torch']}, Python {python}, subclass_testkit {report['tool']['version']}"]
    return "\n".join(lines) + "\n"


def _table(views: Sequence[RunView]) -> Iterator[str]:
    columns = [c for c in _COLUMNS if c in ("passed", "failed") or any(v.whole.counts[c] for v in views)]
    yield "| | subject | selected | " + " | ".join(columns) + " |"
    yield "|---|---|" + "---:|" * (len(columns) + 1)
    for view in views:
        counts = view.whole.counts
        sign = "❌" if view.failed else "✅"
        yield f"| {sign} | {_code(view.spec)} | {counts['selected']} | " + " | ".join(str(counts[c]) for c in columns) + " |"


def _findings(view: RunView, shown: int) -> Iterator[str]:
    found = [f for f in view.findings() if f.status in ("fail", "should")]
    if not found:
        return
    yield ""
    yield f"### {_code(view.spec)}: {view.verdict}"
    yield ""
    for finding in found[:shown]:
        yield _line(finding)
    if len(found) > shown:
        rest = len(found) - shown
        yield f"- and {rest} more {'finding' if rest == 1 else 'findings'}; the HTML or JSON report has all"


def _line(finding: Finding) -> str:
    first = finding.first
    level = "known failure" if first.gate else first.level
    more = f" ({len(finding.results)} instances)" if len(finding.results) > 1 else ""
    message = first.message if len(first.message) <= _LONG else first.message[:_LONG].rpartition(" ")[0] + " ..."
    place = model.place(first.where)
    where = f" {_code(f'{place[0]}:{place[1]}')}" if place else ""
    return f"- **{level}** {_code(first.label)}{more}: {_text(message)}{where}"


def _code(text: str) -> str:
    """As code; ``|`` would end a table's cell, and a backtick the code."""
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", "\\|") + "`"


def _text(text: str) -> str:
    """One line, with nothing that Markdown or HTML takes as its own."""
    line = " ".join(text.split())
    for sign in "\\`*_[]|":
        line = line.replace(sign, "\\" + sign)
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("#", "&#35;").replace("@", "&#64;")
