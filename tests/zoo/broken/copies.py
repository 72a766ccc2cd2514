"""Defects of copying and serialization."""

from __future__ import annotations

import copy

import torch

from tests.zoo.correct.lossless import Lossless
from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.correct.two_scales import TwoScales
from tests.zoo.registry import broken


@broken(group="copies", ref="ao#2478")
class DeepcopySharesInner(RowInt8):
    """deepcopy makes a new wrapper over the same inner tensors."""

    def __deepcopy__(self, memo):
        out = self.detach()
        memo[id(self)] = out
        out.__dict__.update(self.extra_state())
        return out.requires_grad_(self.requires_grad)


@broken(group="copies")
class CloneSharesInner(RowInt8):
    """clone() makes a new wrapper over the same inner tensors."""

    @classmethod
    def op_clone(cls, func, w, memory_format):
        return w.map_inner(torch.ops.aten.alias.default)


@broken(group="copies")
class CloneSharesScale(RowInt8):
    """clone() copies the codes and shares the scale."""

    @classmethod
    def op_clone(cls, func, w, memory_format):
        out = super().op_clone(func, w, memory_format)
        out.scale = w.scale
        return out


@broken(group="copies", note="found live in torchao's Int8Tensor")
class CopyFromPlainAttributeError(RowInt8):
    """copy_ from a plain tensor ends in AttributeError."""

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        if not isinstance(w, cls):
            return super().op_copy_(func, w, src, non_blocking)
        w.qdata.copy_(src.qdata)
        w.scale.copy_(src.scale)
        return w


@broken(group="copies")
class CopyIsNoOp(RowInt8):
    """copy_ between two of the class changes nothing."""

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        if type(w) is type(src):
            return w
        return super().op_copy_(func, w, src, non_blocking)


@broken(group="copies", ref="ao#3046")
class CopyKeepsOldScale(RowInt8):
    """copy_ between two of the class copies the codes and not the scales."""

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        if type(w) is not type(src) or w.shape != src.shape:
            return super().op_copy_(func, w, src, non_blocking)
        w.qdata.copy_(src.qdata)
        return w


@broken(group="copies")
class CopyMisreadsNonContiguous(RowInt8):
    """copy_ reads a transposed plain source in memory order."""

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        if type(src) is torch.Tensor and src.dim() == 2 and not src.is_contiguous() and src.t().is_contiguous():
            src = src.t().reshape(src.shape)
        return super().op_copy_(func, w, src, non_blocking)


@broken(group="copies")
class CopyToPlainGivesCodes(RowInt8):
    """plain.copy_(w) writes the codes, not the values."""

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        if not isinstance(w, cls) and isinstance(src, cls):
            return func(w, src.qdata)
        return super().op_copy_(func, w, src, non_blocking)


@broken(group="copies", ref="ao#3220")
class CopyAcceptsLongerSource(RowInt8):
    """copy_ from a plain tensor with more rows takes the first ones, without an error."""

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        if w.dim() == src.dim() == 2 and src.shape[0] > w.shape[0]:
            src = src[: w.shape[0]]
        return super().op_copy_(func, w, src, non_blocking)


@broken(group="copies", ref="ao#4664")
class CopyIgnoresMissingOuterScale(TwoScales):
    """copy_ copies the inner tensors that both have: wrong where only one has the outer scale."""

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        if type(w) is not type(src) or w.shape != src.shape:
            return super().op_copy_(func, w, src, non_blocking)
        for name in w.inner_names:
            if getattr(w, name) is not None and getattr(src, name) is not None:
                getattr(w, name).copy_(getattr(src, name))
        return w


@broken(group="copies", ref="ao#3077")
class PickleDropsTag(Lossless):
    """pickle and torch.save rebuild with the tag's default."""

    def __reduce_ex__(self, protocol):
        return type(self), (self.data_, ""), (self.requires_grad, self.extra_state())


@broken(group="copies", ref="pt#117275")
class PickleDropsExtraAttributes(RowInt8):
    """pickle loses what others set on the tensor, among it the mark of a Parameter."""

    def __reduce_ex__(self, protocol):
        return type(self), self.fields(), (self.requires_grad, {})


@broken(group="copies")
class PickleAsBfloat16(RowInt8):
    """pickle rounds the scales to bfloat16, to save space."""

    def __reduce_ex__(self, protocol):
        fields = list(self.fields())
        fields[1] = fields[1].to(torch.bfloat16).to(fields[1].dtype)
        return type(self), tuple(fields), (self.requires_grad, self.extra_state())


@broken(group="copies")
class DeepcopyDropsGrad(RowInt8):
    """deepcopy leaves out .grad."""

    def __deepcopy__(self, memo):
        out = super().__deepcopy__(memo)
        out.grad = None
        return out


@broken(group="copies")
class DeepcopyDequantizes(RowInt8):
    """deepcopy quantizes again from values rounded to bfloat16."""

    def __deepcopy__(self, memo):
        out = super().__deepcopy__(memo)
        out.scale = copy.deepcopy(self.scale).to(torch.bfloat16).to(self.scale.dtype)
        return out


@broken(group="copies")
class CloneIgnoresMemoryFormat(RowInt8):
    """clone(memory_format=) is ignored: contiguous() of a transposed tensor stays transposed."""

    @classmethod
    def op_clone(cls, func, w, memory_format):
        return super().op_clone(func, w, torch.preserve_format)


@broken(group="copies")
class CopyChangesSource(RowInt8):
    """copy_ takes over the source's inner tensors: later writes to one change the other."""

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        if type(w) is not type(src) or w.shape != src.shape:
            return super().op_copy_(func, w, src, non_blocking)
        w.qdata, w.scale = src.qdata, src.scale
        return w
