"""Codes of 1 to 7 bits in bytes, without a wasted bit, in tensors that can still be viewed.

A code is cut into shards whose sizes are powers of two, the low bits first:

    bits    1    2    3      4    5      6      7
    shards  1    2    2+1    4    4+1    4+2    4+2+1

Each shard has a tensor of its own, in which a byte holds 8 / size codes that follow each other along the packed
dimension, the first in the low bits. So every shard is an ordinary tensor with fewer entries along one dimension: its
rows can be sliced, transposed and shared like those of any other, which one stream of 3-bit codes couldn't.
"""

from collections.abc import Mapping

import torch

SHARDS: Mapping[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}


def codes_per_byte(bits: int) -> int:
    """The number of codes of which every shard holds whole bytes: sizes along the packed dimension are multiples of it."""
    return 8 // min(SHARDS[bits])


def pack(codes: torch.Tensor, bits: int, dim: int = -1) -> list[torch.Tensor]:
    """Codes 0..2**bits - 1 (uint8) as one uint8 tensor a shard, with 8 / size times fewer entries along `dim`.

    Raises ValueError for another number of bits, and where the size of `dim` isn't a multiple of `codes_per_byte(bits)`.
    """
    check_bits(bits)
    count = codes.shape[dim]
    if count % codes_per_byte(bits):
        raise ValueError(
            f"{count} codes of {bits} bits along dim {dim} of {tuple(codes.shape)} don't fill whole bytes: the size must be a "
            f"multiple of {codes_per_byte(bits)}."
        )
    shards, low = [], 0
    for size in SHARDS[bits]:
        part = (codes >> low) & (2**size - 1)
        shards.append(_pack_shard(part, size, dim))
        low += size
    return shards


def unpack(shards: list[torch.Tensor], bits: int, dim: int = -1) -> torch.Tensor:
    """The codes 0..2**bits - 1 (uint8) that `pack` packed along `dim`."""
    check_bits(bits)
    codes, low = None, 0
    for shard, size in zip(shards, SHARDS[bits], strict=True):
        part = _unpack_shard(shard, size, dim) << low
        codes = part if codes is None else codes | part
        low += size
    assert codes is not None
    return codes


def check_bits(bits: int) -> None:
    """Raise ValueError unless codes of that many bits can be packed."""
    if bits not in SHARDS:
        raise ValueError(f"{bits} bits can't be packed: use one of {', '.join(map(str, SHARDS))}.")


def _pack_shard(part: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    each = 8 // size
    places = part.unflatten(dim, (part.shape[dim] // each, each)).movedim(dim if dim < 0 else dim + 1, -1)
    packed = places[..., 0].clone()
    for i in range(1, each):
        packed |= places[..., i] << (i * size)
    return packed.contiguous()


def _unpack_shard(shard: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    dim = dim % shard.dim()
    places = [(shard >> (i * size)) & (2**size - 1) for i in range(8 // size)]
    return torch.stack(places, dim + 1).flatten(dim, dim + 1)
