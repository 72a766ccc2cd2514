"""Weight-only linears with packed weights of 1 to 7 bits, as custom operators on plain tensors.

    out = x @ ((codes - zero_point) * scale).T + bias

The codes are unpacked and dequantized to the dtype of `x` before the product, as in `int8_linear.py`.
"""

from typing import Any

import torch
import torch.nn.functional as F

from reference_impls.kernels.linear_gradients import bias_gradient, scale_gradient, weight_gradient
from reference_impls.kernels.packing import SHARDS, unpack
from reference_impls.kernels.quantization import dequantize, levels


@torch.library.custom_op("reference_impls::uintx_weight_only_linear", mutates_args=())
def uintx_weight_only_linear(
    x: torch.Tensor,
    shards: list[torch.Tensor],
    bits: int,
    packed_dim: int,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Linear of `x` (..., K) with unsigned codes (N, K), packed along `packed_dim` as `packing.pack` does it.

    `scale` and `zero_point` are (N / b_0, K / b_1), `bias` (N,). Gives (..., N) in x's dtype.
    """
    codes = unpack(shards, bits, packed_dim)
    return F.linear(x, dequantize(codes, scale, zero_point, x.dtype), bias).contiguous()


@uintx_weight_only_linear.register_fake
def _(
    x: torch.Tensor,
    shards: list[torch.Tensor],
    bits: int,
    packed_dim: int,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = shards[0].shape[0] * (8 // SHARDS[bits][0] if packed_dim == 0 else 1)
    return x.new_empty((*x.shape[:-1], rows))


@torch.library.custom_op("reference_impls::int4_weight_only_linear", mutates_args=())
def int4_weight_only_linear(
    x: torch.Tensor, qdata: torch.Tensor, packed_dim: int, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `uintx_weight_only_linear`, with signed 4-bit codes in two's complement, two a byte, and no zero point."""
    codes = signed(unpack([qdata], 4, packed_dim))
    return F.linear(x, dequantize(codes, scale, None, x.dtype), bias).contiguous()


@int4_weight_only_linear.register_fake
def _(
    x: torch.Tensor, qdata: torch.Tensor, packed_dim: int, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], qdata.shape[0] * (2 if packed_dim == 0 else 1)))


def signed(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes 0..15 read as two's complement: int8 codes -8..7."""
    return (codes ^ 8).to(torch.int8) - 8


# --- gradients --------------------------------------------------------------------------------------------------


def _gradients(
    ctx: Any, grad: torch.Tensor, codes: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Those of x, scale and bias."""
    position = 4 if zero_point is not None else 3  # of the scale
    grad_x = grad_scale = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = grad @ dequantize(codes, scale, zero_point, grad.dtype)
    if ctx.needs_input_grad[position]:
        grad_scale = scale_gradient(weight_gradient(x, grad), levels(codes, zero_point, scale.dtype, 0, 0), scale)
    if ctx.has_bias and ctx.needs_input_grad[-1]:
        grad_bias = bias_gradient(grad)
    return grad_x, grad_scale, grad_bias


def _setup_uintx(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, shards, ctx.bits, ctx.packed_dim, scale, zero_point, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, scale, zero_point, *shards)


def _uintx_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, scale, zero_point, *shards = ctx.saved_tensors
    codes = unpack(shards, ctx.bits, ctx.packed_dim)
    grad_x, grad_scale, grad_bias = _gradients(ctx, grad, codes, x, scale, zero_point)
    return grad_x, [None] * len(shards), None, None, grad_scale, None, grad_bias


def _setup_int4(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, qdata, ctx.packed_dim, scale, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, scale, qdata)


def _int4_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, scale, qdata = ctx.saved_tensors
    codes = signed(unpack([qdata], 4, ctx.packed_dim))
    grad_x, grad_scale, grad_bias = _gradients(ctx, grad, codes, x, scale, None)
    return grad_x, None, None, grad_scale, grad_bias


uintx_weight_only_linear.register_autograd(_uintx_backward, setup_context=_setup_uintx)
int4_weight_only_linear.register_autograd(_int4_backward, setup_context=_setup_int4)
