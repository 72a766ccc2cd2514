"""Int8 with one scale for the whole tensor, for inference only: linear gives no gradient for the weight."""

from __future__ import annotations

from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.registry import correct


@correct()
class TensorInt8(RowInt8):
    """Per-tensor symmetric int8, inference only."""

    @classmethod
    def quantize(cls, hp):
        if not hp.is_floating_point() or hp.numel() == 0:
            raise ValueError(f"{cls.__name__} needs a non-empty floating tensor, got {hp.dtype} {tuple(hp.shape)}")
        return (*cls.encode(hp, list(range(hp.dim()))), hp.numel(), (hp.dtype,))

    @classmethod
    def linear_forward(cls, x, w, bias):
        if w.requires_grad:
            raise NotImplementedError("TensorInt8 is for inference: no gradient for the weight")
        return super().linear_forward(x, w, bias)
