"""The list of the zoo's inhabitants: what each class is for, and what is wrong with the broken ones."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

GROUPS = (
    "protocol",
    "slicing",
    "equivalence",
    "gradients",
    "optimizers",
    "compilation",
    "devices",
    "copies",
    "modules",
    "isolation",
)

Cls = TypeVar("Cls", bound=type)


@dataclass(frozen=True)
class Entry:
    """One class of the zoo; `group` is the check group that should find the defect (empty if correct)."""

    name: str
    cls: type
    parent: type | None
    group: str
    defect: str
    ref: str = ""
    note: str = ""
    advice: tuple[str, ...] = ()
    witness: Callable[[type], bool] | None = None
    subject_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> str:
        """What to give to `--subclass`, from the repository's root."""
        return f"{self.cls.__module__}:{self.cls.__name__}"


BROKEN: list[Entry] = []
CORRECT: list[Entry] = []


def broken(
    *,
    group: str,
    ref: str = "",
    note: str = "",
    parent: type | None = None,
    witness: Callable[[type], bool] | None = None,
    **subject_kwargs: Any,
) -> Callable[[Cls], Cls]:
    """Register a broken class. Its one-line docstring is the defect; `ref` a public report ("ao#1078").

    `witness` shows the defect: true on the class, false on its parent. Without it, witnesses.py has one of that name.
    """
    if group not in GROUPS:
        raise ValueError(f"unknown group {group!r}: one of {', '.join(GROUPS)}")

    def register(cls: Cls) -> Cls:
        base = parent or cls.__mro__[1]
        kwargs = {**_inherited_kwargs(base), **subject_kwargs}
        BROKEN.append(Entry(cls.__name__, cls, base, group, _first_line(cls), ref, note, (), witness, kwargs))
        return cls

    return register


def correct(*, note: str = "", advice: tuple[str, ...] = (), **subject_kwargs: Any) -> Callable[[Cls], Cls]:
    """Register a correct class; the keywords are what its Subject must declare (`activation_bits=8`).

    `advice` are checks of level should that say something true of the class, which it does on purpose.
    """

    def register(cls: Cls) -> Cls:
        entry = Entry(cls.__name__, cls, None, "", _first_line(cls), "", note, advice, None, subject_kwargs)
        CORRECT.append(entry)
        return cls

    return register


def load_zoo() -> tuple[list[Entry], list[Entry]]:
    """Import every file of the zoo; returns (CORRECT, BROKEN), in a fixed order."""
    for package in ("tests.zoo.correct", "tests.zoo.broken"):
        path = importlib.import_module(package).__path__
        for name in sorted(module.name for module in pkgutil.iter_modules(path)):
            importlib.import_module(f"{package}.{name}")
    return CORRECT, BROKEN


def _first_line(cls: type) -> str:
    if not cls.__doc__:
        raise ValueError(f"{cls.__name__} needs a docstring line")
    return cls.__doc__.strip().splitlines()[0]


def _inherited_kwargs(parent: type) -> dict[str, Any]:
    return next((entry.subject_kwargs for entry in CORRECT if entry.cls is parent), {})
