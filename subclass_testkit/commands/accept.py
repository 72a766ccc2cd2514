"""Known failures from reports: `accept` writes those that a run found, `prune` removes those that it found gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

from subclass_testkit import expect, known_files
from subclass_testkit.check import select
from subclass_testkit.known_failures import AXES, KnownFailure
from subclass_testkit.outcome import STALE, Outcome, Result

Params = Mapping[str, str]
_GONE = (Outcome.PASSED, Outcome.REFUSED, Outcome.TORCH_LIMIT)


def default_file(folder: Path) -> Path:
    """Where a project keeps its known failures: the file that its pyproject.toml names, that file itself, or one of their own."""
    pyproject = folder / "pyproject.toml"
    if not pyproject.is_file():
        return folder / "known_failures.toml"
    named = known_files.table_of(pyproject).get("known_failures_file")
    return folder / named if named else pyproject


def accept(report: Mapping[str, Any], path: Path, common: Mapping[str, str], globs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Write an entry for each failure of a report that isn't known yet; returns them.

    Args:
        report: a JSON report of a whole run.
        path: the file that gets the entries.
        common: what all of them say: ``reason``, and perhaps ``issue``, ``expires``, ``when``.
        globs: only the checks that match.

    Raises:
        ValueError: the run was interrupted or left checks out; a value of ``common`` is malformed; the file can't be edited.
    """
    expect.complete(report, "what it didn't run can't be accepted")
    entries: list[dict[str, Any]] = []
    for run in report["runs"]:
        results = [Result.from_json(check) for check in run["checks"]]
        failing = [r for r in results if r.fails_run(run["strict"]) and r.kind != STALE]
        ids = list(dict.fromkeys(r.id for r in failing))
        for check_id in select(ids, globs) if globs and ids else ids:
            same = [r for r in results if r.id == check_id]
            mine = [r for r in failing if r.id == check_id]
            for params in cover([r.params for r in mine], [r.params for r in same if r.outcome is Outcome.PASSED]):
                entry = {"subclass": run["spec"], "check": check_id, "params": params, **common, "match": _match(mine)}
                KnownFailure.parse({k: v for k, v in entry.items() if v}, "accept")
                entries.append(entry)
    if entries:
        known_files.append(path, entries)
    return entries


def _match(failing: Sequence[Result]) -> str:
    """The type of the exception, where all raise the same: a silently wrong value must not hide behind a crash that was accepted."""
    kinds = {r.kind for r in failing}
    return next(iter(kinds)) if len(kinds) == 1 and min(kinds).startswith("raised:") else ""


def cover(failing: Sequence[Params], passing: Sequence[Params]) -> list[dict[str, list[str]]]:
    """The fewest ``params`` that cover every failing instance of a check and no passing one.

    ``{}`` covers all; else one or two axes tell them apart; else each instance has a ``params`` of its own.
    """
    if not passing:
        return [{}]
    for number in (1, 2):
        for axes in combinations(AXES, number):
            values = {axis: sorted({p.get(axis, "") for p in failing}) for axis in axes}
            if not any(all(p.get(axis, "") in values[axis] for axis in axes) for p in passing):
                return [values]
    cases = sorted({p.get("case", "") for p in failing})
    if len(cases) > 1:
        return [
            {"case": [case], **rest}
            for case in cases
            for rest in cover(
                [p for p in failing if p.get("case", "") == case], [p for p in passing if p.get("case", "") == case]
            )
        ]
    return [{axis: [value] for axis, value in p.items()} for p in failing]


def prune(report: Mapping[str, Any], path: Path) -> list[str]:
    """Remove the entries of a file that nothing fails for any more, and narrow those that cover what passes; says what it did.

    Entries about subjects and checks that the report doesn't have stay as they are, and so do those not in force here.

    Raises:
        ValueError: the run was interrupted or left checks out, or the file can't be edited.
    """
    expect.complete(report, "what it didn't run may still fail")
    raw = known_files.table_of(path).get("known_failures", []) if path.is_file() else []
    gone, added, told = [], [], []
    for number, data in enumerate(raw, 1):
        entry = KnownFailure.parse(data, f"{path}, known failure {number}")
        covered = _covered(entry, report)
        if covered is None or not entry.active:
            continue
        failing = [r for r in covered if r.broken or r.known]
        passing = [r for r in covered if r.kind == STALE or r.outcome is Outcome.PASSED]
        if not failing and all(r.outcome in _GONE or r.kind == STALE for r in covered):
            gone.append(number)
            told.append(f"{entry.source}: removed ({entry.check}: {entry.reason})")
        elif failing and passing:
            gone.append(number)
            narrowed = _narrowed(data, failing, passing)
            added += narrowed
            told.append(f"{entry.source}: narrowed to {', '.join(str(e.get('params', 'all')) for e in narrowed)}")
    if gone:
        known_files.remove(path, gone)
    if added:
        known_files.append(path, added)
    return told


def _narrowed(data: Mapping[str, Any], failing: Sequence[Result], passing: Sequence[Result]) -> list[dict[str, Any]]:
    order = [f.name for f in fields(KnownFailure)]
    entries = []
    for check_id in dict.fromkeys(r.id for r in failing):
        mine, others = ([r.params for r in rs if r.id == check_id] for rs in (failing, passing))
        for params in cover(mine, others):
            entry = {**data, "check": check_id, "params": params}
            entries.append({k: entry[k] for k in sorted(entry, key=order.index) if entry[k]})
    return entries


def _covered(entry: KnownFailure, report: Mapping[str, Any]) -> list[Result] | None:
    """The results that an entry is about; None where the report has none of its checks."""
    asked = False
    covered = []
    for run in report["runs"]:
        if not entry.names((run["spec"], run["subject"])):
            continue
        results = [Result.from_json(check) for check in run["checks"]]
        values = {axis: frozenset(r.params.get(axis, "") for r in results) for axis in AXES}
        anywhere = KnownFailure(entry.check, reason="its check alone")
        asked = asked or any(anywhere.covers(r, values) for r in results)
        covered += [r for r in results if entry.covers(r, values)]
    return covered if asked else None


def listed(entries: Iterable[Mapping[str, Any]]) -> str:
    """A line an entry."""
    return "\n".join(f"  {e['subclass']}  {e['check']}  {e['params'] or 'all instances'}" for e in entries)
