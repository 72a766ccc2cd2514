"""Weight-only linears of any affine format, as custom operators on plain tensors.

    out = x @ dequantize(codes, scale, zero_point).T + bias

The zero point may be absent, integer or floating-point; `quantization.py` has the formulas.
"""

from typing import Any

import torch
import torch.nn.functional as F

from reference_impls.kernels.linear_gradients import bias_gradient
from reference_impls.kernels.packing import SHARDS, unpack
from reference_impls.kernels.quantization import dequantize


@torch.library.custom_op("reference_impls::affine_linear", mutates_args=())
def affine_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    quant_min: int,
    quant_max: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Linear of `x` (..., K) with codes (N, K) in quant_min..quant_max; gives (..., N) in x's dtype. Differentiable in x and bias."""
    weight = dequantize(codes, scale, zero_point, x.dtype, quant_min, quant_max)
    return F.linear(x, weight, bias).contiguous()


@torch.library.custom_op("reference_impls::affine_packed_linear", mutates_args=())
def affine_packed_linear(
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
    """As `affine_linear`, with codes less `quant_min` packed along `packed_dim` as `packing.pack` does it."""
    weight = dequantize(_codes(shards, bits, packed_dim, quant_min), scale, zero_point, x.dtype, quant_min, quant_max)
    return F.linear(x, weight, bias).contiguous()


def _codes(shards: list[torch.Tensor], bits: int, packed_dim: int, quant_min: int) -> torch.Tensor:
    return unpack(shards, bits, packed_dim).to(torch.int16) + quant_min


@affine_linear.register_fake
def _(x: Any, codes: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, bias: Any = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


@affine_packed_linear.register_fake
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
    rows = shards[0].shape[0] * (8 // SHARDS[bits][0] if packed_dim == 0 else 1)
    return x.new_empty((*x.shape[:-1], rows))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, codes, scale, zero_point, ctx.quant_min, ctx.quant_max, _ = inputs
    ctx.zero_point = zero_point is not None
    ctx.save_for_backward(codes, scale, *([zero_point] if ctx.zero_point else []))


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    codes, scale, *zero_point = ctx.saved_tensors
    weight = dequantize(codes, scale, zero_point[0] if zero_point else None, grad.dtype, ctx.quant_min, ctx.quant_max)
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    return grad_x, None, None, None, None, None, bias_gradient(grad) if ctx.needs_input_grad[-1] else None


def _setup_packed(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, shards, ctx.bits, ctx.packed_dim, scale, zero_point, ctx.quant_min, ctx.quant_max, _ = inputs
    ctx.zero_point = zero_point is not None
    ctx.save_for_backward(scale, *([zero_point] if ctx.zero_point else []), *shards)


def _backward_packed(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    scale, *rest = ctx.saved_tensors
    zero_point, shards = (rest[0], rest[1:]) if ctx.zero_point else (None, rest)
    codes = _codes(list(shards), ctx.bits, ctx.packed_dim, ctx.quant_min)
    weight = dequantize(codes, scale, zero_point, grad.dtype, ctx.quant_min, ctx.quant_max)
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    grad_bias = bias_gradient(grad) if ctx.needs_input_grad[-1] else None
    return grad_x, [None] * len(shards), None, None, None, None, None, None, grad_bias


affine_linear.register_autograd(_backward, setup_context=_setup)
affine_packed_linear.register_autograd(_backward_packed, setup_context=_setup_packed)
