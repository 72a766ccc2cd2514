"""`AffineQuantizedTensor`: one class for every affine format, whatever its packing.

    AffineQuantizedTensor            what users hold: shape, dtype, values, gradients, the choice of linear kernels
      tensor_impl: TensorImpl        the packed codes, scale and zero point; views and writes of them
        _layout: Layout              a value that says how codes are packed; it makes the impl

What it teaches: how formats are added without a new user-visible class. A file in `layouts/` holds a layout, its impl
and its kernels; nothing here names them. `Int8Tensor` and its kin show the same ideas without this indirection.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload
from typing_extensions import Self

from reference_impls.block_tensor import VIEWS, BlockTensor, FromHighPrecision, block_for, pad_blocks, plain_source, precise
from reference_impls.kernels.quantization import (
    choose_asymmetric,
    choose_float_zero,
    choose_symmetric,
    dequantize,
    middle,
    quantize,
)
from reference_impls.linear_arguments import checked_linear
from reference_impls.values import ValueTensor

aten = torch.ops.aten

MAPPINGS = ("symmetric", "asymmetric", "float_zero")


@dataclass(frozen=True)
class Layout:
    """How codes are packed: a value, with the packing's parameters as fields."""

    def pack(
        self, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, quant_min: int, quant_max: int
    ) -> "TensorImpl":
        """The impl that holds these codes (int32, in quant_min..quant_max); ValueError where they don't fit the layout."""
        raise NotImplementedError


class TensorImpl(BlockTensor):
    """The packed data of an `AffineQuantizedTensor`, as a tensor of the same shape in the dtype of its scale.

    A child names its codes, has the attributes "quant_min", "quant_max", "dtype" and "shares_scale" besides its own, and says how codes are
    read and written. `zero_point` is None (symmetric), an int32 tensor, or a floating-point one, in the shape of `scale`.
    """

    parameter_names = ("scale", "zero_point")

    scale: torch.Tensor
    zero_point: torch.Tensor | None
    quant_min: int
    quant_max: int

    @property
    def _layout(self) -> Layout:
        raise NotImplementedError

    def codes(self) -> torch.Tensor:
        """The codes, unpacked, in quant_min..quant_max."""
        raise NotImplementedError

    def write_codes(self, codes: torch.Tensor) -> None:
        """Store int32 codes in the existing inner tensors."""
        raise NotImplementedError

    @property
    def mapping(self) -> str:
        if self.zero_point is None:
            return "symmetric"
        return "float_zero" if self.zero_point.is_floating_point() else "asymmetric"

    def values_copy(self) -> torch.Tensor:
        return dequantize(self.codes(), self.scale, self.zero_point, self.dtype, self.quant_min, self.quant_max)

    def write_values(self, values: torch.Tensor) -> None:
        values = values.to(self.scale.dtype)
        scale, zero_point = choose(values, self.block_size, self.mapping, self.quant_min, self.quant_max)
        self.write_codes(quantize(values, scale, zero_point, self.quant_min, self.quant_max, torch.int32))
        self.scale.copy_(scale)
        if self.zero_point is not None:
            self.zero_point.copy_(zero_point)


@TensorImpl.implements(aten.zero_.default)
def _zero_impl(func: OpOverload, self: TensorImpl) -> TensorImpl:
    """What code stands for zero depends on the zero point: write it as any other value."""
    self.check_writable("zero_")
    self.write_values(self.scale.new_zeros(self.shape))
    return self


@TensorImpl.implements(aten.constant_pad_nd.default)
def _pad_impl(func: OpOverload, self: TensorImpl, pad: list[int], value: float) -> torch.Tensor:
    """New blocks have the scale 1. Which code is zero in them, a layout may store as any bits."""
    padded = pad_blocks(func, self, pad, value)
    if not isinstance(padded, TensorImpl):
        return padded
    code = min(max(0, self.quant_min), self.quant_max)
    for i, count in enumerate(pad):
        dim = self.dim() - 1 - i // 2
        border = padded.narrow(dim, padded.shape[dim] - count if i % 2 else 0, count)
        border.write_codes(self.scale.new_full(border.shape, code, dtype=torch.int32))
        if border.zero_point is not None:
            floats = border.zero_point.is_floating_point()
            border.zero_point.fill_(middle(self.quant_min, self.quant_max) - code if floats else code)
    return padded


def choose(
    values: torch.Tensor, block: tuple[int, ...], mapping: str, quant_min: int, quant_max: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero point (None: symmetric) of each block of `values`, which are float32 or float64."""
    if mapping == "symmetric":
        return choose_symmetric(values, block, quant_min, quant_max), None
    chosen = choose_asymmetric if mapping == "asymmetric" else choose_float_zero
    return chosen(values, block, quant_min, quant_max)


class AffineQuantizedTensor(ValueTensor):
    """A tensor in any affine format; see `from_hp`. `dtype` is what it shows, and in which its values are."""

    inner_names = ("tensor_impl",)
    attribute_names = ("dtype",)

    tensor_impl: TensorImpl

    @staticmethod
    def __new__(
        cls: type[Self],
        tensor_impl: TensorImpl,
        dtype: torch.dtype = torch.float32,
        outer_size: torch.Size | None = None,
        outer_stride: tuple[int, ...] | None = None,
    ) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            tensor_impl.shape if outer_size is None else outer_size,
            strides=tensor_impl.stride() if outer_stride is None else outer_stride,
            storage_offset=tensor_impl.storage_offset(),
            dtype=dtype,
            device=tensor_impl.device,
            layout=torch.strided,
        )

    @classmethod
    def from_hp(
        cls,
        hp: torch.Tensor,
        layout: Layout,
        mapping: str = "asymmetric",
        quant_min: int = 0,
        quant_max: int = 15,
        block_size: str | int | tuple[int, ...] = "row",
    ) -> Self:
        """Quantize a floating-point tensor; gradients pass straight through.

        Args:
            hp: at least 1-D; its dtype becomes the outer dtype.
            layout: how codes are packed.
            mapping: "symmetric" (no zero point), "asymmetric" (an integer zero point: zero is kept exactly), "float_zero" (the zero
                point is a value: `preserve_zero` is False). The formulas are in `kernels/quantization.py`.
            quant_min, quant_max: the smallest and the largest code.
            block_size: the elements with one scale: "row", "tensor", a group size along the last dimension, or a block's shape.

        Raises TypeError for a tensor that isn't floating-point, ValueError for what doesn't fit.
        """
        values = plain_source(hp, "from_hp")
        if mapping not in MAPPINGS:
            raise ValueError(f"mapping {mapping!r} is unknown: use one of {', '.join(MAPPINGS)}.")
        block = _checked_block(hp.shape, block_size) if isinstance(block_size, tuple) else block_for(hp.shape, block_size)
        return FromHighPrecision.apply(values, cls, block, layout, mapping, quant_min, quant_max)

    @classmethod
    def quantized(
        cls, hp: torch.Tensor, block: tuple[int, ...], layout: Layout, mapping: str, quant_min: int, quant_max: int
    ) -> Self:
        """`from_hp` without a gradient."""
        values = precise(hp)
        scale, zero_point = choose(values, block, mapping, quant_min, quant_max)
        codes = quantize(values, scale, zero_point, quant_min, quant_max, torch.int32)
        return cls(layout.pack(codes, scale, zero_point, quant_min, quant_max), hp.dtype)

    # --- what it is ------------------------------------------------------------------------------------------

    @property
    def _layout(self) -> Layout:
        return self.tensor_impl._layout

    @property
    def block_size(self) -> tuple[int, ...]:
        """Elements per scale along each dimension."""
        return self.tensor_impl.block_size

    @property
    def mapping(self) -> str:
        return self.tensor_impl.mapping

    @property
    def preserve_zero(self) -> bool:
        """Whether the value zero is a code."""
        return self.mapping != "float_zero"

    # --- values ----------------------------------------------------------------------------------------------

    def values_copy(self) -> torch.Tensor:
        return self.tensor_impl.values_copy().to(self.dtype)

    def write_values(self, values: torch.Tensor) -> None:
        self.tensor_impl.write_values(values)

    def check_writable(self, operation: str) -> None:
        self.tensor_impl.check_writable(operation)


def _checked_block(shape: torch.Size, block: tuple[int, ...]) -> tuple[int, ...]:
    if len(block) != len(shape) or any(b < 1 or n % b for n, b in zip(shape, block, strict=True)):
        raise ValueError(f"block_size {block} doesn't divide the shape {tuple(shape)}: give a divisor of each dimension.")
    return block


@AffineQuantizedTensor.implements(VIEWS)
def _view(func: OpOverload, self: AffineQuantizedTensor, *arguments: Any) -> Any:
    result = func(self.tensor_impl, *arguments)
    rebuilt = [AffineQuantizedTensor(impl, self.dtype) for impl in (result if isinstance(result, (list, tuple)) else [result])]
    return rebuilt if isinstance(result, (list, tuple)) else rebuilt[0]


@AffineQuantizedTensor.implements(aten.copy_.default)
def _copy_(func: OpOverload, self: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    if not isinstance(self, AffineQuantizedTensor):
        return self.copy_(src.values_copy(), non_blocking)
    if isinstance(src, AffineQuantizedTensor) and src.dtype == self.dtype:
        self.tensor_impl.copy_(src.tensor_impl, non_blocking)
    else:
        values = src.values_copy() if isinstance(src, ValueTensor) else src
        self.tensor_impl.copy_(values.to(self.device, self.dtype, non_blocking))
    return self


@AffineQuantizedTensor.implements(aten.constant_pad_nd.default)
def _pad(func: OpOverload, self: AffineQuantizedTensor, pad: list[int], value: float) -> torch.Tensor:
    padded = func(self.tensor_impl, pad, value)
    return AffineQuantizedTensor(padded, self.dtype) if isinstance(padded, TensorImpl) else padded.to(self.dtype)


@AffineQuantizedTensor.implements(aten.zero_.default)
def _zero_(func: OpOverload, self: AffineQuantizedTensor) -> AffineQuantizedTensor:
    self.tensor_impl.zero_()
    return self


@AffineQuantizedTensor.implements_torch_function(F.linear)
def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return checked_linear(input, weight, bias)


torch.serialization.add_safe_globals([AffineQuantizedTensor])
