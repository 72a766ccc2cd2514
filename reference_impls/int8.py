"""`Int8Tensor`: a weight in int8 with floating-point scales, for inference and for training.

What it teaches: a wrapper subclass with two inner tensors, views that share memory with what they were taken from,
writes that requantize into the same inner tensors (so that any optimizer can train it), a differentiable
constructor, and a linear with a kernel of its own. Its operators are in
`int8_operators.py`; how codes and scales relate is in `kernels/blockwise.py`.

What it leaves out: zero points, several kernels, layouts for faster kernels.
"""

from typing import Any

import torch
from torch._export.wrappers import mark_subclass_constructor_exportable_experimental
from typing_extensions import Self

from reference_impls.block_views import Blocks
from reference_impls.kernels import blockwise
from reference_impls.values import ValueTensor

Granularity = str | int


class Int8Tensor(ValueTensor):
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
    shares_scale: bool

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
        _check_parts(qdata, scale, dtype)
        return torch.Tensor._make_wrapper_subclass(
            cls,
            qdata.shape if outer_size is None else outer_size,
            strides=qdata.stride() if outer_stride is None else outer_stride,
            storage_offset=qdata.storage_offset(),  # compiled code regenerates views from it
            dtype=dtype,
            device=qdata.device,
            layout=qdata.layout,
        )

    @torch._disable_dynamo
    @mark_subclass_constructor_exportable_experimental
    def __init__(
        self,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        shares_scale: bool = False,
        outer_size: torch.Size | None = None,
        outer_stride: tuple[int, ...] | None = None,
    ) -> None:
        self.qdata = qdata
        self.scale = scale
        self.shares_scale = shares_scale

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
        if not isinstance(hp, torch.Tensor) or not hp.is_floating_point():
            raise TypeError(f"from_hp takes a floating-point tensor, not {getattr(hp, 'dtype', type(hp).__name__)}.")
        values = hp.dequantize() if isinstance(hp, ValueTensor) else hp
        return _FromHighPrecision.apply(values, _block_for(hp.shape, granularity), cls)

    @property
    def block_size(self) -> tuple[int, ...]:
        """Elements per scale along each dimension."""
        return blockwise.block_size(self.qdata.shape, self.scale.shape)

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.qdata, self.scale, self.shares_scale)

    def attributes_of_copy(self) -> dict[str, Any]:
        return {"shares_scale": False}

    # --- values ----------------------------------------------------------------------------------------------

    def values_copy(self) -> torch.Tensor:
        return blockwise.dequantize(self.qdata, self.scale, self.dtype)

    def write_values(self, values: torch.Tensor) -> None:
        values = values.to(self.scale.dtype)
        scale = blockwise.choose_scale(values, self.block_size)
        self.qdata.copy_(blockwise.quantize(values, scale))
        self.scale.copy_(scale)

    def check_writable(self, operation: str) -> None:
        if self.shares_scale:
            raise NotImplementedError(
                f"{operation}: this {type(self).__name__} of shape {tuple(self.shape)} is a view of a part of a block. A "
                "write needs a new scale, which would change the rest of the block. Write to the whole block, or "
                "to a clone."
            )
        if any(n > 1 and step == 0 for n, step in zip(self.qdata.shape, self.qdata.stride(), strict=True)):
            raise NotImplementedError(
                f"{operation}: elements of this expanded {type(self).__name__} of shape {tuple(self.shape)} share "
                "memory. Write to a clone."
            )


def _check_parts(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
    if qdata.dtype != torch.int8 or not scale.is_floating_point() or not dtype.is_floating_point:
        raise TypeError(
            f"qdata must be int8, scale and dtype floating-point; they are {qdata.dtype}, {scale.dtype} and {dtype}."
        )
    if qdata.dim() != scale.dim():
        raise ValueError(f"qdata {tuple(qdata.shape)} and scale {tuple(scale.shape)} must have as many dimensions.")
    if qdata.device != scale.device:
        raise ValueError(f"qdata is on {qdata.device} and scale on {scale.device}; move one of them.")


def _block_for(shape: torch.Size, granularity: Granularity) -> tuple[int, ...]:
    if not shape:
        raise ValueError("a 0-dimensional tensor has no rows to quantize; use at least one dimension, hp.reshape(1).")
    row = max(shape[-1], 1)
    if granularity == "tensor":
        return tuple(max(n, 1) for n in shape)
    if granularity == "row":
        return (1,) * (len(shape) - 1) + (row,)
    if isinstance(granularity, bool) or not isinstance(granularity, int):
        raise ValueError(f'granularity {granularity!r} is unknown: use "row", "tensor" or a group size.')
    if granularity < 1 or row % granularity:
        raise ValueError(
            f"group size {granularity} doesn't divide the last dimension of {tuple(shape)}, {shape[-1]}: use a divisor "
            f'of {shape[-1]}, "row" or "tensor".'
        )
    return (1,) * (len(shape) - 1) + (granularity,)


class _FromHighPrecision(torch.autograd.Function):
    """Quantization with the straight-through gradient: that of the quantized tensor, as it is."""

    @staticmethod
    def forward(hp: torch.Tensor, block: tuple[int, ...], cls: type[Int8Tensor]) -> Int8Tensor:
        precise = hp.to(torch.float64 if hp.dtype == torch.float64 else torch.float32)
        scale = blockwise.choose_scale(precise, block)
        return cls(blockwise.quantize(precise, scale), scale, hp.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Int8Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


# so that torch.load, whose default is weights_only=True, accepts the class
torch.serialization.add_safe_globals([Int8Tensor])
