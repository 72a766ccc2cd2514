"""The lockfile of counts: how many checks each group had, so that they can't get fewer unnoticed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from subclass_testkit.outcome import Outcome, Result

VERSION = 1
_JUDGED = (Outcome.PASSED, Outcome.FAILED, Outcome.KNOWN)
_WORDS = {"selected": "check instances", "judged": "instances that passed, failed or are known"}


def lock(report: Mapping[str, Any]) -> dict[str, Any]:
    """The lockfile of a JSON report.

    Raises:
        ValueError: the report is of a session that was interrupted, or ran a part of its checks.
    """
    complete(report, "its counts would be too low")
    subjects = {
        run["spec"]: {"tier": run["tier"], "groups": counts(Result.from_json(check) for check in run["checks"])}
        for run in report["runs"]
    }
    return {"lock_version": VERSION, "subjects": subjects}


def complete(report: Mapping[str, Any], why: str) -> None:
    """See that a report holds all that was asked for.

    Raises:
        ValueError: it doesn't; says ``why`` that matters.
    """
    if report["interrupted"]:
        raise ValueError(f"the report is of an interrupted run: {why}. Run it to the end.")
    for run in report["runs"]:
        if run["deselected"]:
            raise ValueError(
                f"{run['spec']}: {run['deselected']} instances were left out (-k, --lf, -x): {why}. Run all of them."
            )


def counts(results: Iterable[Result]) -> dict[str, dict[str, int]]:
    """Of each group, how many instances were selected, and how many of them were judged (not refused, skipped and so on)."""
    groups: dict[str, dict[str, int]] = {}
    for result in results:
        group = groups.setdefault(result.id.partition("/")[0], dict.fromkeys(_WORDS, 0))
        group["selected"] += 1
        group["judged"] += result.outcome in _JUDGED
    return groups


def write(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """A lockfile.

    Raises:
        ValueError: there is none, or it is none; says how one is written.
    """
    remedy = f"write it with `subclass-testkit lock report.json --to {path}`"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"expect: there is no lockfile {str(path)!r}; {remedy}") from None
    except ValueError as error:
        raise ValueError(f"expect: {str(path)!r} is no lockfile ({error}); {remedy}") from None
    if not isinstance(data, dict) or data.get("lock_version") != VERSION or not isinstance(data.get("subjects"), dict):
        raise ValueError(f"expect: {str(path)!r} is no lockfile of version {VERSION}; {remedy}")
    return data


def drops(lockfile: Mapping[str, Any], spec: str, tier: str, results: Sequence[Result]) -> list[str]:
    """What a run has fewer of than the lockfile says."""
    locked = lockfile["subjects"].get(spec)
    if locked is None:
        return [f"the lockfile has no counts of {spec}: write it anew with `subclass-testkit lock report.json`."]
    now = counts(results)
    hint = f" The lockfile is of the tier {locked['tier']}, this run of {tier}." if locked["tier"] != tier else ""
    return [
        f"{group} has {now.get(group, {}).get(name, 0)} {word}, the lockfile says {before[name]}.{hint}"
        for group, before in locked["groups"].items()
        for name, word in _WORDS.items()
        if now.get(group, {}).get(name, 0) < before[name]
    ]


def untested(lockfile: Mapping[str, Any], specs: Iterable[str]) -> list[str]:
    """The subjects of the lockfile that weren't run."""
    gone = [spec for spec in lockfile["subjects"] if spec not in set(specs)]
    return [f"{spec} stands in the lockfile, and was not tested." for spec in gone]
