"""int8 weight-only linear, as a custom operator on plain tensors.

    out = x @ dequantize(qdata, scale).T + bias

The weight is dequantized to the dtype of `x` before the product. Scaling after the product would save work, but in
float16 the unscaled sums overflow (activations of 100 and K = 1024 are enough), and group-wise scales can't be pulled out.
"""

from typing import Any

import torch

from reference_impls.kernels.quantization import block_size, dequantize


@torch.library.custom_op("reference_impls::int8_weight_only_linear", mutates_args=())
def int8_weight_only_linear(
    x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Linear of `x` (..., K) with codes (N, K), scales (N / b_0, K / b_1) and bias (N,); gives (..., N) in x's dtype."""
    weight = dequantize(qdata, scale, None, x.dtype)
    return torch.nn.functional.linear(x, weight, bias).contiguous()


@int8_weight_only_linear.register_fake
def _(x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, qdata, scale, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, qdata, scale)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, qdata, scale = ctx.saved_tensors
    grad_x = grad_scale = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = grad @ dequantize(qdata, scale, None, grad.dtype)
    if ctx.needs_input_grad[2]:
        grad_scale = _scale_gradient(weight_gradient(x, grad), qdata, scale)
    if ctx.has_bias and ctx.needs_input_grad[3]:
        grad_bias = bias_gradient(grad)
    return grad_x, None, grad_scale, grad_bias


int8_weight_only_linear.register_autograd(_backward, setup_context=_setup_context)


def weight_gradient(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """d loss / d weight (N, K) of a linear from x (..., K) and d loss / d out (..., N); batch dimensions are summed."""
    return grad.reshape(-1, grad.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


def bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    """d loss / d bias (N,) from d loss / d out (..., N)."""
    return grad.reshape(-1, grad.shape[-1]).sum(0)


def _scale_gradient(grad_weight: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each scale multiplies the codes of its block: the sum over the block of d loss / d weight * q."""
    block = block_size(qdata.shape, scale.shape)
    product = grad_weight.to(scale.dtype) * qdata
    return product.reshape(qdata.shape[0] // block[0], block[0], qdata.shape[1] // block[1], block[1]).sum((1, 3))
