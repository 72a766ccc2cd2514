"""4-bit codes in 32-bit words, eight to a word, and the weight-only linear that reads them.

A GPU computes with 16-bit floats in pairs, the two halves of a 32-bit register. So neighbours lie 16 bits apart:

    bits    31-28  27-24  23-20  19-16  15-12  11-8   7-4    3-0
    code      7      5      3      1      6      4     2      0

and a shift and a mask, `(word >> 4 * i) & 0x000F000F`, unpack a pair, codes 2i and 2i + 1, each in its half. The order is that of
the kernels of AWQ (Lin et al. 2023, "AWQ: Activation-aware Weight Quantization", section 4.2).
"""

from typing import Any

import torch
import torch.nn.functional as F

from reference_impls.kernels.linear_gradients import Codes, Wanted, gradients

CODES_PER_WORD = 8

_PAIR_MASK = 0x000F000F


def pack_words(codes: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Codes -8..7 or 0..15 (integers) as int32 words, eight times fewer along `dim`.

    Raises ValueError where the size of `dim` isn't a multiple of 8.
    """
    count = codes.shape[dim]
    if count % CODES_PER_WORD:
        raise ValueError(
            f"{count} codes along dim {dim} of {tuple(codes.shape)} don't fill whole words: the size must be a multiple of "
            f"{CODES_PER_WORD}."
        )
    bits = codes.movedim(dim, -1).to(torch.int32) & 15
    pairs = bits.unflatten(-1, (count // CODES_PER_WORD, 4, 2))
    halves = pairs[..., 0] | (pairs[..., 1] << 16)
    words = halves[..., 0] | (halves[..., 1] << 4) | (halves[..., 2] << 8) | (halves[..., 3] << 12)
    return words.movedim(-1, dim).contiguous()


def unpack_words(words: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The codes, as 0..15 (int32), that `pack_words` packed along `dim`."""
    dim = dim % words.dim()
    pairs = [(words >> 4 * i) & _PAIR_MASK for i in range(4)]
    halves = [half for pair in pairs for half in (pair & 0xFFFF, pair >> 16)]
    return torch.stack(halves, dim + 1).flatten(dim, dim + 1)


def codes_of_words(words: torch.Tensor, dim: int, quant_min: int) -> torch.Tensor:
    """The codes as what they stand for: 0..15, or two's complement where `quant_min` is negative."""
    codes = unpack_words(words, dim)
    return (codes ^ 8) - 8 if quant_min < 0 else codes


@torch.library.custom_op("reference_impls::int4_words_linear", mutates_args=())
def int4_words_linear(
    x: torch.Tensor,
    words: torch.Tensor,
    packed_dim: int,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    quant_min: int,
    quant_max: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Linear of `x` (..., K) with codes (N, K) in quant_min..quant_max, in words along `packed_dim`.

    `scale` and `zero_point` (absent, integer or floating-point: see `quantization.py`) are (N / b_0, K / b_1), `bias` (N,). Gives
    (..., N) in x's dtype. Differentiable in x, scale, a floating-point zero point and bias.
    """
    weight = _weight(words, packed_dim, scale, zero_point, quant_min, quant_max)
    return F.linear(x, weight.values(x.dtype), bias).contiguous()


@int4_words_linear.register_fake
def _(
    x: Any, words: Any, packed_dim: int, scale: Any, zero_point: Any, quant_min: int, quant_max: int, bias: Any = None
) -> Any:
    return x.new_empty((*x.shape[:-1], words.shape[0] * (CODES_PER_WORD if packed_dim == 0 else 1)))


def _weight(words: torch.Tensor, packed_dim: int, scale: torch.Tensor, zero_point: torch.Tensor | None, quant_min: int,
            quant_max: int) -> Codes:  # fmt: skip
    return Codes(codes_of_words(words, packed_dim, quant_min), scale, zero_point, quant_min, quant_max)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, words, ctx.packed_dim, scale, zero_point, ctx.quant_min, ctx.quant_max, _ = inputs
    ctx.save_for_backward(x, words, scale, zero_point)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, words, scale, zero_point = ctx.saved_tensors
    weight = _weight(words, ctx.packed_dim, scale, zero_point, ctx.quant_min, ctx.quant_max)
    grad_x, grad_scale, grad_zero, grad_bias = gradients(grad, x, weight, Wanted.of(ctx, x=0, scale=3, zero_point=4, bias=7))
    return grad_x, None, None, grad_scale, grad_zero, None, None, grad_bias


int4_words_linear.register_autograd(_backward, setup_context=_setup)
