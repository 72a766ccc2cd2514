"""A wrapper whose side tensors (scales, zero points) broadcast to the codes, so that every view is exact.

`qdata` has one code per element; a side tensor has as many dimensions, with size 1 where it is shared. Any
view of the tensor is then the same view of the codes and of the expanded side tensors.
"""

from __future__ import annotations

import torch

from tests.zoo.base import ZooTensor


class BroadcastTensor(ZooTensor):
    """`group`: how many elements share one entry of the first side tensor, in the memory's owner."""

    attr_names = ("group", "casts")

    def with_sides(self, qdata, fn, **attrs):
        sides = [t if (t := getattr(self, name)) is None else fn(t) for name in self.inner_names[1:]]
        return type(self)(qdata, *sides, *(attrs.get(name, getattr(self, name)) for name in self.attr_names))

    @classmethod
    def apply_view(cls, func, w, *args):
        qdata = func(w.qdata, *args)
        return w.with_sides(qdata, lambda side: compress(func(side.expand(w.shape), *args)))

    op_slice = op_select = op_t = op_transpose = op_permute = apply_view
    op_unsqueeze = op_squeeze = op_diagonal = op_unfold = apply_view

    @classmethod
    def op_expand(cls, func, w, size, implicit):
        return cls.apply_view(func, w, size)

    @classmethod
    def op_view(cls, func, w, *args):
        try:
            return cls.apply_view(func, w, *args)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError):
                raise
            func(w.qdata, *args)  # an illegal view has its usual error
            raise NotImplementedError(f"{cls.__name__} can't view {tuple(w.shape)} as {args}: scales differ") from error

    op__unsafe_view = op__reshape_alias = op_view

    @classmethod
    def op_split(cls, func, w, *args):
        parts = func(w.qdata, *args)
        sides = {
            name: [compress(part) for part in func(side.expand(w.shape), *args)]
            for name in w.inner_names[1:]
            if (side := getattr(w, name)) is not None
        }
        attrs = [getattr(w, name) for name in w.attr_names]
        return [
            cls(part, *(sides[name][i] if name in sides else None for name in w.inner_names[1:]), *attrs)
            for i, part in enumerate(parts)
        ]

    op_split_with_sizes = op_unbind = op_unsafe_split = op_split

    @classmethod
    def op_as_strided(cls, func, w, size, stride, storage_offset):
        """Needed by torch.compile, which replays views of its inputs through as_strided."""
        offset = w.storage_offset() if storage_offset is None else storage_offset
        start, steps = follow(w, size, stride, offset)

        def restride(side):
            full = side.expand(w.shape)
            dot = lambda steps: sum(n * s for n, s in zip(steps, full.stride(), strict=True))  # noqa: E731
            return compress(func(full, size, [dot(s) for s in steps], full.storage_offset() + dot(start)))

        return w.with_sides(func(w.qdata, size, stride, offset), restride)

    # A copy owns its memory: what a column view shared with the rest of its row is shared no more.
    @classmethod
    def op_clone(cls, func, w, memory_format):
        out = super().op_clone(func, w, memory_format)
        out.group = out.sharing()
        return out

    @classmethod
    def op__to_copy(cls, func, w, *args):
        out = super().op__to_copy(func, w, *args)
        out.group = out.sharing()
        return out

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        same = type(src) is type(w) and src.casts == w.casts and src.shape == w.shape
        if not same or any(a.shape != b.shape for a, b in zip(w.inner(), src.inner(), strict=True)):
            return cls.fallback(func, (w, src, non_blocking), {})
        w.check_writable()
        for mine, theirs in zip(w.inner(), src.inner(), strict=True):
            mine.copy_(theirs, non_blocking)
        return w

    def inner(self):
        return [getattr(self, name) for name in self.__tensor_flatten__()[0]]

    def sharing(self) -> int:
        side = getattr(self, self.inner_names[1])
        return self.numel() // side.numel() if side.numel() else self.group

    def check_writable(self):
        if self.numel() and self.sharing() != self.group:
            raise NotImplementedError(f"can't write into part of a {type(self).__name__}'s group: its scale is shared")

    def write(self, hp):
        side = getattr(self, self.inner_names[1])
        dims = [d for d in range(self.dim()) if side.shape[d] == 1]
        for name, value in zip(self.inner_names, self.encode(hp, dims), strict=True):
            if value is not None:
                getattr(self, name).copy_(value)

    @classmethod
    def encode(cls, hp, dims) -> tuple[torch.Tensor, ...]:
        """The inner tensors for `hp`, with scales shared along `dims`."""
        raise NotImplementedError

    @classmethod
    def quantize(cls, hp):
        if not hp.is_floating_point() or hp.dim() < 1 or hp.shape[-1] == 0:
            raise ValueError(f"{cls.__name__} needs floating values and a last dimension, got {hp.dtype} {hp.shape}")
        return (*cls.encode(hp, [hp.dim() - 1]), hp.shape[-1], (hp.dtype,))


def compress(side: torch.Tensor) -> torch.Tensor:
    """Undo an expand: size 1 wherever all entries are the same memory."""
    for dim in range(side.dim()):
        if side.stride(dim) == 0 and side.shape[dim] > 1:
            side = side.narrow(dim, 0, 1)
    return side


def reduce_dims(fn, values: torch.Tensor, dims) -> torch.Tensor:
    """`fn` over `dims`, kept; no dims means each element by itself (torch takes it to mean all)."""
    return fn(values, dims, keepdim=True) if len(dims) else values


def wide(hp: torch.Tensor) -> torch.Tensor:
    """At least float32: a half's arithmetic would overflow or round the scale."""
    return hp.to(torch.promote_types(hp.dtype, torch.float32))


def follow(w, size, stride, offset):
    """as_strided in `w`'s coordinates: the first element's, and one step's along each new dimension."""
    dims = sorted((d for d in range(w.dim()) if w.shape[d] > 1), key=lambda d: -w.stride(d))

    def coordinates(distance):
        steps = [0] * w.dim()
        for d in dims:
            if w.stride(d):
                steps[d], distance = divmod(distance, w.stride(d))
        if distance:
            raise NotImplementedError(f"as_strided({size}, {stride}) doesn't follow the rows of {tuple(w.shape)}")
        return steps

    start = coordinates(offset - w.storage_offset())
    steps = [coordinates(s) if n > 1 else [0] * w.dim() for n, s in zip(size, stride, strict=True)]
    for d in range(w.dim()):
        last = start[d] + sum((n - 1) * step[d] for n, step in zip(size, steps, strict=True))
        if all(size) and (start[d] < 0 or last >= w.shape[d]):
            raise NotImplementedError(f"as_strided({size}, {stride}) runs across the rows of {tuple(w.shape)}")
    return start, steps
