"""Float8 (e4m3) with a scale per row; the codes are raw bytes, which every torch operation can move."""

from __future__ import annotations

import torch

from tests.zoo.broadcast import BroadcastTensor, reduce_dims, wide
from tests.zoo.registry import correct


@correct()
class Float8Row(BroadcastTensor):
    """Per-row float8_e4m3fn: the error is at most 1/16 of each element, not half a step of the row."""

    @classmethod
    def encode(cls, hp, dims):
        values = wide(hp)
        tiny = torch.finfo(torch.float32).tiny
        scale = (reduce_dims(torch.amax, values.abs(), dims) / 448).clamp(min=tiny)
        return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale

    def dense(self):
        return self.qdata.view(torch.float8_e4m3fn).to(self.scale.dtype) * self.scale
