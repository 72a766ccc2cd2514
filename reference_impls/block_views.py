"""What a view of a block-quantized tensor is: the same view of each inner tensor, in that tensor's own units.

Each function takes a `Blocks` and an operator's arguments and gives the `Blocks` of the result. Nothing is ever
copied, so results share memory with what they were taken from. What the inner tensors can't say raises
NotImplementedError before anything happens.

An inner tensor with m entries along a dimension of n elements has one entry for each n / m of them. Two kinds differ in
what may happen to an entry:

- an entry of the codes that holds several (a byte of two 4-bit codes) can't be divided;
- a parameter (a scale) also belongs to a part of its block. Such a view is `partial`: it can be read, but not written
  to, because a write needs a new scale, and the scale belongs to elements outside the view as well.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from reference_impls.kernels.quantization import block_size


class Blocks(NamedTuple):
    """Inner tensors over one outer shape (n_0, n_1, ...): codes, and parameters of blocks of them."""

    shape: tuple[int, ...]
    codes: tuple[torch.Tensor, ...]
    parameters: tuple[torch.Tensor, ...]
    partial: bool = False

    def each(self, function: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int]) -> "Blocks":
        """`function` of every inner tensor, for a result of that shape."""
        return Blocks(tuple(shape), tuple(map(function, self.codes)), tuple(map(function, self.parameters)), self.partial)

    @property
    def block(self) -> tuple[int, ...]:
        """Elements per parameter along each dimension."""
        return block_size(self.shape, self.parameters[0].shape)

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides of the codes as if each had an address of its own; those of one entry are next to each other."""
        code, entry = self.codes[0], block_size(self.shape, self.codes[0].shape)
        return tuple(1 if e > 1 else step * math.prod(entry) for e, step in zip(entry, code.stride(), strict=True))

    @property
    def storage_offset(self) -> int:
        return self.codes[0].storage_offset() * math.prod(block_size(self.shape, self.codes[0].shape))


def refusal(operation: str, blocks: Blocks, reason: str) -> NotImplementedError:
    """The error for a view that the inner tensors can't describe."""
    return NotImplementedError(
        f"{operation} of a block-quantized tensor of shape {tuple(blocks.shape)} in blocks of {blocks.block}: {reason}. "
        "Use .dequantize() first."
    )


# --- dimensions moved, added, removed ---------------------------------------------------------------------------


def t(blocks: Blocks) -> Blocks:
    return blocks.each(torch.t, blocks.shape[::-1])


def transpose(blocks: Blocks, dim0: int, dim1: int) -> Blocks:
    shape = list(blocks.shape)
    shape[dim0], shape[dim1] = shape[dim1], shape[dim0]
    return blocks.each(lambda part: part.transpose(dim0, dim1), shape)


def permute(blocks: Blocks, dims: Sequence[int]) -> Blocks:
    return blocks.each(lambda part: part.permute(dims), [blocks.shape[d] for d in dims])


def unsqueeze(blocks: Blocks, dim: int) -> Blocks:
    shape = list(blocks.shape)
    shape.insert(dim if dim >= 0 else dim + len(shape) + 1, 1)
    return blocks.each(lambda part: part.unsqueeze(dim), shape)


def squeeze(blocks: Blocks, dims: int | Sequence[int] | None = None) -> Blocks:
    count = len(blocks.shape)
    candidates = range(count) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = tuple(d % count for d in candidates if count and blocks.shape[d] == 1)
    return blocks.each(lambda part: part.squeeze(gone), [n for d, n in enumerate(blocks.shape) if d not in gone])


def expand(blocks: Blocks, size: Sequence[int], implicit: bool = False) -> Blocks:
    """A repeated dimension keeps its single parameter: the whole dimension becomes one block."""
    new = len(size) - len(blocks.shape)
    old = (1,) * new + tuple(blocks.shape)
    shape = tuple(o if n == -1 and i >= new else n for i, (n, o) in enumerate(zip(size, old, strict=True)))

    def repeated(code: torch.Tensor) -> torch.Tensor:
        entries = (1,) * new + tuple(code.shape)
        return code.expand([m if n == o else n for n, o, m in zip(shape, old, entries, strict=True)])

    def kept(parameter: torch.Tensor) -> torch.Tensor:
        parameter = parameter[(None,) * new]
        return parameter.expand([0 if n == 0 else m for n, m in zip(shape, parameter.shape, strict=True)])

    return Blocks(shape, tuple(map(repeated, blocks.codes)), tuple(map(kept, blocks.parameters)), blocks.partial)


# --- ranges and single indices ----------------------------------------------------------------------------------


def select(blocks: Blocks, dim: int, index: int) -> Blocks:
    n = blocks.shape[dim]
    if not -n <= index < n:
        raise IndexError(f"select: index {index} is out of range for dimension {dim} with size {n}.")
    index %= n

    def code(part: torch.Tensor) -> torch.Tensor:
        if part.shape[dim] != n:
            raise refusal(f"select of index {index} along dim {dim}", blocks, "several codes share a byte along it")
        return part.select(dim, index)

    block = blocks.block[dim]
    shape = [size for d, size in enumerate(blocks.shape) if d != dim % len(blocks.shape)]
    parameters = tuple(part.select(dim, index // block) for part in blocks.parameters)
    return Blocks(tuple(shape), tuple(map(code, blocks.codes)), parameters, blocks.partial or block > 1)


def slice_(blocks: Blocks, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Blocks:
    n = blocks.shape[dim]
    start, end = _clamped(0 if start is None else start, n), _clamped(n if end is None else end, n)
    shape = list(blocks.shape)
    shape[dim] = max(-(-(end - start) // step), 0)

    def entries(part: torch.Tensor, each: int) -> torch.Tensor | None:
        """The entries that hold just the range, or None where it cuts one."""
        if each == 1:
            return torch.ops.aten.slice(part, dim, start, end, step)
        if end <= start:
            return part.narrow(dim, 0, 0)
        if step == 1 and start % each == 0 and end % each == 0:
            return part.narrow(dim, start // each, (end - start) // each)
        return None

    described = f"slice [{start}:{end}:{step}] along dim {dim}"
    codes = []
    for part in blocks.codes:
        each = block_size(blocks.shape, part.shape)[dim]
        codes.append(entries(part, each))
        if codes[-1] is None:
            raise refusal(described, blocks, f"it cuts bytes that hold {each} codes each")
    block = blocks.block[dim]
    parameters = [entries(part, block) for part in blocks.parameters]
    if parameters[0] is not None:
        return Blocks(tuple(shape), tuple(codes), tuple(parameters), blocks.partial)
    last = start + (end - start - 1) // step * step
    if start // block != last // block:
        raise refusal(described, blocks, f"it cuts blocks of {block} of the {n} elements")
    shared = tuple(part.narrow(dim, start // block, 1) for part in blocks.parameters)
    return Blocks(tuple(shape), tuple(codes), shared, True)


def _clamped(index: int, n: int) -> int:
    return min(max(index + n if index < 0 else index, 0), n)


def split_with_sizes(blocks: Blocks, sizes: Sequence[int], dim: int = 0) -> list[Blocks]:
    n = blocks.shape[dim]
    if sum(sizes) != n:
        raise ValueError(f"split sizes {list(sizes)} add up to {sum(sizes)}, but dim {dim} has {n} elements.")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [slice_(blocks, dim, a, a + size) for a, size in zip(starts, sizes, strict=True)]


def split(blocks: Blocks, split_size: int, dim: int = 0) -> list[Blocks]:
    n = blocks.shape[dim]
    if split_size < 0 or (split_size == 0 and n):
        raise ValueError(f"split size {split_size} of dim {dim} with {n} elements: it must be positive.")
    sizes = [min(split_size, n - start) for start in range(0, n, split_size)] if n else [0]
    return split_with_sizes(blocks, sizes, dim)


def unbind(blocks: Blocks, dim: int = 0) -> list[Blocks]:
    return [select(blocks, dim, i) for i in range(blocks.shape[dim])]


# --- reshaping --------------------------------------------------------------------------------------------------


def view(blocks: Blocks, size: Sequence[int]) -> Blocks:
    """Each group of dimensions that are merged and split again must have blocks that stay rectangular."""
    shape = _inferred(size, math.prod(blocks.shape))
    try:
        codes = tuple(part.view(_viewed_grid(blocks.shape, part.shape, shape)) for part in blocks.codes)
        if any(sum(e > 1 for e in block_size(shape, code.shape)) > 1 for code in codes):
            raise ValueError("the codes of a byte would lie along several dimensions")
        parameters = tuple(part.view(_viewed_grid(blocks.shape, part.shape, shape)) for part in blocks.parameters)
    except (ValueError, RuntimeError) as error:
        raise refusal(f"view as {shape}", blocks, str(error)) from None
    return Blocks(shape, codes, parameters, blocks.partial)


def _inferred(size: Sequence[int], numel: int) -> tuple[int, ...]:
    """`size` with its -1 replaced."""
    known = math.prod(n for n in size if n != -1)
    shape = tuple(numel // known if n == -1 and known else n for n in size)
    if math.prod(shape) != numel or any(n < 0 for n in shape):
        raise ValueError(f"view: shape {tuple(size)} doesn't fit {numel} elements.")
    return shape


def _viewed_grid(old: Sequence[int], entries: Sequence[int], new: Sequence[int]) -> list[int]:
    """The shape of an inner tensor of shape `entries` after the outer tensor was viewed from shape `old` as `new`."""
    if 0 in old:
        if 0 not in entries:
            raise ValueError("it is empty")
        return list(new)
    block = block_size(torch.Size(old), torch.Size(entries))
    result: list[int] = []
    for old_dims, new_dims in _dimension_groups(old, new):
        flat = _merged_block([old[d] for d in old_dims], [block[d] for d in old_dims])
        parts = _divided_block([new[d] for d in new_dims], flat)
        result += [new[d] // b for d, b in zip(new_dims, parts, strict=True)]
    return result


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
