"""The reference implementations that come with the kit, with their variants; the claims are declared, so they must be found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from subclass_testkit.adapters._recipe import Recipe
from subclass_testkit.adapters._recipe import subjects as _subjects

if TYPE_CHECKING:
    from subclass_testkit.subject import Subject

_CLAIMS = frozenset({"inference", "training", "compile", "export", "serialization", "devices", "serving"})
_WITHOUT_SHARDS = _CLAIMS - {"serving"}  # a shard can't have a scale of its own

# What the rounding of the values to the outer dtype adds to the error.
_ROUNDED = " + hp.double().abs() * torch.finfo(d.dtype).eps + torch.finfo(d.dtype).tiny"


def _symmetric(steps: int, reduction: str) -> str:
    """Half a step of max|block| / steps."""
    return f"hp.double().abs(){reduction} * (0.5 / {steps})" + _ROUNDED


def _asymmetric(steps: int, group: int | None = None) -> str:
    """A step of the block's range, zero included: half of it by rounding a value, half by rounding the zero point."""
    blocks = f"hp.double().unflatten(-1, (-1, {group}))" if group else "hp.double()"
    keep = "-1" if group else "-1, keepdim=True"
    repeat = f".repeat_interleave({group}, -1)" if group else ""
    return f"({blocks}.amax({keep}).clamp(min=0) - {blocks}.amin({keep}).clamp(max=0)){repeat} / {steps}" + _ROUNDED


def _in_groups(size: int) -> str:
    return f".unflatten(-1, (-1, {size})).amax(-1).repeat_interleave({size}, -1)"


def _recipe(module: str, name: str, arguments: str, **fields: Any) -> Recipe:
    """A class of ``reference_impls.<module>``, made by ``from_hp`` with these arguments."""
    return Recipe(
        paths=(f"reference_impls.{name}", f"reference_impls.{module}.{name}"),
        make=f"{name}.from_hp(hp{arguments})",
        to_plain="t.dequantize()",
        **{"imports": f"from reference_impls import {name}", "ndim": (2, 3), "claims": _CLAIMS, **fields},
    )


def _uintx(bits: int, group: int | None) -> dict[str, Any]:
    whole_bytes = 8 // (bits & -bits)  # of the smallest shard
    return {"multiples_of": (1, max(group or 1, whole_bytes)), "max_error": _asymmetric(2**bits - 1, group)}


RECIPES: tuple[Recipe, ...] = (
    _recipe(
        "int8",
        "Int8Tensor",
        "",
        max_error=_symmetric(127, ".amax(-1, keepdim=True)"),
        variants={
            "tensor": {
                "make": "Int8Tensor.from_hp(hp, 'tensor')",
                "max_error": _symmetric(127, ".amax()"),
                "claims": _WITHOUT_SHARDS,
            },
            "group16": {
                "make": "Int8Tensor.from_hp(hp, 16)",
                "multiples_of": (1, 16),
                "max_error": _symmetric(127, _in_groups(16)),
            },
        },
    ),
    _recipe(
        "per_channel",
        "PerChannelSymmetricWeight",
        "",
        max_error=_symmetric(127, ".flatten(1).amax(-1).reshape(-1, *[1] * (hp.dim() - 1))"),
        variants={
            "axis1": {
                "make": "PerChannelSymmetricWeight.from_hp(hp, 1)",
                "max_error": _symmetric(127, ".transpose(0, 1).flatten(1).amax(-1).reshape(1, -1, *[1] * (hp.dim() - 2))"),
                "claims": _WITHOUT_SHARDS,
            },
        },
    ),
    _recipe(
        "int8_activation",
        "Int8ActivationTensor",
        "",
        activation_bits=8,
        max_error=_symmetric(127, ".amax(-1, keepdim=True)"),
    ),
    _recipe(
        "trainable",
        "TrainableInt8Tensor",
        "",
        ndim=(2,),
        max_error=_symmetric(127, ".amax(-1, keepdim=True)"),
        variants={
            "nearest": {"make": "TrainableInt8Tensor.from_hp(hp, rounding='nearest')"},
            "group16": {
                "make": "TrainableInt8Tensor.from_hp(hp, 16)",
                "multiples_of": (1, 16),
                "max_error": _symmetric(127, _in_groups(16)),
            },
        },
    ),
    _recipe(
        "mixed_precision",
        "Int8MixedPrecisionTensor",
        "",
        activation_bits=8,
        weight_bits=8,
        max_error="torch.zeros(())",
    ),
    _recipe(
        "uintx",
        "UintxTensor",
        ", 4",
        variants={
            f"bits{bits}": {"make": f"UintxTensor.from_hp(hp, {bits}, {group})", **_uintx(bits, group)}
            for bits, group in ((1, None), (2, 16), (3, None), (5, 16), (6, None), (7, 8))
        },
        **_uintx(4, None),
    ),
    _recipe(
        "affine",
        "AffineQuantizedTensor",
        ", PlainLayout(), 'asymmetric', 0, 255",
        imports="from reference_impls import AffineQuantizedTensor, Int4Layout, PlainLayout, UintxLayout",
        max_error=_asymmetric(255),
        variants={
            "tensor": {
                "make": "AffineQuantizedTensor.from_hp(hp, PlainLayout(), 'symmetric', -128, 127, 'tensor')",
                "max_error": _symmetric(127, ".amax()"),
                "claims": _WITHOUT_SHARDS,
            },
            "uint4-float-zero": {
                "make": "AffineQuantizedTensor.from_hp(hp, UintxLayout(4), 'float_zero', 0, 15, 16)",
                "multiples_of": (1, 16),
                "max_error": _asymmetric(15, 16),  # a range that includes zero is no smaller than one that needn't
            },
            "int3": {
                "make": "AffineQuantizedTensor.from_hp(hp, UintxLayout(3), 'symmetric', -4, 3, 16)",
                "multiples_of": (1, 16),
                "max_error": _symmetric(3, _in_groups(16)),
            },
            "int4-words": {
                "make": "AffineQuantizedTensor.from_hp(hp, Int4Layout(), 'symmetric', -8, 7, 16)",
                "multiples_of": (1, 16),
                "max_error": _symmetric(7, _in_groups(16)),
            },
            "uint4-words": {
                "make": "AffineQuantizedTensor.from_hp(hp, Int4Layout(), 'asymmetric', 0, 15, 8)",
                "multiples_of": (1, 8),
                "max_error": _asymmetric(15, 8),
            },
        },
    ),
    _recipe(
        "int4",
        "UInt4Tensor",
        ", 16",
        multiples_of=(1, 16),
        max_error=_asymmetric(15, 16),
        variants={
            "row": {"make": "UInt4Tensor.from_hp(hp, None)", "multiples_of": (1, 2), "max_error": _asymmetric(15)},
            "group2": {"make": "UInt4Tensor.from_hp(hp, 2)", "multiples_of": (1, 2), "max_error": _asymmetric(15, 2)},
        },
    ),
    _recipe(
        "int4",
        "Int4Tensor",
        ", 16",
        multiples_of=(1, 16),
        max_error=_symmetric(7, _in_groups(16)),
        variants={
            "row": {
                "make": "Int4Tensor.from_hp(hp, None)",
                "multiples_of": (1, 2),
                "max_error": _symmetric(7, ".amax(-1, keepdim=True)"),
            },
        },
    ),
)


def subjects() -> dict[str, Subject]:
    """A Subject for each path."""
    return _subjects(RECIPES)
