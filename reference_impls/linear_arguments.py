"""F.linear where an operand is quantized: what it accepts, and what autocast does to it."""

import torch
import torch.nn.functional as F

from reference_impls import operators
from reference_impls.values import ValueTensor


def checked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (..., K) @ weight (N, K).T + bias (N,); gives (..., N), plain. Any operand may be quantized.

    Raises ValueError where sizes, dtypes or devices don't fit.
    """
    x, bias = _plain(x), _plain(bias)
    if not isinstance(weight, ValueTensor) or weight.dim() != 2:
        return F.linear(x, _plain(weight), bias)
    x, weight, bias = _autocast(x), _autocast(weight), _autocast(bias)
    _check(x, weight, bias)
    return operators.Linear.apply(x, weight, bias)


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.dequantize() if isinstance(tensor, ValueTensor) else tensor


def _autocast(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A replacement of F.linear bypasses autocast, so do here what it does to a linear's operands."""
    if tensor is None or tensor.dtype == torch.float64:
        return tensor
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    described = f"linear of input {tuple(x.shape)} with weight {tuple(weight.shape)}"
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{described}: the last dimension of the input must be {weight.shape[1]}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{described}: the bias must have shape ({weight.shape[0]},), not {tuple(bias.shape)}.")
    for name, operand in {"input": x, "bias": bias}.items():
        if operand is not None and operand.dtype != weight.dtype:
            raise ValueError(f"{described}: {name} is {operand.dtype}, weight is {weight.dtype}; convert one of them.")
        if operand is not None and operand.device != weight.device:
            raise ValueError(f"{described}: {name} is on {operand.device}, weight on {weight.device}; move one of them.")
