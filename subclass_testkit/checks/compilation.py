"""Torch.compile gives what eager gives."""

from __future__ import annotations

from subclass_testkit.checks.base import CheckGroup


class CompilationTests(CheckGroup):
    """Torch.compile gives what eager gives."""

    group = "compilation"
