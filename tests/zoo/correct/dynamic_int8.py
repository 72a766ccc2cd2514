"""Int8 weight whose linear also quantizes the activation, one scale per row of it, as it comes in."""

from __future__ import annotations

from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.registry import correct


@correct(activation_bits=8)
class DynamicInt8(RowInt8):
    """Per-row int8 with dynamic int8 activations: linear is about 1% close, its gradients are dense."""

    activation_bits = 8

    @classmethod
    def linear_forward(cls, x, w, bias):
        if x.dtype != w.dtype:
            raise RuntimeError(f"linear: input is {x.dtype}, weight is {w.dtype}")
        codes, scale = cls.encode(x, [x.dim() - 1])
        rounded = (codes.to(scale.dtype) * scale).to(x.dtype)
        return super().linear_forward(rounded, w, bias)
