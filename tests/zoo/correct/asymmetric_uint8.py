"""Unsigned codes with a scale and an integer zero point per row: value = (qdata - zero_point) * scale."""

from __future__ import annotations

import torch

from tests.zoo.broadcast import BroadcastTensor, reduce_dims, wide
from tests.zoo.registry import correct


@correct()
class AsymmetricUint8(BroadcastTensor):
    """Per-row asymmetric uint8; the range always includes 0, so that 0 is exact."""

    inner_names = ("qdata", "scale", "zero_point")

    @classmethod
    def encode(cls, hp, dims):
        values = wide(hp)
        low = reduce_dims(torch.amin, values, dims).clamp(max=0)
        high = reduce_dims(torch.amax, values, dims).clamp(min=0)
        scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).tiny)
        zero_point = (-low / scale).round().clamp(0, 255)
        qdata = ((values / scale).round() + zero_point).clamp(0, 255)
        return qdata.to(torch.uint8), scale, zero_point.to(torch.int32)

    def dense(self):
        return (self.qdata.to(torch.int32) - self.zero_point).to(self.scale.dtype) * self.scale
