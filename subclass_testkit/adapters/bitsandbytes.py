"""bitsandbytes' quantized parameters. Tried with bitsandbytes 0.50.2, torch 2.13.0 (CPU).

They are no wrapper subclasses: the storage is the packed data, so that shape, dtype, slicing and ``F.linear`` of the
outer tensor are those of the bytes. Only what needs none of these applies (building, linear by the library's own
function, copying, saving, modules).

* ``Params4bit``: any shape is accepted. With rows that are no multiple of the block size (and more than a few of
  them, e.g. (64, 96) with blocks of 64) ``dequantize_4bit`` and ``matmul_4bit`` on a CPU read wrong scales: 11 dB
  instead of 21 dB; the flattened tensor is right. The variant ``unaligned`` shows it.
* ``Int8Params``: quantizes by way of float16 and forgets the dtype, which is why reading it names one. Its linear (as
  ``Linear8bitLt`` in eval mode runs it) casts to float16 and rounds the activation to int8 per row. What
  ``Linear8bitLt`` sets on its ``MatmulLtState`` are class attributes: no arguments of the constructor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from subclass_testkit.adapters._recipe import Recipe
from subclass_testkit.adapters._recipe import subjects as _subjects

if TYPE_CHECKING:
    from subclass_testkit.subject import Subject


def _four_bit(quant_type: str, *, nested: bool) -> str:
    return f'Params4bit(hp, quant_type="{quant_type}", compress_statistics={nested}).to("cpu")'


def _four_bit_error(half_gap: float) -> str:
    # half the widest gap between two levels times the block's maximum, and what quantizing the maxima themselves costs
    return (
        f"hp.float().abs().reshape(-1, 64).amax(1).repeat_interleave(64).reshape(hp.shape) * {half_gap}"
        " + hp.float().abs().amax() * (0.01 + torch.finfo(d.dtype).eps)"
    )


RECIPES: tuple[Recipe, ...] = (
    Recipe(
        paths=("bitsandbytes.nn.Params4bit", "bitsandbytes.nn.modules.Params4bit"),
        make=_four_bit("nf4", nested=True),
        to_plain="dequantize_4bit(t.data, t.quant_state)",
        linear="matmul_4bit(x, w, quant_state=w.quant_state, bias=b)",
        imports=(
            "from bitsandbytes import matmul_4bit\n"
            "from bitsandbytes.functional import dequantize_4bit\n"
            "from bitsandbytes.nn import Params4bit"
        ),
        multiples_of=(1, 64),
        shapes=((32, 128), (128, 128)),
        max_error=_four_bit_error(0.152),
        wrapper=False,
        variants={
            "nf4-flat": {"make": _four_bit("nf4", nested=False)},
            "fp4": {"make": _four_bit("fp4", nested=True), "max_error": _four_bit_error(0.167)},
            "unaligned": {
                "multiples_of": (1, 2),
                "shapes": ((64, 96), (128, 160)),
                "max_error": "hp.float().abs().amax() * 0.17",  # of the whole tensor: no block of it can err more
            },
        },
    ),
    Recipe(
        paths=("bitsandbytes.nn.Int8Params", "bitsandbytes.nn.modules.Int8Params"),
        make='Int8Params(hp, requires_grad=False).to("cpu")',
        to_plain="int8_vectorwise_dequant(t.CB, t.SCB)",
        linear="matmul(x, w, bias=b, state=State(CB=w.CB, SCB=w.SCB))",
        imports=(
            "from bitsandbytes import MatmulLtState, matmul\n"
            "from bitsandbytes.functional import int8_vectorwise_dequant\n"
            "from bitsandbytes.nn import Int8Params\n"
            "class State(MatmulLtState): is_training = has_fp16_weights = False"
        ),
        dtypes="float32",
        activation_bits=8,
        max_error="hp.float().abs().amax(-1, keepdim=True) * (1 / 254 + 2**-10 + torch.finfo(d.dtype).eps) + 1e-7",
        wrapper=False,
        variants={
            name: {"dtypes": name, "to_plain": f"int8_vectorwise_dequant(t.CB, t.SCB).to(torch.{name})"}
            for name in ("float16", "bfloat16")
        },
    ),
)


def subjects() -> dict[str, Subject]:
    """The ready subjects, by every path by which a class is known."""
    return _subjects(RECIPES)
