"""Views of Int8Tensor: exact or refused, shared with the base, and written to without touching anything else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impls import Int8Tensor

GRANULARITIES = ["row", "tensor", 4]


def make(granularity, shape=(6, 8)):
    torch.manual_seed(0)
    magnitudes = torch.arange(1.0, shape[0] + 1).reshape(-1, *[1] * (len(shape) - 1)) ** 3
    return Int8Tensor.from_hp(torch.randn(shape) * magnitudes, granularity)


def assert_is_the_view(view, expected):
    """Same values, class, shape, strides and offset."""
    assert type(view) is Int8Tensor
    assert torch.equal(view.dequantize(), expected)
    assert (view.shape, view.stride(), view.storage_offset()) == (
        expected.shape,
        expected.stride(),
        expected.storage_offset(),
    )


# representable with every granularity
EVERYWHERE = [
    "w[1:3]", "w[2]", "w[-2]", "w[4:]", "w[:2]", "w[-3:]", "w[::2]", "w[1:6:3]", "w[...]", "w[None]", "w[0:0]",
    "w[2:10**9]", "w.narrow(0, 1, 2)", "w.narrow(-1, 4, 4)", "w.select(1, 5)", "w.chunk(4)", "w.split(4)",
    "w.split([1, 5])", "w.tensor_split(4)", "w.unbind()", "w.unbind(1)", "w.t()", "w.T", "w.mT", "w.transpose(-1, 0)",
    "w.permute(1, 0)", "w.swapaxes(0, 1)", "w.movedim(0, 1)", "w.view(48)", "w.view(2, 3, 8)", "w.view(3, 2, 2, 4)",
    "w.reshape(12, 4)", "w.flatten()", "w.unflatten(0, (2, 3))", "w.unflatten(1, (2, -1))", "w.unsqueeze(-1)",
    "w[:, None].squeeze(1)", "w[None].squeeze()", "w.expand(3, 6, 8)", "w.t()[4:8]", "w[1:3].t()", "w[1:5][1:3]",
    "w[:, 4:8][1]", "w[1:3, 4:8]", "w[2, 3]", "w.view(-1)[8:16]", "w[1:3].view(-1)", "w.as_strided((2, 8), (8, 1), 8)",
    "w.as_strided((8, 2), (1, 8), 24)", "w.as_strided((2, 4), (16, 1), 12)", "w.as_strided((16,), (1,), 16)",
]  # fmt: skip


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("text", EVERYWHERE)
def test_view(text, granularity):
    w = make(granularity)
    plain = w.dequantize()
    view, expected = eval(text), eval(text, {"w": plain})
    views = view if isinstance(view, (list, tuple)) else [view]
    for got, want in zip(views, expected if isinstance(view, (list, tuple)) else [expected], strict=True):
        assert_is_the_view(got, want)
        assert got._is_view() or got is w


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("w[:, 2:4]", {"row", "tensor", 4}),
        ("w[:, 2:6]", {"row", "tensor"}),
        ("w[:, ::2]", {"row", "tensor"}),
        ("w.chunk(3, 1)", {"row", "tensor"}),
        ("w.t().reshape(-1)", {"tensor"}),
        ("w.view(4, 12)", {"tensor", 4}),
        ("w.view(16, 3)", {"tensor"}),
        ("w.as_strided((2, 2), (9, 1), 0)", set()),
        ("w.as_strided((2, 6), (8, 1), 4)", set()),
    ],
)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_views_that_cut_blocks_are_exact_or_refused(text, kept, granularity):
    w = make(granularity)
    if granularity not in kept:
        with pytest.raises(NotImplementedError, match=r"of shape \(\d, \d\) in blocks of"):
            eval(text)
        return
    views, expected = eval(text), eval(text, {"w": w.dequantize()})
    for got, want in zip(*([v] if isinstance(v, torch.Tensor) else v for v in (views, expected)), strict=True):
        assert torch.equal(got.dequantize(), want)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_experts(granularity):
    w = make(granularity, (3, 4, 8))
    plain = w.dequantize()
    for text in ("w[1]", "w[2][1:3]", "w[1:, 2]", "w.transpose(1, 2)", "w.view(12, 8)", "w.mT[0]", "w[:, :, 4:]"):
        assert_is_the_view(eval(text), eval(text, {"w": plain}))


BOUNDS = st.none() | st.integers(-10, 10)
INDEX = st.one_of(st.integers(-2, 1), st.builds(slice, BOUNDS, BOUNDS, st.none() | st.integers(1, 3)), st.none(), st.just(...))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(GRANULARITIES), st.lists(st.lists(INDEX, max_size=3).map(tuple), min_size=1, max_size=3))
def test_random_chains_of_indices(granularity, chain):
    w = make(granularity)
    expected = w.dequantize()
    for index in chain:
        try:
            expected = expected[index]
        except IndexError:
            return
        try:
            w = w[index]
        except NotImplementedError:
            return
        assert_is_the_view(w, expected)


# --- writes ---

WRITES = {
    "copy_": lambda v, other: v.copy_(other),
    "copy_ quantized": lambda v, other: v.copy_(Int8Tensor.from_hp(other, "tensor")),
    "fill_": lambda v, other: v.fill_(250),
    "zero_": lambda v, other: v.zero_(),
    "mul_": lambda v, other: v.mul_(-3),
    "add_": lambda v, other: v.add_(other, alpha=2),
    "addcdiv_": lambda v, other: v.addcdiv_(other, other.abs() + 1, value=50),
    "lerp_": lambda v, other: v.lerp_(other, 0.25),
    "uniform_": lambda v, other: v.uniform_(-9, 9),
    "masked_fill_": lambda v, other: v.masked_fill_(other > 0, 40),
    "foreach": lambda v, other: torch._foreach_add_([v], [other]),
    "out": lambda v, other: torch.add(other, 1, out=v),
}
TARGETS = [
    "w[2:4]",
    "w[2]",
    "w[::2]",
    "w[:, 4:8]",
    "w[2:4, 0:4]",
    "w[:, 1:3]",
    "w.t()",
    "w.t()[4:8]",
    "w.view(2, 3, 8)[1]",
    "w[:]",
]


def owns_its_scales(target, granularity):
    """Whole rows own the row's scale, whole groups the group's; only the whole tensor owns a scale per tensor."""
    whole = {"w.t()", "w[:]"}
    rows = {"w[2:4]", "w[2]", "w[::2]", "w.view(2, 3, 8)[1]"}
    groups = {"w[:, 4:8]", "w[2:4, 0:4]", "w.t()[4:8]"}
    return target in whole | {"tensor": set(), "row": rows, 4: rows | groups}[granularity]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_changes_exactly_the_view(name, target, granularity):
    w = make(granularity)
    before, version = w.dequantize(), w._version
    inside = torch.zeros(6, 8)
    eval(target, {"w": inside}).fill_(1)
    twin, view = w.dequantize(), eval(target)
    other = torch.randn(view.shape) * 100

    def write(v):
        torch.manual_seed(5)
        WRITES[name](v, other)

    if name != "zero_" and not owns_its_scales(target, granularity):
        with pytest.raises(NotImplementedError, match="part of a block"):
            write(view)
        assert torch.equal(w.dequantize(), before)
        return
    write(view)
    write(eval(target, {"w": twin}))
    after = w.dequantize()
    assert torch.equal(after[inside == 0], before[inside == 0])
    assert torch.equal(eval(target).dequantize(), view.dequantize())
    # copying a quantized tensor of another granularity rounds twice
    step = twin.abs().max() / 127 * (1 if "quantized" in name else 0.5)
    assert (after - twin).abs().max() <= step * 1.001
    assert w._version > version


def test_a_write_to_the_base_is_seen_in_the_view():
    w = make("row")
    view = w[2:4].t()
    w.fill_(3)
    assert torch.equal(view.dequantize(), torch.full((8, 2), 3.0))


def test_copying_between_overlapping_rows_is_refused_as_on_plain_tensors():
    w = make("row")
    for tensor in (w, w.dequantize()):
        before = tensor.clone()
        with pytest.raises(RuntimeError, match="single memory location"):
            tensor[0:2].copy_(tensor[1:3])
        assert torch.equal(tensor, before)


def test_expanded_views_refuse_writes():
    with pytest.raises(NotImplementedError, match="share memory"):
        make("row")[0].expand(4, 8).add_(1)


def test_a_copy_of_a_part_can_be_written_to():
    part = make("row")[:, 2:4].clone()
    part.fill_(2)
    assert torch.equal(part.dequantize(), torch.full((6, 2), 2.0))


@pytest.mark.parametrize("inside", [False, True])
def test_inference_mode(inside):
    w = None if inside else make("row")
    with torch.inference_mode():
        w = make("row") if inside else w
        for text in ("w[1:3]", "w.t()", "w.reshape(-1)", "w.chunk(2)[1]", "w.detach()"):
            assert_is_the_view(eval(text), eval(text, {"w": w.dequantize()}))
        w[1:3].fill_(2)
        assert torch.equal(w[1:3].dequantize(), torch.full((2, 8), 2.0))


# --- padding ---


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_padding_with_zeros(granularity):
    w = make(granularity)
    for pad, value, keeps in [((0, 0, 0, 2), 0, True), ((0, 4), 0, True), ((1, 0), 0, granularity != 4), ((0, 1), 5, False)]:
        padded = torch.nn.functional.pad(w, pad, value=value)
        assert isinstance(padded, Int8Tensor) == keeps
        expected = torch.nn.functional.pad(w.dequantize(), pad, value=value)
        assert torch.equal(padded.dequantize() if keeps else padded, expected)
