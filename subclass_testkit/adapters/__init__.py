"""Ready subjects for public libraries. Each library is imported only when one of its classes is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from subclass_testkit.adapters._recipe import Recipe

if TYPE_CHECKING:
    from subclass_testkit.subject import Subject

__all__ = ["bundled", "find"]

# top-level package of the class -> the module of this package that has its recipes
ADAPTERS: dict[str, str] = {
    "reference_impls": "reference",
    "torch": "torch_core",
    "torchao": "torchao",
    "optimum": "quanto",
    "bitsandbytes": "bitsandbytes",
    "monai": "monai",
}


def find(path: str, cls: type | None = None) -> Subject | None:
    """The ready Subject for a class, by the dotted path that the user gave or by the class itself.

    ``pkg.mod:Name`` and ``pkg.mod.Name`` are the same. When the path is none of the known ones (a re-export, a
    class that moved), ``cls`` decides. None: there is no recipe for it.

    Raises:
        ImportError: there is a recipe, and its library can't be imported.
    """
    path = path.replace(":", ".")
    for recipe in _recipes(path.partition(".")[0]):
        if path in recipe.paths:
            return recipe.subject()
    if cls is None:
        return None
    for recipe in _recipes(cls.__module__.partition(".")[0]):
        # the name first: only a class of the same name is worth an import
        if recipe.paths[0].rpartition(".")[2] == cls.__name__ and _same(recipe, cls):
            return recipe.subject()
    return None


def bundled(*, aliases: bool = False) -> list[str]:
    """The paths of all classes with a ready Subject, by library; imports none of the libraries.

    ``aliases`` adds the other paths by which each of them is known.
    """
    return [path for top in ADAPTERS for recipe in _recipes(top) for path in (recipe.paths if aliases else recipe.paths[:1])]


def _recipes(top: str) -> tuple[Recipe, ...]:
    if top not in ADAPTERS:
        return ()
    module = importlib.import_module(f"{__name__}.{ADAPTERS[top]}")
    return tuple(module.RECIPES)


def _same(recipe: Recipe, cls: type) -> bool:
    try:
        return recipe.load() is cls
    except ImportError:
        return False
