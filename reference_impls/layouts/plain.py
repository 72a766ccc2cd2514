"""Codes as they are, one for each element: `PlainLayout`."""

from dataclasses import dataclass

import torch
from typing_extensions import Self

from reference_impls.affine import AffineQuantizedTensor, Layout, TensorImpl
from reference_impls.block_tensor import block_wrapper, checked_dtype
from reference_impls.kernels.affine_linear import affine_linear
from reference_impls.linear import register_linear_kernel


@dataclass(frozen=True)
class PlainLayout(Layout):
    """int8 or uint8, whichever holds quant_min..quant_max."""

    def pack(
        self, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, quant_min: int, quant_max: int
    ) -> "PlainImpl":
        for dtype in (torch.int8, torch.uint8):
            if torch.iinfo(dtype).min <= quant_min and quant_max <= torch.iinfo(dtype).max:
                return PlainImpl(codes.to(dtype), scale, zero_point, quant_min, quant_max, scale.dtype)
        raise ValueError(f"codes {quant_min}..{quant_max} fit neither int8 nor uint8.")


class PlainImpl(TensorImpl):
    """The impl of `PlainLayout`: `qdata` in the outer shape."""

    inner_names = ("qdata", "scale")
    optional_inner_names = ("zero_point",)
    attribute_names = ("quant_min", "quant_max", "dtype", "shares_scale")

    qdata: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[Self],
        qdata: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None = None,
        quant_min: int = 0,
        quant_max: int = 255,
        dtype: torch.dtype = torch.float32,
        shares_scale: bool = False,
        outer_size: torch.Size | None = None,
        outer_stride: tuple[int, ...] | None = None,
    ) -> Self:
        checked_dtype(scale, dtype, qdata=qdata, zero_point=zero_point)
        return block_wrapper(cls, qdata.shape, qdata, dtype, outer_size, outer_stride)

    @property
    def _layout(self) -> PlainLayout:
        return PlainLayout()

    def codes(self) -> torch.Tensor:
        return self.qdata

    def write_codes(self, codes: torch.Tensor) -> None:
        self.qdata.copy_(codes)


def _not_plain(x: torch.Tensor, weight: AffineQuantizedTensor, bias: torch.Tensor | None) -> str | None:
    return None if isinstance(weight.tensor_impl, PlainImpl) else f"its layout is {weight._layout}"


@register_linear_kernel(AffineQuantizedTensor, "affine_plain", precedence=0, when=_not_plain, op=affine_linear)
def _plain(x: torch.Tensor, weight: AffineQuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    impl = weight.tensor_impl
    return affine_linear(x, impl.codes(), impl.scale, impl.zero_point, impl.quant_min, impl.quant_max, bias)


torch.serialization.add_safe_globals([PlainImpl, PlainLayout])
