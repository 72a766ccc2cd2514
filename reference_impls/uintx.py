"""`UintxTensor`: a weight in 1 to 7 bits a code, with a scale and a zero point for each row or group of a row.

What it teaches: optional inner tensors (7 bits are kept as shards of 4, 2 and 1, see `kernels/packing.py`), a zero point
that every path must honour, and views of packed codes: a range of columns is a view where it starts and ends at whole
bytes and groups, and is refused elsewhere.
"""

import torch
from typing_extensions import Self

from reference_impls.block_tensor import FromHighPrecision, checked_dtype, plain_source, precise
from reference_impls.kernels.packed_linear import uintx_weight_only_linear
from reference_impls.kernels.packing import SHARDS, check_bits, pack, unpack
from reference_impls.kernels.quantization import choose_asymmetric, dequantize, quantize
from reference_impls.linear import register_linear_kernel
from reference_impls.packed_tensor import PackedTensor, packed_block, packed_wrapper


class UintxTensor(PackedTensor):
    """Values (q - zero_point) * scale with codes q in 0..2**bits - 1; see `from_hp`.

    The constructor takes the parts as they are.

    Args:
        scale: float32 or float64, one for each block.
        zero_point: uint8, in the shape of `scale`.
        shard4, shard2, shard1: the bits of the codes, as `kernels.packing.pack` gives them; those that `bits` needs.
        bits: 1 to 7.
        packed_dim: the dimension along which codes share bytes.
        dtype: the floating-point dtype that the tensor shows, and in which its values are.
        shares_scale: see `BlockTensor`.
    """

    inner_names = ("scale", "zero_point")
    optional_inner_names = ("shard4", "shard2", "shard1")
    attribute_names = ("bits", "packed_dim", "dtype", "shares_scale")
    code_names = optional_inner_names
    parameter_names = inner_names

    scale: torch.Tensor
    zero_point: torch.Tensor
    bits: int

    @staticmethod
    def __new__(
        cls: type[Self],
        scale: torch.Tensor,
        zero_point: torch.Tensor,
        shard4: torch.Tensor | None = None,
        shard2: torch.Tensor | None = None,
        shard1: torch.Tensor | None = None,
        bits: int = 4,
        packed_dim: int = 1,
        dtype: torch.dtype = torch.float32,
        shares_scale: bool = False,
        outer_size: torch.Size | None = None,
        outer_stride: tuple[int, ...] | None = None,
    ) -> Self:
        checked_dtype(scale, dtype, zero_point=zero_point, shard4=shard4, shard2=shard2, shard1=shard1)
        shards = {4: shard4, 2: shard2, 1: shard1}
        check_bits(bits)
        present = tuple(size for size, shard in shards.items() if shard is not None)
        if present != SHARDS[bits]:
            raise ValueError(f"codes of {bits} bits have shards of {SHARDS[bits]} bits; given are those of {present}.")
        return packed_wrapper(cls, shards[present[0]], bits, packed_dim, dtype, outer_size, outer_stride)

    @classmethod
    def from_hp(cls, hp: torch.Tensor, bits: int = 4, group_size: int | None = None) -> Self:
        """Quantize a floating-point tensor; gradients pass straight through.

        Args:
            hp: at least 1-D; its last dimension is packed, and must be a multiple of `kernels.packing.codes_per_byte(bits)`.
            bits: 1 to 7.
            group_size: elements of a row with one scale and zero point; None: the whole row.

        The error of an element is at most one scale, which is the range of its block (zero included) / (2**bits - 1), and half of
        it but for the largest or smallest element. Raises TypeError for a tensor that isn't floating-point, ValueError for sizes that don't fit.
        """
        values = plain_source(hp, "from_hp")
        check_bits(bits)
        return FromHighPrecision.apply(values, cls, bits, packed_block(hp.shape, bits, group_size))

    @classmethod
    def quantized(cls, hp: torch.Tensor, bits: int, block: tuple[int, ...]) -> Self:
        """`from_hp` without a gradient."""
        values = precise(hp)
        qmax = 2**bits - 1
        scale, zero_point = choose_asymmetric(values, block, 0, qmax)
        shards = pack(quantize(values, scale, zero_point, 0, qmax, torch.uint8), bits)
        named = {f"shard{size}": shard for size, shard in zip(SHARDS[bits], shards, strict=True)}
        return cls(scale, zero_point.to(torch.uint8), **named, bits=bits, packed_dim=hp.dim() - 1, dtype=hp.dtype)

    # --- values ----------------------------------------------------------------------------------------------

    @property
    def codes(self) -> torch.Tensor:
        """The codes, unpacked: uint8 in the outer shape."""
        return unpack(list(self.blocks.codes), self.bits, self.packed_dim)

    def values_copy(self) -> torch.Tensor:
        return dequantize(self.codes, self.scale, self.zero_point, self.dtype)

    def write_values(self, values: torch.Tensor) -> None:
        values, qmax = values.to(self.scale.dtype), 2**self.bits - 1
        scale, zero_point = choose_asymmetric(values, self.block_size, 0, qmax)
        codes = quantize(values, scale, zero_point, 0, qmax, torch.uint8)
        for shard, new in zip(self.blocks.codes, pack(codes, self.bits, self.packed_dim), strict=True):
            shard.copy_(new)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)


@register_linear_kernel(UintxTensor, "uintx_weight_only", precedence=0, op=uintx_weight_only_linear)
def _weight_only(x: torch.Tensor, weight: UintxTensor, bias: torch.Tensor | None) -> torch.Tensor:
    shards = list(weight.blocks.codes)
    return uintx_weight_only_linear(
        x, shards, weight.bits, weight.packed_dim, weight.scale, weight.zero_point, 0, 2**weight.bits - 1, bias
    )


torch.serialization.add_safe_globals([UintxTensor])
