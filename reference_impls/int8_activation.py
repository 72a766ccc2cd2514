"""`Int8ActivationTensor`: an int8 weight whose linear rounds its activation to int8 too, and multiplies integers.

What it teaches: a child that adds an optional inner tensor, and kernels that are tried before its parent's. Static
quantization (a given scale) goes before dynamic (the scale of each row), and that before the parent's weight-only kernel,
which is left where the weight isn't quantized by rows.
"""

import torch
from typing_extensions import Self

from reference_impls.block_tensor import FromHighPrecision, block_for, plain_source
from reference_impls.int8 import Int8Tensor
from reference_impls.kernels.int8_linear import int8_dynamic_linear, int8_static_linear
from reference_impls.linear import register_linear_kernel


class Int8ActivationTensor(Int8Tensor):
    """An `Int8Tensor` with the linear x (rounded to int8) @ weight.T; see `from_hp`.

    Args:
        activation_scale: float32, of one element: the step of static quantization; None: dynamic.

    The others are those of `Int8Tensor`.
    """

    optional_inner_names = ("activation_scale",)

    activation_scale: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type[Self],
        qdata: torch.Tensor,
        scale: torch.Tensor,
        activation_scale: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        shares_scale: bool = False,
        outer_size: torch.Size | None = None,
        outer_stride: tuple[int, ...] | None = None,
    ) -> Self:
        return Int8Tensor.__new__(cls, qdata, scale, dtype, shares_scale, outer_size, outer_stride)

    @classmethod
    def from_hp(cls, hp: torch.Tensor, activation_scale: float | None = None) -> Self:
        """Quantize a floating-point tensor by rows, as `Int8Tensor.from_hp` does.

        Args:
            hp: at least 1-D.
            activation_scale: the step of static quantization, positive: activations beyond 127 steps saturate. None: each row of an
                activation gets a step of its own, max|row| / 127.

        Raises ValueError for a scale that isn't positive.
        """
        if activation_scale is not None and not activation_scale > 0:
            raise ValueError(f"activation_scale {activation_scale} must be positive.")
        values = plain_source(hp, "from_hp")
        return FromHighPrecision.apply(values, cls, block_for(hp.shape, "row"), activation_scale)

    @classmethod
    def quantized(cls, hp: torch.Tensor, block: tuple[int, ...], activation_scale: float | None = None) -> Self:
        """`from_hp` without a gradient."""
        weight = Int8Tensor.quantized(hp, block)
        step = None if activation_scale is None else weight.scale.new_full((), activation_scale, dtype=torch.float32)
        return cls(weight.qdata, weight.scale, step, hp.dtype)


def _by_rows(weight: Int8ActivationTensor) -> str | None:
    if weight.scale.shape == (weight.shape[0], 1):
        return None
    return f"its scales {tuple(weight.scale.shape)} aren't one for each of {weight.shape[0]} rows"


def _not_static(x: torch.Tensor, weight: Int8ActivationTensor, bias: torch.Tensor | None) -> str | None:
    return "it has no activation_scale" if weight.activation_scale is None else _by_rows(weight)


def _not_dynamic(x: torch.Tensor, weight: Int8ActivationTensor, bias: torch.Tensor | None) -> str | None:
    return "it has an activation_scale" if weight.activation_scale is not None else _by_rows(weight)


@register_linear_kernel(Int8ActivationTensor, "int8_static", precedence=20, when=_not_static, op=int8_static_linear)
def _static(x: torch.Tensor, weight: Int8ActivationTensor, bias: torch.Tensor | None) -> torch.Tensor:
    return int8_static_linear(x, weight.activation_scale, weight.qdata, weight.scale, bias)


@register_linear_kernel(Int8ActivationTensor, "int8_dynamic", precedence=10, when=_not_dynamic, op=int8_dynamic_linear)
def _dynamic(x: torch.Tensor, weight: Int8ActivationTensor, bias: torch.Tensor | None) -> torch.Tensor:
    return int8_dynamic_linear(x, weight.qdata, weight.scale, bias)


torch.serialization.add_safe_globals([Int8ActivationTensor])
