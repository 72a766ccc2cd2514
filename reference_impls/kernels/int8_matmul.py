"""The product of two floating-point matrices, each rounded to int8: what int8 mixed-precision training multiplies.

    out = (aq @ bq) * a_scale * b_scale      aq = round(a / a_scale), one scale for each row; bq likewise, for each column

The scale is max|row| / 127, so that nothing is clipped. A scale belongs to a line that the product sums over, and can be
pulled out of the sum: the product itself is one of integers, exact in int32.

The gradient passes straight through the rounding, and its own products are of this kind too (Wortsman et al. 2023, "Stable and
low-precision training for large-scale vision-language models", SwitchBack without its float product of the weight's gradient).
"""

from typing import Any

import torch

from reference_impls.kernels.int8_linear import int_mm
from reference_impls.kernels.quantization import choose_symmetric, quantize


@torch.library.custom_op("reference_impls::int8_rescaled_matmul", mutates_args=())
def int8_rescaled_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (..., M, K) @ b (K, N), by int8; gives (..., M, N) in the dtype of `a`."""
    if not a.numel() or not b.numel():
        return a.new_zeros((*a.shape[:-1], b.shape[1]))
    (aq, a_scale), (bq, b_scale) = _by_rows(_matrix(a).float()), _by_rows(b.mT.float())
    out = int_mm(aq, bq.t()).to(a_scale.dtype) * a_scale * b_scale.t()
    return out.to(a.dtype).reshape(*a.shape[:-1], b.shape[1])


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """(..., K) as (rows, K), also for K = 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _by_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales (rows, 1) of a matrix."""
    scale = choose_symmetric(x, (1, x.shape[1]), -127, 127)
    return quantize(x, scale, None, -127, 127, torch.int8), scale


@int8_rescaled_matmul.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[1]))


@int8_rescaled_matmul.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A batch of `a` is one more leading dimension."""
    if in_dims[0] is None or in_dims[1] is not None:
        raise NotImplementedError("int8_rescaled_matmul under vmap: only the first operand may be batched.")
    return int8_rescaled_matmul(a.movedim(in_dims[0], 0), b), 0


class Int8RescaledMatmul(torch.autograd.Function):
    """`int8_rescaled_matmul`, differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return int8_rescaled_matmul(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        multiply = Int8RescaledMatmul.apply
        grad_a = multiply(grad, b.mT) if ctx.needs_input_grad[0] else None
        return grad_a, multiply(_matrix(a).mT, _matrix(grad)) if ctx.needs_input_grad[1] else None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    Int8RescaledMatmul.setup_context(ctx, inputs, output)


int8_rescaled_matmul.register_autograd(Int8RescaledMatmul.backward, setup_context=_setup)
