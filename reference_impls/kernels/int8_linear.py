"""Linears with an int8 weight, as custom operators on plain tensors.

    weight-only   out = x @ dequantize(qdata, scale).T + bias
    activation    out = (xq @ qdata.T) * x_scale * scale.T + bias      with   xq = clamp(round(x / x_scale), -127, 127)

The weight-only linear dequantizes to the dtype of `x` before the product. Scaling after it would save work, but in float16
the unscaled sums overflow (activations of 100 and K = 1024 are enough), and group-wise scales can't be pulled out.

With a quantized activation the product is one of integers, exact in int32. The scale of `x` is that of each row
(dynamic: max|row| / 127, Dettmers et al. 2022, "LLM.int8()", eq. 2 without outliers) or is given (static: values beyond
127 x_scale saturate). Its gradient passes straight through the rounding.
"""

from typing import Any

import torch
import torch.nn.functional as F

from reference_impls.kernels.custom_op import custom_op
from reference_impls.kernels.linear_gradients import Codes, Wanted, gradients
from reference_impls.kernels.quantization import choose_symmetric, dequantize, quantize, unclipped_codes

Gradients = tuple[torch.Tensor | None, ...]


@custom_op("reference_impls::int8_weight_only_linear", triton="triton_weight_only")
def int8_weight_only_linear(
    x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Linear of `x` (..., K) with codes (N, K), scales (N / b_0, K / b_1) and bias (N,); gives (..., N) in x's dtype."""
    return F.linear(x, dequantize(qdata, scale, None, x.dtype), bias).contiguous()


@custom_op("reference_impls::int8_dynamic_linear", triton="triton_int8")
def int8_dynamic_linear(
    x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `int8_weight_only_linear`, with each row of `x` rounded to int8; scales (N, 1)."""
    return _integer_linear(x, row_scale(x), qdata, scale, bias)


@custom_op("reference_impls::int8_static_linear", triton="triton_int8")
def int8_static_linear(
    x: torch.Tensor, x_scale: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `int8_dynamic_linear`, with one given scale of `x` (a tensor of one element)."""
    return _integer_linear(x, x_scale.reshape(1, 1), qdata, scale, bias)


def row_scale(x: torch.Tensor) -> torch.Tensor:
    """(rows, 1), in float32."""
    rows = x.reshape(-1, x.shape[-1]).float()
    return choose_symmetric(rows, (1, max(rows.shape[1], 1)), -127, 127)


def row_codes(x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
    """`x` as rows of int8 codes in -127..127; `x_scale` is (rows, 1) or (1, 1)."""
    return quantize(x.reshape(-1, x.shape[-1]).float(), x_scale, None, -127, 127, torch.int8)


def _integer_linear(
    x: torch.Tensor, x_scale: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    out = int_mm(row_codes(x, x_scale), qdata.t()).to(scale.dtype) * x_scale * scale.t()
    out = out if bias is None else out + bias
    return out.to(x.dtype).reshape(*x.shape[:-1], qdata.shape[0])


def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The exact product of int8 matrices, by the integer units where torch has such a kernel for these sizes."""
    fits = a.device.type == "cpu" or (a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0)
    if fits and a.numel() and b.numel():
        # it takes the stride of a dimension of size 1, which may be anything, for the distance of rows; a fresh copy has the usual one
        a, b = (t.clone(memory_format=torch.contiguous_format) if 1 in t.shape else t for t in (a, b))
        return torch._int_mm(a, b)
    # float64 holds every sum of fewer than 2**39 products of int8
    return a.double() @ b.double()


@int8_weight_only_linear.register_fake
@int8_dynamic_linear.register_fake
def _(x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


@int8_static_linear.register_fake
def _(
    x: torch.Tensor, x_scale: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


# --- gradients --------------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _gradients(ctx: Any, grad: torch.Tensor, used: torch.Tensor) -> Gradients:
    """`used` is the activation that was multiplied: `x`, or what it was rounded to."""
    _, qdata, scale = ctx.saved_tensors
    wanted = Wanted.of(ctx, x=0, scale=2, bias=3)
    grad_x, grad_scale, _, grad_bias = gradients(grad, used, Codes(qdata, scale), wanted)
    return grad_x, None, grad_scale, grad_bias


def _weight_only_backward(ctx: Any, grad: torch.Tensor) -> Gradients:
    return _gradients(ctx, grad, ctx.saved_tensors[0])


def _dynamic_backward(ctx: Any, grad: torch.Tensor) -> Gradients:
    x = ctx.saved_tensors[0]
    return _gradients(ctx, grad, _rounded(x, row_scale(x)))


def _setup_static(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])


def _static_backward(ctx: Any, grad: torch.Tensor) -> Gradients:
    """Where `x` saturates its gradient is zero, as in torch.fake_quantize_*."""
    x, x_scale, qdata, scale = ctx.saved_tensors
    wanted = Wanted.of(ctx, x=0, scale=3, bias=4)
    used = _rounded(x, x_scale.reshape(1, 1))
    grad_x, grad_scale, _, grad_bias = gradients(grad, used, Codes(qdata, scale), wanted)
    if grad_x is not None:
        grad_x = grad_x * (unclipped_codes(x.float(), x_scale.reshape([1] * x.dim()), None, -127, 127).abs() <= 127)
    return grad_x, None, None, grad_scale, grad_bias


def _rounded(x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
    """`x`, as rows, quantized and dequantized."""
    return dequantize(row_codes(x, x_scale), x_scale, None, x.dtype)


int8_weight_only_linear.register_autograd(_weight_only_backward, setup_context=_setup)
int8_dynamic_linear.register_autograd(_dynamic_backward, setup_context=_setup)
int8_static_linear.register_autograd(_static_backward, setup_context=_setup_static)
