"""`ValueTensor`: a wrapper whose operators act on its values.

A child says how to read its values and how to write them; from these two follow all operators that it doesn't
implement itself:

- one that only computes runs on the values and gives a plain tensor;
- one that writes (in-place, `out=`, `_foreach_*`, fused optimizers) runs on a fresh copy of the values, which is
  then written back into the same inner tensors, so that aliases see it. Whether every target can be written to is
  checked before anything runs;
- a move or cast, and `empty_like` (for Module.to_empty), is that of each inner tensor. A cast changes the attribute `dtype`
  and no inner tensor: the values are rounded to the new dtype when they are read. All other `*_like` and `new_*` compute
  (optimizer state is plain);
- a view must be implemented: computing it on a copy would lose later writes without a word, so it is refused.
"""

from operator import methodcaller
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from reference_impls import operators, schema
from reference_impls.base import WrapperTensor

aten = torch.ops.aten

# Operators in these namespaces write to arguments without saying so in their schemas.
_UNTRUE_SCHEMAS = frozenset({"c10d"})


class ValueTensor(WrapperTensor):
    """Base class of wrappers that can be dequantized."""

    def values_copy(self) -> torch.Tensor:
        """The values: a fresh plain tensor of the outer shape and dtype, without gradient."""
        raise NotImplementedError

    def write_values(self, values: torch.Tensor) -> None:
        """Store plain `values`, which have the outer shape, in the existing inner tensors."""
        raise NotImplementedError

    def check_writable(self, operation: str) -> None:
        """Raise NotImplementedError where `write_values` would change other elements than this tensor's."""
        raise NotImplementedError

    def dequantize(self) -> torch.Tensor:
        """The values as a plain tensor of the outer shape and dtype; differentiable."""
        return operators.Dequantize.apply(self)

    @classmethod
    def _fallback(cls, func: OpOverload, arguments: tuple[Any, ...]) -> Any:
        targets = [t for t in schema.written(func, arguments) if isinstance(t, ValueTensor)]
        if targets and not schema.changes_metadata(func):
            return _run_and_write_back(func, arguments, targets)
        if not targets and not schema.returns_alias(func) and func.namespace not in _UNTRUE_SCHEMAS:
            return _run_on_values(func, arguments)
        return super()._fallback(func, arguments)


def _run_on_values(func: OpOverload, arguments: tuple[Any, ...]) -> Any:
    on_values = schema.call(func, tree_map_only(ValueTensor, methodcaller("values_copy"), arguments))
    # a plain `out=` or `plain.add_(w)`: return the object that was given
    return schema.written_result(func, arguments) if schema.written(func, arguments) else on_values


def _run_and_write_back(func: OpOverload, arguments: tuple[Any, ...], targets: list[ValueTensor]) -> Any:
    for target in targets:
        target.check_writable(str(func))
    on_values = tree_map_only(ValueTensor, _strided_values, arguments)
    schema.call(func, on_values)
    results = [
        result
        for target, result in zip(schema.written(func, arguments), schema.written(func, on_values), strict=True)
        if isinstance(target, ValueTensor)
    ]
    for target, result in zip(targets, results, strict=True):
        _check_same_shape(func, target, result)
    for target, result in zip(targets, results, strict=True):
        target.write_values(result)
    # torch counts the writes to `self`; those to the tensors in a list it leaves to the handler
    torch.autograd.graph.increment_version(schema.written_in_lists(func, arguments))
    return schema.written_result(func, arguments)


def _strided_values(tensor: ValueTensor) -> torch.Tensor:
    """The values with the outer strides: what a random in-place operator draws for an element depends on them."""
    values = tensor.values_copy()
    overlaps = any(step == 0 for step in tensor.stride())
    if values.stride() == tensor.stride() or overlaps:
        return values
    return values.new_empty_strided(tensor.shape, tensor.stride()).copy_(values)


def _check_same_shape(func: OpOverload, target: torch.Tensor, result: torch.Tensor) -> None:
    if target.shape != result.shape:
        raise ValueError(
            f"{func}: the result has shape {tuple(result.shape)}, and can't be written into a {type(target).__name__} "
            f"of shape {tuple(target.shape)}."
        )


@ValueTensor.implements([aten._to_copy.default, aten.empty_like.default])
def to_copy_or_empty_like(func: OpOverload, self: ValueTensor, dtype: torch.dtype | None, *options: Any) -> torch.Tensor:
    if dtype is None or dtype == self.dtype:
        changes = {}
    elif not dtype.is_floating_point:
        return schema.call(func, (self.values_copy(), dtype, *options))
    elif "dtype" in self.attribute_names:
        changes = {"dtype": dtype}
    else:
        raise NotImplementedError(f"{type(self).__name__} has no attribute dtype, and can't become {dtype}.")
    return self.mapped(lambda inner: schema.call(func, (inner, None, *options)), **changes, **self.attributes_of_copy())


@ValueTensor.implements([torch.ops.reference_impls.dequantize.default, aten.dequantize.self])
def _dequantize(func: OpOverload, self: ValueTensor) -> torch.Tensor:
    return self.values_copy()


@ValueTensor.implements_torch_function(torch.dequantize)
def _torch_dequantize(input: ValueTensor) -> torch.Tensor:
    return input.dequantize()


@ValueTensor.implements_torch_function(torch.Tensor.tolist)
def _tolist(self: ValueTensor) -> list[Any]:
    return self.dequantize().tolist()
