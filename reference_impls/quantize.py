"""`quantize_`: swap the weights of a model for quantized ones, as a config object says.

    quantize_(model, Int4WeightOnly(group_size=32))
    quantize_(model, TrainableInt8(), lambda module, name: name != "head")

A config is a value that makes a quantized weight of a plain one. Anything that has `quantize(weight) -> tensor` is a config.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from reference_impls.base import WrapperTensor
from reference_impls.int4 import Int4Tensor, UInt4Tensor
from reference_impls.int8 import Int8Tensor
from reference_impls.int8_activation import Int8ActivationTensor
from reference_impls.mixed_precision import Int8MixedPrecisionTensor
from reference_impls.trainable import TrainableInt8Tensor
from reference_impls.uintx import UintxTensor


class Config(Protocol):
    """How a weight is quantized."""

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        """The quantized weight of a plain one, (N, K)."""


@dataclass(frozen=True)
class Int8WeightOnly:
    """`Int8Tensor`; `granularity` is "row", "tensor" or a group size."""

    granularity: str | int = "row"

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        return Int8Tensor.from_hp(weight, self.granularity)


@dataclass(frozen=True)
class Int8DynamicActivation:
    """`Int8ActivationTensor` with a step for each row of the activation."""

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        return Int8ActivationTensor.from_hp(weight)


@dataclass(frozen=True)
class Int4WeightOnly:
    """`Int4Tensor`, or `UInt4Tensor` with `symmetric=False`; `group_size` None: whole rows."""

    group_size: int | None = 32
    symmetric: bool = True

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        return (Int4Tensor if self.symmetric else UInt4Tensor).from_hp(weight, self.group_size)


@dataclass(frozen=True)
class UintxWeightOnly:
    """`UintxTensor` of 1 to 7 bits; `group_size` None: whole rows."""

    bits: int
    group_size: int | None = None

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        return UintxTensor.from_hp(weight, self.bits, self.group_size)


@dataclass(frozen=True)
class TrainableInt8:
    """`TrainableInt8Tensor`: the weight goes on training."""

    granularity: str | int = "row"
    rounding: str = "stochastic"

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        return TrainableInt8Tensor.from_hp(weight, self.granularity, self.rounding)


@dataclass(frozen=True)
class Int8MixedPrecision:
    """`Int8MixedPrecisionTensor`: the weight trains in full precision, and is multiplied in int8."""

    def quantize(self, weight: torch.Tensor) -> torch.Tensor:
        return Int8MixedPrecisionTensor.from_hp(weight)


def quantize_(model: nn.Module, config: Config, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> nn.Module:
    """Replace the weight of each linear layer of `model`, in place, by the one that `config` makes of it; gives the model.

    Args:
        filter_fn: called with each module and its dotted name; those for which it is true are quantized, by their `weight`. Default:
            every `nn.Linear`.

    A weight that two modules share is quantized once and stays shared. Whether it requires grad stays as it was. Weights that are
    quantized already are left alone.

    Raises ValueError, that names the module, where a weight doesn't fit the config, and where nothing was selected; then no weight
    was replaced.
    """
    selected = filter_fn or (lambda module, name: isinstance(module, nn.Linear))
    modules = {n: m for n, m in model.named_modules() if selected(m, n) and not isinstance(m.weight, WrapperTensor)}
    if not modules and not any(selected(m, n) for n, m in model.named_modules()):
        raise ValueError("quantize_ selected no module; without filter_fn it takes nn.Linear layers only.")
    made: dict[int, nn.Parameter] = {}
    for name, module in modules.items():
        if id(module.weight) not in made:
            try:
                quantized = config.quantize(module.weight.detach())
            except ValueError as error:
                raise ValueError(f"{name or type(module).__name__}.weight: {error}") from error
            made[id(module.weight)] = nn.Parameter(quantized, module.weight.requires_grad)
    for module in modules.values():
        module.weight = made[id(module.weight)]
    return model


def size_in_bytes(model: nn.Module) -> int:
    """The bytes of all parameters and buffers, counting shared ones once, and inner tensors for what they take."""
    total = 0
    for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
        inner = tensor.inner_tensors.values() if isinstance(tensor, WrapperTensor) else [tensor]
        total += sum(t.numel() * t.element_size() for t in inner)
    return total
