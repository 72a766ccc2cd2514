"""Copies and serialization keep everything, and are independent."""

from __future__ import annotations

from subclass_testkit.checks.base import CheckGroup


class CopyTests(CheckGroup):
    """Copies and serialization keep everything, and are independent."""

    group = "copies"
