"""How far a linear may be off because it rounds its operands to integers before it multiplies them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rounding(NamedTuple):
    """Bits to which a linear rounds its activation and the values of its weight, symmetrically; None: not at all."""

    activation: int | None = None
    weight: int | None = None

    def step(self, name: str, values: torch.Tensor, *, by_row: bool = True) -> torch.Tensor | float:
        """The most by which an operand may be off: a step of it, of the dtype of ``values``, which are absolute.

        Args:
            name: ``w`` is the weight, all others are activations.
            by_row: a step of the row (broadcasts against ``values``); else of the whole operand, as in the products of a backward, where
                a class that rounds activations may round each operand.
        """
        bits = self.weight if name == "w" else self.activation
        if name == "w" and not by_row:
            bits = min((b for b in self if b), default=None)
        if not bits or not values.numel():
            return 0.0
        largest: torch.Tensor = values.amax(-1, keepdim=True) if by_row and values.dim() else values.amax()
        steps: int = 2 ** (bits - 1) - 1
        return largest / steps
