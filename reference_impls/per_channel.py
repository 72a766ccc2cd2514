"""`PerChannelSymmetricWeight`: an int8 weight with one scale for each index of one dimension, the output channels.

What it teaches: how little a child has to say. It only chooses its blocks; views, writes, copies and the linear are
inherited, and so is what others register for the parent later.
"""

import torch
from typing_extensions import Self

from reference_impls.block_tensor import FromHighPrecision, plain_source
from reference_impls.int8 import Int8Tensor


class PerChannelSymmetricWeight(Int8Tensor):
    """Values q * scale with int8 codes q in -127..127; see `from_hp`. The constructor is that of `Int8Tensor`."""

    @classmethod
    def from_hp(cls, hp: torch.Tensor, axis: int = 0) -> Self:
        """Quantize a floating-point tensor of at least one dimension, with a scale for each index of dimension `axis`.

        Gradients pass straight through. The error of an element is at most half its scale, which is max|channel| / 127.
        Raises TypeError for a tensor that isn't floating-point, ValueError for an axis that doesn't exist.
        """
        values = plain_source(hp, "from_hp")
        if not -hp.dim() <= axis < hp.dim():
            raise ValueError(f"axis {axis} doesn't exist in a tensor of shape {tuple(hp.shape)}.")
        block = tuple(1 if d == axis % hp.dim() else max(n, 1) for d, n in enumerate(hp.shape))
        return FromHighPrecision.apply(values, cls, block)


# so that torch.load, whose default is weights_only=True, accepts the class
torch.serialization.add_safe_globals([PerChannelSymmetricWeight])
