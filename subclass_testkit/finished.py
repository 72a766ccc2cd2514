"""A run that has ended: its results, what is wrong with its known failures and counts, and so its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from subclass_testkit.outcome import Result

if TYPE_CHECKING:
    from subclass_testkit.suite import Run


@dataclass
class Finished:
    """A run and its results. ``problems`` fail it whatever the results are."""

    run: Run
    results: Sequence[Result]
    problems: Sequence[str] = ()

    @property
    def failed(self) -> bool:
        """Whether nothing ran, a result fails the run, or there is a problem."""
        return not self.results or bool(self.problems) or any(r.fails_run(self.run.options.strict) for r in self.results)

    @property
    def deselected(self) -> int:
        """Instances of the run that have no result: left out (``-k``, ``--lf``), or not reached."""
        return len(self.run.instances) - len(self.results)
