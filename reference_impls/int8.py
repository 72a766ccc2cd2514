"""`Int8Tensor`: a weight in int8 with floating-point scales, for inference and for training.

What it teaches: a wrapper subclass with two inner tensors, writes that requantize into the same inner tensors (so that
any optimizer can train it), a differentiable constructor, and a linear with a kernel of its own. Its views are in
`block_views.py`; how codes and scales relate is in `kernels/quantization.py`.

What it leaves out: zero points, packing, several kernels.
"""

import torch
from typing_extensions import Self

from reference_impls.block_tensor import (
    BlockTensor,
    FromHighPrecision,
    Granularity,
    block_for,
    block_wrapper,
    checked_dtype,
    plain_source,
    precise,
)
from reference_impls.kernels.int8_linear import int8_weight_only_linear
from reference_impls.kernels.quantization import choose_symmetric, dequantize, quantize
from reference_impls.linear import register_linear_kernel

QMAX = 127  # -128 isn't used, so that negation is exact and the range is symmetric


class Int8Tensor(BlockTensor):
    """Values q * scale with int8 codes q in -127..127; see `from_hp`.

    The constructor takes the parts as they are.

    Args:
        qdata: int8, any shape: it gives the outer shape, strides, storage offset and device.
        scale: float32 or float64, one for each block: as many dimensions as `qdata`, and each size divides that of
            `qdata`.
        dtype: the floating-point dtype that the tensor shows, and in which its values are.
        shares_scale: this is a view of a part of a block, whose scale also belongs to elements outside: read-only.
    """

    inner_names = ("qdata", "scale")
    attribute_names = ("dtype", "shares_scale")

    qdata: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[Self],
        qdata: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        shares_scale: bool = False,
        outer_size: torch.Size | None = None,
        outer_stride: tuple[int, ...] | None = None,
    ) -> Self:
        checked_dtype(scale, dtype, qdata=qdata)
        if qdata.dtype != torch.int8:
            raise TypeError(f"qdata must be int8, not {qdata.dtype}.")
        return block_wrapper(cls, qdata.shape, qdata, dtype, outer_size, outer_stride)

    @classmethod
    def from_hp(cls, hp: torch.Tensor, granularity: Granularity = "row") -> Self:
        """Quantize a floating-point tensor; gradients pass straight through.

        Args:
            hp: at least 1-D (the last dimension is the one that a linear sums over); its dtype becomes the outer dtype.
            granularity: one scale for each row ("row": all but the last dimension), for the whole tensor ("tensor"), or
                for each run of that many elements of a row (an int, which must divide the row's length).

        The error of an element is at most half its scale, which is max|block| / 127. A NaN makes its block NaN; an
        infinity saturates. Raises TypeError for a tensor that isn't floating-point, ValueError for a granularity that
        doesn't fit the shape.
        """
        values = plain_source(hp, "from_hp")
        return FromHighPrecision.apply(values, cls, block_for(hp.shape, granularity))

    @classmethod
    def quantized(cls, hp: torch.Tensor, block: tuple[int, ...]) -> Self:
        """`from_hp` without a gradient."""
        values = precise(hp)
        scale = choose_symmetric(values, block, -QMAX, QMAX)
        return cls(quantize(values, scale, None, -QMAX, QMAX, torch.int8), scale, hp.dtype)

    # --- values ----------------------------------------------------------------------------------------------

    def values_copy(self) -> torch.Tensor:
        return dequantize(self.qdata, self.scale, None, self.dtype)

    def write_values(self, values: torch.Tensor) -> None:
        values = values.to(self.scale.dtype)
        scale = choose_symmetric(values, self.block_size, -QMAX, QMAX)
        self.qdata.copy_(quantize(values, scale, None, -QMAX, QMAX, torch.int8, self.round_steps))
        self.scale.copy_(scale)

    def round_steps(self, steps: torch.Tensor) -> torch.Tensor:
        """How a write rounds values in units of the scale."""
        return steps.round()


@register_linear_kernel(Int8Tensor, "int8_weight_only", precedence=0, op=int8_weight_only_linear)
def _weight_only(x: torch.Tensor, weight: Int8Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return int8_weight_only_linear(x, weight.qdata, weight.scale, bias)


# so that torch.load, whose default is weights_only=True, accepts the class
torch.serialization.add_safe_globals([Int8Tensor])
