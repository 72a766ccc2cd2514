"""Torch's own tensor classes: the known-good controls. Tried with torch 2.13.0 (CPU).

All of them keep the values exactly, for any dtype and shape. The sources are cloned because the constructors
keep the very tensor that they are given: an in-place operation would change the plain values too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from subclass_testkit.adapters._recipe import Recipe
from subclass_testkit.adapters._recipe import subjects as _subjects

if TYPE_CHECKING:
    from subclass_testkit.subject import Subject

_ANY = (1, 2, 3)
_EXACT = "torch.zeros_like(hp)"

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        paths=("torch.testing._internal.two_tensor.TwoTensor", "torch.testing._internal.subclasses.TwoTensor"),
        make="TwoTensor(hp.clone(), hp.clone())",
        to_plain="t.a",
        imports="from torch.testing._internal.two_tensor import TwoTensor",
        ndim=_ANY,
        max_error=_EXACT,
    ),
    Recipe(
        paths=("torch.testing._internal.subclasses.WrapperSubclass",),
        make="WrapperSubclass(hp.clone())",
        to_plain="t.a",
        imports="from torch.testing._internal.subclasses import WrapperSubclass",
        ndim=_ANY,
        max_error=_EXACT,
    ),
    Recipe(
        paths=("torch.testing._internal.custom_tensor.ConstantExtraMetadataTensor",),
        make="ConstantExtraMetadataTensor(hp.clone())",
        to_plain="t.elem",
        imports="from torch.testing._internal.custom_tensor import ConstantExtraMetadataTensor",
        ndim=_ANY,
        max_error=_EXACT,
    ),
    Recipe(
        paths=("torch.Tensor",),
        make="hp.clone()",
        to_plain="t",
        ndim=_ANY,
        max_error=_EXACT,
        wrapper=False,
    ),
    Recipe(
        # a plain tensor with a mark: isinstance() looks at the mark, and results of operations don't carry it
        paths=("torch.nn.Buffer", "torch.nn.parameter.Buffer", "torch.nn.modules.module.Buffer"),
        make="torch.nn.Buffer(hp.clone())",
        to_plain="t.clone()",
        ndim=_ANY,
        max_error=_EXACT,
        wrapper=False,
    ),
)


def subjects() -> dict[str, Subject]:
    """The ready subjects, by every path by which a class is known."""
    return _subjects(RECIPES)
