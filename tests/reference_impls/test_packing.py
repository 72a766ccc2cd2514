"""Packing of 1 to 7 bit codes: exact bytes by hand, and every code in every place."""

import pytest
import torch

from reference_impls.kernels.packing import SHARDS, codes_per_byte, pack, unpack


def test_bytes_by_hand():
    codes = torch.tensor([[0x1, 0xF, 0x8, 0x3]], dtype=torch.uint8)
    assert [t.tolist() for t in pack(codes, 4)] == [[[0xF1, 0x38]]]  # the first code in the low half
    codes = torch.tensor([0b101, 0b010, 0b111, 0b000, 0b001, 0b110, 0b011, 0b100], dtype=torch.uint8)
    two, one = pack(codes, 3)
    assert two.tolist() == [0b00_11_10_01, 0b00_11_10_01]  # low bits: 1, 2, 3, 0 and 1, 2, 3, 0
    assert one.tolist() == [0b1_0_1_0_0_1_0_1]  # high bits: 1, 0, 1, 0, 0, 1, 0, 1


@pytest.mark.parametrize("bits", SHARDS)
def test_no_bit_is_wasted(bits):
    shards = pack(torch.zeros(3, 16, dtype=torch.uint8), bits)
    assert sum(SHARDS[bits]) == bits
    assert sum(t.numel() for t in shards) * 8 == 3 * 16 * bits
    assert all(t.is_contiguous() for t in shards)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("bits", SHARDS)
def test_every_code_in_every_place(bits, dim):
    torch.manual_seed(bits)
    codes = torch.randint(2**bits, (8, 16, 24), dtype=torch.uint8)
    assert len(codes.unique()) == 2**bits
    shards = pack(codes, bits, dim)
    assert [t.shape[dim] for t in shards] == [codes.shape[dim] * size // 8 for size in SHARDS[bits]]
    assert torch.equal(unpack(shards, bits, dim), codes)


@pytest.mark.parametrize("bits", SHARDS)
def test_non_contiguous_codes(bits):
    codes = torch.randint(2**bits, (16, 8), dtype=torch.uint8).t()
    assert torch.equal(unpack(pack(codes, bits), bits), codes)


@pytest.mark.parametrize("bits", SHARDS)
def test_a_slice_of_the_shards_is_the_packed_slice(bits):
    codes = torch.randint(2**bits, (6, 32), dtype=torch.uint8)
    whole = codes_per_byte(bits)
    sliced = [t[2:4, : whole * size // 8 * 2] for t, size in zip(pack(codes, bits), SHARDS[bits], strict=True)]
    assert torch.equal(unpack(sliced, bits), codes[2:4, : 2 * whole])


def test_empty():
    for shape in ((0, 8), (3, 0)):
        codes = torch.zeros(shape, dtype=torch.uint8)
        assert unpack(pack(codes, 3), 3).shape == shape


@pytest.mark.parametrize(
    ("bits", "count", "text"), [(8, 8, "8 bits"), (0, 8, "0 bits"), (3, 12, "multiple of 8"), (4, 3, "multiple of 2")]
)
def test_misuse_is_said(bits, count, text):
    with pytest.raises(ValueError, match=text):
        pack(torch.zeros(2, count, dtype=torch.uint8), bits)


@pytest.mark.parametrize("bits", [3, 4, 7])
def test_compiles_into_one_graph(bits):
    codes = torch.randint(2**bits, (4, 16), dtype=torch.uint8)
    there_and_back = torch.compile(lambda c: unpack(pack(c, bits), bits), backend="aot_eager", fullgraph=True)
    assert torch.equal(there_and_back(codes), codes)
