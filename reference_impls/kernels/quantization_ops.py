"""The quantization primitives as operators: one node each in a traced graph, checked arguments, gradients.

The formulas, and what the parameters' shapes mean, are in `quantization.py`. A subclass's own code calls the functions
there, which a compiler can fuse with what surrounds them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from reference_impls.kernels import quantization

_MAPPINGS = ("symmetric", "asymmetric", "float_zero")


@torch.library.custom_op("reference_impls::choose_qparams_affine", mutates_args=())
def choose_qparams_affine(
    x: torch.Tensor, block_size: Sequence[int], mapping: str, qmin: int, qmax: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of each block of `x`.

    Args:
        x: float32 or float64, any shape.
        block_size: elements per block along each dimension of `x`; must divide its shape.
        mapping: "symmetric" (the zero point is 0 where 0 is the middle of the codes -qmax..qmax), "asymmetric" (an int32
            zero point in qmin..qmax; zero is kept exactly), "float_zero" (the zero point is a value, of the dtype of `x`).
        qmin, qmax: the smallest and the largest code.

    Raises ValueError where the block doesn't fit or `mapping` is unknown, TypeError for another dtype. No gradient.
    """
    _check_choice(x, block_size, mapping)
    block = tuple(block_size)
    if mapping == "symmetric":
        scale = quantization.choose_symmetric(x, block, qmin, qmax)
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    choose = quantization.choose_asymmetric if mapping == "asymmetric" else quantization.choose_float_zero
    return choose(x, block, qmin, qmax)


@choose_qparams_affine.register_fake
def _(x: torch.Tensor, block_size: Sequence[int], mapping: str, qmin: int, qmax: int) -> tuple[torch.Tensor, torch.Tensor]:
    _check_choice(x, block_size, mapping)
    scale = x.new_empty([n // b for n, b in zip(x.shape, block_size, strict=True)])
    return scale, torch.empty_like(scale, dtype=x.dtype if mapping == "float_zero" else torch.int32)


def _check_choice(x: torch.Tensor, block_size: Sequence[int], mapping: str) -> None:
    _check_precise(x)
    if mapping not in _MAPPINGS:
        raise ValueError(f"mapping {mapping!r} is unknown: use one of {', '.join(_MAPPINGS)}.")
    if len(block_size) != x.dim() or any(b < 1 or n % b for n, b in zip(x.shape, block_size, strict=False)):
        raise ValueError(
            f"block_size {tuple(block_size)} doesn't fit shape {tuple(x.shape)}: it needs as many numbers as there are "
            "dimensions, each a divisor of its dimension."
        )


@torch.library.custom_op("reference_impls::quantize_affine", mutates_args=())
def quantize_affine(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, qmin: int, qmax: int, dtype: torch.dtype
) -> torch.Tensor:
    """Codes qmin..qmax of `x` (float32 or float64) in its shape, in the integer `dtype`. No gradient: codes are integers."""
    _check_precise(x)
    _check_parameters(x.shape, scale, zero_point)
    return quantization.quantize(x, scale, zero_point, qmin, qmax, dtype)


@quantize_affine.register_fake
def _(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, qmin: int, qmax: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype)


@torch.library.custom_op("reference_impls::dequantize_affine", mutates_args=())
def dequantize_affine(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, qmin: int, qmax: int, dtype: torch.dtype
) -> torch.Tensor:
    """The values of integer `codes` in `dtype`. Differentiable in the scale and in a floating-point zero point."""
    _check_parameters(codes.shape, scale, zero_point)
    return quantization.dequantize(codes, scale, zero_point, dtype, qmin, qmax)


@dequantize_affine.register_fake
def _(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, qmin: int, qmax: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_like(codes, dtype=dtype)


def _setup_dequantize(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    codes, scale, zero_point, ctx.qmin, ctx.qmax, _ = inputs
    ctx.has_zero_point = zero_point is not None
    ctx.save_for_backward(codes, scale, *([zero_point] if ctx.has_zero_point else []))


def _dequantize_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """x' = level * scale + offset: d scale = sum of grad * level, d offset = sum of grad, over each block."""
    codes, scale, *zero_point = ctx.saved_tensors
    wide = grad.to(scale.dtype)
    grad_scale = grad_zero = None
    if ctx.needs_input_grad[1]:
        steps = quantization.levels(codes, zero_point[0] if zero_point else None, scale.dtype, ctx.qmin, ctx.qmax)
        grad_scale = quantization.sum_over_blocks(wide * steps, scale.shape)
    if ctx.has_zero_point and ctx.needs_input_grad[2]:
        grad_zero = quantization.sum_over_blocks(wide, scale.shape).to(zero_point[0].dtype)
    return None, grad_scale, grad_zero, None, None, None


dequantize_affine.register_autograd(_dequantize_backward, setup_context=_setup_dequantize)


@torch.library.custom_op("reference_impls::fake_quantize_affine", mutates_args=())
def fake_quantize_affine(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, qmin: int, qmax: int
) -> torch.Tensor:
    """`x` (float32 or float64) rounded to the nearest representable values: quantized and dequantized.

    The gradient passes straight through where `x` isn't clipped and is zero elsewhere, as in torch.fake_quantize_*.
    """
    _check_precise(x)
    _check_parameters(x.shape, scale, zero_point)
    codes = quantization.quantize(x, scale, zero_point, qmin, qmax, torch.int32)
    return quantization.dequantize(codes, scale, zero_point, x.dtype, qmin, qmax)


@fake_quantize_affine.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, qmin: int, qmax: int) -> torch.Tensor:
    return torch.empty_like(x)


def _setup_fake_quantize(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, scale, zero_point, ctx.qmin, ctx.qmax = inputs
    ctx.has_zero_point = zero_point is not None
    ctx.save_for_backward(x, scale, *([zero_point] if ctx.has_zero_point else []))


def _fake_quantize_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, scale, *zero_point = ctx.saved_tensors
    zero = zero_point[0] if zero_point else None
    codes = quantization.unclipped_codes(x, scale, zero, ctx.qmin, ctx.qmax)
    inside = (codes >= ctx.qmin) & (codes <= ctx.qmax)
    return grad * inside, None, None, None, None


fake_quantize_affine.register_autograd(_fake_quantize_backward, setup_context=_setup_fake_quantize)


def _check_precise(x: torch.Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"x is {x.dtype}; convert it to float32 or float64, in which scales are computed.")


def _check_parameters(shape: torch.Size, scale: torch.Tensor, zero_point: torch.Tensor | None) -> None:
    if scale.dim() != len(shape) or any(n % m if m else n for n, m in zip(shape, scale.shape, strict=True)):
        raise ValueError(
            f"a scale of shape {tuple(scale.shape)} doesn't cut a tensor of shape {tuple(shape)} into equal blocks."
        )
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(f"zero_point {tuple(zero_point.shape)} and scale {tuple(scale.shape)} must have the same shape.")
