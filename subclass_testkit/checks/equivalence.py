"""Every operation equals the one on the dequantized values."""

from __future__ import annotations

from subclass_testkit.checks.base import CheckGroup


class EquivalenceTests(CheckGroup):
    """Every operation equals the one on the dequantized values."""

    group = "equivalence"
