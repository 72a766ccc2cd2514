"""`BlockTensor`: a wrapper of codes and of parameters (scale, zero point) of blocks of them.

A child declares which of its inner tensors are codes and which are parameters, how many codes share an entry, how to
read values and how to write them. From this follow its views (`block_views.py`), which share memory with what they were
taken from; copies into it, which requantize into the same inner tensors, so that aliases see them; and padding.

What follows from values alone (all other operators) is in `values.py`.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch._ops import OpOverload
from typing_extensions import Self

from reference_impls import block_strided, block_views
from reference_impls.block_views import Blocks
from reference_impls.kernels.quantization import block_size
from reference_impls.linear_arguments import checked_linear
from reference_impls.values import ValueTensor

aten = torch.ops.aten

Granularity = str | int


class BlockTensor(ValueTensor):
    """Base class of quantized tensors.

    A child's inner tensors are `code_names` and then `parameter_names`. Its attributes include "dtype" and "shares_scale": this
    is a view of a part of a block, whose parameters also belong to elements outside, so that it can't be written to.

    The code 0, where the zero point is 0, must stand for the value 0.
    """

    code_names: ClassVar[tuple[str, ...]] = ("qdata",)
    parameter_names: ClassVar[tuple[str, ...]] = ("scale",)

    shares_scale: bool

    @property
    def blocks(self) -> Blocks:
        """The inner tensors, as what views act on."""
        inner = self.inner_tensors
        codes, parameters = (
            tuple(inner[name] for name in names if name in inner) for names in (self.code_names, self.parameter_names)
        )
        return Blocks(tuple(self.shape), codes, parameters, self.shares_scale)

    def of_blocks(self, blocks: Blocks) -> Self:
        """A tensor like this one around other codes and parameters."""
        present = [name for name in (*self.code_names, *self.parameter_names) if getattr(self, name) is not None]
        viewed = dict(zip(present, (*blocks.codes, *blocks.parameters), strict=True))
        return self.rebuilt({**self.inner_tensors, **viewed}, **self.attributes_of_blocks(blocks))

    def attributes_of_blocks(self, blocks: Blocks) -> dict[str, Any]:
        """The attributes that a view changes."""
        return {"shares_scale": blocks.partial}

    def attributes_of_copy(self) -> dict[str, Any]:
        return {"shares_scale": False}

    @property
    def block_size(self) -> tuple[int, ...]:
        """Elements per parameter along each dimension."""
        return self.blocks.block

    def check_writable(self, operation: str) -> None:
        if self.shares_scale:
            raise NotImplementedError(
                f"{operation}: this {type(self).__name__} of shape {tuple(self.shape)} is a view of a part of a block. A "
                "write needs a new scale, which would change the rest of the block. Write to the whole block, or "
                "to a clone."
            )
        if any(n > 1 and step == 0 for n, step in zip(self.shape, self.stride(), strict=True)):
            raise NotImplementedError(
                f"{operation}: elements of this expanded {type(self).__name__} of shape {tuple(self.shape)} share "
                "memory. Write to a clone."
            )


def block_wrapper(
    cls: Any,
    shape: torch.Size,
    codes: torch.Tensor,
    dtype: torch.dtype,
    outer_size: torch.Size | None,
    outer_stride: tuple[int, ...] | None,
) -> Any:
    """The wrapper of a tensor of `shape` whose first codes these are; `outer_size` and `outer_stride` come first where given."""
    blocks = Blocks(tuple(shape), (codes,), ())
    return torch.Tensor._make_wrapper_subclass(
        cls,
        shape if outer_size is None else outer_size,
        strides=blocks.stride if outer_stride is None else outer_stride,
        storage_offset=blocks.storage_offset,  # compiled code regenerates views from it
        dtype=dtype,
        device=codes.device,
        layout=codes.layout,
    )


def checked_dtype(scale: torch.Tensor, dtype: torch.dtype, **codes: torch.Tensor | None) -> None:
    """Raise where a constructor was given parts that don't fit together."""
    if not scale.is_floating_point() or not dtype.is_floating_point:
        raise TypeError(f"scale and dtype must be floating-point; they are {scale.dtype} and {dtype}.")
    for name, part in codes.items():
        if part is None:
            continue
        if part.dim() != scale.dim():
            raise ValueError(f"{name} {tuple(part.shape)} and scale {tuple(scale.shape)} must have as many dimensions.")
        if part.device != scale.device:
            raise ValueError(f"{name} is on {part.device} and scale on {scale.device}; move one of them.")


class FromHighPrecision(torch.autograd.Function):
    """Quantization with the straight-through gradient: that of the quantized tensor, as it is.

    `cls.quantized(hp, *options)` does the work, on float32 or float64.
    """

    @staticmethod
    def forward(hp: torch.Tensor, cls: Any, *options: Any) -> torch.Tensor:
        return cls.quantized(hp, *options)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.options = len(inputs) - 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, *([None] * ctx.options)


def plain_source(hp: torch.Tensor, name: str) -> torch.Tensor:
    """The argument of a constructor from high precision, checked; its values if it is quantized itself."""
    if not isinstance(hp, torch.Tensor) or not hp.is_floating_point():
        raise TypeError(f"{name} takes a floating-point tensor, not {getattr(hp, 'dtype', type(hp).__name__)}.")
    if not hp.dim():
        raise ValueError(f"{name}: a 0-dimensional tensor has no rows to quantize; use at least one dimension, hp.reshape(1).")
    return hp.dequantize() if isinstance(hp, ValueTensor) else hp


def precise(hp: torch.Tensor) -> torch.Tensor:
    """`hp` in the dtype in which scales are computed: float32, or float64 for a float64 source."""
    return hp.to(torch.float64 if hp.dtype == torch.float64 else torch.float32)


def block_for(shape: torch.Size, granularity: Granularity) -> tuple[int, ...]:
    """The block that a granularity ("row", "tensor" or a group size) means for a tensor of that shape."""
    row = max(shape[-1], 1)
    if granularity == "tensor":
        return tuple(max(n, 1) for n in shape)
    if granularity == "row":
        return (1,) * (len(shape) - 1) + (row,)
    if isinstance(granularity, bool) or not isinstance(granularity, int):
        raise ValueError(f'granularity {granularity!r} is unknown: use "row", "tensor" or a group size.')
    if granularity < 1 or row % granularity:
        raise ValueError(
            f"group size {granularity} doesn't divide the last dimension of {tuple(shape)}, {shape[-1]}: use a divisor "
            f'of {shape[-1]}, "row" or "tensor".'
        )
    return (1,) * (len(shape) - 1) + (granularity,)


# --- views: same memory, same class -----------------------------------------------------------------------------

VIEWS = {
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


@BlockTensor.implements(VIEWS)
def _view(func: OpOverload, self: BlockTensor, *arguments: Any) -> BlockTensor | list[BlockTensor]:
    result = VIEWS[func](self.blocks, *arguments)
    return [self.of_blocks(blocks) for blocks in result] if isinstance(result, list) else self.of_blocks(result)


# --- writes -----------------------------------------------------------------------------------------------------


@BlockTensor.implements(aten.copy_.default)
def _copy_(func: OpOverload, self: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    if not isinstance(self, BlockTensor):
        return self.copy_(src.values_copy(), non_blocking)
    self.check_writable("copy_")
    if _same_blocks(self, src):
        for mine, other in zip(self.inner_tensors.values(), src.inner_tensors.values(), strict=True):
            mine.copy_(other, non_blocking)
        return self
    values = src.values_copy() if isinstance(src, ValueTensor) else src
    self.write_values(_broadcast(values.to(self.device, self.dtype, non_blocking), self))
    return self


def _same_blocks(self: BlockTensor, src: torch.Tensor) -> bool:
    """Whether copying each inner tensor copies the values exactly."""
    if type(src) is not type(self) or src.shape != self.shape:
        return False
    mine, other = ({**t.attributes, "shares_scale": False} for t in (self, src))
    parts = zip(self.inner_tensors.values(), src.inner_tensors.values(), strict=False)
    same_parts = len(self.inner_tensors) == len(src.inner_tensors)
    return mine == other and same_parts and all(a.shape == b.shape and a.dtype == b.dtype for a, b in parts)


def _broadcast(values: torch.Tensor, target: BlockTensor) -> torch.Tensor:
    try:
        return values.expand(target.shape)
    except RuntimeError:
        raise ValueError(
            f"copy_: a tensor of shape {tuple(values.shape)} can't be broadcast to the {type(target).__name__} of shape "
            f"{tuple(target.shape)}."
        ) from None


@BlockTensor.implements(aten.zero_.default)
def _zero_(func: OpOverload, self: BlockTensor) -> BlockTensor:
    """Zero needs no new scale: where there is no zero point either, a part of a block can be zeroed.

    Only a NaN must go from the scale, because 0 * NaN is NaN. A part of a block that is NaN stays so: the rest of it is as well.
    """
    blocks = self.blocks
    if len(blocks.parameters) > 1:
        self.check_writable("zero_")
    for part in (*blocks.codes, *blocks.parameters[1:]):
        part.zero_()
    if not self.shares_scale:
        blocks.parameters[0].nan_to_num_(nan=1.0)
    return self


@BlockTensor.implements(aten.fill_.Scalar)
def _fill_(func: OpOverload, self: BlockTensor, value: float) -> BlockTensor:
    if value == 0:
        return self.zero_()
    # made from an inner tensor: a factory function in a handler would make a real tensor beside fake ones
    return self.copy_(self.blocks.parameters[0].new_full((), value, dtype=self.dtype))


# --- padding ----------------------------------------------------------------------------------------------------


@BlockTensor.implements(aten.constant_pad_nd.default)
def pad_blocks(func: OpOverload, self: BlockTensor, pad: list[int], value: float) -> torch.Tensor:
    """Zeros in whole blocks are added as codes (uneven shards of a DTensor are padded so); any others give values."""
    blocks = self.blocks
    pads = [_padding_in_entries(blocks, part, pad) for part in (*blocks.codes, *blocks.parameters)]
    if value != 0 or None in pads:
        return func(self.values_copy(), pad, value)
    # any positive scale will do for blocks of zeros; codes and zero point are 0
    fills = [0] * len(blocks.codes) + [1] + [0] * (len(blocks.parameters) - 1)
    parts = [func(t, p, v) for t, p, v in zip((*blocks.codes, *blocks.parameters), pads, fills, strict=True)]
    shape = [n + sum(_of_dim(pad, self.dim() - 1 - d)) for d, n in enumerate(self.shape)]
    count = len(blocks.codes)
    return self.of_blocks(Blocks(tuple(shape), tuple(parts[:count]), tuple(parts[count:])))


def _of_dim(pad: list[int], i: int) -> list[int]:
    return pad[2 * i : 2 * i + 2]


def _padding_in_entries(blocks: Blocks, part: torch.Tensor, pad: list[int]) -> list[int] | None:
    """`pad` (before and after, from the last dimension on) in entries of an inner tensor, or None where it cuts one."""
    result = []
    for i, count in enumerate(pad):
        dim = len(blocks.shape) - 1 - i // 2
        each = block_size(blocks.shape, part.shape)[dim]
        is_parameter = any(part is p for p in blocks.parameters)
        # a single block just grows, unless it has a zero point: the code 0 isn't the value 0 in it
        one_block = is_parameter and each > 1 and part.shape[dim] == 1 and len(blocks.parameters) == 1
        if count < 0 or (count % each and not one_block):
            return None
        result.append(0 if one_block else count // each)
    return result


# --- linear -----------------------------------------------------------------------------------------------------


@BlockTensor.implements_torch_function(F.linear)
def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return checked_linear(input, weight, bias)
