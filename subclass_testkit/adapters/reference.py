"""The reference implementations that come with the kit, with their variants; the claims are declared, so they must be found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from subclass_testkit.adapters._recipe import Recipe
from subclass_testkit.adapters._recipe import subjects as _subjects

if TYPE_CHECKING:
    from subclass_testkit.subject import Subject

# half a step of max|block| / 127, and the rounding of the values to the outer dtype
_HALF_STEP = "hp.double().abs(){} * (0.5 / 127 + torch.finfo(d.dtype).eps) + torch.finfo(d.dtype).tiny"

_CLAIMS = frozenset({"inference", "training", "compile", "export", "serialization", "devices", "serving"})

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        paths=("reference_impls.Int8Tensor", "reference_impls.int8.Int8Tensor"),
        make="Int8Tensor.from_hp(hp)",
        to_plain="t.dequantize()",
        imports="from reference_impls import Int8Tensor",
        ndim=(2, 3),
        claims=_CLAIMS,
        max_error=_HALF_STEP.format(".amax(-1, keepdim=True)"),
        variants={
            "tensor": {
                "make": "Int8Tensor.from_hp(hp, 'tensor')",
                "max_error": _HALF_STEP.format(".amax()"),
                "claims": _CLAIMS - {"serving"},  # a shard can't have a scale of its own
            },
            "group16": {
                "make": "Int8Tensor.from_hp(hp, 16)",
                "multiples_of": (1, 16),
                "max_error": _HALF_STEP.format(".unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, -1)"),
            },
        },
    ),
)


def subjects() -> dict[str, Subject]:
    """A Subject for each path."""
    return _subjects(RECIPES)
