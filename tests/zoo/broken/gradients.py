"""Defects of gradient flow: cut graphs, wrong or missing gradients, gradients that are changed in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.zoo.base import ZooTensor
from tests.zoo.correct.dynamic_int8 import DynamicInt8
from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.registry import broken


@broken(group="gradients", note="found live with dynamically quantized activations")
class LinearCutsGraph(DynamicInt8):
    """linear's output doesn't require grad: the fused path isn't differentiable, and says nothing."""

    @classmethod
    def fn_linear(cls, input, weight, bias=None):
        return super().fn_linear(input, weight, bias).detach()


@broken(group="gradients")
class WeightGradOfFirstBatch(RowInt8):
    """The weight's gradient of a 3-D input counts only the first batch entry."""

    @classmethod
    def linear_backward(cls, grad, x, w):
        grad_x, grad_w, grad_bias = super().linear_backward(grad, x, w)
        if x.dim() == 3 and x.shape[0]:
            grad_w = grad[0].t() @ x[0]
        return grad_x, grad_w, grad_bias


@broken(group="gradients")
class SquareWeightGradTransposed(RowInt8):
    """The gradient of a square weight is transposed."""

    @classmethod
    def linear_backward(cls, grad, x, w):
        grad_x, grad_w, grad_bias = super().linear_backward(grad, x, w)
        return grad_x, grad_w.t() if w.shape[0] == w.shape[1] else grad_w, grad_bias


@broken(group="gradients")
class GradOutputMutated(RowInt8):
    """backward scales grad_output in place after it has used it."""

    @classmethod
    def linear_backward(cls, grad, x, w):
        grads = super().linear_backward(grad, x, w)
        grad.mul_(0.5)
        return grads


@broken(group="gradients")
class BiasGradIsMean(RowInt8):
    """The bias gradient is averaged over the batch, not summed."""

    @classmethod
    def linear_backward(cls, grad, x, w):
        grad_x, grad_w, _ = super().linear_backward(grad, x, w)
        return grad_x, grad_w, grad.reshape(-1, grad.shape[-1]).mean(0)


@broken(group="gradients")
class GradOfTheCodes(RowInt8):
    """The weight's gradient is multiplied by the scale: that of the codes, not of the values."""

    @classmethod
    def linear_backward(cls, grad, x, w):
        grad_x, grad_w, grad_bias = super().linear_backward(grad, x, w)
        return grad_x, grad_w * w.scale.to(grad_w.dtype), grad_bias


@broken(group="gradients")
class NonContiguousGradMisread(RowInt8):
    """A transposed grad_output is read in memory order."""

    @classmethod
    def linear_backward(cls, grad, x, w):
        if grad.dim() == 2 and not grad.is_contiguous() and grad.t().is_contiguous():
            grad = grad.t().reshape(grad.shape)
        return super().linear_backward(grad, x, w)


@broken(group="gradients")
class FrozenWeightStopsInputGrad(RowInt8):
    """x gets no gradient when the weight is frozen, as under LoRA."""

    @classmethod
    def linear_backward(cls, grad, x, w):
        grad_x, grad_w, grad_bias = super().linear_backward(grad, x, w)
        return grad_x if w.requires_grad else None, grad_w, grad_bias


@broken(group="gradients")
class InputGradUsesFirstScale(RowInt8):
    """x's gradient uses row 0's scale for all rows."""

    @classmethod
    def linear_backward(cls, grad, x, w):
        _, grad_w, grad_bias = super().linear_backward(grad, x, w)
        return grad @ (w.qdata.to(w.scale.dtype) * w.scale[:1]).to(w.dtype), grad_w, grad_bias


@broken(group="gradients")
class DequantizeNotDifferentiable(RowInt8):
    """dequantize() returns values without a grad_fn."""

    def dequantize(self):
        return self.detach().values()


@broken(group="gradients")
class ConstructorNotDifferentiable(RowInt8):
    """from_hp() of a tensor that requires grad cuts the graph."""

    @classmethod
    def from_hp(cls, hp):
        return super().from_hp(hp.detach())


@broken(group="gradients")
class KeywordBiasDetached(RowInt8):
    """A bias given by keyword is added, but gets no gradient."""

    @classmethod
    def fn_linear(cls, *args, **kwargs):
        if kwargs.get("bias") is not None:
            kwargs["bias"] = kwargs["bias"].detach()
        return super().fn_linear(*args, **kwargs)


class _Unguarded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias):
        ctx.x, ctx.w = x.detach(), w.detach()
        return type(w).linear_forward(x, w, bias)

    @staticmethod
    def backward(ctx, grad):
        return type(ctx.w).linear_backward(grad, ctx.x, ctx.w)


@broken(group="gradients")
class MutationAfterSaveUnnoticed(RowInt8):
    """Operands are kept on ctx, not saved: a weight changed before backward gives wrong gradients."""

    @classmethod
    def fn_linear(cls, input, weight, bias=None):
        if not isinstance(weight, ZooTensor):
            return super().fn_linear(input, weight, bias)
        if bias is None:
            bias = torch.zeros(weight.shape[0], dtype=input.dtype, device=input.device)
        return _Unguarded.apply(input, weight, bias)


@broken(group="gradients")
class FloatBackwardInBfloat16(RowInt8):
    """backward multiplies in bfloat16, whatever the dtype of the forward."""

    @classmethod
    def linear_backward(cls, grad, x, w):
        low = torch.bfloat16
        grads = super().linear_backward(grad.to(low), x.to(low), w.detach().to(low))
        return tuple(g.to(grad.dtype) for g in grads)


@broken(group="gradients")
class VectorInputGradShape(RowInt8):
    """The weight's gradient of a 1-D input is that of the normalised input."""

    @classmethod
    def linear_backward(cls, grad, x, w):
        if x.dim() == 1:
            x = F.normalize(x, dim=0)
        return super().linear_backward(grad, x, w)
