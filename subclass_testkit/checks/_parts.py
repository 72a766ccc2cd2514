"""A mixin whose checks stand in several files."""

from __future__ import annotations

from typing import TypeVar

from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import NotClaimed
from subclass_testkit.script import Script

Mixin = TypeVar("Mixin", bound=type[CheckGroup])


def with_checks_of_its_parts(mixin: Mixin) -> Mixin:
    """Make the checks of the mixin's direct bases its own, before those that it defines itself."""
    own = {name: value for name, value in vars(mixin).items() if hasattr(value, "__check__")}
    for name in own:
        delattr(mixin, name)
    for part in mixin.__bases__:
        for name, value in vars(part).items():
            if hasattr(value, "__check__"):
                setattr(mixin, name, value)
    for name, value in own.items():
        setattr(mixin, name, value)
    return mixin


class OfValues(CheckGroup):
    """Base of parts whose rules are about a tensor that shows its values' shape."""

    def script(self, hp: str | None = None, **texts: str) -> Script:
        """As the base's; not claimed for a tensor that is no wrapper and shows its packed storage (bitsandbytes' parameters)."""
        script = super().script(hp, **texts)
        if "wrapper" not in self.case.found and _report(script, "w") != _report(script, "d"):
            raise NotClaimed(
                f"no wrapper, and it shows its storage: {_report(script, 'w')} for values of {_report(script, 'd')}"
            )
        return script


def _report(script: Script, name: str) -> str:
    return f"{list(script[name].shape)} {script[name].dtype}"
