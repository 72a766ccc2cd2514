"""Run the kit on the bundled public subclasses; write docs/findings.md and the table in README.md.

python scripts/public_findings.py            # all libraries that are installed
python scripts/public_findings.py torchao    # the paths that contain this; prints only
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from subclass_testkit import adapters, check_subclass
from subclass_testkit.api import Report
from subclass_testkit.outcome import Outcome, Result
from subclass_testkit.report.terminal import group_failures

ROOT = Path(__file__).parent.parent
DISTRIBUTIONS = {
    "torchao": "torchao",
    "optimum": "optimum-quanto",
    "bitsandbytes": "bitsandbytes",
    "torch": "torch",
    "monai": "monai",
}
BEGIN, END = "<!-- findings: written by scripts/public_findings.py -->", "<!-- /findings -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", default="", help="only paths that contain this; then nothing is written")
    parser.add_argument("--json", type=Path, help="also write each report into this folder")
    arguments = parser.parse_args()
    only = arguments.only
    reports: list[tuple[str, Report, float]] = []
    for path in adapters.bundled():
        if only not in path or not _installed(path):
            continue
        start = time.perf_counter()
        report = check_subclass(path)
        reports.append((path, report, time.perf_counter() - start))
        if arguments.json:
            report.save(arguments.json / f"{path}.json")
        print(_row(path, report), f"({reports[-1][2]:.0f} s)", flush=True)
    if not only:
        _write(ROOT / "docs" / "findings.md", _document(reports))
        _write_between(ROOT / "README.md", _table(reports))
    return 0


def _installed(path: str) -> bool:
    if path.split(".")[0] not in DISTRIBUTIONS:
        return False  # the reference implementations: not a public library
    try:
        importlib.metadata.version(DISTRIBUTIONS[path.split(".")[0]])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _version(path: str) -> str:
    name = DISTRIBUTIONS[path.split(".")[0]]
    return f"{name} {importlib.metadata.version(name).split('+')[0]}"


def _must(report: Report) -> list[list[Result]]:
    return group_failures(r for r in report.results if r.outcome is Outcome.FAILED and r.level == "must")


def _should(report: Report) -> list[list[Result]]:
    return group_failures(r for r in report.results if r.outcome is Outcome.FAILED and r.level != "must")


def _row(path: str, report: Report) -> str:
    totals = report.totals
    checks = len({group[0].id for group in _must(report)})
    name = path.rpartition(".")[2]
    return (
        f"| {_version(path)} | `{name}` | {totals['selected']} | {totals['passed']} | {totals['refused']} | "
        f"{checks} | {len(_must(report))} | {len(_should(report))} |"
    )


_HEAD = (
    "| library | class | check instances | passed | refused | checks failed | distinct findings | should-level |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|"
)


def _table(reports: Iterable[tuple[str, Report, float]]) -> str:
    return "\n".join([_HEAD, *(_row(path, report) for path, report, _ in reports)])


def _document(reports: list[tuple[str, Report, float]]) -> str:
    lines = [
        "# What the kit found in public libraries",
        "",
        f"Written by `scripts/public_findings.py`, tier standard, torch {torch.__version__.split('+')[0]} on a CPU. A finding is one check that failed in one way; the",
        "instance shown is the first. Each can be reproduced with the script that `pytest --subclass=... --subclass-checks=...` prints.",
        "",
        _table(reports),
        "",
    ]
    for path, report, seconds in reports:
        lines += [f"## {path.rpartition('.')[2]}", "", f"`{path}`, {_version(path)}; {seconds:.0f} s.", ""]
        findings = [*_must(report), *_should(report)]
        lines += [_item(group) for group in findings] or ["No findings."]
        lines.append("")
    return "\n".join(lines)


def _item(group: list[Result]) -> str:
    first = group[0]
    level = "" if first.level == "must" else f" ({first.level})"
    more = f" *{len(group)} instances.*" if len(group) > 1 else ""
    message = " ".join(first.message.split()).replace("|", "\\|")
    likely = f" Likely: {' '.join(first.diagnosis.split()).rstrip('.')}." if first.diagnosis else ""
    where = f" Code: `{first.where}`." if first.where else ""
    return f"- **{first.id}**{level} [{', '.join(first.params.values())}]: {message}{likely}{where}{more}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.rstrip() + "\n", encoding="utf-8")


def _write_between(path: Path, text: str) -> None:
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
