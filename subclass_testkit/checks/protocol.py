"""The wrapper protocol, construction, printing, global state."""

from __future__ import annotations

from subclass_testkit.checks.base import CheckGroup


class ProtocolTests(CheckGroup):
    """The wrapper protocol, construction, printing, global state."""

    group = "protocol"
