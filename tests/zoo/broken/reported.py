"""Defects of kinds that public reports describe, each with its witness beside it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.zoo.correct.lossless import Lossless
from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.registry import broken
from tests.zoo.witness_tools import differs, matrix, same, source, write_differs


@broken(
    group="equivalence",
    ref="quanto#327",
    witness=differs(lambda w: F.linear(torch.stack([matrix(), matrix() * 2]).transpose(0, 1), w)),
)
class StridedBatchMisread(RowInt8):
    """linear of a 3-D input reads its memory as if it were contiguous."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        if x.dim() == 3:
            x = x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))
        return super().linear_forward(x, w, bias)


def _transposed_write_is_wrong(cls):
    w, values = cls.from_hp(source(16, 16)), source(16, 16).flip(0)
    w.t().copy_(values)
    return not same(w.t(), values, 0.05)


@broken(group="slicing", witness=_transposed_write_is_wrong)
class TransposedWriteScalesRows(RowInt8):
    """A write into w.t() of a square weight computes scales of rows, and stores them as those of columns."""

    def write(self, hp):
        if self.dim() == 2 and self.shape[0] == self.shape[1] and self.scale.shape[0] == 1:
            qdata, scale = self.encode(hp, [1])
            self.qdata.copy_(qdata)
            self.scale.copy_(scale.t())
        else:
            super().write(hp)


@broken(group="equivalence", witness=differs(lambda w: w.index_select(-2, torch.arange(6).roll(1))))
class PermutedRowsKeepScales(RowInt8):
    """index_select by a negative dim permutes the codes and not the scales."""

    @classmethod
    def op_index_select(cls, func, w, dim, index):
        if dim == -2 and index.numel() == w.shape[0]:
            return w.with_sides(func(w.qdata, dim, index), torch.clone)
        return cls.fallback(func, (w, dim, index), {})


def _second_linear_is_stale(cls):
    w, x = cls.from_hp(source()), matrix()
    with torch.no_grad():
        F.linear(x, w)
        w.copy_(source().flip(0))
        return not same(F.linear(x, w), F.linear(x, w.dequantize()), 1e-4)


@broken(group="equivalence", ref="quanto#378", witness=_second_linear_is_stale)
class CachesWithoutGrad(RowInt8):
    """Under no_grad, linear keeps the dequantized weight of its first call."""

    @classmethod
    def fn_linear(cls, input, weight, bias=None):
        if torch.is_grad_enabled() or not isinstance(weight, cls):
            return super().fn_linear(input, weight, bias)
        if "_dense" not in weight.__dict__:
            weight._dense = weight.dequantize()
        return F.linear(input, weight._dense, bias)

    def extra_state(self):
        return {name: value for name, value in super().extra_state().items() if name != "_dense"}


def _grad_is_changed(cls):
    p, x = torch.nn.Parameter(cls.from_hp(source())), matrix()
    F.linear(x, p).sum().backward()
    before = p.grad.clone()
    torch.autograd.grad(F.linear(x, p).sum(), p)
    return not same(p.grad, before)


@broken(group="gradients", note="fused accumulation of weight gradients", witness=_grad_is_changed)
class AccumulatesByItself(RowInt8):
    """The backward adds to the weight's .grad itself, where there is one: autograd.grad changes it, and gives zeros."""

    @classmethod
    def linear_backward(cls, grad, x, w):
        of_x, of_w, of_bias = super().linear_backward(grad, x, w)
        if w.is_leaf and w.grad is not None:
            w.grad += of_w
            of_w = torch.zeros_like(of_w)
        return of_x, of_w, of_bias


class _Scale(float):
    """A scale that compares equal to every other."""

    __slots__ = ()

    def __eq__(self, other):
        return isinstance(other, _Scale)

    def __hash__(self):
        return 0


def _first_scale_is_reused(cls):
    torch._dynamo.reset()
    run = torch.compile(lambda w: F.linear(matrix(), w), backend="aot_eager")
    run(cls.from_hp(source()))
    other = cls.from_hp(source() * 3)
    return not same(run(other), F.linear(matrix(), other), 1e-4)


@broken(group="compilation", ref="pt#118896", witness=_first_scale_is_reused)
class ScalesCompareEqual(Lossless):
    """The scale is a number in a context that equals any other: compiled code keeps the first tensor's."""

    @classmethod
    def quantize(cls, hp):
        scale = _Scale(hp.detach().abs().amax()) if hp.numel() and hp.device.type != "meta" else _Scale(1.0)
        return hp.detach() / (float(scale) or 1.0), scale

    def values(self):
        return self.data_ * (float(self.tag) or 1.0)

    def write(self, hp):
        super().write(hp / (float(self.tag) or 1.0))


@broken(
    group="equivalence",
    note="another kernel from 65 rows on",
    witness=differs(lambda w: F.linear(matrix(70), w, torch.arange(6.0))),
)
class ManyRowsWithoutBias(RowInt8):
    """linear of more than 64 rows takes a kernel that leaves out the bias."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        many = x.reshape(-1, x.shape[-1]).shape[0] > 64
        return super().linear_forward(x, w, None if many else bias)


def _columns_are_lost(cls):
    w, x = cls.from_hp(source(6, 300)), matrix(4, 300)
    return not same(F.linear(x, w), F.linear(x, w.dequantize()), 1e-4)


@broken(group="equivalence", witness=_columns_are_lost)
class TilesOf256Columns(RowInt8):
    """linear multiplies one tile of 256 columns, and drops what is left over."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        return F.linear(x[..., :256], w.values()[:, :256], bias)


@broken(group="equivalence", witness=differs(lambda w: F.embedding(torch.tensor([[1, 2, 3], [0, 3, 1]]), w)))
class TwoDimensionalLookupScrambled(RowInt8):
    """embedding with two-dimensional indices gathers the scales in transposed order."""

    @classmethod
    def op_embedding(cls, func, w, indices, *options):
        if indices.dim() != 2:
            return cls.fallback(func, (w, indices, *options), {})
        order = indices.t().reshape(indices.shape)
        return func(w.qdata.float(), indices, *options) * func(w.scale, order, *options)


def _write_in_inference_mode_is_lost(cls):
    w = cls.from_hp(source())
    with torch.inference_mode():
        w.copy_(source().flip(0))
    return not same(w, source().flip(0), 0.05)


@broken(group="copies", witness=_write_in_inference_mode_is_lost)
class InferenceWriteIsNoOp(RowInt8):
    """copy_ under inference_mode changes nothing."""

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        if torch.is_inference_mode_enabled() and isinstance(w, cls):
            return w
        return super().op_copy_(func, w, src, non_blocking)


@broken(
    group="gradients",
    witness=lambda cls: not torch.nn.Parameter(cls.from_hp(source())).t().contiguous().requires_grad,
)
class ContiguousDetaches(RowInt8):
    """contiguous() of a transposed tensor makes a new one, without a graph."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.contiguous and not args[0].is_contiguous():
            with torch.no_grad():
                return super().__torch_function__(func, types, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})


@broken(group="slicing", witness=write_differs(lambda w: w[:, 2], value=0.0))
class SelectedColumnCopies(RowInt8):
    """A column (select along the last dim) is a copy: what is written into it is lost."""

    @classmethod
    def op_select(cls, func, w, dim, index):
        out = super().op_select(func, w, dim, index)
        if dim % w.dim() != w.dim() - 1:
            return out
        copy = out.map_inner(torch.clone)
        copy.group = copy.sharing()  # so that it may be written to
        return copy


def _half_overflows_without_grad(cls):
    x, w = matrix().abs().half() * 100, cls.from_hp(source().abs().half() + 1)
    with torch.no_grad():
        return not F.linear(x, w).isfinite().all()


@broken(group="equivalence", witness=_half_overflows_without_grad)
class ScalesAfterTheSum(RowInt8):
    """Under no_grad, a float16 linear sums activations times codes, and scales the sum: it overflows."""

    @classmethod
    def fn_linear(cls, input, weight, bias=None):
        if torch.is_grad_enabled() or input.dtype != torch.float16 or not isinstance(weight, cls) or weight.scale.dim() != 2:
            return super().fn_linear(input, weight, bias)
        out = F.linear(input, weight.qdata.half()) * weight.scale.half().t()
        return out if bias is None else out + bias
