"""`dequantize` and `linear` as operators of our own, which take a quantized tensor as a whole.

Why operators, and not functions that read the inner tensors? A call of an operator reaches a class's
`__torch_dispatch__` below autograd, undecomposed; so it is differentiable with the formula given here, is recorded as
one call by torch.export (which can't follow a look inside an intermediate subclass), and runs under fake tensors.
Each comes twice: the operator, and the same as an autograd.Function (what torch.func requires), which the rest of the
package calls. A class says what the operator does with `@Class.implements(torch.ops.reference_impls.linear.default)`; the
definitions here are those for plain tensors.
"""

from typing import Any

import torch
import torch.nn.functional as F

from reference_impls.kernels.linear_gradients import bias_gradient, weight_gradient


@torch.library.custom_op("reference_impls::dequantize", mutates_args=())
def dequantize(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, as a new plain tensor of the same shape and dtype."""
    return tensor.clone()


@dequantize.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


@dequantize.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    return dequantize(tensor), in_dims[0]


class Dequantize(torch.autograd.Function):
    """`dequantize`, differentiable: the gradient of a quantized tensor is that of its values."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        return dequantize(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


dequantize.register_autograd(Dequantize.backward)


@torch.library.custom_op("reference_impls::linear", mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K) @ weight (N, K).T + bias (N,): gives a contiguous (..., N) in the dtype of `x`."""
    return F.linear(x, weight, bias).contiguous()


@linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@linear.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], x: Any, weight: Any, bias: Any = None) -> tuple[torch.Tensor, int]:
    """A batch of inputs is one more leading dimension."""
    if in_dims[0] is None or any(dim is not None for dim in in_dims[1:]):
        raise NotImplementedError("linear under vmap: only the input may be batched, not the weight or the bias.")
    return linear(x.movedim(in_dims[0], 0), weight, bias), 0


class Linear(torch.autograd.Function):
    """`linear`, differentiable: the weight's gradient is that of its values, dense also for a quantized weight.

    A weight that has a `backward_matmul` computes the products of the backward with it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        matmul = getattr(weight, "backward_matmul", torch.matmul)
        grad_x = matmul(grad, Dequantize.apply(weight)) if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(x, grad, matmul) if ctx.needs_input_grad[1] else None
        grad_bias = bias_gradient(grad) if len(ctx.needs_input_grad) > 2 and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    Linear.setup_context(ctx, inputs, output)


linear.register_autograd(Linear.backward, setup_context=_setup_linear)
