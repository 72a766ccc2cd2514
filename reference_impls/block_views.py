"""What a view of a block-quantized tensor is: the same view of its codes, and the scales that belong to it.

Each function takes a `Blocks` and an operator's arguments and gives the `Blocks` of the result. The codes are viewed
by torch itself. Along each dimension the scales follow: a block covers `b = codes / scales` elements of it.
Nothing is ever copied, so results share memory with what they were taken from. What can't be said with one scale per
block raises NotImplementedError before anything happens.

`partial` says that the result covers only a part of some block. Such a view can be read, but not written to: a write
needs a new scale, and the scale also belongs to elements outside the view.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from reference_impls.kernels.blockwise import block_size


class Blocks(NamedTuple):
    """int8 codes (n_0, n_1, ...) and their scales (n_0 / b_0, n_1 / b_1, ...)."""

    qdata: torch.Tensor
    scale: torch.Tensor
    partial: bool = False


def refusal(operation: str, blocks: Blocks, reason: str) -> NotImplementedError:
    """The error for a view that one scale per block can't describe."""
    return NotImplementedError(
        f"{operation} of a block-quantized tensor of shape {tuple(blocks.qdata.shape)} in blocks of "
        f"{block_size(blocks.qdata.shape, blocks.scale.shape)}: {reason}. Use .dequantize() first."
    )


# --- dimensions moved, added, removed ---------------------------------------------------------------------------


def t(blocks: Blocks) -> Blocks:
    return Blocks(blocks.qdata.t(), blocks.scale.t(), blocks.partial)


def transpose(blocks: Blocks, dim0: int, dim1: int) -> Blocks:
    return Blocks(blocks.qdata.transpose(dim0, dim1), blocks.scale.transpose(dim0, dim1), blocks.partial)


def permute(blocks: Blocks, dims: Sequence[int]) -> Blocks:
    return Blocks(blocks.qdata.permute(dims), blocks.scale.permute(dims), blocks.partial)


def unsqueeze(blocks: Blocks, dim: int) -> Blocks:
    return Blocks(blocks.qdata.unsqueeze(dim), blocks.scale.unsqueeze(dim), blocks.partial)


def squeeze(blocks: Blocks, dims: int | Sequence[int] | None = None) -> Blocks:
    qdata = blocks.qdata
    candidates = range(qdata.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = tuple(d for d in candidates if qdata.dim() and qdata.shape[d] == 1)
    return Blocks(qdata.squeeze(gone), blocks.scale.squeeze(gone), blocks.partial)


def expand(blocks: Blocks, size: Sequence[int], implicit: bool = False) -> Blocks:
    """A repeated dimension keeps its single scale: the whole dimension becomes one block."""
    qdata = blocks.qdata.expand(size)
    scale = blocks.scale[(None,) * (qdata.dim() - blocks.scale.dim())]
    if 0 in qdata.shape:
        scale = scale.expand([0 if n == 0 else m for n, m in zip(qdata.shape, scale.shape, strict=True)])
    return Blocks(qdata, scale, blocks.partial)


# --- ranges and single indices ----------------------------------------------------------------------------------


def select(blocks: Blocks, dim: int, index: int) -> Blocks:
    qdata = blocks.qdata.select(dim, index)
    n, m = blocks.qdata.shape[dim], blocks.scale.shape[dim]
    block = n // m
    return Blocks(qdata, blocks.scale.select(dim, (index % n) // block), blocks.partial or block > 1)


def slice_(blocks: Blocks, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Blocks:
    n, m = blocks.qdata.shape[dim], blocks.scale.shape[dim]
    start, end = _clamped(0 if start is None else start, n), _clamped(n if end is None else end, n)
    qdata = torch.ops.aten.slice(blocks.qdata, dim, start, end, step)
    scale, partial = _slice_scale(blocks, dim, start, end, step, n // m if m else 1)
    return Blocks(qdata, scale, blocks.partial or partial)


def _clamped(index: int, n: int) -> int:
    return min(max(index + n if index < 0 else index, 0), n)


def _slice_scale(blocks: Blocks, dim: int, start: int, end: int, step: int, block: int) -> tuple[torch.Tensor, bool]:
    """The scales of a range, and whether the range covers only a part of a block."""
    n = blocks.qdata.shape[dim]
    if block == 1:
        return torch.ops.aten.slice(blocks.scale, dim, start, end, step), False
    if end <= start:
        return blocks.scale.narrow(dim, 0, 0), False
    last = start + (end - start - 1) // step * step
    if start // block == last // block:
        whole = step == 1 and end - start == block
        return blocks.scale.narrow(dim, start // block, 1), not whole
    if step == 1 and start % block == 0 and end % block == 0:
        return blocks.scale.narrow(dim, start // block, (end - start) // block), False
    raise refusal(
        f"slice [{start}:{end}:{step}] along dim {dim}",
        blocks,
        f"it cuts blocks of {block} of the {n} elements",
    )


def split_with_sizes(blocks: Blocks, sizes: Sequence[int], dim: int = 0) -> list[Blocks]:
    n = blocks.qdata.shape[dim]
    if sum(sizes) != n:
        raise ValueError(f"split sizes {list(sizes)} add up to {sum(sizes)}, but dim {dim} has {n} elements.")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [slice_(blocks, dim, a, a + size) for a, size in zip(starts, sizes, strict=True)]


def split(blocks: Blocks, split_size: int, dim: int = 0) -> list[Blocks]:
    n = blocks.qdata.shape[dim]
    pieces = blocks.qdata.split(split_size, dim)  # torch's own rules for the sizes, and its errors
    sizes = [piece.shape[dim] for piece in pieces]
    return split_with_sizes(blocks, sizes, dim) if n else [slice_(blocks, dim) for _ in sizes]


def unbind(blocks: Blocks, dim: int = 0) -> list[Blocks]:
    return [select(blocks, dim, i) for i in range(blocks.qdata.shape[dim])]


# --- reshaping --------------------------------------------------------------------------------------------------


def view(blocks: Blocks, size: Sequence[int]) -> Blocks:
    """Each group of dimensions that are merged and split again must have blocks that stay rectangular."""
    qdata = blocks.qdata.view(size)
    try:
        scale_shape = _viewed_scale_shape(blocks, qdata.shape)
        return Blocks(qdata, blocks.scale.view(scale_shape), blocks.partial)
    except (ValueError, RuntimeError) as error:
        raise refusal(f"view as {tuple(qdata.shape)}", blocks, str(error)) from None


def _viewed_scale_shape(blocks: Blocks, new: Sequence[int]) -> list[int]:
    old = blocks.qdata.shape
    if 0 in old:
        return _empty_scale_shape(blocks, new)
    block = block_size(old, blocks.scale.shape)
    result: list[int] = []
    for old_dims, new_dims in _dimension_groups(old, new):
        flat = _merged_block([old[d] for d in old_dims], [block[d] for d in old_dims])
        parts = _divided_block([new[d] for d in new_dims], flat)
        result += [new[d] // b for d, b in zip(new_dims, parts, strict=True)]
    return result


def _empty_scale_shape(blocks: Blocks, new: Sequence[int]) -> list[int]:
    if 0 not in blocks.scale.shape:
        raise ValueError("it is empty")
    return list(new)


def _dimension_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Minimal runs of old and new dimensions with the same number of elements: (2, 3, 4) as (6, 4) -> 2,3|6 and 4|4."""
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news, left, right = [], [], 1, 1
        while not (olds or news) or left != right:
            if i < len(old) and (left <= right or j == len(new)):
                olds.append(i)
                left *= old[i]
                i += 1
            else:
                news.append(j)
                right *= new[j]
                j += 1
        groups.append((olds, news))
    return groups


def _merged_block(sizes: Sequence[int], block: Sequence[int]) -> int:
    """The block length in the flattened dimension."""
    flat = inner = 1
    for n, b in zip(reversed(sizes), reversed(block), strict=True):
        if b > 1 and flat != inner:
            raise ValueError(f"blocks of {b} over several of the merged dimensions {tuple(sizes)} aren't contiguous")
        if b > 1:
            flat *= b
        inner *= n
    return flat


def _divided_block(sizes: Sequence[int], flat: int) -> list[int]:
    """A flat block length as a block over the dimensions that the flat one is split into."""
    parts = []
    for n in reversed(sizes):
        if math.gcd(n, flat) != min(n, flat):
            raise ValueError(f"blocks of {flat} don't fit into dimensions {tuple(sizes)}")
        parts.append(min(n, flat))
        flat //= parts[-1]
    if flat != 1:
        raise ValueError(f"blocks are larger than dimensions {tuple(sizes)}")
    return parts[::-1]
