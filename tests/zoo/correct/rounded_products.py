"""Lossless weights whose linear rounds the values that it multiplies."""

from __future__ import annotations

import torch

from tests.zoo.correct.lossless import Lossless
from tests.zoo.registry import correct


@torch.no_grad()
def to_int8(x, dim):
    """`x` rounded to 255 levels along a dimension, in its dtype; the backward can't be differentiated again."""
    values = x.double()
    step = (values.abs().amax(dim, keepdim=True) / 127).clamp(min=1e-30) if x.shape[dim] else 1
    return ((values / step).round() * step).to(x.dtype)


@correct(note="declares no rounding: the probe must see that both operands are rounded")
class Int8Products(Lossless):
    """Int8 mixed precision: full-precision values, and int8 operands in all three products of a linear."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        if x.dtype != w.dtype:
            raise RuntimeError(f"linear: input is {x.dtype}, weight is {w.dtype}")
        return torch.nn.functional.linear(to_int8(x, -1), to_int8(w.values(), -1), bias)

    @classmethod
    def linear_backward(cls, grad, x, w):
        rows, lines = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        of_weight = to_int8(rows, 0).t() @ to_int8(lines, 0)
        return to_int8(grad, -1) @ to_int8(w.dequantize(), 0), of_weight, rows.sum(0)


@correct(weight_bits=2)
class TernaryProducts(Lossless):
    """Ternary training: full-precision values, which a linear rounds to -1, 0 and 1 times their mean magnitude."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        return torch.nn.functional.linear(x, cls.ternary(w.values()), bias)

    @classmethod
    def linear_backward(cls, grad, x, w):
        rows = grad.reshape(-1, grad.shape[-1])
        return grad @ cls.ternary(w.dequantize()), rows.t() @ x.reshape(-1, x.shape[-1]), rows.sum(0)

    @staticmethod
    @torch.no_grad()
    def ternary(values):
        scale = values.abs().mean(-1, keepdim=True).clamp(min=1e-30)
        return (values / scale).round().clamp(-1, 1) * scale
