"""Weight-only linears with packed weights of 1 to 7 bits, as custom operators on plain tensors.

    out = x @ dequantize(codes, scale, zero_point).T + bias

The codes are unpacked and dequantized to the dtype of `x` before the product, as in `int8_linear.py`.
"""

from typing import Any

import torch
import torch.nn.functional as F

from reference_impls.kernels.custom_op import custom_op
from reference_impls.kernels.linear_gradients import Codes, Wanted, gradients
from reference_impls.kernels.packing import SHARDS, unpack


@custom_op("reference_impls::uintx_weight_only_linear", triton="triton_weight_only")
def uintx_weight_only_linear(
    x: torch.Tensor,
    shards: list[torch.Tensor],
    bits: int,
    packed_dim: int,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    quant_min: int,
    quant_max: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Linear of `x` (..., K) with codes (N, K) in quant_min..quant_max, which less quant_min are packed as `packing.pack` does it.

    `scale` and `zero_point` (absent, integer or floating-point: see `quantization.py`) are (N / b_0, K / b_1), `bias` (N,). Gives
    (..., N) in x's dtype. Differentiable in x, scale, a floating-point zero point and bias.
    """
    weight = _codes(shards, bits, packed_dim, scale, zero_point, quant_min, quant_max).values(x.dtype)
    return F.linear(x, weight, bias).contiguous()


@uintx_weight_only_linear.register_fake
def _(
    x: Any,
    shards: Any,
    bits: int,
    packed_dim: int,
    scale: Any,
    zero_point: Any,
    quant_min: int,
    quant_max: int,
    bias: Any = None,
) -> torch.Tensor:
    return _out(x, shards[0], bits, packed_dim)


@custom_op("reference_impls::int4_weight_only_linear", triton="triton_weight_only")
def int4_weight_only_linear(
    x: torch.Tensor, qdata: torch.Tensor, packed_dim: int, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `uintx_weight_only_linear`, with signed 4-bit codes in two's complement, two a byte, and no zero point."""
    return F.linear(x, _signed_codes(qdata, packed_dim, scale).values(x.dtype), bias).contiguous()


@int4_weight_only_linear.register_fake
def _(x: Any, qdata: Any, packed_dim: int, scale: Any, bias: Any = None) -> torch.Tensor:
    return _out(x, qdata, 4, packed_dim)


def signed(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes 0..15 read as two's complement: int8 codes -8..7."""
    return (codes ^ 8).to(torch.int8) - 8


def _out(x: torch.Tensor, shard: torch.Tensor, bits: int, packed_dim: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], shard.shape[0] * (8 // SHARDS[bits][0] if packed_dim == 0 else 1)))


def _codes(shards: list[torch.Tensor], bits: int, packed_dim: int, scale: torch.Tensor, zero_point: torch.Tensor | None,
           quant_min: int, quant_max: int) -> Codes:  # fmt: skip
    codes = unpack(shards, bits, packed_dim)
    return Codes(codes.to(torch.int16) + quant_min if quant_min else codes, scale, zero_point, quant_min, quant_max)


def _signed_codes(qdata: torch.Tensor, packed_dim: int, scale: torch.Tensor) -> Codes:
    return Codes(signed(unpack([qdata], 4, packed_dim)), scale)


# --- gradients --------------------------------------------------------------------------------------------------


def _setup_uintx(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, shards, ctx.bits, ctx.packed_dim, scale, zero_point, ctx.quant_min, ctx.quant_max, _ = inputs
    ctx.save_for_backward(x, scale, zero_point, *shards)


def _uintx_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, scale, zero_point, *shards = ctx.saved_tensors
    weight = _codes(shards, ctx.bits, ctx.packed_dim, scale, zero_point, ctx.quant_min, ctx.quant_max)
    wanted = Wanted.of(ctx, x=0, scale=4, zero_point=5, bias=8)
    grad_x, grad_scale, grad_zero, grad_bias = gradients(grad, x, weight, wanted)
    return grad_x, [None] * len(shards), None, None, grad_scale, grad_zero, None, None, grad_bias


def _setup_int4(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, qdata, ctx.packed_dim, scale, _ = inputs
    ctx.save_for_backward(x, qdata, scale)


def _int4_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, qdata, scale = ctx.saved_tensors
    wanted = Wanted.of(ctx, x=0, scale=3, bias=4)
    grad_x, grad_scale, _, grad_bias = gradients(grad, x, _signed_codes(qdata, ctx.packed_dim, scale), wanted)
    return grad_x, None, None, grad_scale, grad_bias


uintx_weight_only_linear.register_autograd(_uintx_backward, setup_context=_setup_uintx)
int4_weight_only_linear.register_autograd(_int4_backward, setup_context=_setup_int4)
