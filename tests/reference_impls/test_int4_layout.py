"""`Int4Layout`: words by hand, every code in every place, where columns can be cut."""

import pytest
import torch

from reference_impls import AffineQuantizedTensor, Int4Layout
from reference_impls.kernels.int4_words import pack_words, unpack_words
from reference_impls.layouts.int4 import Int4Impl


def quantized(hp, mapping="symmetric", quant_min=-8, quant_max=7, group=16):
    return AffineQuantizedTensor.from_hp(hp, Int4Layout(), mapping, quant_min, quant_max, group)


# --- words -----------------------------------------------------------------------------------------------------------


def test_words_by_hand():
    low = quantized(torch.arange(16.0)[None], "asymmetric", 0, 15)
    assert low.tensor_impl.words.tolist() == [[0x75316420, 0xFDB9ECA8 - 2**32]]
    signed = quantized(torch.tensor([[-7.0, -1, 0, 1, 2, 3, 4, 7]]), group=8)
    assert signed.tensor_impl.words.tolist() == [[0x731F4209]]  # -7 is 9, -1 is F
    assert (signed.tensor_impl.scale.tolist(), signed.tensor_impl.zero_point) == ([[1.0]], None)


def test_a_shift_and_a_mask_unpack_neighbours():
    word = pack_words(torch.arange(8)[None] + 8)
    halves = [((word >> 4 * i) & 0x000F000F).view(torch.int16).tolist() for i in range(4)]
    assert halves == [[[8, 9]], [[10, 11]], [[12, 13]], [[14, 15]]]


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_every_code_in_every_place(dim):
    codes = torch.stack([torch.arange(16).roll(i) for i in range(16)]).repeat(8, 1, 1)
    words = pack_words(codes, dim)
    assert words.dtype == torch.int32
    assert words.is_contiguous()
    assert words.shape[dim] == codes.shape[dim] // 8
    assert torch.equal(unpack_words(words, dim), codes.int())
    assert torch.equal(pack_words(codes - 16, dim), words)  # only four bits count


def test_empty_words():
    for shape in ((0, 8), (3, 0)):
        assert unpack_words(pack_words(torch.zeros(shape))).shape == shape
        assert quantized(torch.zeros(shape), group="row").dequantize().shape == shape


def test_half_a_byte_an_element():
    impl = quantized(torch.randn(4, 64), group=64).tensor_impl
    assert impl.words.numel() * impl.words.element_size() == 4 * 64 / 2


def test_packing_compiles_into_one_graph():
    codes = torch.arange(64).reshape(4, 16) % 16
    there_and_back = torch.compile(lambda c: unpack_words(pack_words(c)), backend="aot_eager", fullgraph=True)
    assert torch.equal(there_and_back(codes), codes.int())


# --- where columns can be cut ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
def test_columns_are_cut_at_words_only(transposed):
    w = quantized(torch.randn(6, 32))
    d = w.dequantize()
    side = (lambda t: t.t()) if transposed else (lambda t: t)
    for start in range(0, 33, 4):
        for end in range(start + 4, 33, 4):
            inside_a_group = start // 16 == (end - 1) // 16
            if start % 8 or end % 8 or not (inside_a_group or start % 16 == end % 16 == 0):
                with pytest.raises(NotImplementedError, match="cuts"):
                    side(w).narrow(0 if transposed else 1, start, end - start)
            else:
                cut = side(w).narrow(0 if transposed else 1, start, end - start)
                assert torch.equal(cut.dequantize(), side(d).narrow(0 if transposed else 1, start, end - start))


def test_a_part_of_a_group_is_not_written_to():
    w = quantized(torch.randn(6, 32))
    with pytest.raises(NotImplementedError, match="view of a part of a block"):
        w[:, :8].zero_()
    before = w.dequantize()
    with torch.no_grad():
        w[:, 16:].copy_(torch.zeros(6, 16))
    assert torch.equal(w.dequantize(), torch.cat([before[:, :16], torch.zeros(6, 16)], 1))


def test_a_contiguous_copy_is_packed_along_its_rows():
    w = quantized(torch.randn(8, 32))
    copy = w.t().contiguous()
    assert (copy.tensor_impl.packed_dim, copy.stride(), copy.is_contiguous()) == (1, (8, 1), True)
    assert torch.equal(copy.dequantize(), w.dequantize().t())
    with pytest.raises(ValueError, match="6 codes along dim 1 of \\(32, 6\\) don't fill whole words"):
        quantized(torch.randn(6, 32)).t().contiguous()


def test_words_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match=r"must be int32, not torch\.uint8"):
        Int4Impl(torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 1))
