"""Defects of updates: lost, half done, clipped, biased, unseen by aliases."""

from __future__ import annotations

import torch

from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.correct.stochastic_int8 import StochasticInt8
from tests.zoo.registry import broken


@broken(group="optimizers", note="ao tutorials, AdamW")
class StepIsNoOp(RowInt8):
    """In-place operations compute on a dequantized copy and throw it away."""

    def write(self, hp):
        pass


@broken(group="optimizers")
class StepClipsToOldRange(RowInt8):
    """Updates keep the old scale: values beyond the old range are clipped."""

    def write(self, hp):
        self.qdata.copy_(self.round_codes(hp.to(self.scale.dtype) / self.scale))


@broken(group="optimizers")
class ForeachIsNoOp(RowInt8):
    """Operators on lists of tensors aren't recognised: a foreach optimizer changes nothing."""

    @classmethod
    def fallback(cls, func, args, kwargs):
        if "_foreach_" in func.name() and func.name().split(".")[0].endswith("_"):
            args = [[t.detach().clone() if isinstance(t, cls) else t for t in args[0]], *args[1:]]
        return super().fallback(func, args, kwargs)


@broken(group="optimizers")
class FusedIsNoOp(RowInt8):
    """Fused optimizer steps change nothing; the others are right."""

    @classmethod
    def fallback(cls, func, args, kwargs):
        if "_fused_" in func.name():
            args = [[t.detach().clone() if isinstance(t, cls) else t for t in args[0]], *args[1:]]
        return super().fallback(func, args, kwargs)


@broken(group="optimizers")
class UpdateRebindsInner(RowInt8):
    """An update puts new inner tensors into this object: aliases taken before stay stale."""

    def write(self, hp):
        self.qdata, self.scale = self.encode(hp, [self.dim() - 1])


@broken(group="optimizers")
class AddIgnoresAlpha(RowInt8):
    """add_(x, alpha=a) adds x: SGD steps with a learning rate of -1."""

    @classmethod
    def op_add_(cls, func, w, other, alpha):
        sign = -1 if alpha < 0 else 1
        return cls.fallback(func, (w, other), {"alpha": sign})


@broken(group="optimizers")
class AddcdivIgnoresValue(RowInt8):
    """addcdiv_ ignores value= and keeps only its sign."""

    @classmethod
    def op_addcdiv_(cls, func, w, a, b, value):
        return cls.fallback(func, (w, a, b), {"value": -1 if value < 0 else 1})


@broken(group="optimizers")
class MulInPlaceIsNoOp(RowInt8):
    """mul_ does nothing: AdamW's weight decay is lost."""

    @classmethod
    def op_mul_(cls, func, w, other):
        return w


@broken(group="optimizers", ref="ao#1044")
class StateIsQuantized(RowInt8):
    """zeros_like gives a quantized tensor: momenta are rounded to int8."""

    @classmethod
    def op_zeros_like(cls, func, w, *args):
        return cls(torch.zeros_like(w.qdata), torch.ones_like(w.scale), w.group, w.casts)


@broken(group="optimizers")
class FirstRowNotUpdated(RowInt8):
    """An update of more than one row leaves out row 0."""

    def write(self, hp):
        if self.dim() != 2 or self.shape[0] < 2:
            return super().write(hp)
        qdata, scale = self.encode(hp, [1])
        self.qdata[1:].copy_(qdata[1:])
        self.scale[1:].copy_(scale[1:])
        return None


@broken(group="optimizers")
class CodesUpdatedScaleNot(RowInt8):
    """An update writes codes for the new scale and forgets to write the scale."""

    def write(self, hp):
        dims = [d for d in range(self.dim()) if self.scale.shape[d] == 1]
        self.qdata.copy_(self.encode(hp, dims)[0])


@broken(group="optimizers")
class SecondStepLost(RowInt8):
    """Only the first update of a tensor counts."""

    def write(self, hp):
        if self.__dict__.get("_written"):
            return
        self._written = True
        super().write(hp)


@broken(group="optimizers")
class TransposedUpdateLost(RowInt8):
    """Updates go to qdata.contiguous(), a copy when the tensor is transposed."""

    def write(self, hp):
        super().write(hp) if self.qdata.is_contiguous() else self.qdata.contiguous().copy_(self.qdata)


@broken(group="optimizers")
class DetachedAliasIsACopy(RowInt8):
    """detach() copies the inner tensors: an alias taken before a step never sees it."""

    @classmethod
    def op_detach(cls, func, w):
        return w.map_inner(torch.clone)


@broken(group="optimizers")
class RefusesAfterTheChange(RowInt8):
    """In-place operations raise NotImplementedError after the scale has been overwritten."""

    def write(self, hp):
        self.scale.copy_(self.encode(hp, [d for d in range(self.dim()) if self.scale.shape[d] == 1])[1])
        raise NotImplementedError("RefusesAfterTheChange can't be updated in place")


@broken(group="optimizers")
class ScaleNeverShrinks(RowInt8):
    """An update can enlarge a row's scale but not reduce it: shrinking weights become zero."""

    def write(self, hp):
        dims = [d for d in range(self.dim()) if self.scale.shape[d] == 1]
        scale = torch.maximum(self.scale, self.encode(hp, dims)[1])
        self.qdata.copy_(self.round_codes(hp.to(scale.dtype) / scale))
        self.scale.copy_(scale)


@broken(group="optimizers")
class StochasticRoundsDown(StochasticInt8):
    """Stochastic rounding draws from [0, 0.5): the mean drifts downwards."""

    def write(self, hp):
        dims = [d for d in range(self.dim()) if self.scale.shape[d] == 1]
        scale = self.encode(hp, dims)[1]
        exact = hp.to(scale.dtype) / scale
        self.qdata.copy_((exact + torch.rand_like(exact) * 0.5).floor().clamp(-127, 127).to(torch.int8))
        self.scale.copy_(scale)


@broken(group="optimizers")
class StochasticReseeds(StochasticInt8):
    """Every update reseeds the global generator: all updates round the same way."""

    def write(self, hp):
        torch.manual_seed(0)
        super().write(hp)


@broken(group="optimizers")
class AddSubtracts(RowInt8):
    """add_ with a positive alpha subtracts: right for every gradient step, wrong for the rest."""

    @classmethod
    def op_add_(cls, func, w, other, alpha):
        return cls.fallback(func, (w, other), {"alpha": -abs(alpha)})


@broken(group="optimizers")
class Bfloat16UpdateKeepsScale(RowInt8):
    """In bfloat16 only, an update keeps the old scale."""

    def write(self, hp):
        if hp.dtype != torch.bfloat16:
            return super().write(hp)
        self.qdata.copy_(self.round_codes(hp.to(self.scale.dtype) / self.scale))
        return None
