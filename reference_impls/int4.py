"""`UInt4Tensor` and `Int4Tensor`: weights in 4 bits, two codes a byte, in groups of a row.

What they teach: the asymmetric and the symmetric form of the same format, and what two codes a byte mean for views: a
range of columns is a view where it starts and ends at whole bytes and groups, and is refused elsewhere.
"""

import torch
from typing_extensions import Self

from reference_impls.block_tensor import FromHighPrecision, checked_dtype, plain_source, precise
from reference_impls.kernels.packed_linear import int4_weight_only_linear, signed, uintx_weight_only_linear
from reference_impls.kernels.packing import pack, unpack
from reference_impls.kernels.quantization import choose_asymmetric, choose_symmetric, dequantize, quantize
from reference_impls.linear import register_linear_kernel
from reference_impls.packed_tensor import PackedTensor, packed_block, packed_wrapper

BITS = 4
GROUP = 32


class UInt4Tensor(PackedTensor):
    """Values (q - zero_point) * scale with codes q in 0..15; see `from_hp`.

    The constructor takes the parts as they are.

    Args:
        qdata: uint8, two codes a byte along `packed_dim`, the first in the low half.
        scale: float32 or float64, one for each block.
        zero_point: uint8, in the shape of `scale`.
        packed_dim: the dimension along which codes share bytes.
        dtype: the floating-point dtype that the tensor shows, and in which its values are.
        shares_scale: see `BlockTensor`.
    """

    inner_names = ("qdata", "scale", "zero_point")
    attribute_names = ("packed_dim", "dtype", "shares_scale")
    bits = BITS
    parameter_names = ("scale", "zero_point")

    qdata: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[Self],
        qdata: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor,
        packed_dim: int = 1,
        dtype: torch.dtype = torch.float32,
        shares_scale: bool = False,
        outer_size: torch.Size | None = None,
        outer_stride: tuple[int, ...] | None = None,
    ) -> Self:
        checked_dtype(scale, dtype, qdata=qdata, zero_point=zero_point)
        return packed_wrapper(cls, qdata, BITS, packed_dim, dtype, outer_size, outer_stride)

    @classmethod
    def from_hp(cls, hp: torch.Tensor, group_size: int | None = GROUP) -> Self:
        """Quantize a floating-point tensor; gradients pass straight through.

        Args:
            hp: at least 1-D, its last dimension even.
            group_size: elements of a row with one scale and zero point; None: the whole row.

        The error of an element is at most one scale, which is the range of its group (zero included) / 15. Raises TypeError for a
        tensor that isn't floating-point, ValueError for sizes that don't fit.
        """
        return FromHighPrecision.apply(plain_source(hp, "from_hp"), cls, packed_block(hp.shape, BITS, group_size))

    @classmethod
    def quantized(cls, hp: torch.Tensor, block: tuple[int, ...]) -> Self:
        """`from_hp` without a gradient."""
        values = precise(hp)
        scale, zero_point = choose_asymmetric(values, block, 0, 15)
        (qdata,) = pack(quantize(values, scale, zero_point, 0, 15, torch.uint8), BITS)
        return cls(qdata, scale, zero_point.to(torch.uint8), hp.dim() - 1, hp.dtype)

    def values_copy(self) -> torch.Tensor:
        codes = unpack([self.qdata], BITS, self.packed_dim)
        return dequantize(codes, self.scale, self.zero_point, self.dtype)

    def write_values(self, values: torch.Tensor) -> None:
        values = values.to(self.scale.dtype)
        scale, zero_point = choose_asymmetric(values, self.block_size, 0, 15)
        (qdata,) = pack(quantize(values, scale, zero_point, 0, 15, torch.uint8), BITS, self.packed_dim)
        self.qdata.copy_(qdata)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)


class Int4Tensor(PackedTensor):
    """Values q * scale with codes q in -7..7, in two's complement; see `from_hp`. Arguments as those of `UInt4Tensor`."""

    inner_names = ("qdata", "scale")
    attribute_names = ("packed_dim", "dtype", "shares_scale")
    bits = BITS

    qdata: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[Self],
        qdata: torch.Tensor,
        scale: torch.Tensor,
        packed_dim: int = 1,
        dtype: torch.dtype = torch.float32,
        shares_scale: bool = False,
        outer_size: torch.Size | None = None,
        outer_stride: tuple[int, ...] | None = None,
    ) -> Self:
        checked_dtype(scale, dtype, qdata=qdata)
        return packed_wrapper(cls, qdata, BITS, packed_dim, dtype, outer_size, outer_stride)

    @classmethod
    def from_hp(cls, hp: torch.Tensor, group_size: int | None = GROUP) -> Self:
        """Quantize a floating-point tensor; gradients pass straight through.

        Args:
            hp: at least 1-D, its last dimension even.
            group_size: elements of a row with one scale; None: the whole row.

        The error of an element is at most half its scale, which is max|group| / 7. Raises TypeError for a tensor that isn't
        floating-point, ValueError for sizes that don't fit.
        """
        return FromHighPrecision.apply(plain_source(hp, "from_hp"), cls, packed_block(hp.shape, BITS, group_size))

    @classmethod
    def quantized(cls, hp: torch.Tensor, block: tuple[int, ...]) -> Self:
        """`from_hp` without a gradient."""
        values = precise(hp)
        scale = choose_symmetric(values, block, -7, 7)
        return cls(_packed(values, scale, -1), scale, hp.dim() - 1, hp.dtype)

    def values_copy(self) -> torch.Tensor:
        codes = unpack([self.qdata], BITS, self.packed_dim)
        return dequantize(signed(codes), self.scale, None, self.dtype)

    def write_values(self, values: torch.Tensor) -> None:
        values = values.to(self.scale.dtype)
        scale = choose_symmetric(values, self.block_size, -7, 7)
        self.qdata.copy_(_packed(values, scale, self.packed_dim))
        self.scale.copy_(scale)


def _packed(values: torch.Tensor, scale: torch.Tensor, dim: int) -> torch.Tensor:
    codes = quantize(values, scale, None, -7, 7, torch.int8)
    (qdata,) = pack((codes & 15).to(torch.uint8), BITS, dim)
    return qdata


@register_linear_kernel(UInt4Tensor, "uintx_weight_only", precedence=0, op=uintx_weight_only_linear)
def _uintx_weight_only(x: torch.Tensor, weight: UInt4Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return uintx_weight_only_linear(x, [weight.qdata], BITS, weight.packed_dim, weight.scale, weight.zero_point, 0, 15, bias)


@register_linear_kernel(Int4Tensor, "int4_weight_only", precedence=0, op=int4_weight_only_linear)
def _int4_weight_only(x: torch.Tensor, weight: Int4Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return int4_weight_only_linear(x, weight.qdata, weight.packed_dim, weight.scale, bias)


torch.serialization.add_safe_globals([UInt4Tensor, Int4Tensor])
