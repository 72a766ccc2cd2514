"""Correct quantized classes.

They share nothing with `tests/zoo/base.py`: written as other authors write, each on its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.zoo.correct.standalone_lossless import is_foreign
from tests.zoo.registry import correct

aten = torch.ops.aten


@correct()
class Minimal(torch.Tensor):
    """An allow-list: detach, clone, moves and linear; all else is refused, by one line at the end."""

    @staticmethod
    def __new__(cls, q, s, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=dtype, device=q.device)

    def __init__(self, q, s, dtype):
        self.q, self.s = (q, s)

    def __tensor_flatten__(self):
        return (["q", "s"], {"dtype": self.dtype})

    @classmethod
    def __tensor_unflatten__(cls, t, ctx, size, stride):
        return cls(t["q"], t["s"], ctx["dtype"])

    @classmethod
    def from_float(cls, hp):
        hp = hp.detach().contiguous()
        s = hp.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        q = (hp.float() / s).round().clamp(-127, 127).to(torch.int8)
        return cls(q, s, hp.dtype)

    def dequantize(self):
        return (self.q.float() * self.s).to(self.dtype)

    def __repr__(self, **k):
        return f"Minimal(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:

            def lin(input, weight, bias=None):
                if not isinstance(weight, cls) or isinstance(input, cls):
                    raise NotImplementedError("linear: only the weight may be Minimal")
                return F.linear(input, weight.dequantize(), bias)

            return lin(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.detach.default:
            w = args[0]
            return cls(w.q.detach(), w.s.detach(), w.dtype)
        if func is aten.clone.default:
            w = args[0]
            return cls(w.q.clone(), w.s.clone(), w.dtype)
        if func is aten._to_copy.default:
            w = args[0]
            if kwargs.get("dtype", w.dtype) not in (None, w.dtype):
                raise NotImplementedError("Minimal: dtype changes")
            d = kwargs.get("device")
            return cls(w.q.to(d, copy=True), w.s.to(d, copy=True), w.dtype)
        raise NotImplementedError(f"Minimal does not implement {func}")


CODE_BOOK = (-1.0, -0.5, -0.25, 0.0, 0.15, 0.35, 0.6, 1.0)


@correct()
class NF3(torch.Tensor):
    """A code book as an inner tensor, and blocks over the flattened, padded tensor; linear by a Function of its own."""

    @staticmethod
    def __new__(cls, codes, absmax, book, shape, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, absmax, book, shape, dtype):
        self.codes, self.absmax, self.book = (codes, absmax, book)

    def __tensor_flatten__(self):
        return (["codes", "absmax", "book"], {"shape": tuple(self.shape), "dtype": self.dtype})

    @staticmethod
    def __tensor_unflatten__(t, ctx, size, stride):
        return NF3(t["codes"], t["absmax"], t["book"], ctx["shape"], ctx["dtype"])

    @staticmethod
    def from_float(hp):
        flat = hp.detach().float().reshape(-1)
        x = F.pad(flat, (0, -flat.numel() % 64)).view(-1, 64)
        absmax = x.abs().amax(1)
        book = torch.tensor(CODE_BOOK, device=hp.device)
        y = x / absmax.clamp(min=1e-38).unsqueeze(1)
        return NF3((y.unsqueeze(-1) - book).abs().argmin(-1).to(torch.uint8), absmax, book, hp.shape, hp.dtype)

    def dequantize(self):
        return (
            (self.book[self.codes.long()] * self.absmax.unsqueeze(1))
            .reshape(-1)[: self.numel()]
            .reshape(self.shape)
            .to(self.dtype)
        )

    def __repr__(self, **k):
        return f"NF3({tuple(self.shape)}, {self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_foreign(types, cls):
            return NotImplemented
        w = args[0]
        if func in (aten.detach.default, aten.clone.default):
            f = torch.Tensor.detach if func is aten.detach.default else torch.clone
            return NF3(f(w.codes), f(w.absmax), f(w.book), w.shape, w.dtype)
        if func is aten._to_copy.default and kwargs.get("dtype") in (None, w.dtype):
            d = kwargs.get("device")
            return NF3(w.codes.to(d, copy=True), w.absmax.to(d, copy=True), w.book.to(d, copy=True), w.shape, w.dtype)
        if func in (aten.mm.default, aten.addmm.default, aten.embedding.default):
            return func(*[a.dequantize() if isinstance(a, NF3) else a for a in args], **kwargs)
        raise NotImplementedError(f"NF3: {func} is not supported")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            return _NF3Linear.apply(*_bind_linear(*args, **kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _bind_linear(input, weight, bias=None):
    if not isinstance(weight, NF3) or isinstance(input, NF3) or isinstance(bias, NF3):
        raise NotImplementedError("NF3: linear takes NF3 as weight only")
    return (input, weight, bias)


class _NF3Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.w = w
        ctx.has_b = b is not None
        return F.linear(x, w.dequantize(), b)

    @staticmethod
    def backward(ctx, g):
        gb = g.reshape(-1, g.shape[-1]).sum(0) if ctx.has_b and ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[1]:
            raise NotImplementedError("NF3: no gradient for the weight")
        return (g @ ctx.w.dequantize(), None, gb)


@correct()
class Sparse24(torch.Tensor):
    """Two kept values of four and their positions; linear by __torch_function__, when nothing trains."""

    @staticmethod
    def __new__(cls, values, index, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=values.dtype, device=values.device)

    def __init__(self, values, index, shape):
        self.values_, self.index_ = (values, index)

    def __tensor_flatten__(self):
        return (["values_", "index_"], tuple(self.shape))

    @staticmethod
    def __tensor_unflatten__(t, ctx, size, stride):
        return Sparse24(t["values_"], t["index_"], ctx)

    @classmethod
    def from_hp(cls, hp):
        if hp.dim() < 1 or hp.shape[-1] % 4 or hp.numel() == 0:
            raise ValueError(f"Sparse24: last dimension must be a non-zero multiple of 4: {tuple(hp.shape)}")
        x = hp.detach().contiguous().view(-1, 4)
        idx = x.abs().topk(2, 1).indices.sort(1).values
        return cls(x.gather(1, idx), idx.to(torch.uint8), hp.shape)

    def dequantize(self):
        out = torch.zeros(self.values_.shape[0], 4, dtype=self.dtype, device=self.values_.device)
        return out.scatter(1, self.index_.long(), self.values_).view(self.shape)

    def __repr__(self, **k):
        return f"Sparse24({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.nn.functional.embedding):
            args, kwargs = pytree.tree_map(
                lambda t: t.dequantize().detach() if isinstance(t, cls) and (not t.requires_grad) else t, (args, kwargs)
            )
            if any(isinstance(t, cls) for t in pytree.tree_leaves((args, kwargs))):
                raise NotImplementedError(f"Sparse24: {func} of a weight that requires grad")
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_foreign(types, cls):
            return NotImplemented
        w = args[0]
        if func in (aten.detach.default, aten.clone.default):
            f = torch.Tensor.detach if func is aten.detach.default else torch.clone
            return Sparse24(f(w.values_), f(w.index_), w.shape)
        if func is aten._to_copy.default:
            d, t = (kwargs.get("device"), kwargs.get("dtype") or w.dtype)
            return Sparse24(w.values_.to(device=d, dtype=t, copy=True), w.index_.to(d, copy=True), w.shape)
        if func in (aten.mul.Tensor, aten.div.Tensor) and isinstance(w, cls) and (not isinstance(args[1], torch.Tensor)):
            return Sparse24(func(w.values_, args[1]), w.index_.clone(), w.shape)
        if func is aten.zeros_like.default:
            return torch.zeros(w.shape, dtype=kwargs.get("dtype") or w.dtype, device=kwargs.get("device") or w.device)
        raise NotImplementedError(f"Sparse24: {func}")


@correct()
class FakeQuantized(torch.Tensor):
    """Quantization-aware: it keeps its values in full precision, and rounds them to four bits when they are read."""

    VIEWS = (aten.t.default, aten.slice.Tensor, aten.select.int, aten.detach.default, aten.alias.default)

    @staticmethod
    def __new__(cls, latent, step, dtype):
        geometry = dict(strides=latent.stride(), storage_offset=latent.storage_offset(), dtype=dtype, device=latent.device)
        return torch.Tensor._make_wrapper_subclass(cls, latent.shape, **geometry)

    def __init__(self, latent, step, dtype):
        self.latent, self.step = latent, step

    def __tensor_flatten__(self):
        return ["latent", "step"], (self.dtype,)

    @classmethod
    def __tensor_unflatten__(cls, t, ctx, size, stride):
        return cls(t["latent"], t["step"], *ctx)

    @classmethod
    def from_hp(cls, hp):
        if not hp.numel():
            raise ValueError(f"FakeQuantized: no values to choose a step from in shape {tuple(hp.shape)}")
        latent = hp.detach().clone()
        return cls(latent, (latent.float().abs().max() / 7).clamp(min=torch.finfo(torch.float32).tiny), hp.dtype)

    def read(self):
        return ((self.latent.float() / self.step).round().clamp(-7, 7) * self.step).to(self.dtype)

    def dequantize(self):
        return ReadFakeQuantized.apply(self)

    def __repr__(self, **k):
        return f"FakeQuantized(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            args, kwargs = pytree.tree_map(lambda t: t.dequantize() if isinstance(t, cls) else t, (args, kwargs or {}))
            return F.linear(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_foreign(types, cls):
            return NotImplemented
        w = args[0]
        if func in cls.VIEWS:
            return return_and_correct_aliasing(func, args, kwargs, cls(func(w.latent, *args[1:], **kwargs), w.step, w.dtype))
        if func is aten.clone.default:
            return cls(w.latent.clone(**kwargs), w.step.clone(), w.dtype)
        if func is aten._to_copy.default:
            dtype = kwargs.pop("dtype", None) or w.dtype
            if not dtype.is_floating_point:
                return func(w.read(), dtype=dtype, **kwargs)
            # the latent values keep their precision: rounded anew, some would fall on the other side of a tie
            return cls(func(w.latent, **kwargs), w.step.to(kwargs.get("device"), copy=True), dtype)
        if func._schema.is_mutable or any(r.alias_info for r in func._schema.returns):
            raise NotImplementedError(f"FakeQuantized does not implement {func}")
        args, kwargs = pytree.tree_map(lambda t: t.read() if isinstance(t, cls) else t, (args, kwargs))
        return func(*args, **kwargs)


class ReadFakeQuantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.read()

    @staticmethod
    def backward(ctx, grad):
        return grad
