"""`PackedTensor`: block tensors whose codes share bytes along one dimension.

The outer shape can't be read off the codes alone: the packed dimension has several codes an entry. It is an attribute,
because views move it: the transpose of a weight packed along its columns is packed along its rows.
"""

from typing import Any

import torch
from torch._ops import OpOverload
from typing_extensions import Self

from reference_impls.base import clone
from reference_impls.block_tensor import BlockTensor, block_for, block_wrapper
from reference_impls.block_views import Blocks
from reference_impls.kernels.packing import SHARDS, codes_per_byte, pack, unpack
from reference_impls.values import to_copy_or_empty_like


class PackedTensor(BlockTensor):
    """Base class of packed tensors. A child has the attribute `packed_dim` (not negative) besides those of BlockTensor."""

    bits: int
    packed_dim: int

    def attributes_of_blocks(self, blocks: Blocks) -> dict[str, Any]:
        code = blocks.codes[0]
        packed = [d for d, (n, m) in enumerate(zip(blocks.shape, code.shape, strict=True)) if n != m]
        # without elements along it, the packed dimension can't be told from others without elements, and needn't be
        packed_dim = packed[0] if packed else tuple(blocks.shape).index(0)
        return {**super().attributes_of_blocks(blocks), "packed_dim": packed_dim}

    def packed_last(self) -> Self:
        """The same values, packed along the last dimension: contiguous codes follow each other in memory."""
        last = self.dim() - 1
        if self.packed_dim == last:
            return self
        return self.of_blocks(self.blocks._replace(codes=tuple(self.packed_along(last))))

    def packed_along(self, dim: int) -> list[torch.Tensor]:
        """The same codes, packed along another dimension."""
        return pack(unpack(list(self.blocks.codes), self.bits, self.packed_dim), self.bits, dim)


@PackedTensor.implements(torch.ops.aten.clone.default)
def _clone(func: OpOverload, self: PackedTensor, memory_format: torch.memory_format | None) -> PackedTensor:
    return clone(func, self.packed_last() if memory_format is torch.contiguous_format else self, memory_format)


@PackedTensor.implements([torch.ops.aten._to_copy.default, torch.ops.aten.empty_like.default])
def _to_copy_or_empty_like(func: OpOverload, self: PackedTensor, *options: Any) -> torch.Tensor:
    contiguous = options[-1] is torch.contiguous_format  # memory_format is the last argument of both
    return to_copy_or_empty_like(func, self.packed_last() if contiguous else self, *options)


def packed_wrapper(
    cls: Any,
    code: torch.Tensor,
    bits: int,
    packed_dim: int,
    dtype: torch.dtype,
    outer_size: torch.Size | None,
    outer_stride: tuple[int, ...] | None,
) -> Any:
    """The wrapper of a tensor whose first shard of codes is `code`."""
    if code.dtype != torch.uint8:
        raise TypeError(f"packed codes must be uint8, not {code.dtype}.")
    shape = packed_shape(code, 8 // SHARDS[bits][0], packed_dim)
    return block_wrapper(cls, shape, code, dtype, outer_size, outer_stride)


def packed_shape(code: torch.Tensor, each: int, packed_dim: int) -> torch.Size:
    """The outer shape of entries that hold `each` codes along `packed_dim`."""
    return torch.Size(n * each if d == packed_dim else n for d, n in enumerate(code.shape))


def packed_block(shape: torch.Size, bits: int, group_size: int | None) -> tuple[int, ...]:
    """The block of a weight of that shape in groups (None: whole rows), or ValueError where its rows can't be packed or grouped."""
    each = codes_per_byte(bits)
    if shape[-1] % each:
        raise ValueError(
            f"{bits}-bit codes of a row of {shape[-1]} elements don't fill whole bytes: the last dimension of {tuple(shape)} must "
            f"be a multiple of {each}."
        )
    return block_for(shape, "row" if group_size is None else group_size)
