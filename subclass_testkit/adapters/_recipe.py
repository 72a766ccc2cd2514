"""Ready recipes as static text; a Subject is made of one only when its library is asked for."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subclass_testkit.subject import Subject


@dataclass(frozen=True)
class Recipe:
    """The fields of a Subject without the class itself, so that listing recipes imports no library.

    Args:
        paths: every dotted path by which a user may name the class. The first is the one to import it by.
        dtypes: names of torch dtypes, separated by spaces. A variant's ``dtypes`` is written the same way.
        variants: name -> the fields that differ.

    The other fields are those of ``subclass_testkit.Subject``.
    """

    paths: tuple[str, ...]
    make: str
    to_plain: str
    imports: str = ""
    multiples_of: tuple[int, ...] | int = 1
    ndim: tuple[int, ...] = (2,)
    shapes: tuple[tuple[int, ...], ...] | None = None
    dtypes: str = "float32 bfloat16 float16"
    claims: frozenset[str] | None = None
    activation_bits: int | None = None
    weight_bits: int | None = None
    linear: str | None = None
    max_error: str | None = None
    stochastic: bool = False
    refusals: str = ""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    wrapper: bool = True
    parameter: bool = True

    def load(self) -> type:
        """The class.

        Raises:
            ImportError: the library is not installed, or is a version that lacks the class.
        """
        module, _, name = self.paths[0].rpartition(".")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
            except AttributeError as error:
                raise ImportError(f"{module} has no {name}", name=module) from error

    def subject(self) -> Subject:
        """The Subject; imports the library."""
        from subclass_testkit.subject import Subject

        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "paths"}
        fields["dtypes"] = _dtypes(self.dtypes)
        fields["variants"] = {
            name: {**change, "dtypes": _dtypes(change["dtypes"])} if "dtypes" in change else dict(change)
            for name, change in self.variants.items()
        }
        return Subject(self.load(), name=self.paths[0], **fields)


def subjects(recipes: Iterable[Recipe]) -> dict[str, Subject]:
    """A Subject for each path; classes which the installed version of the library lacks are left out.

    Raises:
        ImportError: none of the classes can be imported.
    """
    found: dict[str, Subject] = {}
    missing: ImportError | None = None
    for recipe in recipes:
        try:
            subject = recipe.subject()
        except ImportError as error:
            missing = error
            continue
        found.update(dict.fromkeys(recipe.paths, subject))
    if missing is not None and not found:
        raise missing
    return found


def _dtypes(names: str) -> tuple[Any, ...]:
    import torch

    return tuple(getattr(torch, name) for name in names.split())
