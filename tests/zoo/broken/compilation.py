"""Defects that appear only under torch.compile, or that keep it from compiling well."""

from __future__ import annotations

import itertools

import torch

from tests.zoo.base import TRACING_TYPES
from tests.zoo.correct.lossless import Lossless
from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.registry import broken


def traced(w) -> bool:
    """Whether the inner tensors are those of a tracer."""
    return isinstance(w.qdata, TRACING_TYPES)


@broken(group="compilation")
class CompiledLinearWithoutBias(RowInt8):
    """linear leaves out the bias under torch.compile only."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        return super().linear_forward(x, w, None if torch.compiler.is_compiling() else bias)


@broken(group="compilation", note="found live: a compiled slice returned all rows")
class CompiledSliceFromZero(RowInt8):
    """A compiled w[a:b] starts at row 0; the eager one is right."""

    @classmethod
    def op_slice(cls, func, w, dim, start, end, step):
        if traced(w) and dim == 0 and start:
            start, end = 0, min(end, w.shape[0]) - start
        return super().op_slice(func, w, dim, start, end, step)


@broken(group="compilation", ref="ao#1463")
class AsStridedDecays(RowInt8):
    """as_strided gives a plain tensor: a view returned from a compiled function loses its class."""

    @classmethod
    def op_as_strided(cls, func, w, size, stride, storage_offset):
        return func(w.values(), size, stride, storage_offset)


@broken(group="compilation", ref="pt#184367")
class AsStridedIsDetach(RowInt8):
    """as_strided ignores its arguments: a compiled function returns the whole weight for a slice of it."""

    @classmethod
    def op_as_strided(cls, func, w, size, stride, storage_offset):
        return w.map_inner(torch.ops.aten.alias.default)


@broken(group="compilation")
class CompiledUpdateLost(RowInt8):
    """In-place operations are no-ops when they are traced."""

    def write(self, hp):
        if not traced(self):
            super().write(hp)


@broken(group="compilation")
class GraphBreakInLinear(RowInt8):
    """linear looks at the data of x to choose a kernel, which breaks the graph."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        if x.numel() and x.abs().max().item() > 1e30:
            raise NotImplementedError("activations beyond 1e30")
        return super().linear_forward(x, w, bias)


@broken(group="compilation", ref="pt#114405")
class RecompilesForEveryInstance(RowInt8):
    """The flatten context holds a serial number: each new instance compiles again."""

    attr_names = ("group", "casts", "serial")
    numbers = itertools.count()

    @classmethod
    def quantize(cls, hp):
        return (*super().quantize(hp), next(cls.numbers))


@broken(group="compilation")
class CompiledBackwardZero(RowInt8):
    """The compiled backward gives a zero gradient for the weight."""

    @classmethod
    def linear_backward(cls, grad, x, w):
        grad_x, grad_w, grad_bias = super().linear_backward(grad, x, w)
        return grad_x, grad_w * (not traced(w)), grad_bias


@broken(group="compilation")
class ScaleAsConstant(RowInt8):
    """A traced linear multiplies with row 0's scale, which its per-tensor kernel takes as enough."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        if torch.compiler.is_compiling():
            w = cls(w.qdata, w.scale[:1].expand(w.scale.shape), w.group, w.casts)
        return super().linear_forward(x, w, bias)


@broken(group="compilation")
class OffsetNotReported(RowInt8):
    """Slices report a storage offset of 0."""

    @classmethod
    def outer(cls, named):
        size, stride, _, dtype = super().outer(named)
        return size, stride, 0, dtype


@broken(
    group="compilation",
    ref="pt#118896",
    variants={"negated": {"make": "ContextComparesEqual.from_hp(-hp).negated()"}},
)
class ContextComparesEqual(Lossless):
    """Contexts with different tags (which change the values) compare equal: no recompilation."""

    def values(self):
        return -self.data_ if self.tag == "negated" else self.data_.clone()

    def negated(self):
        return type(self)(self.data_, _Tag("negated"))

    @classmethod
    def quantize(cls, hp):
        return hp.detach().clone(), _Tag("weight")


class _Tag(str):
    """A tag that compares equal to every other."""

    __slots__ = ()

    def __eq__(self, other):
        return str(self) == other if type(other) is str else isinstance(other, _Tag)

    def __hash__(self):
        return 0


@broken(group="compilation")
class MetaLinearShape(RowInt8):
    """Under a tracer, linear's bfloat16 output is declared (and becomes) float32."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        out = super().linear_forward(x, w, bias)
        return out.float() if torch.compiler.is_compiling() and out.dtype == torch.bfloat16 else out
