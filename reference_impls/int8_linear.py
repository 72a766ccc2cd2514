"""F.linear with a block-quantized int8 weight: checks, autocast, the kernel, and the gradient of each operand."""

from typing import Any

import torch
import torch.nn.functional as F

from reference_impls.kernels.int8_linear import bias_gradient, int8_weight_only_linear, weight_gradient
from reference_impls.values import ValueTensor


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (..., K) @ weight (N, K).T + bias (N,); gives (..., N), plain. Any operand may be quantized.

    Raises ValueError where sizes, dtypes or devices don't fit.
    """
    x, bias = _plain(x), _plain(bias)
    if not isinstance(weight, ValueTensor) or weight.dim() != 2:
        return F.linear(x, _plain(weight), bias)
    x, weight, bias = _autocast(x), _autocast(weight), _autocast(bias)
    _check(x, weight, bias)
    return _Int8Linear.apply(x, weight, bias)


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.dequantize() if isinstance(tensor, ValueTensor) else tensor


def _autocast(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A replacement of F.linear bypasses autocast, so do here what it does to a linear's operands."""
    if tensor is None or not torch.is_autocast_enabled(tensor.device.type) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    described = f"linear of input {tuple(x.shape)} with weight {tuple(weight.shape)}"
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{described}: the last dimension of the input must be {weight.shape[1]}.")
    if bias is not None and bias.shape not in ((weight.shape[0],), (1,), ()):
        raise ValueError(f"{described}: the bias must have shape ({weight.shape[0]},), not {tuple(bias.shape)}.")
    for name, operand in {"input": x, "bias": bias}.items():
        if operand is not None and operand.dtype != weight.dtype:
            raise ValueError(f"{described}: {name} is {operand.dtype}, weight is {weight.dtype}; convert one of them.")
        if operand is not None and operand.device != weight.device:
            raise ValueError(f"{described}: {name} is on {operand.device}, weight is on {weight.device}; move one of them.")


class _Int8Linear(torch.autograd.Function):
    """The weight's gradient is that of its values: dense, in the outer dtype."""

    @staticmethod
    def forward(x: torch.Tensor, weight: ValueTensor, bias: torch.Tensor | None) -> torch.Tensor:
        return int8_weight_only_linear(x, weight.qdata, weight.scale, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight.dequantize() if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(x, grad) if ctx.needs_input_grad[1] else None
        grad_bias = bias_gradient(grad) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias
