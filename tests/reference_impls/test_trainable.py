"""Training with `TrainableInt8Tensor`: what stochastic rounding keeps, and a model that learns as well as its float twin."""

import copy
import math

import pytest
import torch
from torch import nn

from reference_impls import TrainableInt8Tensor


def weight(rounding, rows=8, columns=256):
    torch.manual_seed(0)
    return nn.Parameter(TrainableInt8Tensor.from_hp(torch.randn(rows, columns), rounding=rounding))


def test_an_unknown_rounding_is_an_error():
    with pytest.raises(ValueError, match="'up' is unknown: use 'nearest' or 'stochastic'"):
        TrainableInt8Tensor.from_hp(torch.randn(4, 8), rounding="up")


@pytest.mark.parametrize(("rounding", "moves"), [("nearest", False), ("stochastic", True)])
def test_small_updates_are_lost_by_nearest_rounding_only(rounding, moves):
    """Fifty updates of a tenth of a step add up to five steps. The largest element of each row, which sets the scale, stays."""
    p = weight(rounding)
    start, step = p.dequantize().detach(), p.scale.clone()
    grad = torch.full_like(start, 0.1) * step
    grad.scatter_(1, start.abs().argmax(1, keepdim=True), 0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    for _ in range(50):
        p.grad = grad.clone()
        optimizer.step()
    steps = ((start - p.dequantize().detach()) / step)[grad > 0]
    expected, error = (5.0, 4 * math.sqrt(50 * 0.1 * 0.9 / steps.numel())) if moves else (0.0, 1e-3)
    assert abs(float(steps.mean()) - expected) < error + 0.1 * moves  # codes at the end of the range can't all move


def test_stochastic_rounding_is_unbiased_element_by_element():
    p, target = weight("stochastic", 4, 16), torch.linspace(-1, 1, 64).reshape(4, 16)
    draws = []
    for seed in range(2000):
        torch.manual_seed(seed)
        with torch.no_grad():
            p.copy_(target)
        draws.append(p.dequantize().detach())
    draws = torch.stack(draws)
    standard_error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - target).abs() <= 4 * standard_error + 1e-6).all()
    assert (draws.std(0) > 0).float().mean() > 0.8  # it does draw


def test_the_generator_decides():
    values = []
    for seed in (1, 1, 2):
        p = weight("stochastic")
        torch.manual_seed(seed)
        with torch.no_grad():
            p.add_(0.001)
        values.append(p.dequantize().detach())
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_aliases_see_a_step_and_copies_of_codes_are_exact(rounding):
    p = weight(rounding)
    alias, inner, before = p.detach(), p.qdata, p.dequantize().detach()
    p.grad = torch.randn(p.shape)
    torch.optim.SGD([p], lr=0.5).step()
    assert p.qdata is inner
    assert torch.equal(alias.dequantize(), p.dequantize())
    assert not torch.equal(alias.dequantize(), before)
    assert torch.equal(copy.deepcopy(p).dequantize(), p.dequantize())


def test_gradients_accumulate():
    p, x, y = weight("stochastic"), torch.randn(5, 256), torch.randn(3, 256)
    nn.functional.linear(x, p).sum().backward()
    first = p.grad.clone()
    nn.functional.linear(y, p).square().sum().backward()
    second = p.grad - first
    p.grad = None
    nn.functional.linear(y, p).square().sum().backward()
    torch.testing.assert_close(second, p.grad, rtol=1e-4, atol=1e-3)


class Task:
    """A regression that a three-layer model can learn but not fit exactly: noisy values of a random network, new ones in each step."""

    def __init__(self):
        torch.manual_seed(0)
        self.teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).requires_grad_(False)

    def batch(self, seed, size=128):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, 32, generator=generator)
        return x, self.teacher(x) + 0.1 * torch.randn(size, 8, generator=generator)

    def loss(self, model, *batch):
        x, y = self.batch(*batch)
        return nn.functional.mse_loss(model(x), y)

    def trained(self, convert, steps=400):
        """The loss on data that the model hasn't seen."""
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        for layer in model[::2]:
            layer.weight = nn.Parameter(convert(layer.weight.detach()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for i in range(steps):
            optimizer.zero_grad()
            self.loss(model, i + 1).backward()
            optimizer.step()
        return float(self.loss(model, 0, 4096).detach())


def test_a_three_layer_model_learns_as_well_as_its_float_twin():
    task = Task()
    twin = task.trained(torch.clone)
    assert twin < task.trained(torch.clone, steps=0) / 5
    for rounding in ("nearest", "stochastic"):
        quantized = task.trained(lambda hp, rounding=rounding: TrainableInt8Tensor.from_hp(hp, rounding=rounding))
        assert quantized <= 1.05 * twin, (rounding, quantized, twin)
