"""`Int8MixedPrecisionTensor`: a full-precision weight whose linear multiplies int8, forward and backward.

What it teaches: a class that keeps its values as they are, and changes how they are multiplied. The optimizer sees a plain
full-precision weight, and loses nothing to rounding; the three products of a linear (its output, the gradient of the input and
that of the weight) round both operands to int8 and rescale the result.

All that it adds to `ValueTensor` are views, which are those of its one inner tensor.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload
from typing_extensions import Self

from reference_impls import schema
from reference_impls.block_tensor import plain_source
from reference_impls.kernels.int8_matmul import Int8RescaledMatmul, int8_rescaled_matmul
from reference_impls.linear import register_linear_kernel
from reference_impls.linear_arguments import checked_linear
from reference_impls.values import ValueTensor

aten = torch.ops.aten


class Int8MixedPrecisionTensor(ValueTensor):
    """The values of a plain tensor; see `from_hp`.

    Args:
        data: floating-point, any shape: it gives the outer shape, strides, storage offset, dtype and device.
    """

    inner_names = ("data_",)

    data_: torch.Tensor
    backward_matmul = staticmethod(Int8RescaledMatmul.apply)

    @staticmethod
    def __new__(
        cls: type[Self],
        data_: torch.Tensor,
        outer_size: torch.Size | None = None,
        outer_stride: tuple[int, ...] | None = None,
    ) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data_.shape if outer_size is None else outer_size,
            strides=data_.stride() if outer_stride is None else outer_stride,
            storage_offset=data_.storage_offset(),  # compiled code regenerates views from it
            dtype=data_.dtype,
            device=data_.device,
            layout=data_.layout,
        )

    @classmethod
    def from_hp(cls, hp: torch.Tensor) -> Self:
        """A weight with the values of `hp`, in memory of its own; gradients pass through.

        Raises TypeError for a tensor that isn't floating-point.
        """
        return _FromHighPrecision.apply(plain_source(hp, "from_hp"), cls)

    def values_copy(self) -> torch.Tensor:
        return self.data_.clone(memory_format=torch.contiguous_format)

    def write_values(self, values: torch.Tensor) -> None:
        self.data_.copy_(values)

    def check_writable(self, operation: str) -> None:
        if any(n > 1 and step == 0 for n, step in zip(self.shape, self.stride(), strict=True)):
            raise NotImplementedError(f"{operation}: elements of this expanded tensor share memory. Write to a clone.")


class _FromHighPrecision(torch.autograd.Function):
    @staticmethod
    def forward(hp: torch.Tensor, cls: type[Int8MixedPrecisionTensor]) -> Int8MixedPrecisionTensor:
        return cls(hp.clone())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


@Int8MixedPrecisionTensor.implements(
    [
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        aten.view.default,
        aten._unsafe_view.default,
        aten.as_strided.default,
        aten.diagonal.default,
        aten.unfold.default,
    ]
)
def _view(func: OpOverload, self: Int8MixedPrecisionTensor, *arguments: Any) -> Any:
    viewed = schema.call(func, (self.data_, *arguments))
    return [self.rebuilt({"data_": part}) for part in viewed] if isinstance(viewed, list) else self.rebuilt({"data_": viewed})


@Int8MixedPrecisionTensor.implements([aten._to_copy.default, aten.empty_like.default])
def _to_copy(func: OpOverload, self: Int8MixedPrecisionTensor, dtype: torch.dtype | None, *options: Any) -> torch.Tensor:
    if dtype is not None and not dtype.is_floating_point:
        return schema.call(func, (self.data_, dtype, *options))
    return self.mapped(lambda inner: schema.call(func, (inner, dtype, *options)))


@Int8MixedPrecisionTensor.implements(aten.copy_.default)
def _copy_(func: OpOverload, self: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    values = src.data_ if isinstance(src, Int8MixedPrecisionTensor) else src
    (self.data_ if isinstance(self, Int8MixedPrecisionTensor) else self).copy_(values, non_blocking)
    return self


@Int8MixedPrecisionTensor.implements_torch_function(F.linear)
def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return checked_linear(input, weight, bias)


@register_linear_kernel(Int8MixedPrecisionTensor, "int8_mixed_precision", precedence=0, op=int8_rescaled_matmul)
def _int8(x: torch.Tensor, weight: Int8MixedPrecisionTensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = int8_rescaled_matmul(x, weight.data_.mT)
    return out if bias is None else out + bias


torch.serialization.add_safe_globals([Int8MixedPrecisionTensor])
