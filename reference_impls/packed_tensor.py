"""`PackedTensor`: block tensors whose codes share bytes along one dimension.

The outer shape can't be read off the codes alone: the packed dimension has several codes an entry. It is an attribute,
because views move it: the transpose of a weight packed along its columns is packed along its rows.
"""

from typing import Any

import torch

from reference_impls.block_tensor import BlockTensor, block_for, outer_geometry
from reference_impls.block_views import Blocks
from reference_impls.kernels.packing import SHARDS, codes_per_byte


class PackedTensor(BlockTensor):
    """Base class of packed tensors. A child has the attribute `packed_dim` (not negative) besides those of BlockTensor."""

    packed_dim: int

    def attributes_of_blocks(self, blocks: Blocks) -> dict[str, Any]:
        code = blocks.codes[0]
        # an empty tensor shows no packing; then any dimension without elements will do
        moved = [d for d, (n, m) in enumerate(zip(blocks.shape, code.shape, strict=True)) if n != m or n == 0]
        return {**super().attributes_of_blocks(blocks), "packed_dim": moved[0]}


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
    each = 8 // SHARDS[bits][0]
    shape = torch.Size(n * each if d == packed_dim else n for d, n in enumerate(code.shape))
    geometry = outer_geometry(shape, code)
    if outer_stride is not None:
        geometry["strides"] = outer_stride
    return torch.Tensor._make_wrapper_subclass(cls, shape if outer_size is None else outer_size, dtype=dtype, **geometry)


def packed_block(shape: torch.Size, bits: int, group_size: int | None) -> tuple[int, ...]:
    """The block of a weight of that shape in groups (None: whole rows), or ValueError where its rows can't be packed or grouped."""
    each = codes_per_byte(bits)
    if shape[-1] % each:
        raise ValueError(
            f"{bits}-bit codes of a row of {shape[-1]} elements don't fill whole bytes: the last dimension of {tuple(shape)} must "
            f"be a multiple of {each}."
        )
    return block_for(shape, "row" if group_size is None else group_size)
