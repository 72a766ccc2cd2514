"""What the writers have in common: a JSON report's results as objects, grouped into findings and cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from subclass_testkit.outcome import STALE, Outcome, Result, totals

Status = Literal["fail", "should", "known", "pass", "none"]
# What a cell shows, and what it means to those who can't see its colour.
SIGNS: dict[Status, tuple[str, str]] = {
    "fail": ("✗", "fails"),
    "should": ("!", "passes, with remarks"),
    "known": ("~", "known failures only"),
    "pass": ("✓", "passes"),
    "none": ("·", "nothing was judged"),
}


@dataclass(frozen=True)
class Finding:
    """What went wrong in one way: the instances of a check with failures of the same kind."""

    results: tuple[Result, ...]
    status: Status

    @property
    def first(self) -> Result:
        """The instance that stands for all: the one whose place in the code is known, if any."""
        return next((r for r in self.results if r.where), self.results[0])

    @property
    def severity(self) -> tuple[int, int]:
        """The smaller, the worse: broken promises of the list first, then musts, then by how often."""
        first = self.results[0]
        silent = first.kind.startswith("raised:")  # a wrong value without an error is worse than an error
        rank = {"fail": 0, "should": 4, "known": 6}.get(self.status, 8)
        return rank + (0 if first.gate else 2) + silent, -len(self.results)

    @property
    def stale(self) -> bool:
        return self.results[0].kind == STALE


@dataclass(frozen=True)
class Cell:
    """The results of some checks of a subject."""

    results: tuple[Result, ...]
    strict: bool

    @property
    def counts(self) -> dict[str, int]:
        return totals(self.results)

    @property
    def failing(self) -> int:
        """How many checks fail the run."""
        return len({r.id for r in self.results if r.fails_run(self.strict)})

    @property
    def status(self) -> Status:
        outcomes = {r.outcome for r in self.results}
        if self.failing:
            return "fail"
        if Outcome.FAILED in outcomes:
            return "should"
        if Outcome.KNOWN in outcomes:
            return "known"
        return "pass" if Outcome.PASSED in outcomes else "none"

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.results)


class RunView:
    """A run of a JSON report."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.subject: str = data["subject"]
        self.spec: str = data["spec"]
        self.strict: bool = data["strict"]
        self.problems: Sequence[str] = data["problems"]
        self.failed: bool = data["verdict"] == "fail"
        self.results = tuple(Result.from_json(check) for check in data["checks"])

    @property
    def short(self) -> str:
        """The class's name alone."""
        return self.subject.rpartition(".")[2]

    @property
    def whole(self) -> Cell:
        return Cell(self.results, self.strict)

    def groups(self) -> dict[str, Cell]:
        """The cells of the groups of checks, in the order of the run."""
        names = dict.fromkeys(r.id.partition("/")[0] for r in self.results)
        return {n: Cell(tuple(r for r in self.results if r.id.partition("/")[0] == n), self.strict) for n in names}

    def checks(self) -> dict[str, Cell]:
        """The cells of the checks, in the order of the run."""
        members: dict[str, list[Result]] = {}
        for result in self.results:
            members.setdefault(result.id, []).append(result)
        return {name: Cell(tuple(rs), self.strict) for name, rs in members.items()}

    def findings(self) -> list[Finding]:
        """Failures and known failures, most severe first."""
        groups: dict[tuple[str, str, Status], list[Result]] = {}
        for result in self.results:
            status: Status | None = None
            if result.fails_run(self.strict):
                status = "fail"
            elif result.outcome is Outcome.FAILED:
                status = "should"
            elif result.outcome is Outcome.KNOWN:
                status = "known"
            if status:
                groups.setdefault((result.id, result.kind, status), []).append(result)
        found = [Finding(tuple(results), status) for (_, _, status), results in groups.items()]
        return sorted(found, key=lambda f: f.severity)

    @property
    def verdict(self) -> str:
        """One line."""
        counts = self.whole.counts
        parts = [f"{counts['passed']} of {counts['selected']} passed"]
        if failing := self.whole.failing:
            parts.insert(0, f"{failing} {'check fails' if failing == 1 else 'checks fail'}")
        if counts["known"]:
            parts.append(f"{counts['known']} known")
        return ", ".join(parts)


def runs(report: Mapping[str, Any]) -> list[RunView]:
    return [RunView(run) for run in report["runs"]]


def group_names(views: Sequence[RunView]) -> list[str]:
    """All groups of all runs, in the order of the first run that has them."""
    return list(dict.fromkeys(name for view in views for name in view.groups()))


def failed(report: Mapping[str, Any]) -> bool:
    """Whether the session as a whole failed; one without runs did."""
    return bool(report["problems"]) or not report["runs"] or any(run["verdict"] == "fail" for run in report["runs"])


def place(where: str) -> tuple[str, int] | None:
    """The file and line that a result's or a run's place begins with (``mypkg/tensor.py:120, in _slice: ...``)."""
    head = where.split(",")[0].split(" ")[0]
    file, colon, line = head.rpartition(":")
    return (file, int(line)) if colon and file and line.isdigit() else None
