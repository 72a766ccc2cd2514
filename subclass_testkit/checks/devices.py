"""Device and dtype moves take everything along."""

from __future__ import annotations

from subclass_testkit.checks.base import CheckGroup


class DeviceTests(CheckGroup):
    """Device and dtype moves take everything along."""

    group = "devices"
