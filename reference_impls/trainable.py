"""`TrainableInt8Tensor`: an int8 weight that small updates train as well.

What it teaches: why rounding to the nearest code stalls, and what stochastic rounding does about it.

An `Int8Tensor` trains already: its constructor and its linear are differentiable, its gradient is dense, and an optimizer
writes the updated values back through `write_values`. But an update of less than half a step rounds back to the code from
which it came, and is lost; with a small learning rate, all are. Rounded up or down at random, with the probabilities that
make the mean right, one of ten updates of a tenth of a step moves the code by a whole one: nothing is lost on average.

Every write of values rounds so (copy_ from a plain tensor, in-place arithmetic, optimizer steps). Copies of codes (clone,
copy_ from the same kind, loading a checkpoint) are exact, and making the tensor rounds to the nearest.
"""

import torch
from typing_extensions import Self

from reference_impls.block_tensor import FromHighPrecision, Granularity, block_for, plain_source
from reference_impls.int8 import Int8Tensor
from reference_impls.kernels.quantization import round_stochastic

_ROUNDINGS = {"nearest": torch.round, "stochastic": round_stochastic}


class TrainableInt8Tensor(Int8Tensor):
    """An `Int8Tensor` with a choice of how updates are rounded; see `from_hp`.

    Args:
        rounding: "nearest", or "stochastic", which draws from torch's global generator of the device.

    The others are those of `Int8Tensor`.
    """

    attribute_names = ("dtype", "shares_scale", "rounding")

    rounding: str

    @staticmethod
    def __new__(
        cls: type[Self],
        qdata: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        shares_scale: bool = False,
        rounding: str = "stochastic",
        outer_size: torch.Size | None = None,
        outer_stride: tuple[int, ...] | None = None,
    ) -> Self:
        if rounding not in _ROUNDINGS:
            raise ValueError(f"rounding {rounding!r} is unknown: use {' or '.join(map(repr, _ROUNDINGS))}.")
        return Int8Tensor.__new__(cls, qdata, scale, dtype, shares_scale, outer_size, outer_stride)

    @classmethod
    def from_hp(cls, hp: torch.Tensor, granularity: Granularity = "row", rounding: str = "stochastic") -> Self:
        """Quantize a floating-point tensor to the nearest codes, as `Int8Tensor.from_hp` does; later writes round as `rounding` says."""
        values = plain_source(hp, "from_hp")
        return FromHighPrecision.apply(values, cls, block_for(hp.shape, granularity), rounding)

    @classmethod
    def quantized(cls, hp: torch.Tensor, block: tuple[int, ...], rounding: str = "stochastic") -> Self:
        """`from_hp` without a gradient."""
        weight = Int8Tensor.quantized(hp, block)
        return cls(weight.qdata, weight.scale, hp.dtype, rounding=rounding)

    def round_steps(self, steps: torch.Tensor) -> torch.Tensor:
        return _ROUNDINGS[self.rounding](steps)


torch.serialization.add_safe_globals([TrainableInt8Tensor])
