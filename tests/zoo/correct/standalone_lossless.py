"""Correct classes that keep every value.

They share nothing with `tests/zoo/base.py`: written as other authors write, each on its own.
"""

from __future__ import annotations

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.zoo.registry import correct

aten = torch.ops.aten


def is_foreign(types, cls):
    """Whether another author's subclass takes part, which must get its turn."""
    familiar = (cls, torch.Tensor, torch.nn.Parameter)
    return any(
        t not in familiar and not t.__module__.startswith("torch._subclasses") and t.__name__ != "FunctionalTensor"
        for t in types
    )


@correct()
class HiLo(torch.Tensor):
    """Lossless in two inner tensors of different dtypes, with a constructor of keyword-only arguments."""

    @staticmethod
    def __new__(cls, *, hi, lo):
        return torch.Tensor._make_wrapper_subclass(
            cls, hi.shape, strides=hi.stride(), storage_offset=hi.storage_offset(), dtype=lo.dtype, device=hi.device
        )

    def __init__(self, *, hi, lo):
        self.hi, self.lo = (hi, lo)

    def __tensor_flatten__(self):
        return (["hi", "lo"], None)

    @staticmethod
    def __tensor_unflatten__(t, ctx, size, stride):
        return HiLo(hi=t["hi"], lo=t["lo"])

    @classmethod
    def from_hp(cls, hp):
        hp = hp.detach()
        hi = hp.to(torch.bfloat16)
        return cls(hi=hi, lo=hp - hi.to(hp.dtype))

    def dequantize(self):
        return self.hi.to(self.lo.dtype) + self.lo

    def __repr__(self, **k):
        return f"HiLo({tuple(self.shape)}, {self.dtype}, {self.device})"

    VIEWS = {
        aten.t.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.transpose.int,
        aten.permute.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.expand.default,
        aten.detach.default,
        aten.alias.default,
        aten.as_strided.default,
    }
    COPIES = {aten.clone.default, aten._to_copy.default}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(
            not issubclass(t, (HiLo, torch.Tensor))
            or (t not in (HiLo, torch.Tensor, torch.nn.Parameter) and (not t.__module__.startswith("torch._subclasses")))
            for t in types
        ):
            return NotImplemented
        if func is aten._to_copy.default and kwargs.get("dtype") not in (None, args[0].dtype):
            raise NotImplementedError("HiLo: dtype change by _to_copy")
        kw = {k: v for k, v in kwargs.items() if k != "dtype"} if func is aten._to_copy.default else kwargs
        if func in cls.VIEWS | cls.COPIES:
            w = args[0]
            out = HiLo(hi=func(w.hi, *args[1:], **kw), lo=func(w.lo, *args[1:], **kw))
            return return_and_correct_aliasing(func, args, kwargs, out)
        if func._schema.is_mutable or any(r.alias_info for r in func._schema.returns):
            raise NotImplementedError(f"HiLo: {func}")
        un = lambda x: x.dequantize() if isinstance(x, HiLo) else x
        return func(*pytree.tree_map(un, args), **pytree.tree_map(un, kwargs))


@correct(advice=("gradients/make-keeps-the-graph", "devices/to-empty-keeps-the-class"))
class TransposedBox(torch.Tensor):
    """Lossless, with its data stored column by column: a fresh tensor isn't contiguous."""

    @staticmethod
    def __new__(cls, stored):
        v = stored.t()
        return torch.Tensor._make_wrapper_subclass(
            cls, v.shape, strides=v.stride(), storage_offset=v.storage_offset(), dtype=v.dtype, device=v.device
        )

    def __init__(self, stored):
        self.stored = stored

    def __tensor_flatten__(self):
        return (["stored"], None)

    @staticmethod
    def __tensor_unflatten__(t, ctx, size, stride):
        return TransposedBox(t["stored"])

    @classmethod
    def from_hp(cls, hp):
        if hp.dim() != 2:
            raise ValueError(f"TransposedBox: 2-D only, got {tuple(hp.shape)}")
        return cls(hp.detach().t().clone(memory_format=torch.contiguous_format))

    def dequantize(self):
        return self.stored.t()

    def __repr__(self, **k):
        return f"TransposedBox({tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_foreign(types, cls):
            return NotImplemented
        if func._schema.name in (
            "aten::set_",
            "aten::resize_",
            "aten::resize_as_",
            "aten::t_",
            "aten::transpose_",
            "aten::squeeze_",
            "aten::unsqueeze_",
            "aten::as_strided_",
        ):
            raise NotImplementedError(f"TransposedBox: {func} changes metadata")
        un = lambda t: t.stored.t() if isinstance(t, cls) else t
        wrap = lambda t: cls(t.t()) if isinstance(t, torch.Tensor) and t.dim() == 2 else t
        out = func(*pytree.tree_map(un, args), **pytree.tree_map(un, kwargs))
        rets = func._schema.returns
        if any(r.alias_info and (not r.alias_info.is_write) for r in rets):
            if not isinstance(out, torch.Tensor) or out.dim() != 2:
                raise NotImplementedError(f"TransposedBox: {func} gives a view that is not a matrix")
            return return_and_correct_aliasing(func, args, kwargs, wrap(out))
        if func in (aten.clone.default, aten._to_copy.default):
            return wrap(out)
        if func._schema.is_mutable:
            return return_and_correct_aliasing(func, args, kwargs, out)
        return out


@correct()
class Tagged(torch.Tensor):
    """Plain storage with a unit: every result of an operation has the unit of its first operand."""

    @classmethod
    def from_hp(cls, hp, tag="V"):
        t = hp.clone().as_subclass(cls)
        t.tag = tag
        return t

    def dequantize(self):
        return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        tags = [t.tag for t in pytree.tree_leaves((args, kwargs or {})) if isinstance(t, cls) and hasattr(t, "tag")]
        if tags and isinstance(out, cls) and (not hasattr(out, "tag")):
            out.tag = tags[0]
        return out
