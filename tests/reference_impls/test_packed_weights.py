"""UintxTensor, UInt4Tensor, Int4Tensor and PerChannelSymmetricWeight: bytes by hand, views, writes, padding, refusals."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impls import Int4Tensor, Int8Tensor, PerChannelSymmetricWeight, UInt4Tensor, UintxTensor

MAKERS = {
    "int8": Int8Tensor.from_hp,
    "channel": PerChannelSymmetricWeight.from_hp,
    "channel1": lambda hp: PerChannelSymmetricWeight.from_hp(hp, 1),
    "uint4 row": lambda hp: UInt4Tensor.from_hp(hp, None),
    "uint4 group": lambda hp: UInt4Tensor.from_hp(hp, 8),
    "int4 row": lambda hp: Int4Tensor.from_hp(hp, None),
    "int4 group": lambda hp: Int4Tensor.from_hp(hp, 8),
    **{f"{bits} bits": lambda hp, bits=bits: UintxTensor.from_hp(hp, bits) for bits in range(1, 8)},
    "3 bits group": lambda hp: UintxTensor.from_hp(hp, 3, 8),
}
every_class = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def source(*shape):
    torch.manual_seed(0)
    return torch.randn(shape or (6, 16)) + 0.25


# --- exact bytes, worked out by hand: every scale is 1 ---------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 8])
def test_uint4_bytes(zero):
    w = UInt4Tensor.from_hp(torch.arange(16.0)[None] - zero, 16)
    assert w.qdata.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]  # the first code in the low half
    assert (w.scale.tolist(), w.zero_point.tolist()) == ([[1.0]], [[zero]])


def test_int4_bytes_are_twos_complement():
    w = Int4Tensor.from_hp(torch.tensor([[-7.0, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 0]]), 16)
    assert w.qdata.tolist() == [[0xA9, 0xCB, 0xED, 0x0F, 0x21, 0x43, 0x65, 0x07]]
    assert w.scale.tolist() == [[1.0]]


def test_three_bits_in_two_shards():
    w = UintxTensor.from_hp(torch.arange(8.0)[None] - 3, 3)
    assert w.zero_point.tolist() == [[3]]
    assert w.shard4 is None
    assert w.shard2.tolist() == [[0b11_10_01_00, 0b11_10_01_00]]
    assert w.shard1.tolist() == [[0b1111_0000]]


def test_seven_bits_in_three_shards():
    w = UintxTensor.from_hp(torch.tensor([[0.0, 127, 64, 16, 85, 0, 1, 42]]), 7)
    assert w.shard4.tolist() == [[0xF0, 0x00, 0x05, 0xA1]]
    assert w.shard2.tolist() == [[0b01_00_11_00, 0b10_00_00_01]]
    assert w.shard1.tolist() == [[0b0001_0110]]


def test_groups_have_their_own_parameters():
    w = UInt4Tensor.from_hp(torch.tensor([[0.0, 15, -30, 0]]), 2)
    assert (w.scale.tolist(), w.zero_point.tolist()) == ([[1.0, 2.0]], [[0, 15]])
    assert w.qdata.tolist() == [[0xF0, 0xF0]]


def test_channels_of_each_axis():
    hp = torch.tensor([[127.0, -254.0], [0.0, 127.0]])
    rows, columns = PerChannelSymmetricWeight.from_hp(hp), PerChannelSymmetricWeight.from_hp(hp, -1)
    assert (rows.scale.tolist(), rows.qdata.tolist()) == ([[2.0], [1.0]], [[64, -127], [0, 127]])  # 63.5 rounds to even
    assert (columns.scale.tolist(), columns.qdata.tolist()) == ([[1.0, 2.0]], [[127, -127], [0, 64]])


# --- views -----------------------------------------------------------------------------------------------------------


@every_class
@pytest.mark.parametrize(
    "text",
    [
        "w[1:3]",
        "w[2]",
        "w[::2]",
        "w.t()",
        "w.t()[8:16]",
        "w[:, 8:]",
        "w[None].transpose(0, 1)",
        "w.view(2, 3, 16)",
        "w.t()[:, 4]",
    ],
)
def test_views_share_memory_with_their_source(make, text):
    w = make(source())
    view, expected = eval(text), eval(text, {"w": w.dequantize()})
    assert type(view) is type(w)
    assert torch.equal(view.dequantize(), expected)
    assert (view.shape, view.stride(), view.storage_offset()) == (expected.shape, expected.stride(), expected.storage_offset())
    w.mul_(-2)
    assert torch.equal(view.dequantize(), eval(text, {"w": w.dequantize()}))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_range_of_any_dimension_is_exact_or_refused(data):
    name = data.draw(st.sampled_from(sorted(MAKERS)))
    shape = data.draw(st.sampled_from([(6, 16), (16, 32), (3, 4, 16)]))
    w = MAKERS[name](source(*shape))
    plain = w.dequantize()
    for _ in range(data.draw(st.integers(1, 3))):
        dim = data.draw(st.integers(0, w.dim() - 1))
        ends = [data.draw(st.integers(0, plain.shape[dim])) for _ in range(2)]
        index = (slice(None),) * dim + (slice(*ends, data.draw(st.integers(1, 3))),)
        try:
            w = w[index]
        except NotImplementedError:
            return
        plain = plain[index]
    assert w.shape == plain.shape
    assert torch.equal(w.dequantize(), plain)


@pytest.mark.parametrize(
    ("w", "text", "message"),
    [
        (UInt4Tensor.from_hp(source(), None), "w[:, 1:3]", r"cuts bytes that hold 2 codes"),
        (UintxTensor.from_hp(source(), 3), "w[:, 2:6]", r"cuts bytes that hold 4 codes"),
        (UInt4Tensor.from_hp(source(), 8), "w[:, 4:12]", r"cuts blocks of 8 of the 16 elements"),
        (Int4Tensor.from_hp(source(), 8), "w[:, 3]", r"several codes share a byte"),
        (UInt4Tensor.from_hp(source(), None), "w[:, :8].zero_()", r"view of a part of a block"),
        (Int4Tensor.from_hp(source(), None), "w[:, :8].add_(1)", r"view of a part of a block"),
    ],
)
def test_what_a_view_cannot_say_is_refused_and_changes_nothing(w, text, message):
    before = w.dequantize()
    with pytest.raises(NotImplementedError, match=message):
        eval(text)
    assert torch.equal(w.dequantize(), before)


# --- writes ----------------------------------------------------------------------------------------------------------


@every_class
def test_writes_go_into_the_same_inner_tensors(make):
    w, other = make(source()), make(source() * 3 - 1)
    inner = {name: part.data_ptr() for name, part in w.inner_tensors.items()}
    w.copy_(other.dequantize())
    # other's values are on its own grid, so requantizing them gives them again, up to the last bit of the scale
    torch.testing.assert_close(w.dequantize(), other.dequantize())
    assert {name: part.data_ptr() for name, part in w.inner_tensors.items()} == inner


@every_class
def test_a_write_to_rows_leaves_the_others(make):
    w = make(source())
    before = w.dequantize()
    if w.scale.shape[0] == 1:
        with pytest.raises(NotImplementedError, match="view of a part of a block"):
            w[1:3].mul_(2)
        assert torch.equal(w.dequantize(), before)
        return
    w[1:3].mul_(2)
    torch.testing.assert_close(w.dequantize()[1:3], before[1:3] * 2)
    assert torch.equal(w.dequantize()[[0, 3, 4, 5]], before[[0, 3, 4, 5]])


@every_class
@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda w: w.fill_(0)])
def test_zero_also_where_a_block_is_nan(make, write):
    hp = source()
    hp[1, 2] = torch.nan
    w = make(hp)
    assert w.dequantize().isnan().any()
    write(w)
    assert torch.equal(w.dequantize(), torch.zeros(6, 16))


# --- padding ---------------------------------------------------------------------------------------------------------


@every_class
@pytest.mark.parametrize("pad", [(0, 8), (8, 0), (0, 3), (0, 0, 0, 2), (0, 8, 1, 2), (0, -8)])
@pytest.mark.parametrize("transposed", [False, True])
def test_padding_adds_zeros(make, pad, transposed):
    w = make(source(16, 16))
    w = w.t() if transposed else w
    padded = F.pad(w, pad)
    values = padded.dequantize() if isinstance(padded, type(w)) else padded
    assert torch.equal(values, F.pad(w.dequantize(), pad))


# --- uses ------------------------------------------------------------------------------------------------------------


@every_class
def test_an_expert_of_a_3d_weight(make):
    w = make(source(3, 4, 16))
    x = source(5, 16)
    for e in range(3):
        assert type(w[e]) is type(w)
        torch.testing.assert_close(F.linear(x, w[e]), x @ w.dequantize()[e].t())


@every_class
def test_embedding(make):
    w = make(source())
    assert torch.equal(F.embedding(torch.tensor([4, 0, 4]), w), w.dequantize()[[4, 0, 4]])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: UintxTensor.from_hp(source(), 8), ValueError, "8 bits can't be packed"),
        (lambda: UintxTensor.from_hp(source(2, 12), 3), ValueError, "must be a multiple of 8"),
        (lambda: UInt4Tensor.from_hp(source(2, 16), 5), ValueError, "group size 5 doesn't divide"),
        (lambda: Int4Tensor.from_hp(source(2, 7), None), ValueError, "must be a multiple of 2"),
        (lambda: PerChannelSymmetricWeight.from_hp(source(), 2), ValueError, r"axis 2 doesn't exist .*\(6, 16\)"),
        (lambda: Int4Tensor.from_hp(torch.ones(2, 8, dtype=torch.int32)), TypeError, "floating-point"),
        (
            lambda: UintxTensor(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.uint8), bits=3),
            ValueError,
            r"shards of \(2, 1\)",
        ),
        (lambda: UInt4Tensor(torch.zeros(2, 4), torch.ones(2, 1), torch.zeros(2, 1)), TypeError, "must be uint8"),
    ],
)
def test_misuse_is_said(call, error, message):
    with pytest.raises(error, match=message):
        call()
