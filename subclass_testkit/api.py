"""One call for notebooks and scripts: `check_subclass`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from subclass_testkit.instances import Options, validated
from subclass_testkit.outcome import Outcome, Result, totals
from subclass_testkit.report import json, terminal
from subclass_testkit.resolve import resolve
from subclass_testkit.suite import Run


@dataclass
class Report:
    """The outcome of :func:`check_subclass`. ``str(report)`` is the terminal summary."""

    run: Run
    results: list[Result]

    @property
    def ok(self) -> bool:
        """Whether something ran and nothing failed (at level must; with ``strict`` at all)."""
        return bool(self.results) and not any(r.fails_run(self.run.options.strict) for r in self.results)

    @property
    def failures(self) -> list[Result]:
        return [r for r in self.results if r.outcome is Outcome.FAILED]

    @property
    def totals(self) -> dict[str, int]:
        return totals(self.results)

    def to_json(self) -> dict[str, Any]:
        """The report as design and schema say (one run)."""
        return json.report([(self.run, self.results)])

    def __str__(self) -> str:
        return terminal.render(self.run, self.results)


def check_subclass(
    subject: object,
    *,
    claims: Iterable[str] = (),
    checks: Iterable[str] = (),
    tier: str = "standard",
    strict: bool = False,
    isolate: str = "hazardous",
    seed: int = 0,
) -> Report:
    """Run the suite on a tensor subclass, without pytest.

    Args:
        subject: a tensor class, a :class:`Subject`, or the name of one (``"mypkg.MyTensor"``).
        claims: claims that must be found, besides those that the subject declares.
        checks: globs of check ids; ``!glob`` leaves out.
        tier: ``quick``, ``standard`` or ``full``.
        strict: should-level findings fail too.
        isolate: ``hazardous`` (checks run in a child process, dangerous ones in one each), ``all`` (one each) or ``none`` (in this process).
        seed: shifts all data.

    Raises:
        SubjectError: the class can't be found or built; ValueError: an unknown option value.
    """
    options = validated(Options(tuple(claims), tuple(checks), tier, strict, isolate, seed))
    run = Run(resolve(subject), options, spec=subject if isinstance(subject, str) else "")
    return Report(run, list(run.all()))
