"""Run the kit on the zoo: which check kills which broken subclass. Writes docs/kill-matrix.md and tests/zoo/intended.json.

python -m tests.zoo.kill_matrix --jobs 2
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from subclass_testkit.check import registry
from subclass_testkit.instances import Options
from subclass_testkit.outcome import Outcome
from subclass_testkit.resolve import resolve
from subclass_testkit.subject import Subject
from subclass_testkit.suite import Run
from tests.zoo.registry import Entry, load_zoo

ROOT = Path(__file__).parent.parent.parent
INTENDED = Path(__file__).parent / "intended.json"
# Killers of the process are looked for where they strike.
_WHERE = {"isolation": ("slicing/view-*", "devices/*", "copies/copy-*")}


def subject_of(entry: Entry) -> Subject:
    """The subject of a zoo class: conventions, and what its registration declares."""
    return resolve(Subject(entry.cls, **entry.subject_kwargs) if entry.subject_kwargs else entry.cls)


def killers(entry: Entry, options: Options) -> dict[str, Any]:
    """The checks that fail on a class, with how many instances; the time of the first failure, and of all.

    Those of level ``should`` count only where none of level ``must`` fails.
    """
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    run = Run(subject_of(entry), options)
    fails: dict[str, Counter[str]] = {"must": Counter(), "should": Counter(), "preview": Counter()}
    first = None
    for result in run.all():
        if result.outcome is Outcome.FAILED:
            fails[result.level][result.id] += 1
            first = first or time.perf_counter() - start
    return {"fails": dict(fails["must"] or fails["should"]), "first": first, "seconds": time.perf_counter() - start}


def _job(index: int) -> dict[str, Any]:
    entry = load_zoo()[1][index]
    found = killers(entry, Options(checks=_WHERE.get(entry.group, (f"{entry.group}/*",))))
    if not found["fails"]:
        found = killers(entry, Options(checks=(f"!{entry.group}/*",)))
    return {"name": entry.name, "group": entry.group, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--raw", type=Path, help="also write the raw matrix here, or read it if it exists")
    arguments = parser.parse_args()
    broken = load_zoo()[1]
    if arguments.raw and arguments.raw.exists():
        rows = json.loads(arguments.raw.read_text())
    else:
        rows = []
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            for row in pool.map(_job, range(len(broken))):
                rows.append(row)
                print(
                    f"{len(rows)}/{len(broken)} {row['name']:<32} {row['seconds']:5.0f} s  {len(row['fails'])} checks",
                    flush=True,
                )
        if arguments.raw:
            arguments.raw.write_text(json.dumps(rows))
    _write(rows, {entry.name: entry for entry in broken})


def _write(rows: list[dict[str, Any]], entries: dict[str, Entry]) -> None:
    by_check = Counter(check for row in rows for check in row["fails"])
    old = json.loads(INTENDED.read_text()) if INTENDED.exists() else {}
    intended = {}
    for row in rows:
        own = [c for c in row["fails"] if c.split("/")[0] == row["group"]] or list(row["fails"])
        if old.get(row["name"]) in row["fails"]:
            intended[row["name"]] = old[row["name"]]
        elif own:
            intended[row["name"]] = min(own, key=lambda c: (by_check[c], c))  # the most specific one
    INTENDED.write_text(json.dumps(intended, indent=1) + "\n")
    (ROOT / "docs" / "kill-matrix.md").write_text(_document(rows, intended, entries, by_check))


def _document(rows: list[dict[str, Any]], intended: dict[str, str], entries: dict[str, Entry], by_check: Counter[str]) -> str:
    alive = [row["name"] for row in rows if not row["fails"]]
    own = sum(intended.get(row["name"], "").split("/")[0] == row["group"] for row in rows)
    idle = [c for c in registry() if not by_check[c] and registry()[c].level == "must"]
    firsts = sorted(row["first"] for row in rows if row["first"] is not None)
    lines = [
        "# Kill matrix",
        "",
        "Written by `python -m tests.zoo.kill_matrix`. Each broken subclass of `tests/zoo/broken/` has one realistic defect; it is *killed* when a check fails on it (one of level should counts where none of level must does). The checks of its own",
        "group are run and, where none of these kills it, all others. Numbers are failing check instances.",
        "",
        f"{len(rows)} broken subclasses: {own} killed in the intended group, {len(rows) - own - len(alive)} by another group only, {len(alive)} undetected"
        + (f" ({', '.join(alive)})" if alive else "")
        + f". Time to the first failure: median {firsts[len(firsts) // 2]:.1f} s, worst {firsts[-1]:.1f} s."
        if firsts
        else "",
        "",
    ]
    groups = list(dict.fromkeys(c.split("/")[0] for c in registry()))
    lines += [
        "| broken subclass | defect | intended check | " + " | ".join(groups) + " |",
        "|---|---|---|" + "---:|" * len(groups),
    ]
    for row in rows:
        counts = Counter()
        for check, n in row["fails"].items():
            counts[check.split("/")[0]] += n
        defect = entries[row["name"]].defect.replace("|", "\\|")
        cells = " | ".join(str(counts[g]) if counts[g] else "" for g in groups)
        lines.append(f"| {row['name']} | {defect} | {intended.get(row['name'], '**none**')} | {cells} |")
    lines += ["", "## Checks", "", "| check | level | kills |", "|---|---|---:|"]
    lines += [f"| {c} | {info.level} | {by_check[c] or ''} |" for c, info in registry().items()]
    lines += [
        "",
        f"{len(idle)} must-level checks kill no class of the zoo yet: {', '.join(idle)}."
        if idle
        else "Every must-level check kills a class of the zoo.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
