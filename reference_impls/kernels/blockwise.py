"""Symmetric int8 quantization of blocks: `quantization.py` with the codes -127..127.

    scale = max|x| / 127      q = clamp(round(x / scale), -127, 127)      x' = q * scale

-128 isn't used, so that negation is exact and the range is symmetric.
"""

import torch

from reference_impls.kernels import quantization
from reference_impls.kernels.quantization import block_size

__all__ = ["QMAX", "block_size", "choose_scale", "dequantize", "quantize"]

QMAX = 127


def choose_scale(x: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """The scale of each block of `x` (float32 or float64, any shape that `block` divides), in the dtype of `x`."""
    return quantization.choose_symmetric(x, block, -QMAX, QMAX)


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int8 codes in -127..127 of `x`, in the shape of `x`."""
    return quantization.quantize(x, scale, None, -QMAX, QMAX, torch.int8)


def dequantize(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """qdata * scale, computed in the scale's dtype and then rounded to `dtype`."""
    return quantization.dequantize(qdata, scale, None, dtype)
