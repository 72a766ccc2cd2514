"""Training Int8Tensor: gradients, optimizers, compiled and exported programs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from reference_impls import Int8Tensor

GRANULARITIES = ["row", "tensor", 4]


def source():
    torch.manual_seed(0)
    return torch.randn(6, 8) * torch.arange(1.0, 7)[:, None]


def parameter(granularity="row"):
    return nn.Parameter(Int8Tensor.from_hp(source(), granularity))


# --- gradients ---


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (0, 8)])
def test_linear_gradients_are_the_dense_ones(granularity, shape):
    w, bias, x = parameter(granularity), torch.randn(6, requires_grad=True), torch.randn(shape, requires_grad=True)
    dense = [t.detach().clone().requires_grad_() for t in (x, w.dequantize(), bias)]
    for _ in range(2):  # gradients accumulate
        F.linear(x, w, bias).square().sum().backward()
        F.linear(*dense).square().sum().backward()
    for got, expected in zip((x, w, bias), dense, strict=True):
        assert type(got.grad) is torch.Tensor
        torch.testing.assert_close(got.grad, expected.grad)


def test_frozen_weight():
    w, x = nn.Parameter(Int8Tensor.from_hp(source()), requires_grad=False), torch.randn(3, 8, requires_grad=True)
    F.linear(x, w).sum().backward()
    assert w.grad is None
    torch.testing.assert_close(x.grad, w.dequantize().sum(0).expand(3, 8))


def test_straight_through_constructor_and_dequantize():
    hp = source().requires_grad_()
    upstream = torch.randn(6, 8)
    w = Int8Tensor.from_hp(hp, 4)
    assert w.requires_grad
    w.dequantize().backward(upstream)
    assert torch.equal(hp.grad, upstream)


def test_writing_after_saving_for_backward_is_an_error():
    w = parameter()
    out = F.linear(torch.ones(1, 8, requires_grad=True), w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpoint_and_double_use():
    w, x = parameter(), torch.randn(3, 8, requires_grad=True)
    dense, y = w.dequantize().detach().requires_grad_(), x.detach().clone().requires_grad_()
    (checkpoint(F.linear, x, w, use_reentrant=False) @ w).sum().backward()
    (F.linear(y, dense) @ dense).sum().backward()
    torch.testing.assert_close(w.grad, dense.grad)
    torch.testing.assert_close(x.grad, y.grad)


def test_gradcheck_and_transforms():
    w = Int8Tensor.from_hp(source().double())
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: F.linear(x, w).sin(), x)
    d = w.dequantize()
    torch.testing.assert_close(torch.func.grad(lambda x: F.linear(x, w).sum())(x.detach()), d.sum(0).expand(2, 8))
    torch.testing.assert_close(torch.func.vmap(lambda row: F.linear(row, w))(x), x @ d.t())


# --- optimizers ---

OPTIMIZERS = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.Adam, {"lr": 0.3, "amsgrad": True, "maximize": True}),
    (optim.AdamW, {"lr": 0.3}),
    (optim.Adagrad, {"lr": 0.3}),
    (optim.RMSprop, {"lr": 0.1, "momentum": 0.5}),
    (optim.Adamax, {"lr": 0.3}),
    (optim.NAdam, {"lr": 0.3}),
    (optim.RAdam, {"lr": 0.3, "weight_decay": 0.1}),
]
IDS = [f"{cls.__name__}{i}" for i, (cls, _) in enumerate(OPTIMIZERS)]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("mode", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=IDS)
def test_optimizer_steps_follow_the_dense_ones(cls, options, mode, granularity):
    if "fused" in mode and cls not in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad):
        pytest.skip("torch has no fused version")
    p = parameter(granularity)
    dense = nn.Parameter(p.dequantize().detach().clone())
    alias, parts, version = p.detach(), (p.qdata, p.scale), p._version
    ours, theirs = cls([p], **options, **mode), cls([dense], **options, **mode)
    steps = 3
    for i in range(steps):
        torch.manual_seed(i)
        p.grad = torch.randn(6, 8) * 3
        dense.grad = p.grad.clone()
        ours.step()
        theirs.step()
    # each write rounds by at most half a step; an optimizer writes at most twice a step (weight decay, update)
    bound = 2 * steps * dense.abs().max() / 127 / 2 * 1.2
    assert (p.dequantize() - dense).abs().max() <= bound
    assert (p.dequantize() - source()).abs().max() > bound / 2
    assert (p.qdata, p.scale) == parts or (p.qdata is parts[0] and p.scale is parts[1])
    assert torch.equal(alias.dequantize(), p.dequantize())
    assert p._version > version
    for state in ours.state[p].values():
        assert type(state) is torch.Tensor
        assert state.dtype == torch.float32


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cls", [optim.SGD, optim.AdamW, optim.RMSprop])
def test_learning_rate_zero_changes_no_bit(cls, dtype, granularity):
    p = nn.Parameter(Int8Tensor.from_hp(source().to(dtype), granularity))
    codes, scale = p.qdata.clone(), p.scale.clone()
    p.grad = (torch.rand(6, 8) + 1).to(dtype)  # the square of a small one would underflow in float16
    cls([p], lr=0.0).step()
    assert torch.equal(p.qdata, codes)
    assert torch.equal(p.scale, scale)


def test_training_goes_down_like_its_float_twin():
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    target = torch.tanh(x @ torch.randn(8, 6))

    def train(quantize):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 6))
        for layer in model[::2]:
            layer.weight = nn.Parameter(quantize(layer.weight.detach()))
        optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
        return F.mse_loss(model(x), target).item()

    dense = train(lambda hp: hp)
    assert dense < 0.1
    assert train(Int8Tensor.from_hp) < dense * 1.5


# --- compiled ---


def compiled(function, backend):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


VIEWS = ["w", "w.detach()", "w.clone()", "w[2:4]", "w.t()", "w[:, 4:8]", "w[2:4].t()", "w[3]", "w.view(2, 3, 8)", "w[::2]",
         "w.to(torch.bfloat16)", "w[2:4].reshape(-1)"]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("text", VIEWS)
def test_compiled_results_are_views_of_the_same_class(text, backend):
    w = Int8Tensor.from_hp(source(), 4)
    expected = eval(text)
    got = compiled(eval(f"lambda w: {text}"), backend)(w)
    assert type(got) is Int8Tensor
    assert torch.equal(got.dequantize(), expected.dequantize())
    assert (got.shape, got.stride(), got.storage_offset()) == (expected.shape, expected.stride(), expected.storage_offset())
    assert got.attributes == expected.attributes
    shared = [t.qdata.untyped_storage().data_ptr() == w.qdata.untyped_storage().data_ptr() for t in (got, expected)]
    assert shared[0] == shared[1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_compiled_training_step(granularity, backend):
    x = torch.randn(3, 8, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)

    def loss(w, x, bias):
        return (F.linear(x, w, bias=bias).square().mean() + F.linear(x, w[2:4]).sum()) * 2

    results = []
    for function in (loss, compiled(loss, backend)):
        w, x.grad, bias.grad = parameter(granularity), None, None
        value = function(w, x, bias)
        value.backward()
        results.append((value.detach(), w.grad, x.grad, bias.grad))
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(eager, other)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "text", ["w.add_(g)", "w.copy_(g)", "w[2:4].copy_(g[2:4])", "w.zero_()", "torch._foreach_add_([w], [g])"]
)
def test_compiled_writes_are_seen(text, backend):
    g = torch.arange(48.0).reshape(6, 8) - 20
    w, expected = Int8Tensor.from_hp(source()), Int8Tensor.from_hp(source())
    parts = w.qdata, w.scale
    eval(text, {"w": expected, "g": g, "torch": torch})
    names = {"torch": torch}
    exec(f"def write(w, g):\n    {text}\n", names)
    compiled(names["write"], backend)(w, g)
    assert torch.equal(w.dequantize(), expected.dequantize())
    assert w.qdata is parts[0]
    assert w.scale is parts[1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_writes_through_views_leave_the_rest_alone(backend):
    """Also where quantizing the rest again would change it: its codes don't reach 127."""
    w = Int8Tensor(torch.arange(48, dtype=torch.int8).reshape(6, 8), torch.rand(6, 1) + 0.5)
    before = w.dequantize()

    def write(w):
        w[2:4].add_(1)

    compiled(write, backend)(w)
    assert torch.equal(w.dequantize()[[0, 1, 4, 5]], before[[0, 1, 4, 5]])
    torch.testing.assert_close(w.dequantize()[2:4], before[2:4] + 1, rtol=0, atol=0.2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_writes_to_a_part_of_a_block_are_refused(backend):
    w = Int8Tensor.from_hp(source(), "tensor")
    before = w.dequantize()

    def write(w):
        w[2:4].add_(1)

    with pytest.raises(Exception, match="view of a part of a block"):
        compiled(write, backend)(w)
    assert torch.equal(w.dequantize(), before)


def test_recompiles_for_another_layout_only():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(F.linear, backend=counter, fullgraph=True)
    x = torch.randn(3, 8)
    counts = []
    hp = source()
    for w in (*(Int8Tensor.from_hp(s) for s in (hp, -hp)), Int8Tensor.from_hp(hp, 4), hp, Int8Tensor.from_hp(hp)):
        torch.testing.assert_close(function(x, w), x @ (w.dequantize() if w is not hp else w).t())
        counts.append(counter.frame_count)
    assert counts == [1, 1, 2, 3, 3]


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Slice(nn.Module):
        def forward(self, w, x):
            return F.linear(x, w[2:4]) + w[2:4].dequantize().sum()

    w, x = Int8Tensor.from_hp(source()), torch.randn(3, 8)
    program = torch.export.export(Slice(), (w, x), strict=strict)
    other = Int8Tensor.from_hp(source() + 1)
    torch.testing.assert_close(program.module()(other, x), Slice()(other, x))

    linear = nn.Linear(8, 6)
    linear.weight = nn.Parameter(w, requires_grad=False)
    batch = torch.export.Dim("batch")
    program = torch.export.export(linear, (x,), dynamic_shapes=({0: batch},), strict=strict)
    for exported in (program, program.run_decompositions()):
        torch.testing.assert_close(exported.module()(torch.ones(5, 8)), linear(torch.ones(5, 8)))


def test_fake_tensors():
    w = Int8Tensor.from_hp(source())[2:4]
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(w)
        assert type(fake) is Int8Tensor
        assert (fake.shape, fake.stride(), fake.storage_offset()) == (w.shape, w.stride(), w.storage_offset())
        assert F.linear(torch.empty(3, 8), fake).shape == (3, 2)
        assert fake.add_(1)[1:].t().shape == (8, 1)
