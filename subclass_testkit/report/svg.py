"""The matrix of subjects and groups as a picture, for a README: one file, light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from subclass_testkit.report import model
from subclass_testkit.report.model import SIGNS, Cell, RunView

_CELL_W, _CELL_H, _GAP, _PAD = 44, 30, 3, 16
_LETTER = 7.3  # the width of a letter of the labels, in pixels
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f }
.mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
.small { font-size: 11px; fill: #57606a }
.title { font-size: 15px; font-weight: 600 }
.bg { fill: #ffffff }
.fail { fill: #ffd7d5 } .should { fill: #fff1c2 } .known { fill: #e6ddfb } .pass { fill: #d3f5dc } .none { fill: #eef1f4 }
.t-fail { fill: #a40e26; font-weight: 600 } .t-should { fill: #7a4e00 } .t-known { fill: #5a32a3 } .t-pass { fill: #116329 } .t-none { fill: #8c959f }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } .bg { fill: #0d1117 }
.fail { fill: #5c1a1f } .should { fill: #4d3800 } .known { fill: #3b2a63 } .pass { fill: #12361f } .none { fill: #21262d }
.t-fail { fill: #ffb3b0 } .t-should { fill: #f2cc60 } .t-known { fill: #d2bcff } .t-pass { fill: #7ee2a0 } .t-none { fill: #6e7681 }
}
"""


def render(report: Mapping[str, Any]) -> str:
    """Rows are subjects, columns groups of checks; a cell says how many checks of the group fail."""
    views = model.runs(report)
    groups = model.group_names(views)
    left = _PAD + max([len(v.short) for v in views] + [12]) * 7.9 + 14
    slant = max([len(g) for g in groups] + [1]) * _LETTER * 0.72
    top = _PAD + 26 + slant + 8
    width = max(left + len(groups) * (_CELL_W + _GAP) + max(_PAD, slant * 0.9), left + 330)
    height = top + len(views) * (_CELL_H + _GAP) + 34
    title = f"Conformance: {sum(not v.failed for v in views)} of {len(views)} subjects pass"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label={quoteattr(title)} '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        '<rect class="bg" width="100%" height="100%" rx="8"/>',
        f'<text class="title" x="{_PAD}" y="{_PAD + 14}">{escape(title)}</text>',
        f'<text class="small" x="{width - _PAD:.0f}" y="{_PAD + 14}" text-anchor="end">torch {escape(report["torch"])}</text>',
        *(_column(name, left + i * (_CELL_W + _GAP), top) for i, name in enumerate(groups)),
        *(_row(view, groups, left, top + i * (_CELL_H + _GAP)) for i, view in enumerate(views)),
        _legend(left, height - 12),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _column(name: str, x: float, top: float) -> str:
    cx = x + _CELL_W / 2
    return f'<text class="small" transform="translate({cx:.1f} {top - 8:.1f}) rotate(-45)">{escape(name)}</text>'


def _row(view: RunView, groups: Sequence[str], left: float, y: float) -> str:
    middle = y + _CELL_H / 2 + 4.5
    parts = [f'<text class="mono" x="{_PAD}" y="{middle:.1f}">{escape(view.short)}</text>']
    cells = view.groups()
    for i, name in enumerate(groups):
        parts.append(_cell(cells.get(name, Cell((), view.strict)), name, view, left + i * (_CELL_W + _GAP), y, middle))
    return "".join(parts)


def _cell(cell: Cell, name: str, view: RunView, x: float, y: float, middle: float) -> str:
    sign, meaning = SIGNS[cell.status]
    text = f"{sign} {cell.failing}" if cell.failing else sign
    tip = f"{view.short}, {name}: {meaning}"
    return (
        f'<g><title>{escape(tip)}</title><rect class="{cell.status}" x="{x:.1f}" y="{y:.1f}" width="{_CELL_W}" height="{_CELL_H}" rx="4"/>'
        f'<text class="t-{cell.status}" x="{x + _CELL_W / 2:.1f}" y="{middle:.1f}" text-anchor="middle">{text}</text></g>'
    )


def _legend(x: float, y: float) -> str:
    words = "✓ passes   ✗ 3: so many checks fail   ~ known failures   ! remarks   · not judged"
    return f'<text class="small" x="{_PAD}" y="{y:.1f}" xml:space="preserve">{escape(words)}</text>'
