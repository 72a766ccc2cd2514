"""MONAI's MetaTensor: a class with metadata that keeps its values in its own storage. Tried with monai 1.6.1, torch 2.13.0 (CPU).

monai needs only numpy and torch for this; ``pip install --no-deps monai`` is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from subclass_testkit.adapters._recipe import Recipe
from subclass_testkit.adapters._recipe import subjects as _subjects

if TYPE_CHECKING:
    from subclass_testkit.subject import Subject

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        paths=("monai.data.MetaTensor", "monai.data.meta_tensor.MetaTensor"),
        make="MetaTensor(hp.clone())",
        to_plain="t.as_tensor()",
        imports="from monai.data import MetaTensor",
        ndim=(1, 2, 3),
        max_error="torch.zeros_like(hp)",
        wrapper=False,
    ),
)


def subjects() -> dict[str, Subject]:
    """The ready subjects, by every path by which a class is known."""
    return _subjects(RECIPES)
