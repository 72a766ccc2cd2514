"""A wrapper that changes no value: everything is done by the one inner tensor, and a tag travels with it."""

from __future__ import annotations

import torch

from tests.zoo.base import ZooTensor
from tests.zoo.registry import correct


@correct()
class Lossless(ZooTensor):
    """A tensor with a tag: views, copies and moves keep it, results of arithmetic are plain."""

    inner_names = ("data_",)
    attr_names = ("tag",)

    @classmethod
    def outer(cls, named):
        data = named["data_"]
        return data.shape, data.stride(), data.storage_offset(), data.dtype

    @classmethod
    def quantize(cls, hp):
        return hp.detach().clone(), "weight"

    def values(self):
        return self.data_.clone()

    @classmethod
    def op_slice(cls, func, w, *args):
        return w.map_inner(lambda t: func(t, *args))

    op_select = op_t = op_transpose = op_permute = op_unsqueeze = op_squeeze = op_diagonal = op_unfold = op_slice
    op_view = op__unsafe_view = op__reshape_alias = op_as_strided = op_slice

    @classmethod
    def op_expand(cls, func, w, size, implicit):
        return w.map_inner(lambda t: func(t, size))

    @classmethod
    def op_split(cls, func, w, *args):
        return [cls(part, w.tag) for part in func(w.data_, *args)]

    op_split_with_sizes = op_unbind = op_unsafe_split = op_split

    @classmethod
    def op__to_copy(cls, func, w, dtype, layout, device, pin_memory, non_blocking, memory_format):
        options = dict(device=device, pin_memory=pin_memory, non_blocking=non_blocking, memory_format=memory_format)
        return w.map_inner(lambda t: func(t, dtype=dtype, layout=layout, **options))

    @classmethod
    def op_empty_like(cls, func, w, dtype, layout, device, pin_memory, memory_format):
        options = dict(device=device, pin_memory=pin_memory, memory_format=memory_format)
        return w.map_inner(lambda t: func(t, dtype=dtype, layout=layout, **options))

    def write(self, hp):
        # Through the tensor itself: a view writes its own elements and no others.
        torch.ops.aten.copy_(self.data_, hp)
