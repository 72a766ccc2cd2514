"""Modules, state dicts, parameters."""

from __future__ import annotations

from subclass_testkit.checks.base import CheckGroup


class ModuleTests(CheckGroup):
    """Modules, state dicts, parameters."""

    group = "modules"
