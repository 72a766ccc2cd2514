"""How a check ends: outcomes, findings and results, as plain data that can cross a process border."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["must", "should", "preview"]
STALE = "known:passed"  # the kind of a result that passed, though it is declared to fail


class Outcome(str, enum.Enum):
    """The one word that a selected check instance ends with."""

    PASSED = "passed"
    FAILED = "failed"
    KNOWN = "known"
    REFUSED = "refused"
    BLOCKED = "blocked"
    NOT_CLAIMED = "not claimed"
    TORCH_LIMIT = "torch limit"
    SKIPPED = "skipped"


@dataclass
class Finding:
    """What a check observed that breaks its rule.

    ``kind`` is a short slug (``value``, ``shape``, ``dtype``, ``raised:IndexError``, ...) by which two findings are
    compared; ``message`` is for people.
    """

    kind: str
    message: str
    likely: str = ""
    reproduction: str = ""


class CheckFailed(AssertionError):
    """The subject breaks the rule of the running check."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


class Refused(Exception):
    """The operation said that it is not supported. ``odd`` tells a deliberate error of an unusual type."""

    def __init__(self, message: str, *, kind: str, odd: bool = False, reproduction: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.odd = odd
        self.reproduction = reproduction


class CheckSkipped(Exception):
    """The environment lacks what the check needs; the text says what."""


class NotClaimed(Exception):
    """The check is about something that the subject doesn't claim; the text says what."""


@dataclass
class Result:
    """One check instance after it ran.

    ``where`` is the place in the subject's own code, if known; ``known`` the reason of the known failure that it is; ``gate`` what is
    wrong with the known failure that is declared for it.
    """

    id: str
    level: Level
    params: dict[str, str]
    outcome: Outcome
    seconds: float = 0.0
    message: str = ""
    kind: str = ""
    diagnosis: str = ""
    where: str = ""
    reproduction: str = ""
    notes: list[str] = field(default_factory=list)
    known: str = ""
    gate: str = ""

    @property
    def broken(self) -> bool:
        """Whether the rule doesn't hold, declared or not: checks that depend on this one say nothing."""
        return self.outcome in (Outcome.FAILED, Outcome.KNOWN) and self.kind != STALE

    @property
    def cause(self) -> tuple[str, str]:
        """What findings of several checks may have in common: the line of the subject's that raised; else the check itself."""
        return (self.kind, self.where) if self.where and self.kind.startswith("raised:") else (self.id, self.kind)

    @property
    def label(self) -> str:
        """``slicing/row-slice[w[8:16]-float32-32x48]``: the name that reports and pytest print."""
        return instance_label(self.id, self.params)

    def fails_run(self, strict: bool = False) -> bool:
        """Whether this result makes the run fail (``strict``: should-level findings too)."""
        if self.gate:
            return True
        if self.outcome is Outcome.FAILED:
            return self.level == "must" or (strict and self.level == "should")
        return strict and bool(self.notes) and self.outcome in (Outcome.PASSED, Outcome.REFUSED)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["outcome"] = self.outcome.value
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        return cls(**{**data, "outcome": Outcome(data["outcome"])})


def instance_label(check_id: str, params: dict[str, str]) -> str:
    """The printed name of a check instance: its id and, in brackets, the values of its axes."""
    return f"{check_id}[{'-'.join(params.values())}]" if params else check_id


def totals(results: Iterable[Result]) -> dict[str, int]:
    """How many results ended in each outcome; ``selected`` is their sum."""
    results = list(results)
    counts = {"selected": len(results)}
    counts.update({o.value: sum(r.outcome is o for r in results) for o in Outcome})
    return counts
