"""optimum-quanto's weights and activations. Tried with optimum-quanto 0.2.7, torch 2.13.0 (CPU).

* ``WeightQBytesTensor`` with bfloat16 and a scale that isn't per row (axis -1, or per tensor): ``F.linear`` ends in
  ``RuntimeError: _weight_int8pack_mm_cpu : expect scales to be 1d tensor``; float32 and float16 work.
* ``WeightQBitsTensor`` with bfloat16, qint4 and groups of 128 becomes a ``TinyGemmWeightQBitsTensor``, also on a CPU
  (variant ``group128``).
  It wants rows in multiples of 16.
* float8 qtypes: a zero row makes the scale of ``AbsmaxOptimizer`` zero, and the values NaN.
* A dimension of size 1 can't be the axis: ``ValueError: Cannot quantize Tensor of shape ...``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from subclass_testkit.adapters._recipe import Recipe
from subclass_testkit.adapters._recipe import subjects as _subjects

if TYPE_CHECKING:
    from subclass_testkit.subject import Subject

# "The dtype of a weights Tensor cannot be changed" and the like (ValueError)
_REFUSALS = r"(is not|is only) supported|The dtype of a \w+( Tensor)? cannot be changed"


def _bytes(qtype: str, axis: str) -> str:
    return f"WeightQBytesTensor.quantize(hp, {qtype}, {axis}, AbsmaxOptimizer()(hp, {qtype}, {axis}))"


def _bytes_imports(qtype: str) -> str:
    return f"from optimum.quanto import AbsmaxOptimizer, WeightQBytesTensor, {qtype}"


def _bits(qtype: str, axis: str, group: str, zeropoint: str = "") -> str:
    return f"WeightQBitsTensor.quantize(hp, {qtype}, {axis}, {group}, *MaxOptimizer()(hp, {qtype}, {axis}, {group}{zeropoint}))"


def _bits_imports(qtype: str) -> str:
    return f"from optimum.quanto import MaxOptimizer, WeightQBitsTensor, {qtype}"


def _bits_error(steps: int, group: int) -> str:
    rows = f"hp.float().reshape(-1, {group})"
    return (
        f"(({rows}.amax(1) - {rows}.amin(1)) / {2 * steps} + {rows}.abs().amax(1) * 3 * torch.finfo(d.dtype).eps)"
        f".repeat_interleave({group}).reshape(hp.shape)"
    )


def _int8_error(reduction: str) -> str:
    return f"hp.float().abs().amax({reduction}) * (1 / 254 + torch.finfo(d.dtype).eps) + torch.finfo(d.dtype).tiny"


def _float8_error(reduction: str, bits: int) -> str:
    # the relative rounding of the normal numbers; and of the subnormal ones, in units of the largest
    return f"hp.float().abs() * (2**-{bits} + 2 * torch.finfo(d.dtype).eps) + hp.float().abs().amax({reduction}) * 2**-15 + torch.finfo(d.dtype).tiny"


RECIPES: tuple[Recipe, ...] = (
    Recipe(
        paths=(
            "optimum.quanto.WeightQBytesTensor",
            "optimum.quanto.tensor.WeightQBytesTensor",
            "optimum.quanto.tensor.weights.WeightQBytesTensor",
            "optimum.quanto.tensor.weights.qbytes.WeightQBytesTensor",
        ),
        make=_bytes("qint8", "0"),
        to_plain="t.dequantize()",
        imports=_bytes_imports("qint8"),
        refusals=_REFUSALS,
        max_error=_int8_error("-1, keepdim=True"),
        variants={
            "columns": {"make": _bytes("qint8", "-1"), "max_error": _int8_error("0, keepdim=True")},
            "tensor": {"make": _bytes("qint8", "None"), "max_error": _int8_error("")},
            "float8": {
                "make": _bytes("qfloat8_e4m3fn", "0"),
                "imports": _bytes_imports("qfloat8_e4m3fn"),
                "max_error": _float8_error("-1, keepdim=True", 4),
            },
            "float8-e5m2": {
                "make": _bytes("qfloat8_e5m2", "0"),
                "imports": _bytes_imports("qfloat8_e5m2"),
                "max_error": _float8_error("-1, keepdim=True", 3),
            },
        },
    ),
    Recipe(
        paths=(
            "optimum.quanto.WeightQBitsTensor",
            "optimum.quanto.tensor.WeightQBitsTensor",
            "optimum.quanto.tensor.weights.WeightQBitsTensor",
            "optimum.quanto.tensor.weights.qbits.WeightQBitsTensor",
        ),
        make=_bits("qint4", "0", "32"),
        to_plain="t.dequantize()",
        imports=_bits_imports("qint4"),
        multiples_of=(1, 32),
        refusals=_REFUSALS,
        max_error=_bits_error(15, 32),
        variants={
            "int2": {"make": _bits("qint2", "0", "32"), "imports": _bits_imports("qint2"), "max_error": _bits_error(3, 32)},
            "columns": {"make": _bits("qint4", "-1", "32"), "multiples_of": (32, 1), "max_error": None},
            # the rounded zero point is clipped to the range of the values: groups of one sign saturate
            "zeropoint": {"make": _bits("qint4", "0", "32", ", zeropoint=True"), "max_error": None},
            "group128": {"make": _bits("qint4", "0", "128"), "multiples_of": (16, 128), "max_error": _bits_error(15, 128)},
        },
    ),
    Recipe(
        paths=(
            "optimum.quanto.ActivationQBytesTensor",
            "optimum.quanto.tensor.ActivationQBytesTensor",
            "optimum.quanto.tensor.activations.ActivationQBytesTensor",
            "optimum.quanto.tensor.activations.qbytes.ActivationQBytesTensor",
        ),
        parameter=False,
        make="ActivationQBytesTensor.quantize(hp, qint8, AbsmaxOptimizer()(hp, qint8))",
        to_plain="t.dequantize()",
        imports="from optimum.quanto import AbsmaxOptimizer, ActivationQBytesTensor, qint8",
        ndim=(2, 3),
        refusals=_REFUSALS,
        max_error=_int8_error(""),
        variants={
            "float8": {
                "make": "ActivationQBytesTensor.quantize(hp, qfloat8_e4m3fn, AbsmaxOptimizer()(hp, qfloat8_e4m3fn))",
                "imports": "from optimum.quanto import AbsmaxOptimizer, ActivationQBytesTensor, qfloat8_e4m3fn",
                "max_error": _float8_error("", 4),
            },
        },
    ),
)


def subjects() -> dict[str, Subject]:
    """The ready subjects, by every path by which a class is known."""
    return _subjects(RECIPES)
