"""Int4, two codes a byte, a scale for every group of 8 along a row: slices inside a group are refused."""

from __future__ import annotations

import torch

from tests.zoo.base import ZooTensor
from tests.zoo.broadcast import wide
from tests.zoo.registry import correct

GROUP = 8


@correct(multiples_of=(1, GROUP))
class PackedInt4(ZooTensor):
    """Group-wise symmetric int4 [N, K], K a multiple of 8: qdata [N, K/2] uint8, scale [N, K/8]."""

    attr_names = ("casts",)

    @classmethod
    def outer(cls, named):
        qdata = named["qdata"]
        rows, packed = qdata.shape
        return (rows, packed * 2), (qdata.stride(0) * 2, 1), qdata.storage_offset() * 2, named["casts"][-1]

    @classmethod
    def quantize(cls, hp):
        if not hp.is_floating_point() or hp.dim() != 2 or hp.shape[1] % GROUP or not hp.shape[1]:
            raise ValueError(f"{cls.__name__} needs floating [N, K], K a multiple of {GROUP}: got {tuple(hp.shape)}")
        return (*cls.encode(hp), (hp.dtype,))

    @classmethod
    def encode(cls, hp):
        groups = wide(hp).contiguous().unflatten(1, (-1, GROUP))
        scale = (groups.abs().amax(2) / 7).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (groups / scale.unsqueeze(2)).round().clamp(-7, 7).flatten(1) + 8
        codes = codes.to(torch.uint8)
        return codes[:, ::2] | codes[:, 1::2] << 4, scale

    def dense(self):
        codes = torch.stack((self.qdata & 15, self.qdata >> 4), 2).flatten(1).to(torch.int8) - 8
        groups = codes.to(self.scale.dtype).unflatten(1, (-1, GROUP))
        return (groups * self.scale.unsqueeze(2)).flatten(1)

    def write(self, hp):
        for mine, new in zip((self.qdata, self.scale), self.encode(hp), strict=True):
            mine.copy_(new)

    @classmethod
    def op_slice(cls, func, w, dim, start, end, step):
        if dim % 2 == 0:
            return w.map_inner(lambda t: func(t, 0, start, end, step))
        begin, end, step = slice(start, end, step).indices(w.shape[1])
        end = max(begin, end)
        if step != 1 or begin % GROUP or end % GROUP:
            raise NotImplementedError(f"{cls.__name__} can't cut groups of {GROUP}: [{begin}:{end}:{step}]")
        return w.map_inner(lambda t: func(t, 1, begin * t.shape[1] // w.shape[1], end * t.shape[1] // w.shape[1]))

    @classmethod
    def op_split(cls, func, w, size, dim):
        return cls.op_split_with_sizes(func, w, [min(size, w.shape[dim] - i) for i in range(0, w.shape[dim], size)], dim)

    @classmethod
    def op_split_with_sizes(cls, func, w, sizes, dim):
        bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        cut = torch.ops.aten.slice.Tensor
        return [cls.op_slice(cut, w, dim, a, b, 1) for a, b in zip(bounds, bounds[1:], strict=False)]

    # A copy is contiguous, whatever the layout that was asked for: the codes can't be transposed.
    @classmethod
    def op_clone(cls, func, w, memory_format):
        return w.map_inner(lambda t: func(t, memory_format=torch.contiguous_format))

    @classmethod
    def op_view(cls, func, w, size):
        if tuple(size) != tuple(w.shape):
            raise NotImplementedError(f"{cls.__name__} can't view {tuple(w.shape)} as {tuple(size)}")
        return w.map_inner(torch.ops.aten.alias.default)

    @classmethod
    def op_as_strided(cls, func, w, size, stride, storage_offset):
        """Whole rows, and aligned columns of them: what torch.compile needs to replay a view of an input."""
        offset = (w.storage_offset() if storage_offset is None else storage_offset) - w.storage_offset()
        row, column = divmod(offset, w.stride(0))
        fits = len(size) == 2 and stride[1] == 1 and stride[0] % w.stride(0) == 0 and column + size[1] <= w.shape[1]
        if not fits:
            raise NotImplementedError(f"{cls.__name__} can't be restrided to {tuple(size)}, {tuple(stride)}")
        step = stride[0] // w.stride(0)
        cut = torch.ops.aten.slice.Tensor
        rows = cls.op_slice(cut, w, 0, row, row + (size[0] - 1) * step + 1 if size[0] else row, max(step, 1))
        return cls.op_slice(cut, rows, 1, column, column + size[1], 1)
