"""The weight-only linear of any affine format with unpacked codes, as a custom operator on plain tensors.

out = x @ dequantize(codes, scale, zero_point).T + bias
"""

from typing import Any

import torch
import torch.nn.functional as F

from reference_impls.kernels.custom_op import custom_op
from reference_impls.kernels.linear_gradients import Codes, Wanted, gradients


@custom_op("reference_impls::affine_linear", triton="triton_weight_only")
def affine_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    quant_min: int,
    quant_max: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Linear of `x` (..., K) with codes (N, K) in quant_min..quant_max; `scale` and `zero_point` are (N / b_0, K / b_1), bias (N,).

    Gives (..., N) in x's dtype. Differentiable in x, scale, a floating-point zero point and bias.
    """
    return F.linear(x, Codes(codes, scale, zero_point, quant_min, quant_max).values(x.dtype), bias).contiguous()


@affine_linear.register_fake
def _(x: Any, codes: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, bias: Any = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, codes, scale, zero_point, ctx.quant_min, ctx.quant_max, _ = inputs
    ctx.save_for_backward(x, codes, scale, zero_point)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, codes, scale, zero_point = ctx.saved_tensors
    weight = Codes(codes, scale, zero_point, ctx.quant_min, ctx.quant_max)
    grad_x, grad_scale, grad_zero, grad_bias = gradients(grad, x, weight, Wanted.of(ctx, x=0, scale=2, zero_point=3, bias=6))
    return grad_x, None, grad_scale, grad_zero, None, None, grad_bias


affine_linear.register_autograd(_backward, setup_context=_setup)
