"""Int8 whose updates round at random, so that steps far below the quantization step count on average."""

from __future__ import annotations

import torch

from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.registry import correct


@correct(note="in-place operations draw from the global generator; from_hp is deterministic")
class StochasticInt8(RowInt8):
    """Per-row int8 with stochastic rounding in every in-place operation, unbiased."""

    def write(self, hp):
        dims = [d for d in range(self.dim()) if self.scale.shape[d] == 1]
        _, scale = self.encode(hp, dims)
        exact = hp.to(scale.dtype) / scale
        codes = (exact + torch.rand_like(exact)).floor().clamp(-127, 127)
        self.qdata.copy_(codes.to(torch.int8))
        self.scale.copy_(scale)
