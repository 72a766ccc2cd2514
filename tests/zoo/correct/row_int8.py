"""Int8 with a scale per row: trainable, and complete. Most of the zoo derives from it."""

from __future__ import annotations

import torch

from tests.zoo.broadcast import BroadcastTensor, reduce_dims, wide
from tests.zoo.registry import correct


@correct()
class RowInt8(BroadcastTensor):
    """Per-row symmetric int8: value = qdata * scale; views are exact, updates requantize in place."""

    inner_names = ("qdata", "scale")

    @classmethod
    def encode(cls, hp, dims):
        values = wide(hp)
        # The floor keeps a zero row finite: its codes are 0 and its scale isn't.
        tiny = torch.finfo(torch.float32).tiny
        scale = (reduce_dims(torch.amax, values.abs(), dims) / 127).clamp(min=tiny)
        return cls.round_codes(values / scale), scale

    @classmethod
    def round_codes(cls, codes):
        return codes.round().clamp(-127, 127).to(torch.int8)

    def dense(self):
        return self.qdata.to(self.scale.dtype) * self.scale
