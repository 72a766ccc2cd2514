"""Affine quantization of blocks of a tensor: choose scale and zero point, quantize, dequantize.

A tensor of shape (n_0, n_1, ...) is cut into blocks of shape (b_0, b_1, ...). Each block has one scale (and one zero
point), so these have shape (n_0 / b_0, n_1 / b_1, ...). The block is always `shape / scale.shape`: only the functions
that choose parameters are told it.

    per tensor   block = shape           scale (1, 1)
    per row      block = (1, K)          scale (N, 1)
    per group    block = (1, g)          scale (N, K / g)

Where the zero point lies depends on its domain:

    integer (zero_point is an int tensor, or None for 0)
        q = clamp(round(x / scale) + zero_point, qmin, qmax)                  x' = (q - zero_point) * scale
    float (zero_point is a float tensor: the value of the code `mid`)
        q = clamp(round((x - zero_point) / scale + mid), qmin, qmax)          x' = (q - mid) * scale + zero_point
        mid = (qmin + qmax + 1) / 2

The integer domain is eq. 1 of Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", and what torch's fake_quantize operators compute, in their order of roundings:
`round` is to even, and x / scale is x * (1 / scale). The float domain is that of torch's int4 matmul kernels
(`aten::_weight_int4pack_mm`).

`x` is float32 or float64 throughout; callers convert narrower dtypes first, so that nothing overflows on the way.
"""

from collections.abc import Callable

import torch


def block_size(shape: torch.Size, parameter_shape: torch.Size) -> tuple[int, ...]:
    """Elements per scale along each dimension (1 where the tensor is empty)."""
    return tuple(n // m if m else 1 for n, m in zip(shape, parameter_shape, strict=True))


# --- choosing parameters ----------------------------------------------------------------------------------------


def choose_symmetric(x: torch.Tensor, block: tuple[int, ...], qmin: int, qmax: int) -> torch.Tensor:
    """The scale of each block, max|x| / qmax, in the dtype of `x`, for codes with qmin = -qmax or -qmax - 1.

    The scale is positive and finite, also for a block of zeros or subnormals (then it's the smallest normal number)
    and for one with an infinity (which saturates). NaN gives NaN. For qmax = 127, quantizing the dequantized values
    again gives the same scale, bit for bit; for any other, up to rounding.
    """
    # Rounding the quotient leaves 127 * scale within 63.5 ulp(scale) of the magnitude, whose own half ulp is 64 (or 32)
    # ulp(scale): so the largest dequantized value has this scale again as its 127th, rounded.
    return _usable(_reduced(x.abs(), block, torch.amax) / qmax, max(qmax, -qmin))


def choose_asymmetric(x: torch.Tensor, block: tuple[int, ...], qmin: int, qmax: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and int32 zero point (in qmin..qmax) of each block, so that the codes span its values and zero.

        scale = (max(x, 0) - min(x, 0)) / (qmax - qmin)      zero_point = clamp(qmin - round(min(x, 0) / scale), qmin, qmax)

    Zero is a code, so that padding and pruned weights stay exact. The scale is positive and finite as in
    `choose_symmetric`; a NaN makes it NaN.
    """
    low, high = _reduced(x, block, torch.amin).clamp(max=0), _reduced(x, block, torch.amax).clamp(min=0)
    scale = _scale_of_range(low, high, qmax - qmin)
    zero_point = (qmin - (low / scale).round()).clamp(qmin, qmax)
    return scale, zero_point.nan_to_num(qmin).to(torch.int32)


def choose_float_zero(x: torch.Tensor, block: tuple[int, ...], qmin: int, qmax: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point (of the dtype of `x`) of each block, so that the codes span just its values; zero may be no code.

    scale = (max(x) - min(x)) / (qmax - qmin)            zero_point = min(x) + scale * (mid - qmin)
    """
    low, high = _reduced(x, block, torch.amin), _reduced(x, block, torch.amax)
    finite = torch.finfo(x.dtype)
    low, high = low.clamp(finite.min, finite.max), high.clamp(finite.min, finite.max)
    scale = _scale_of_range(low, high, qmax - qmin)
    return scale, low + scale * (middle(qmin, qmax) - qmin)


def _scale_of_range(low: torch.Tensor, high: torch.Tensor, steps: int) -> torch.Tensor:
    # halves, because the range of a finite tensor may be infinite
    return _usable((high / 2 - low / 2) / (steps / 2), steps)


def _usable(scale: torch.Tensor, steps: int) -> torch.Tensor:
    """`scale` made positive, and such that `steps` times it is finite; NaN stays."""
    finfo = torch.finfo(scale.dtype)
    return scale.clamp(finfo.tiny, finfo.max / steps * (1 - finfo.eps))


def _reduced(x: torch.Tensor, block: tuple[int, ...], reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    return reduce(_split(x, block), dim=tuple(range(1, 2 * x.dim(), 2))) if x.dim() else x


# --- codes and values -------------------------------------------------------------------------------------------


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    rounding: Callable[[torch.Tensor], torch.Tensor] = torch.round,
) -> torch.Tensor:
    """Codes qmin..qmax of `x` in its shape and in the integer `dtype`; `rounding` gives whole numbers."""
    return unclipped_codes(x, scale, zero_point, qmin, qmax, rounding).clamp(qmin, qmax).to(dtype)


def unclipped_codes(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    qmin: int,
    qmax: int,
    rounding: Callable[[torch.Tensor], torch.Tensor] = torch.round,
) -> torch.Tensor:
    """The codes as whole floating-point numbers, before they are clipped to qmin..qmax."""
    inverse = spread(1.0 / scale, x.shape)
    if zero_point is None:
        return rounding(x * inverse)
    offset = spread(zero_point, x.shape)
    if zero_point.is_floating_point():
        return rounding((x - offset) * inverse + middle(qmin, qmax))
    return rounding(x * inverse) + offset


def round_stochastic(x: torch.Tensor) -> torch.Tensor:
    """The whole number below or above each element, with the probabilities that make the mean right: floor(x + u), u in [0, 1).

    u is drawn from torch's global generator of the device (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", eq. 2).
    """
    return (x + torch.rand_like(x)).floor()


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    dtype: torch.dtype,
    qmin: int = 0,
    qmax: int = 0,
) -> torch.Tensor:
    """The values of `codes`, computed in the scale's dtype and then rounded to `dtype`: fp16 can't overflow on the way.

    `qmin` and `qmax` matter for a floating-point zero point only.
    """
    values = levels(codes, zero_point, scale.dtype, qmin, qmax) * spread(scale, codes.shape)
    if zero_point is not None and zero_point.is_floating_point():
        values = values + spread(zero_point, codes.shape)
    return values.to(dtype)


def levels(codes: torch.Tensor, zero_point: torch.Tensor | None, dtype: torch.dtype, qmin: int, qmax: int) -> torch.Tensor:
    """How many scales each code lies from the zero point, in the floating-point `dtype`."""
    codes = codes.to(dtype)
    if zero_point is None:
        return codes
    return codes - (middle(qmin, qmax) if zero_point.is_floating_point() else spread(zero_point, codes.shape))


def middle(qmin: int, qmax: int) -> float:
    """The code whose value a floating-point zero point is; halfway between two codes where their number is odd."""
    return (qmin + qmax + 1) / 2


def spread(parameter: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A per-block parameter in a form that broadcasts against `shape`: each entry repeated over its block."""
    block = block_size(shape, parameter.shape)
    if all(b == 1 or m == 1 for b, m in zip(block, parameter.shape, strict=True)):
        return parameter
    repeated = _split(parameter, (1,) * parameter.dim())
    return repeated.expand(_split_shape(shape, block)).reshape(shape)


def sum_over_blocks(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The sums of `x` over each block, as a parameter of that shape: the transpose of `spread`."""
    return _reduced(x, block_size(x.shape, shape), torch.sum)


def _split(x: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """(n_0, n_1, ...) as (n_0 / b_0, b_0, n_1 / b_1, b_1, ...)."""
    return x.reshape(_split_shape(x.shape, block))


def _split_shape(shape: torch.Size, block: tuple[int, ...]) -> list[int]:
    return [part for n, b in zip(shape, block, strict=True) for part in (n // b, b)]
