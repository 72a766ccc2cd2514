"""Gradients flow, and equal the dense ones."""

from __future__ import annotations

from subclass_testkit.checks.base import CheckGroup


class GradientFlowTests(CheckGroup):
    """Gradients flow, and equal the dense ones."""

    group = "gradients"
