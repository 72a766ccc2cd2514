"""Torch.export gives a program that computes what eager computes."""

from __future__ import annotations

from subclass_testkit.checks.base import CheckGroup


class ExportTests(CheckGroup):
    """Torch.export gives a program that computes what eager computes."""

    group = "export"
