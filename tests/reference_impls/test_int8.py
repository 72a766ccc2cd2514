"""Int8Tensor: construction, equivalence with its values, copies, serialization, modules."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reference_impls import Int8Tensor

GRANULARITIES = ["row", "tensor", 4]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def source(dtype=torch.float32):
    """(6, 8): rows of different magnitudes, no two elements alike."""
    torch.manual_seed(0)
    return (torch.randn(6, 8) * torch.tensor([1.0, 20, 0.03, 5, 300, 7])[:, None]).to(dtype)


@pytest.fixture(params=GRANULARITIES)
def w(request):
    return Int8Tensor.from_hp(source(), request.param)


def codes_and_scale(w):
    """What must be untouched where nothing may change."""
    return w.qdata.clone(), w.scale.clone()


# --- construction ---


@pytest.mark.parametrize(
    ("granularity", "block", "scale_shape"),
    [("row", (1, 8), (6, 1)), ("tensor", (6, 8), (1, 1)), (4, (1, 4), (6, 2)), (1, (1, 1), (6, 8))],
)
def test_granularity(granularity, block, scale_shape):
    hp = source()
    w = Int8Tensor.from_hp(hp, granularity)
    assert w.block_size == block
    assert w.scale.shape == scale_shape
    blocks = hp.reshape(6 // block[0], block[0], 8 // block[1], block[1])
    step = (blocks.abs().amax((1, 3), keepdim=True) / 127).expand(blocks.shape).reshape(6, 8)
    assert ((w.dequantize() - hp).abs() <= step * 0.50001).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", ["row", "tensor", 16])
def test_quantizing_the_values_gives_the_values(dtype, granularity):
    torch.manual_seed(1)
    hp = torch.randn(300, 64) * torch.logspace(-4, 2, 300)[:, None]
    hp[0], hp[1], hp[2, 3], hp[3] = 0, 3, 6e4, 1e-7
    w = Int8Tensor.from_hp(hp.to(dtype), granularity)
    assert w.dtype == w.dequantize().dtype == dtype
    assert w.dequantize().isfinite().all()
    assert torch.equal(Int8Tensor.from_hp(w.dequantize(), granularity).dequantize(), w.dequantize())


def test_three_dimensions_and_transposed_sources():
    hp = source().reshape(2, 3, 8)
    assert Int8Tensor.from_hp(hp).scale.shape == (2, 3, 1)
    w = Int8Tensor.from_hp(source().t())
    assert (w.shape, w.stride(), w.scale.shape) == ((8, 6), (1, 8), (8, 1))


@pytest.mark.parametrize(
    ("hp", "granularity", "message"),
    [
        (torch.ones(2, 10), 4, r"group size 4 doesn't divide the last dimension of \(2, 10\), 10"),
        (torch.ones(2, 8), 0, "group size 0"),
        (torch.ones(2, 8), "rows", 'use "row", "tensor" or a group size'),
        (torch.ones(2, 8), True, "granularity True is unknown"),
        (torch.tensor(1.0), "row", "0-dimensional"),
    ],
)
def test_illegal_granularity(hp, granularity, message):
    with pytest.raises(ValueError, match=message):
        Int8Tensor.from_hp(hp, granularity)


@pytest.mark.parametrize("hp", [torch.ones(2, 2, dtype=torch.int32), [[1.0]]])
def test_from_hp_wants_floating_point(hp):
    with pytest.raises(TypeError, match="floating-point"):
        Int8Tensor.from_hp(hp)


# --- equivalence ---


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 2, 3, 8), (0, 8)])
@pytest.mark.parametrize("bias", [None, torch.arange(6.0)])
def test_linear(w, shape, bias):
    x, d = torch.randn(shape), w.dequantize()
    expected = F.linear(x, d, bias)
    for out in (F.linear(x, w, bias), F.linear(x, w, bias=bias), F.linear(bias=bias, weight=w, input=x)):
        assert type(out) is torch.Tensor
        assert (out.shape, out.dtype, out.stride()) == (expected.shape, expected.dtype, expected.stride())
        torch.testing.assert_close(out, expected)


def test_linear_of_other_shapes_and_kinds(w):
    x, d = torch.randn(5, 8), w.dequantize()
    torch.testing.assert_close(F.linear(x, w[2]), x @ d[2])
    torch.testing.assert_close(F.linear(w, x), d @ x.t())
    torch.testing.assert_close(F.linear(x, w, w[:, 0] if w.scale.shape[1] == 1 else w[:, 0:4][:, 0]), x @ d.t() + d[:, 0])
    torch.testing.assert_close(F.linear(torch.randn(8, 5).t(), w).shape, torch.Size([5, 6]))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(3, 7), r"\(3, 7\) with weight \(6, 8\): the last dimension of the input must be 8"),
        (torch.ones(3, 8).half(), "input is torch.float16, weight is torch.float32"),
        (torch.ones(3, 8, device="meta"), "input is on meta, weight on cpu"),
    ],
)
def test_linear_of_what_doesnt_fit(w, x, message):
    with pytest.raises(ValueError, match=message):
        F.linear(x, w)


def test_autocast(w):
    with torch.autocast("cpu", torch.bfloat16):
        out = F.linear(torch.ones(2, 8), w)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, F.linear(torch.ones(2, 8), w.dequantize()))


COMPUTATIONS = {
    "add": lambda w: w + 1,
    "rsub": lambda w: 1 - w,
    "two": lambda w: w * w,
    "matmul": lambda w: w @ w.t(),
    "addmm": lambda w: torch.addmm(torch.ones(6), torch.ones(3, 8), w.t(), alpha=2, beta=3),
    "embedding": lambda w: F.embedding(torch.tensor([4, 1]), w),
    "cat": lambda w: torch.cat([w, torch.ones(1, 8)]),
    "index": lambda w: w[torch.tensor([5, 0])],
    "where": lambda w: torch.where(w > 0, w, 0),
    "max": lambda w: w.max(1).values,
    "dropout": lambda w: F.dropout(w),
    "normal_like": lambda w: torch.randn_like(w),
    "foreach": lambda w: torch._foreach_mul([w, w], 2)[1],
    "out": lambda w: torch.add(w, 1, out=torch.empty(6, 8)),
    "into plain": lambda w: torch.ones(6, 8).mul_(w),
    "copy to plain": lambda w: torch.zeros(6, 8).copy_(w),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "zeros_like": torch.zeros_like,
    "int": lambda w: w.int(),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_computations_give_plain_values_and_leave_the_operand_alone(w, name):
    before = codes_and_scale(w)
    torch.manual_seed(3)
    result = COMPUTATIONS[name](w)
    torch.manual_seed(3)
    expected = COMPUTATIONS[name](w.dequantize())
    assert type(result) is torch.Tensor
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)
    assert all(map(torch.equal, before, codes_and_scale(w)))


REFUSALS = {
    "diagonal": lambda w: w.diagonal(),
    "unfold": lambda w: w.unfold(0, 2, 1),
    "view as integers": lambda w: w.view(torch.int32),
    "t_": lambda w: w.t_(),
    "resize_": lambda w: w.resize_(3, 3),
    "set_": lambda w: w.set_(torch.ones(3)),
    "numpy": lambda w: w.numpy(),
    "dlpack": torch.from_dlpack,
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_who_refuses_what(w, name):
    before = codes_and_scale(w)
    with pytest.raises(NotImplementedError, match="Int8Tensor"):
        REFUSALS[name](w)
    assert all(map(torch.equal, before, codes_and_scale(w)))


def test_data_takes_only_its_own_kind(w):
    with pytest.raises(TypeError, match="converted|convert it"):
        w.data = torch.ones(6, 8)
    w.data = Int8Tensor.from_hp(torch.full((2, 4), 3.0))
    assert w.shape == (2, 4)
    assert torch.equal(w.dequantize(), torch.full((2, 4), 3.0))


# --- moves ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_dtype_rounds_the_values(w, dtype):
    moved = w.to(dtype)
    assert type(moved) is Int8Tensor
    assert moved.qdata.dtype == torch.int8
    assert torch.equal(moved.dequantize(), w.dequantize().to(dtype))
    assert F.linear(torch.ones(2, 8, dtype=dtype), moved).dtype == dtype


def test_to_the_same_is_the_same(w):
    assert w.to("cpu") is w
    assert w.to(torch.float32) is w
    assert w.contiguous() is w
    other = w.to("cpu", copy=True)
    other.zero_()
    assert w.abs().sum() > 0


def test_module_moves_keep_parameter_and_class(w):
    m = nn.Linear(8, 6)
    m.weight = nn.Parameter(w)
    parameter = m.weight
    m.to(torch.bfloat16)
    assert m.weight is parameter
    assert torch.equal(parameter.detach().dequantize(), w.dequantize().bfloat16())
    assert m(torch.ones(2, 8).bfloat16()).dtype == torch.bfloat16
    m.to("meta")
    assert {t.device.type for t in (parameter, parameter.qdata, parameter.scale)} == {"meta"}
    assert "device='meta'" in repr(parameter)
    m.to_empty(device="cpu")
    assert type(m.weight) is Int8Tensor
    assert m.weight.qdata.device.type == "cpu"


# --- copies ---

COPIES = {
    "clone": lambda w: w.clone(),
    "deepcopy": copy.deepcopy,
    **{f"pickle {p}": lambda w, p=p: pickle.loads(pickle.dumps(w, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)},
    "save": lambda w: saved_and_loaded(w, weights_only=True),
    "save all": lambda w: saved_and_loaded(w, weights_only=False),
}


def saved_and_loaded(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    # the module has registered the class; `safe_globals` would unregister it at its end, for all later tests
    return torch.load(buffer, **options)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("of", ["whole", "rows", "transposed"])
def test_copies_are_equal_and_independent(w, how, of):
    original = {"whole": w, "rows": w[2:4] if w.scale.shape[0] > 1 else w[:], "transposed": w.t()}[of]
    made = COPIES[how](original)
    assert type(made) is Int8Tensor
    assert (made.shape, made.stride(), made.dtype) == (original.shape, original.stride(), original.dtype)
    assert torch.equal(made.dequantize(), original.dequantize())
    before = codes_and_scale(w)
    made.fill_(-5)
    assert all(map(torch.equal, before, codes_and_scale(w)))


def test_deepcopy_of_a_parameter(w):
    p = nn.Parameter(w)
    p.grad, p.note = torch.ones(6, 8), "kept"
    made = copy.deepcopy({"a": p, "b": p})
    assert made["a"] is made["b"]
    assert isinstance(made["a"], nn.Parameter)
    assert made["a"].note == "kept"
    assert torch.equal(made["a"].grad, torch.ones(6, 8))
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(p[1:3])


def test_views_saved_together_stay_views():
    w = Int8Tensor.from_hp(source())
    loaded = saved_and_loaded([w, w[2:4]])
    loaded[1].fill_(3)
    assert torch.equal(loaded[0][2:4].dequantize(), torch.full((2, 8), 3.0))


@pytest.mark.parametrize("to", GRANULARITIES)
@pytest.mark.parametrize("kind", [*GRANULARITIES, "plain"])
def test_copy_(kind, to):
    other = source() * 2 + 1
    src = other if kind == "plain" else Int8Tensor.from_hp(other, kind)
    values = src if kind == "plain" else src.dequantize()
    w = Int8Tensor.from_hp(source(), to)
    qdata, scale = w.qdata, w.scale
    assert w.copy_(src) is w
    assert w.qdata is qdata
    assert w.scale is scale
    expected = values if kind == to else Int8Tensor.from_hp(values, to).dequantize()
    assert torch.equal(w.dequantize(), expected)


def test_copy_broadcasts_or_names_the_sizes(w):
    w.copy_(torch.arange(8.0))
    torch.testing.assert_close(w.dequantize(), torch.arange(8.0).expand(6, 8), atol=0.03, rtol=0)
    before = codes_and_scale(w)
    with pytest.raises(ValueError, match=r"\(5, 8\).*\(6, 8\)"):
        w.copy_(torch.ones(5, 8))
    assert all(map(torch.equal, before, codes_and_scale(w)))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("src", [*GRANULARITIES, "plain"])
@pytest.mark.parametrize("dst", [*GRANULARITIES, "plain"])
def test_load_state_dict_loads(src, dst, assign):
    def linear(kind, seed):
        m = nn.Linear(8, 6, bias=False)
        torch.manual_seed(seed)
        hp = torch.randn(6, 8)
        m.weight = nn.Parameter(hp if kind == "plain" else Int8Tensor.from_hp(hp, kind))
        return m

    saved, loaded = linear(src, 1), linear(dst, 2)
    loaded.load_state_dict(saved.state_dict(), assign=assign)
    step = saved.weight.detach().abs().max() / 127
    difference = (loaded.weight.detach() - saved.weight.detach()).abs().max()
    assert difference <= (0 if assign or dst in (src, "plain") else step / 2 * 1.0001)


def test_share_memory(w):
    assert w.share_memory_() is w
    assert w.is_shared()
    assert w.qdata.is_shared()
    assert w.scale.is_shared()


def test_loading_in_a_new_process(tmp_path):
    path = tmp_path / "w.pt"
    w = Int8Tensor.from_hp(source())
    torch.save(w, path)
    code = (
        f"import torch, reference_impls\nw = torch.load({str(path)!r}, mmap=True)\nprint(w.dequantize().double().sum().item())"
    )
    root = Path(__file__).parents[2]
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert float(shown.stdout) == w.dequantize().double().sum().item()


def test_repr_is_short(w):
    for text in (repr(w), str(nn.Parameter(w)), f"{w}", repr(w.to("meta"))):
        assert text.count("Int8Tensor") == 1
        assert len(text) < 300
