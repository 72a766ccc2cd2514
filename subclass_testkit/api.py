"""One call for notebooks and scripts: `check_subclass`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subclass_testkit import known_files
from subclass_testkit.finished import Finished
from subclass_testkit.instances import Options, validated
from subclass_testkit.known_failures import KnownFailure
from subclass_testkit.outcome import Outcome, Result, totals
from subclass_testkit.report import json, terminal, write
from subclass_testkit.resolve import resolve
from subclass_testkit.suite import Run


@dataclass
class Report:
    """The outcome of :func:`check_subclass`. ``str(report)`` is the terminal summary."""

    run: Run
    results: list[Result]

    @property
    def ok(self) -> bool:
        """Whether something ran, nothing failed (at level must; with ``strict`` at all), and the known failures are as declared."""
        return not self._end.failed

    @property
    def problems(self) -> list[str]:
        """What is wrong with the known failures themselves: expired, or about nothing."""
        return self.run.problems(self.results)

    @property
    def failures(self) -> list[Result]:
        return [r for r in self.results if r.outcome is Outcome.FAILED]

    @property
    def totals(self) -> dict[str, int]:
        return totals(self.results)

    def to_json(self) -> dict[str, Any]:
        """The report as design and schema say (one run)."""
        return json.report([self._end])

    def save(self, path: str | Path) -> None:
        """Write it to a file; the ending chooses the format (``.html``, ``.md``, ``.json``, ...)."""
        write(Path(path), self.to_json())

    @property
    def _end(self) -> Finished:
        return Finished(self.run, self.results, self.problems)

    def __str__(self) -> str:
        return terminal.render(self._end)


def check_subclass(
    subject: object,
    *,
    claims: Iterable[str] = (),
    checks: Iterable[str] = (),
    tier: str = "standard",
    strict: bool = False,
    isolate: str = "hazardous",
    seed: int = 0,
    rules: str = "",
    known_failures: str | Path | Iterable[KnownFailure | Mapping[str, Any]] = (),
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
        rules: the newest rule set whose checks run (``"2026.12"``); empty: all.
        known_failures: declared failures: a file, or :class:`KnownFailure` objects or dicts with the same names.

    Raises:
        SubjectError: the class can't be found or built; ValueError: an unknown option value, or a malformed known failure.
    """
    options = validated(Options(tuple(claims), tuple(checks), tier, strict, isolate, seed, rules))
    known = known_files.load(known_failures, "check_subclass")
    run = Run(resolve(subject), options, spec=subject if isinstance(subject, str) else "", known=known)
    return Report(run, list(run.all()))
