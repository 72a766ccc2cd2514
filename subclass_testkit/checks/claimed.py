"""Declared claims are kept."""

from __future__ import annotations

from subclass_testkit.check import CLAIMS, check, over
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import CheckFailed, Finding, NotClaimed


class ClaimTests(CheckGroup):
    """What the subject says it supports was found by probing."""

    group = "claims"

    @over(*CLAIMS)
    @check(
        axes="one",
        why="people choose a class by what it says it supports",
        fix="make the operation of the claim work, or don't declare the claim",
    )
    def test_declared_claim_is_found(self, claim: str) -> None:
        """A claim that is declared (by the subject, or demanded by --subclass-claims) holds when it is tried."""
        reason = self.case.facts.get("claims", {}).get(claim, "not probed")
        if claim not in self.subject.declared:
            word = "found" if claim in self.case.found else "not found"
            raise NotClaimed(f"not declared; {word}: {reason}")
        if claim not in self.case.found:
            raise CheckFailed(Finding("claim", f"{claim} ({CLAIMS[claim]}) is declared, but not found: {reason}."))
