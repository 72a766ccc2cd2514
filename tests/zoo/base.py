"""What the zoo's wrapper subclasses share: construction, dispatch by operator name, and a dense fallback.

A class declares `inner_names` and `attr_names`, and says how values are encoded (`quantize`, `dense`). A
handler is a classmethod `op_<operator>`: it gets the operator and all its arguments, in the schema's order
and with defaults filled in, so that positional and keyword calls can't differ. A broken class overrides one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

TRACING_TYPES = (FakeTensor, FunctionalTensor)
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class ZooTensor(torch.Tensor):
    """Base of the zoo's wrapper subclasses; the fields are the inner tensors, then the attributes."""

    inner_names: tuple[str, ...] = ("qdata", "scale")
    attr_names: tuple[str, ...] = ("casts",)

    # --- construction -----------------------------------------------------------------------------

    @staticmethod
    def __new__(cls, *fields, size=None, stride=None):
        named = dict(zip(cls.inner_names + cls.attr_names, fields, strict=True))
        inner = [named[name] for name in cls.inner_names if named[name] is not None]
        cls.check_devices(inner)
        own_size, own_stride, offset, dtype = cls.outer(named)
        return torch.Tensor._make_wrapper_subclass(
            cls,
            own_size if size is None else size,
            strides=own_stride if stride is None else stride,
            storage_offset=offset,
            dtype=dtype,
            device=inner[0].device,
        )

    def __init__(self, *fields, size=None, stride=None):
        for name, value in zip(self.inner_names + self.attr_names, fields, strict=True):
            setattr(self, name, value)

    @classmethod
    def check_devices(cls, inner):
        if len({t.device for t in inner}) > 1:
            raise ValueError(f"inner tensors are on different devices: {[str(t.device) for t in inner]}")

    @classmethod
    def outer(cls, named):
        """Size, stride, offset and dtype to report; here, one code per element."""
        main = named[cls.inner_names[0]]
        return main.shape, main.stride(), main.storage_offset(), named["casts"][-1]

    @classmethod
    def quantize(cls, hp: torch.Tensor) -> tuple:
        """The fields that encode `hp`."""
        raise NotImplementedError

    def dense(self) -> torch.Tensor:
        """The values, freshly computed, before they are cast to this tensor's dtype."""
        raise NotImplementedError

    def values(self) -> torch.Tensor:
        """The plain values; every dtype that the tensor has been cast to has rounded them, in turn."""
        out = self.dense()
        for dtype in self.casts:
            out = out.to(dtype)
        return out

    @classmethod
    def from_hp(cls, hp: torch.Tensor):
        """Quantize a floating tensor; differentiable (straight through)."""
        return _Quantize.apply(hp, cls)

    def dequantize(self) -> torch.Tensor:
        """The values as a plain tensor; differentiable."""
        return _Dequantize.apply(self)

    # --- protocol ---------------------------------------------------------------------------------

    def fields(self) -> tuple:
        return tuple(getattr(self, name) for name in self.inner_names + self.attr_names)

    def map_inner(self, fn: Callable[[torch.Tensor], torch.Tensor], **attrs: Any):
        """The same class over mapped inner tensors."""
        inner = [t if (t := getattr(self, name)) is None else fn(t) for name in self.inner_names]
        return type(self)(*inner, *(attrs.get(name, getattr(self, name)) for name in self.attr_names))

    def __tensor_flatten__(self):
        present = [name for name in self.inner_names if getattr(self, name) is not None]
        return present, tuple(getattr(self, name) for name in self.attr_names)

    @classmethod
    def __tensor_unflatten__(cls, inner, ctx, outer_size, outer_stride):
        fields = [inner.get(name) for name in cls.inner_names]
        return cls(*fields, *ctx, size=outer_size, stride=outer_stride)

    def __repr__(self, *, tensor_contents=None):
        grad = ", requires_grad=True" if self.requires_grad else ""
        where = f"dtype={self.dtype}, device='{self.device}'"
        return f"{type(self).__name__}(shape={tuple(self.shape)}, {where}{grad})"

    def extra_state(self) -> dict[str, Any]:
        """Attributes that others have set on the tensor (a Parameter's mark, a weight loader)."""
        own = set(self.inner_names + self.attr_names)
        return {name: value for name, value in self.__dict__.items() if name not in own}

    # The stock copies use the outer storage, which a wrapper hasn't got: they fail for a view with an offset.
    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only a leaf tensor can be deep-copied: detach() it first")
        out = self.map_inner(lambda t: copy.deepcopy(t, memo))
        memo[id(self)] = out
        out.__dict__.update(copy.deepcopy(self.extra_state(), memo))
        out.requires_grad_(self.requires_grad)
        if self.grad is not None:
            out.grad = copy.deepcopy(self.grad, memo)
        return out

    def __reduce_ex__(self, protocol):
        return type(self), self.fields(), (self.requires_grad, self.extra_state())

    def __setstate__(self, state):
        requires_grad, extra = state
        self.__dict__.update(extra)
        self.requires_grad_(requires_grad)

    # --- dispatch ---------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            return cls.fn_linear(*args, **kwargs)
        if func is torch.Tensor.share_memory_:
            return args[0].share_inner_memory()
        if func in STORAGE_FUNCTIONS:
            raise NotImplementedError(f"{cls.__name__} has no storage of its own: dequantize() or copy_() instead")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not all(t in PLAIN_TYPES or issubclass(t, (*TRACING_TYPES, ZooTensor)) for t in types):
            return NotImplemented
        handler = getattr(cls, "op_" + func._schema.name.split("::")[1], None)
        if handler is None:
            return cls.fallback(func, args, kwargs)
        out = handler(func, *normalise(func, args, kwargs))
        if is_view(func) and all(isinstance(leaf, ZooTensor) for leaf in tree_leaves(out)):
            return return_and_correct_aliasing(func, args, kwargs, out)
        return out

    @classmethod
    def fallback(cls, func, args, kwargs):
        """Run `func` on the values; what it wrote is quantized back into the same inner tensors."""
        if func._can_decompose():
            # inference_mode hands composite operators over whole; their parts have handlers.
            out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if is_view(func) or torch.Tag.inplace_view in func.tags or func.overloadpacket in METADATA_OPS:
            raise NotImplementedError(f"{cls.__name__} doesn't support {func}")
        written = [t for t in tree_leaves(written_args(func, args, kwargs)) if isinstance(t, ZooTensor)]
        for tensor in written:
            tensor.check_writable()
        plain = {id(t): t.values() for t in tree_leaves((args, kwargs)) if isinstance(t, ZooTensor)}
        to_plain = lambda leaf: plain.get(id(leaf), leaf)  # noqa: E731
        out = func(*tree_map(to_plain, args), **tree_map(to_plain, kwargs))
        if any(plain[id(t)].shape != t.shape for t in written):
            raise NotImplementedError(f"{func} would resize a {cls.__name__}")
        for tensor in written:
            tensor.write(plain[id(tensor)])
        back = {id(plain[id(t)]): t for t in written}
        return tree_map(lambda leaf: back.get(id(leaf), leaf), out)

    def check_writable(self) -> None:
        """Raise NotImplementedError where a write would change elements outside this view."""

    def write(self, hp: torch.Tensor) -> None:
        """Quantize `hp` into this tensor's own inner tensors, so that every alias sees it."""
        for name, value in zip(self.inner_names, type(self).quantize(hp), strict=False):
            if value is not None:
                getattr(self, name).copy_(value)

    # --- operators that every class has -----------------------------------------------------------

    @classmethod
    def op_detach(cls, func, w):
        return w.map_inner(func)

    @classmethod
    def op_alias(cls, func, w):
        return w.map_inner(func)

    @classmethod
    def op_clone(cls, func, w, memory_format):
        return w.map_inner(lambda t: func(t, memory_format=memory_format))

    @classmethod
    def op__to_copy(cls, func, w, dtype, layout, device, pin_memory, non_blocking, memory_format):
        if layout not in (None, torch.strided):
            raise NotImplementedError(f"{cls.__name__} can't become {layout}")
        if dtype is not None and not dtype.is_floating_point:
            raise NotImplementedError(f"{cls.__name__} can't become {dtype}: dequantize() first")
        options = dict(device=device, pin_memory=pin_memory, non_blocking=non_blocking, memory_format=memory_format)
        return w.map_inner(lambda t: func(t, **options), casts=w.cast_to(dtype))

    @classmethod
    def op_empty_like(cls, func, w, dtype, layout, device, pin_memory, memory_format):
        # Kept in the class because Module.to_empty() puts the result in the Parameter's place.
        options = dict(device=device, pin_memory=pin_memory, memory_format=memory_format)
        if dtype is not None and not dtype.is_floating_point or layout not in (None, torch.strided):
            return func(w.values(), dtype=dtype, layout=layout, **options)
        return w.map_inner(lambda t: func(t, **options), casts=w.cast_to(dtype))

    @classmethod
    def op__pin_memory(cls, func, w, device):
        return w.map_inner(lambda t: func(t, device))

    def cast_to(self, dtype):
        return self.casts if dtype in (None, self.dtype) else (*self.casts, dtype)

    def share_inner_memory(self):
        for name in self.__tensor_flatten__()[0]:
            getattr(self, name).share_memory_()
        return self

    # --- linear -----------------------------------------------------------------------------------

    @classmethod
    def fn_linear(cls, input, weight, bias=None):
        ours = isinstance(weight, ZooTensor) and not isinstance(input, ZooTensor) and weight.dim() == 2
        if not ours or torch._C._are_functorch_transforms_active():
            # torch.func can't see through _Linear: the operators that linear is made of have handlers, too.
            with torch._C.DisableTorchFunctionSubclass():
                return F.linear(input, weight, bias)
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            # Overriding F.linear goes round autocast, so its casts are made here.
            dtype = torch.get_autocast_dtype(kind)
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return _Linear.apply(input, weight, bias)

    @classmethod
    def linear_forward(cls, x, w, bias):
        return F.linear(x, w.values(), bias)

    @classmethod
    def linear_backward(cls, grad, x, w):
        """Gradients of x [..., K], w [N, K] and bias [N], for grad [..., N]."""
        rows = grad.reshape(-1, grad.shape[-1])
        return grad @ w.dequantize(), rows.t() @ x.reshape(-1, x.shape[-1]), rows.sum(0)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias):
        ctx.save_for_backward(x, w)
        return type(w).linear_forward(x, w, bias)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grads = type(w).linear_backward(grad, x, w)
        return tuple(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=True))


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hp, cls):
        return cls(*cls.quantize(hp))

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.values()

    @staticmethod
    def backward(ctx, grad):
        return grad


METADATA_OPS = {torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_}
STORAGE_FUNCTIONS = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.data.__set__,
    torch.Tensor.__dlpack__,
}


def normalise(func, args, kwargs) -> list[Any]:
    """All arguments of the operator, in its schema's order, with defaults filled in."""
    schema = func._schema.arguments
    rest = schema[len(args) :]
    return [*args, *(kwargs.get(arg.name, arg.default_value) for arg in rest)]


def is_view(func) -> bool:
    """Whether the result aliases an argument which isn't written to."""
    alias = [ret.alias_info for ret in func._schema.returns]
    return bool(alias) and alias[0] is not None and not alias[0].is_write


def written_args(func, args, kwargs) -> list[Any]:
    values = normalise(func, args, kwargs)
    schema = func._schema.arguments
    return [v for v, arg in zip(values, schema, strict=True) if arg.alias_info and arg.alias_info.is_write]
