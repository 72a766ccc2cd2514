"""Random sequences of operations: the subject and its plain twin go through them together, and agree after each step."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import run_state_machine_as_test

from subclass_testkit.check import check
from subclass_testkit.checks._machine import machine_of
from subclass_testkit.checks.base import CheckGroup

_WHY = "each operation can be right by itself, and leave behind a tensor on which the next one is wrong"
_FIX = "the script is the shortest sequence that goes wrong: repair its last step, or the one that left something stale"


class SequenceTests(CheckGroup):
    """Model-based testing: a state machine of views, copies, moves, writes, products and steps."""

    group = "sequences"

    @check(tier="standard", axes="variant", why=_WHY, fix=_FIX, timeout=60)
    def test_random_operations(self) -> None:
        """After any sequence of operations, every tensor that came of them equals its plain twin; or the operation was refused."""
        self._run(examples=100 if self.case.variant == "default" else 30, steps=10)

    @check(tier="full", axes="each", why=_WHY, fix=_FIX, timeout=300)
    def test_long_random_operations(self) -> None:
        """The same holds for longer sequences, in each dtype, shape and variant."""
        self._run(examples=200, steps=20)

    def _run(self, examples: int, steps: int) -> None:
        """Run the machine; without a seed always the same sequences. With one, others, and what failed is stored and tried first."""
        self.script()  # a subject that can't be built says so here
        exploring = self.case.seed != 0
        machine: Any = machine_of(self)
        run_state_machine_as_test(
            seed(self.case.seed)(machine) if exploring else machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                derandomize=not exploring,
                database=DirectoryBasedExampleDatabase(".hypothesis/examples") if exploring else None,
                deadline=None,
                report_multiple_bugs=False,
                verbosity=Verbosity.quiet,
                suppress_health_check=list(HealthCheck),
                phases=(Phase.reuse, Phase.generate, Phase.shrink) if exploring else (Phase.generate, Phase.shrink),
            ),
        )
