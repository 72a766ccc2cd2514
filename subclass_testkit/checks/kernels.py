"""Which kernel ran."""

from __future__ import annotations

from subclass_testkit.checks.base import CheckGroup


class KernelTests(CheckGroup):
    """Which kernel ran."""

    group = "kernels"
