"""Correct classes around others, and as optimizer state.

They share nothing with `tests/zoo/base.py`: written as other authors write, each on its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.zoo.correct.standalone_lossless import is_foreign
from tests.zoo.registry import correct

aten = torch.ops.aten


@correct()
class Fp8(torch.Tensor):
    """float8 codes with one scale; views of the codes, writes refused, all else on the values."""

    VIEWS = {
        aten.t.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.transpose.int,
        aten.permute.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.detach.default,
        aten.alias.default,
        aten.as_strided.default,
        aten.squeeze.dim,
        aten.squeeze.default,
        aten.expand.default,
    }

    @staticmethod
    def __new__(cls, data, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), storage_offset=data.storage_offset(), dtype=dtype, device=data.device
        )

    def __init__(self, data, scale, dtype):
        self.fp8_data, self.fp8_scale = (data, scale)

    def __tensor_flatten__(self):
        return (["fp8_data", "fp8_scale"], [self.dtype])

    @classmethod
    def __tensor_unflatten__(cls, t, ctx, size, stride):
        return cls(t["fp8_data"], t["fp8_scale"], ctx[0])

    @classmethod
    def from_hp(cls, hp):
        s = (hp.detach().float().abs().max() / 448 if hp.numel() else torch.ones((), device=hp.device)).clamp(min=1e-30)
        return cls((hp.detach().float() / s).clamp(-448, 448).to(torch.float8_e4m3fn), s, hp.dtype)

    def dequantize(self):
        return (self.fp8_data.float() * self.fp8_scale).to(self.dtype)

    def __repr__(self, **k):
        return f"Fp8(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_foreign(types, cls):
            return NotImplemented
        w = args[0] if args else None
        if func in cls.VIEWS:
            return return_and_correct_aliasing(
                func, args, kwargs, cls(func(w.fp8_data, *args[1:], **kwargs), w.fp8_scale, w.dtype)
            )
        if func is aten.clone.default:
            return cls(w.fp8_data.clone(**kwargs), w.fp8_scale.clone(), w.dtype)
        if func is aten._to_copy.default:
            d = kwargs.get("device")
            return cls(w.fp8_data.to(d, copy=True), w.fp8_scale.to(d, copy=True), kwargs.get("dtype") or w.dtype)
        if func._schema.is_mutable or any(r.alias_info for r in func._schema.returns):
            raise NotImplementedError(f"Fp8 does not implement {func}")
        un = lambda t: t.dequantize() if isinstance(t, cls) else t
        return func(*pytree.tree_map(un, args), **pytree.tree_map(un, kwargs))


@correct()
class Outer(torch.Tensor):
    """A wrapper around another wrapper, which does the work."""

    @staticmethod
    def __new__(cls, inner, *, note="n"):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )

    def __init__(self, inner, *, note="n"):
        self.inner, self.note = (inner, note)

    def __tensor_flatten__(self):
        return (["inner"], {"note": self.note})

    @classmethod
    def __tensor_unflatten__(cls, t, ctx, size, stride):
        return cls(t["inner"], **ctx)

    @classmethod
    def from_hp(cls, hp):
        return cls(Fp8.from_hp(hp), note="from_hp")

    def dequantize(self):
        return self.inner.dequantize()

    def __repr__(self, **k):
        return f"Outer(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_foreign([t for t in types if t is not Fp8], cls):
            return NotImplemented
        note = next(t.note for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, cls))
        un = lambda t: t.inner if isinstance(t, cls) else t
        out = func(*pytree.tree_map(un, args), **pytree.tree_map(un, kwargs))
        out = pytree.tree_map(lambda t: cls(t, note=note) if isinstance(t, Fp8) else t, out)
        return return_and_correct_aliasing(func, args, kwargs, out) if any(r.alias_info for r in func._schema.returns) else out


@correct(advice=("gradients/make-keeps-the-graph",))
class AroundTwoTensor(torch.Tensor):
    """A wrapper around torch's own TwoTensor, which writes every plain tensor in a list twice."""

    @staticmethod
    def __new__(cls, inner):
        geometry = dict(strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=inner.device)
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **geometry)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, t, ctx, size, stride):
        return cls(t["inner"])

    @classmethod
    def from_hp(cls, hp):
        return cls(TwoTensor(hp.detach().clone(), hp.detach().clone()))

    def dequantize(self):
        return self.inner.a

    def __repr__(self, **k):
        return f"AroundTwoTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_foreign([t for t in types if t is not TwoTensor], cls):
            return NotImplemented
        un = lambda t: t.inner if isinstance(t, cls) else t
        out = func(*pytree.tree_map(un, args), **pytree.tree_map(un, kwargs))
        out = pytree.tree_map(lambda t: cls(t) if isinstance(t, TwoTensor) else t, out)
        return return_and_correct_aliasing(func, args, kwargs, out)


@correct()
class State8(torch.Tensor):
    """Optimizer state in blocks of 256 over the flattened tensor: copy_ writes into it, views are refused."""

    @staticmethod
    def __new__(cls, codes, scale, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, device=codes.device, dtype=torch.float32)

    def __init__(self, codes, scale, shape):
        self.codes, self.scale = (codes, scale)

    def __tensor_flatten__(self):
        return (["codes", "scale"], [tuple(self.shape)])

    @classmethod
    def __tensor_unflatten__(cls, t, ctx, size=None, stride=None):
        return cls(t["codes"], t["scale"], *ctx)

    @staticmethod
    def _quant(x):
        flat = x.detach().float().reshape(-1)
        x = F.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)
        s = x.abs().amax(1, keepdim=True) / 127
        s = torch.where(s < 1e-30, torch.ones_like(s), s)
        return ((x / s).round().clamp(-127, 127).to(torch.int8), s)

    @classmethod
    def from_float(cls, hp):
        if hp.dtype != torch.float32:
            raise TypeError(f"State8 takes float32, got {hp.dtype}")
        return cls(*cls._quant(hp), hp.shape)

    def dequantize(self):
        return (self.codes * self.scale).reshape(-1)[: self.numel()].reshape(self.shape)

    def __repr__(self, **k):
        return f"State8(shape={tuple(self.shape)}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_foreign(types, cls):
            return NotImplemented
        if func is aten.copy_.default:
            dst, src = args[:2]
            if not isinstance(dst, cls):
                return dst.copy_(src.dequantize())
            full = src.dequantize() if isinstance(src, cls) else src
            if isinstance(src, cls) and src.shape == dst.shape:
                dst.codes.copy_(src.codes)
                dst.scale.copy_(src.scale)
            else:
                q, s = cls._quant(full.to(dst.device).expand(dst.shape))
                dst.codes.copy_(q)
                dst.scale.copy_(s)
            return dst
        if func is aten.detach.default:
            return cls(args[0].codes.detach(), args[0].scale.detach(), args[0].shape)
        if func is aten.clone.default:
            return cls(args[0].codes.clone(), args[0].scale.clone(), args[0].shape)
        if func is aten._to_copy.default:
            w, d = (args[0], kwargs.get("device"))
            if kwargs.get("dtype") in (None, torch.float32):
                return cls(w.codes.to(d, copy=True), w.scale.to(d, copy=True), w.shape)
            raise NotImplementedError(f"State8: {func} to another dtype")
        if func._schema.is_mutable or any(r.alias_info for r in func._schema.returns):
            raise NotImplementedError(f"State8 does not implement {func}")
        un = lambda t: t.dequantize() if isinstance(t, cls) else t
        return func(*pytree.tree_map(un, args), **pytree.tree_map(un, kwargs))
