"""4-bit codes in the order in which an int4 kernel reads them: `Int4Layout`.

`UintxLayout(4)` has two codes a byte too. Here they lie in 32-bit words, from which a kernel unpacks two neighbours at once (see
`kernels/int4_words.py`), and a word has one scale, which a kernel reads once. The price: columns are cut at words only.
"""

from dataclasses import dataclass

import torch
from typing_extensions import Self

from reference_impls.affine import AffineQuantizedTensor, Layout, TensorImpl
from reference_impls.block_tensor import block_wrapper, checked_dtype
from reference_impls.kernels.int4_words import CODES_PER_WORD, codes_of_words, int4_words_linear, pack_words, unpack_words
from reference_impls.kernels.quantization import block_size
from reference_impls.linear import register_linear_kernel
from reference_impls.packed_tensor import PackedTensor, packed_shape


@dataclass(frozen=True)
class Int4Layout(Layout):
    """Codes within -8..7 or 0..15, eight a word along the last dimension; groups of a multiple of eight."""

    def pack(
        self, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, quant_min: int, quant_max: int
    ) -> "Int4Impl":
        if not (-8 <= quant_min <= quant_max <= 7 or 0 <= quant_min <= quant_max <= 15):
            raise ValueError(f"codes {quant_min}..{quant_max} are neither within -8..7 nor within 0..15.")
        words = pack_words(codes)
        group = block_size(codes.shape, scale.shape)[-1]
        if group % CODES_PER_WORD and codes.numel():
            raise ValueError(f"a group of {group} elements cuts a word: use a multiple of {CODES_PER_WORD}.")
        return Int4Impl(words, scale, zero_point, codes.dim() - 1, quant_min, quant_max, scale.dtype)


class Int4Impl(TensorImpl, PackedTensor):
    """The impl of `Int4Layout`: int32 `words` along `packed_dim`."""

    inner_names = ("words", "scale")
    optional_inner_names = ("zero_point",)
    attribute_names = ("packed_dim", "quant_min", "quant_max", "dtype", "shares_scale")
    code_names = ("words",)

    words: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[Self],
        words: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None = None,
        packed_dim: int = 1,
        quant_min: int = 0,
        quant_max: int = 15,
        dtype: torch.dtype = torch.float32,
        shares_scale: bool = False,
        outer_size: torch.Size | None = None,
        outer_stride: tuple[int, ...] | None = None,
    ) -> Self:
        checked_dtype(scale, dtype, words=words, zero_point=zero_point)
        if words.dtype != torch.int32:
            raise TypeError(f"words of codes must be int32, not {words.dtype}.")
        return block_wrapper(cls, packed_shape(words, CODES_PER_WORD, packed_dim), words, dtype, outer_size, outer_stride)

    @property
    def _layout(self) -> Int4Layout:
        return Int4Layout()

    def codes(self) -> torch.Tensor:
        return codes_of_words(self.words, self.packed_dim, self.quant_min)

    def write_codes(self, codes: torch.Tensor) -> None:
        self.words.copy_(pack_words(codes, self.packed_dim))

    def packed_along(self, dim: int) -> list[torch.Tensor]:
        return [pack_words(unpack_words(self.words, self.packed_dim), dim)]


def _not_int4(x: torch.Tensor, weight: AffineQuantizedTensor, bias: torch.Tensor | None) -> str | None:
    return None if isinstance(weight.tensor_impl, Int4Impl) else f"its layout is {weight._layout}"


@register_linear_kernel(AffineQuantizedTensor, "int4_words", precedence=2, when=_not_int4, op=int4_words_linear)
def _int4(x: torch.Tensor, weight: AffineQuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    impl = weight.tensor_impl
    return int4_words_linear(x, impl.words, impl.packed_dim, impl.scale, impl.zero_point, impl.quant_min, impl.quant_max, bias)


torch.serialization.add_safe_globals([Int4Impl, Int4Layout])
