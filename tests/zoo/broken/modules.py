"""Defects that appear when the tensor is a Parameter of a module."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.zoo.correct.lossless import Lossless
from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.registry import broken


@broken(group="modules", note="found live: a dense fallback swallows copy_")
class LoadStateDictIsNoOp(RowInt8):
    """copy_ into a Parameter changes nothing: load_state_dict reports that all keys matched."""

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        return w if isinstance(w, cls) else super().op_copy_(func, w, src, non_blocking)


@broken(group="modules")
class LoadPlainIsNoOp(RowInt8):
    """load_state_dict from a plain checkpoint changes nothing; from a quantized one it is right."""

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        if isinstance(w, cls) and not isinstance(src, cls):
            return w
        return super().op_copy_(func, w, src, non_blocking)


@broken(group="modules")
class ParameterLosesTag(Lossless):
    """detach() gives the tag's default: Parameter() and load_state_dict(assign=True) lose it."""

    @classmethod
    def op_detach(cls, func, w):
        out = super().op_detach(func, w)
        out.tag = ""
        return out


@broken(group="modules")
class StaleDenseCache(RowInt8):
    """linear keeps the dense weight of its first call, and uses it after loading or a step."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        if "_dense" not in w.__dict__:
            w._dense = w.values().detach()
        return F.linear(x, w._dense, bias)


@broken(group="modules")
class ToEmptyIsPlain(RowInt8):
    """empty_like() is plain: a meta module's to_empty() loses the class."""

    @classmethod
    def op_empty_like(cls, func, w, dtype, layout, device, pin_memory, memory_format):
        return torch.empty(w.shape, dtype=dtype or w.dtype, device=device or w.device)


@broken(group="modules")
class FlattenGivesCodes(RowInt8):
    """view(-1) is a plain tensor of the codes: parameters_to_vector() returns integers as values."""

    @classmethod
    def op_view(cls, func, w, size):
        if len(size) == 1:
            return func(w.qdata.to(w.dtype), size)
        return super().op_view(func, w, size)


@broken(group="modules")
class NarrowedCopyKeepsScale(RowInt8):
    """copy_ into a narrowed parameter (a weight loader's shard) writes codes for the old scale."""

    def write(self, hp):
        if self.storage_offset():
            self.qdata.copy_(self.round_codes(hp.to(self.scale.dtype) / self.scale))
        else:
            super().write(hp)


@broken(group="modules")
class LerpIgnoresWeight(RowInt8):
    """lerp_ takes the mean, whatever its weight: an EMA forgets at once."""

    @classmethod
    def fallback(cls, func, args, kwargs):
        if "lerp_" in func.name():
            args = (*args[:2], 0.5)
        return super().fallback(func, args, {} if "lerp_" in func.name() else kwargs)


@broken(group="modules")
class DeepcopyUnfreezes(RowInt8):
    """A deepcopy of a frozen Parameter requires grad."""

    def __deepcopy__(self, memo):
        out = super().__deepcopy__(memo)
        return out.requires_grad_() if getattr(self, "_is_param", False) else out


@broken(group="modules")
class SharedBetweenInstances(RowInt8):
    """from_hp of an equal-shaped tensor reuses the previous one's scale buffer: two modules share scales."""

    buffers: dict = {}

    @classmethod
    def quantize(cls, hp):
        qdata, scale, group, casts = super().quantize(hp)
        key = (tuple(scale.shape), scale.dtype, scale.device)
        if type(scale) is torch.Tensor and not scale.is_meta:
            scale = cls.buffers.setdefault(key, scale).copy_(scale)
        return qdata, scale, group, casts


@broken(group="modules")
class ParameterOfViewCopies(RowInt8):
    """Parameter() of a view copies it: what is loaded into the Parameter doesn't reach the whole weight."""

    @classmethod
    def op_detach(cls, func, w):
        return w.map_inner(torch.clone) if w._is_view() or w.storage_offset() else super().op_detach(func, w)
