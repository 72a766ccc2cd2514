"""`as_strided` of a block-quantized tensor, where the strides describe ranges of its dimensions.

AOTAutograd makes an output that is a view of an input again by `input.as_strided(size, stride, offset)`. So a subclass
without as_strided loses its class, or gives stale rows, in compiled code only. Here the strides are translated
back: each dimension of the result walks along one dimension of the source. What isn't such a walk is refused.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from reference_impls import block_views
from reference_impls.block_views import Blocks, refusal


class Walk(NamedTuple):
    """A dimension of the result: `count` elements, `step` apart, along dimension `dim` of the source."""

    dim: int
    step: int
    count: int


def as_strided(blocks: Blocks, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Blocks:
    offset = blocks.storage_offset if storage_offset is None else storage_offset
    viewed = _by_walking(blocks, size, stride, offset) or _by_reshaping_rows(blocks, size, stride, offset)
    if viewed is None:
        described = f"as_strided(size={tuple(size)}, stride={tuple(stride)}, storage_offset={offset})"
        raise refusal(described, blocks, "the strides don't describe ranges of its dimensions")
    if viewed.codes[0].shape == viewed.shape:
        # the strides of dimensions of size 1 are free: take those that were asked for
        viewed = viewed._replace(codes=tuple(code.as_strided(size, stride, offset) for code in viewed.codes))
    return viewed


def _by_walking(blocks: Blocks, size: Sequence[int], stride: Sequence[int], offset: int) -> Blocks | None:
    """The ranges, single indices, permutations and repeats that the strides describe."""
    starts = _start_indices(blocks, offset - blocks.storage_offset)
    walks = _walks(blocks, starts, size, stride) if starts is not None else None
    if starts is None or walks is None:
        return None
    walked = {walk.dim: walk for walk in walks if walk is not None}
    for dim in reversed(range(len(blocks.shape))):
        blocks = _range(blocks, starts[dim], walked[dim]) if dim in walked else block_views.select(blocks, dim, starts[dim])
    kept = sorted(walked)
    blocks = block_views.permute(blocks, [kept.index(walk.dim) for walk in walks if walk is not None])
    for position, walk in enumerate(walks):
        if walk is None:
            blocks = block_views.unsqueeze(blocks, position)
    return block_views.expand(blocks, size)


def _by_reshaping_rows(blocks: Blocks, size: Sequence[int], stride: Sequence[int], offset: int) -> Blocks | None:
    """A contiguous result that holds whole rows of a contiguous source: a range of rows in another shape."""
    distance, count, numel = offset - blocks.storage_offset, math.prod(size), math.prod(blocks.shape)
    if not _is_contiguous(blocks.shape, blocks.stride) or not numel or not _is_contiguous(size, stride):
        return None
    row = blocks.stride[0]
    if distance < 0 or distance % row or count % row or distance + count > numel:
        return None
    return block_views.view(block_views.slice_(blocks, 0, distance // row, (distance + count) // row), size)


def _start_indices(source: Blocks, distance: int) -> list[int] | None:
    """The index of the element that lies `distance` elements after the first, or None if there is none."""
    if distance < 0 or 0 in source.shape:
        return None
    starts = [0] * len(source.shape)
    for dim in _by_descending_stride(source):
        starts[dim] = min(distance // source.stride[dim], source.shape[dim] - 1)
        distance -= starts[dim] * source.stride[dim]
    return starts if distance == 0 else None


def _walks(source: Blocks, starts: list[int], size: Sequence[int], stride: Sequence[int]) -> list[Walk | None] | None:
    """A walk for each dimension of the result, None for one that stands still; None if some dimension is no walk."""
    walks: list[Walk | None] = []
    free = _by_descending_stride(source)
    for count, jump in zip(size, stride, strict=True):
        walk = None if count == 1 or jump == 0 else _walk(source, starts, free, count, jump)
        if walk is None and count != 1 and jump != 0:
            return None
        if walk is not None:
            free.remove(walk.dim)
        walks.append(walk)
    return walks


def _walk(source: Blocks, starts: list[int], free: list[int], count: int, jump: int) -> Walk | None:
    for dim in free:
        step, rest = divmod(jump, source.stride[dim])
        if step > 0 and rest == 0 and starts[dim] + (count - 1) * step < source.shape[dim]:
            return Walk(dim, step, count)
    return None


def _range(blocks: Blocks, start: int, walk: Walk) -> Blocks:
    end = start + (walk.count - 1) * walk.step + 1 if walk.count else start
    return block_views.slice_(blocks, walk.dim, start, end, walk.step)


def _by_descending_stride(source: Blocks) -> list[int]:
    stride = source.stride
    dims = [d for d, n in enumerate(source.shape) if n > 1 and stride[d] > 0]
    return sorted(dims, key=stride.__getitem__, reverse=True)


def _is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True
