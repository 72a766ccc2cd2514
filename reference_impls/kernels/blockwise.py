"""Symmetric int8 quantization of blocks of a tensor: choose scales, quantize, dequantize.

A tensor of shape (n_0, n_1, ...) is cut into blocks of shape (b_0, b_1, ...), each with one scale, so that the
scales have shape (n_0 / b_0, n_1 / b_1, ...). The block is always `shape / scale.shape`, and isn't passed around.

    per tensor   block = shape           scale (1, 1)
    per row      block = (1, K)          scale (N, 1)
    per group    block = (1, g)          scale (N, K / g)

Formulas (symmetric case of Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", eq. 1, with zero point 0 and the codes -127..127):

    scale = max|x| / 127      q = clamp(round(x / scale), -127, 127)      x' = q * scale

-128 isn't used, so that negation is exact and the range is symmetric. `round` is to even, and x / scale is computed
as x * (1 / scale), as in torch.fake_quantize_per_channel_affine.
"""

import torch

QMAX = 127


def block_size(shape: torch.Size, scale_shape: torch.Size) -> tuple[int, ...]:
    """Elements per scale along each dimension (1 where the tensor is empty)."""
    return tuple(n // m if m else 1 for n, m in zip(shape, scale_shape, strict=True))


def choose_scale(x: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """The scale of each block of `x` (float32 or float64, any shape that `block` divides), in the dtype of `x`.

    The scale is positive and finite, also for a block of zeros or subnormals (then it's the smallest normal number)
    and for one with an infinity (which saturates). NaN gives NaN. Quantizing the dequantized values again gives the
    same scale, bit for bit.
    """
    tiny = torch.finfo(x.dtype).tiny
    # the largest scale whose product with 127 is finite
    largest = torch.finfo(x.dtype).max / QMAX * (1 - torch.finfo(x.dtype).eps)
    blocks = _split(x, block)
    magnitude = blocks.abs().amax(dim=tuple(range(1, 2 * x.dim(), 2))) if x.dim() else x.abs()
    # Rounding the quotient leaves 127 * scale within 63.5 ulp(scale) of the magnitude, whose own half ulp is 64 (or 32)
    # ulp(scale): so the largest dequantized value has this scale again as its 127th, rounded.
    return (magnitude / QMAX).clamp(tiny, largest)


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int8 codes in -127..127 of `x`, in the shape of `x`."""
    codes = _blockwise(x, 1.0 / scale)
    return codes.round().clamp(-QMAX, QMAX).to(torch.int8)


def dequantize(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """qdata * scale, computed in the scale's dtype and then rounded to `dtype`: fp16 can't overflow on the way."""
    return _blockwise(qdata.to(scale.dtype), scale).to(dtype)


def _blockwise(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x times its block's factor, with the strides of x."""
    block = block_size(x.shape, factor.shape)
    if not all(b == 1 or m == 1 for b, m in zip(block, factor.shape, strict=True)):
        repeated = _split(factor, (1,) * factor.dim())
        factor = repeated.expand(_split_shape(x.shape, block)).reshape(x.shape)
    return x * factor


def _split(x: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """(n_0, n_1, ...) as (n_0 / b_0, b_0, n_1 / b_1, b_1, ...)."""
    return x.reshape(_split_shape(x.shape, block))


def _split_shape(shape: torch.Size, block: tuple[int, ...]) -> list[int]:
    return [part for n, b in zip(shape, block, strict=True) for part in (n // b, b)]
