"""The gradients of out = x @ weight.T + bias, where the weight is (codes less zero point) times scale, in blocks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from reference_impls.kernels.quantization import dequantize, levels, sum_over_blocks


class Wanted(NamedTuple):
    """Which gradients are wanted."""

    x: bool
    scale: bool
    bias: bool
    zero_point: bool

    @classmethod
    def of(cls, ctx: Any, *, x: int, scale: int, bias: int, zero_point: int | None = None) -> "Wanted":
        """What a backward is asked for, by the positions of an operator's arguments.

        An argument at the end that has its default value isn't in `needs_input_grad`.
        """
        needs = dict(enumerate(ctx.needs_input_grad))
        return cls(*(position is not None and needs.get(position, False) for position in (x, scale, bias, zero_point)))


class Codes(NamedTuple):
    """A quantized weight (N, K), as `quantization.dequantize` takes it."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None
    quant_min: int = 0
    quant_max: int = 0

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(self.codes, self.scale, self.zero_point, dtype, self.quant_min, self.quant_max)

    def levels(self) -> torch.Tensor:
        return levels(self.codes, self.zero_point, self.scale.dtype, self.quant_min, self.quant_max)


def gradients(grad: torch.Tensor, x: torch.Tensor, weight: Codes, wanted: Wanted) -> tuple[torch.Tensor | None, ...]:
    """d loss / d x, scale, zero point (a floating-point one) and bias, from d loss / d out (..., N) and the `x` that was multiplied.

    weight = level * scale + zero point: each scale gets the sum over its block of d loss / d weight * level, each zero point that
    of d loss / d weight.
    """
    of_weight = weight_gradient(x, grad).to(weight.scale.dtype) if wanted.scale or wanted.zero_point else None
    return (
        grad @ weight.values(grad.dtype) if wanted.x else None,
        sum_over_blocks(of_weight * weight.levels(), weight.scale.shape) if wanted.scale and of_weight is not None else None,
        sum_over_blocks(of_weight, weight.scale.shape) if wanted.zero_point and of_weight is not None else None,
        bias_gradient(grad) if wanted.bias else None,
    )


def weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul
) -> torch.Tensor:
    """d loss / d weight (N, K) of a linear from x (..., K) and d loss / d out (..., N); batch dimensions are summed."""
    return matmul(grad.reshape(-1, grad.shape[-1]).mT, x.reshape(-1, x.shape[-1]))


def bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    """d loss / d bias (N,) from d loss / d out (..., N)."""
    return grad.reshape(-1, grad.shape[-1]).sum(0)
