"""Optimizer steps change the values as a dense step does, or are refused before anything changes."""

from __future__ import annotations

from subclass_testkit.checks.base import CheckGroup


class OptimizerTests(CheckGroup):
    """Optimizer steps change the values as a dense step does, or are refused before anything changes."""

    group = "optimizers"
