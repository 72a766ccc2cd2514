"""Codes of 1 to 7 bits in bytes: `UintxLayout`. Four bits are two codes a byte."""

from dataclasses import dataclass

import torch
from typing_extensions import Self

from reference_impls.affine import AffineQuantizedTensor, Layout, TensorImpl
from reference_impls.block_tensor import checked_dtype
from reference_impls.kernels.packed_linear import uintx_weight_only_linear
from reference_impls.kernels.packing import SHARDS, check_bits, pack, unpack
from reference_impls.linear import register_linear_kernel
from reference_impls.packed_tensor import PackedTensor, packed_wrapper


@dataclass(frozen=True)
class UintxLayout(Layout):
    """`bits` (1 to 7) a code, less quant_min, along the last dimension: see `kernels/packing.py`."""

    bits: int = 4

    def pack(
        self, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, quant_min: int, quant_max: int
    ) -> "UintxImpl":
        check_bits(self.bits)
        if quant_max - quant_min >= 2**self.bits:
            raise ValueError(f"codes {quant_min}..{quant_max} don't fit into {self.bits} bits.")
        shards = pack((codes - quant_min).to(torch.uint8), self.bits)
        named = {f"shard{size}": shard for size, shard in zip(SHARDS[self.bits], shards, strict=True)}
        packed_dim = codes.dim() - 1
        return UintxImpl(scale, zero_point, **named, bits=self.bits, packed_dim=packed_dim, quant_min=quant_min,
                         quant_max=quant_max, dtype=scale.dtype)  # fmt: skip


class UintxImpl(TensorImpl, PackedTensor):
    """The impl of `UintxLayout`: the shards of the codes, as in `UintxTensor`."""

    inner_names = ("scale",)
    optional_inner_names = ("zero_point", "shard4", "shard2", "shard1")
    attribute_names = ("bits", "packed_dim", "quant_min", "quant_max", "dtype", "shares_scale")
    code_names = ("shard4", "shard2", "shard1")

    @staticmethod
    def __new__(
        cls: type[Self],
        scale: torch.Tensor,
        zero_point: torch.Tensor | None = None,
        shard4: torch.Tensor | None = None,
        shard2: torch.Tensor | None = None,
        shard1: torch.Tensor | None = None,
        bits: int = 4,
        packed_dim: int = 1,
        quant_min: int = 0,
        quant_max: int = 15,
        dtype: torch.dtype = torch.float32,
        shares_scale: bool = False,
        outer_size: torch.Size | None = None,
        outer_stride: tuple[int, ...] | None = None,
    ) -> Self:
        checked_dtype(scale, dtype, zero_point=zero_point, shard4=shard4, shard2=shard2, shard1=shard1)
        first = {4: shard4, 2: shard2, 1: shard1}[SHARDS[bits][0]]
        if first is None:
            raise ValueError(f"codes of {bits} bits have shards of {SHARDS[bits]} bits; the first is missing.")
        return packed_wrapper(cls, first, bits, packed_dim, dtype, outer_size, outer_stride)

    @property
    def _layout(self) -> UintxLayout:
        return UintxLayout(self.bits)

    def codes(self) -> torch.Tensor:
        return unpack(list(self.blocks.codes), self.bits, self.packed_dim).to(torch.int16) + self.quant_min

    def write_codes(self, codes: torch.Tensor) -> None:
        packed = pack((codes - self.quant_min).to(torch.uint8), self.bits, self.packed_dim)
        for shard, new in zip(self.blocks.codes, packed, strict=True):
            shard.copy_(new)


def _not_uintx(x: torch.Tensor, weight: AffineQuantizedTensor, bias: torch.Tensor | None) -> str | None:
    return None if isinstance(weight.tensor_impl, UintxImpl) else f"its layout is {weight._layout}"


@register_linear_kernel(AffineQuantizedTensor, "uintx_weight_only", precedence=1, when=_not_uintx, op=uintx_weight_only_linear)
def _uintx(x: torch.Tensor, weight: AffineQuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    impl = weight.tensor_impl
    packing = (list(impl.blocks.codes), impl.bits, impl.packed_dim)
    return uintx_weight_only_linear(x, *packing, impl.scale, impl.zero_point, impl.quant_min, impl.quant_max, bias)


torch.serialization.add_safe_globals([UintxImpl, UintxLayout])
