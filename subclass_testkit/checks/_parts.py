"""A mixin whose checks stand in several files."""

from __future__ import annotations

from typing import TypeVar

from subclass_testkit.checks.base import CheckGroup

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
