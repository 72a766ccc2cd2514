"""Whole models: swapping weights, saving and loading, meta-device loading, size."""

import io

import pytest
import torch
from torch import nn

from reference_impls import (
    Int4Tensor,
    Int4WeightOnly,
    Int8ActivationTensor,
    Int8DynamicActivation,
    Int8MixedPrecision,
    Int8MixedPrecisionTensor,
    Int8Tensor,
    Int8WeightOnly,
    TrainableInt8,
    TrainableInt8Tensor,
    UInt4Tensor,
    UintxTensor,
    UintxWeightOnly,
    quantize_,
    size_in_bytes,
)

CONFIGS = {
    "int8": (Int8WeightOnly(), Int8Tensor, 64 * 64 + 4 * 64),
    "int8 groups": (Int8WeightOnly(16), Int8Tensor, 64 * 64 + 4 * 64 * 4),
    "dynamic": (Int8DynamicActivation(), Int8ActivationTensor, 64 * 64 + 4 * 64),
    "int4": (Int4WeightOnly(32), Int4Tensor, 64 * 32 + 4 * 64 * 2),
    "uint4": (Int4WeightOnly(32, symmetric=False), UInt4Tensor, 64 * 32 + 5 * 64 * 2),
    "uint3": (UintxWeightOnly(3), UintxTensor, 64 * 24 + 5 * 64),
    "mixed precision": (Int8MixedPrecision(), Int8MixedPrecisionTensor, 4 * 64 * 64),
    "trainable": (TrainableInt8(), TrainableInt8Tensor, 64 * 64 + 4 * 64),
}


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64))


X = torch.linspace(-1, 1, 5 * 64).sin().reshape(5, 64)


@pytest.mark.parametrize(("config", "cls", "size"), CONFIGS.values(), ids=CONFIGS)
def test_weights_are_swapped_and_little_is_lost(config, cls, size):
    plain, quantized = model(), quantize_(model(), config)
    assert [type(m.weight.data) for m in quantized if hasattr(m, "weight")] == [cls, cls, torch.Tensor]
    assert isinstance(quantized[0].weight, nn.Parameter)
    assert size_in_bytes(quantized) == 2 * (size + 64 * 4) + 2 * 64 * 4
    error = (quantized(X) - plain(X)).norm() / plain(X).norm()
    assert 0 < error < (0.6 if cls is UintxTensor else 0.3)


@pytest.mark.parametrize(("config", "cls", "size"), CONFIGS.values(), ids=CONFIGS)
def test_a_saved_model_loads(config, cls, size):
    quantized = quantize_(model(), config)
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    state = torch.load(file)  # weights_only
    same_kind = quantize_(model(1), config)
    same_kind.load_state_dict(state)
    assert torch.equal(same_kind(X), quantized(X))
    with torch.device("meta"):
        empty = model()
    empty.load_state_dict(state, assign=True)
    assert type(empty[0].weight.data) is cls
    assert torch.equal(empty(X), quantized(X))


def test_a_filter_chooses_by_name():
    quantized = quantize_(model(), Int8WeightOnly(), lambda module, name: name == "2")
    assert type(quantized[0].weight.data) is torch.Tensor
    assert type(quantized[2].weight.data) is Int8Tensor


def test_tied_weights_stay_tied_and_frozen_ones_frozen():
    tied = model()
    tied[2].weight = tied[0].weight
    tied[0].weight.requires_grad_(False)
    quantize_(tied, Int4WeightOnly())
    assert tied[2].weight is tied[0].weight
    assert not tied[0].weight.requires_grad


def test_quantizing_twice_changes_nothing():
    quantized = quantize_(model(), Int8WeightOnly())
    weight = quantized[0].weight
    assert quantize_(quantized, Int4WeightOnly())[0].weight is weight


def test_misfits_name_the_module_and_change_nothing():
    plain = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 6))
    with pytest.raises(ValueError, match=r"1\.weight: group size 32 doesn't divide"):
        quantize_(plain, Int4WeightOnly(32))
    assert type(plain[0].weight.data) is torch.Tensor
    with pytest.raises(ValueError, match="selected no module"):
        quantize_(nn.ReLU(), Int8WeightOnly())


def test_a_quantized_model_trains():
    trained, target = quantize_(model(), TrainableInt8()), model(1)(X).detach()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (trained(X) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 4
