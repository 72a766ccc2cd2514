"""The operators of `Int8Tensor` that aren't derived from its values: views, writes, padding, linear."""

from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload

from reference_impls import block_strided, block_views
from reference_impls.block_views import Blocks
from reference_impls.int8 import Int8Tensor
from reference_impls.int8_linear import checked_linear
from reference_impls.kernels.int8_linear import int8_weight_only_linear
from reference_impls.values import ValueTensor

aten = torch.ops.aten

# --- views: same memory, same class -----------------------------------------------------------------------------

_VIEWS = {
    aten.t.default: block_views.t,
    aten.transpose.int: block_views.transpose,
    aten.permute.default: block_views.permute,
    aten.unsqueeze.default: block_views.unsqueeze,
    aten.squeeze.default: block_views.squeeze,
    aten.squeeze.dim: block_views.squeeze,
    aten.squeeze.dims: block_views.squeeze,
    aten.expand.default: block_views.expand,
    aten.select.int: block_views.select,
    aten.slice.Tensor: block_views.slice_,
    aten.split.Tensor: block_views.split,
    aten.split_with_sizes.default: block_views.split_with_sizes,
    aten.unbind.int: block_views.unbind,
    aten.view.default: block_views.view,
    aten._unsafe_view.default: block_views.view,
    aten.as_strided.default: block_strided.as_strided,
}


@Int8Tensor.implements(_VIEWS)
def _view(func: OpOverload, self: Int8Tensor, *arguments: Any) -> Int8Tensor | list[Int8Tensor]:
    result = _VIEWS[func](self.blocks, *arguments)
    return [_rebuilt(self, blocks) for blocks in result] if isinstance(result, list) else _rebuilt(self, result)


def _rebuilt(self: Int8Tensor, blocks: Blocks) -> Int8Tensor:
    return self.rebuilt({"qdata": blocks.qdata, "scale": blocks.scale}, shares_scale=blocks.partial)


# --- writes -----------------------------------------------------------------------------------------------------


@Int8Tensor.implements(aten.copy_.default)
def _copy_(func: OpOverload, self: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    if not isinstance(self, Int8Tensor):
        return self.copy_(src.values_copy(), non_blocking)
    self.check_writable("copy_")
    if _same_blocks(self, src):
        self.qdata.copy_(src.qdata, non_blocking)
        self.scale.copy_(src.scale, non_blocking)
        return self
    values = src.values_copy() if isinstance(src, ValueTensor) else src
    self.write_values(_broadcast(values.to(self.device, self.dtype, non_blocking), self))
    return self


def _same_blocks(self: Int8Tensor, src: torch.Tensor) -> bool:
    """Whether copying codes and scales copies the values exactly."""
    return (
        isinstance(src, Int8Tensor)
        and src.dtype == self.dtype
        and src.shape == self.shape
        and src.scale.shape == self.scale.shape
        and src.scale.dtype == self.scale.dtype
    )


def _broadcast(values: torch.Tensor, target: Int8Tensor) -> torch.Tensor:
    try:
        return values.expand(target.shape)
    except RuntimeError:
        raise ValueError(
            f"copy_: a tensor of shape {tuple(values.shape)} can't be broadcast to the {type(target).__name__} of shape "
            f"{tuple(target.shape)}."
        ) from None


@Int8Tensor.implements(aten.zero_.default)
def _zero_(func: OpOverload, self: Int8Tensor) -> Int8Tensor:
    """Zero is the one value that needs no new scale, so that any view can be zeroed."""
    self.qdata.zero_()
    return self


@Int8Tensor.implements(aten.fill_.Scalar)
def _fill_(func: OpOverload, self: Int8Tensor, value: float) -> Int8Tensor:
    if value == 0:
        return self.zero_()
    # made from an inner tensor: a factory function in a handler would make a real tensor beside fake ones
    return self.copy_(self.scale.new_full((), value, dtype=self.dtype))


# --- padding ---------------------------------------------------------------------------------------------------


@Int8Tensor.implements(aten.constant_pad_nd.default)
def _pad(func: OpOverload, self: Int8Tensor, pad: list[int], value: float) -> torch.Tensor:
    """Zeros in whole blocks are added as codes (uneven shards of a DTensor are padded so); any others give values."""
    scale_pad = _padding_of_scales(self, pad)
    if value != 0 or scale_pad is None:
        return func(self.values_copy(), pad, value)
    # any positive scale will do for blocks of zeros
    inner = {"qdata": func(self.qdata, pad, 0), "scale": func(self.scale, scale_pad, 1.0)}
    return self.rebuilt(inner, **self.attributes_of_copy())


def _padding_of_scales(self: Int8Tensor, pad: list[int]) -> list[int] | None:
    """`pad` (before and after, from the last dimension on) in blocks, or None where it cuts one."""
    scale_pad = []
    for i, count in enumerate(pad):
        dim = self.dim() - 1 - i // 2
        block = self.block_size[dim]
        one_block = block > 1 and self.scale.shape[dim] == 1  # it just grows
        if count < 0 or (count % block and not one_block):
            return None
        scale_pad.append(0 if one_block else count // block)
    return scale_pad


# --- linear -----------------------------------------------------------------------------------------------------


@Int8Tensor.implements_torch_function(F.linear)
def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return checked_linear(input, weight, bias)


@Int8Tensor.implements(torch.ops.reference_impls.linear.default)
def _linear_kernel(func: OpOverload, x: torch.Tensor, weight: Int8Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return int8_weight_only_linear(x, weight.qdata, weight.scale, bias)
