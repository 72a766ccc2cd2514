"""What an operator's schema says: argument order, defaults, what it writes to, what it aliases.

Every handler gets its arguments through `bind`, all of them, in the schema's order and with the defaults filled
in. So `w.narrow(0, 2, 4)` and `torch.narrow(input=w, dim=0, start=2, length=4)` can't differ, and no handler ever
looks at `len(args)`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

# These change the shape or the storage of the tensor that they are called on, without the `inplace_view` tag.
_REBIND_STORAGE = frozenset(
    {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::resize_as_sparse_"}
)


def bind(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call, in the schema's order, missing ones replaced by the schema's defaults."""
    parameters = func._schema.arguments
    if len(args) == len(parameters):
        return tuple(args)
    return tuple(args) + tuple(kwargs.get(p.name, p.default_value) for p in parameters[len(args) :])


def call(func: OpOverload, arguments: tuple[Any, ...]) -> Any:
    """Call `func` with the arguments that `bind` returned."""
    positional = _positional_count(func)
    names = [p.name for p in func._schema.arguments[positional:]]
    return func(*arguments[:positional], **dict(zip(names, arguments[positional:], strict=True)))


@functools.cache
def _positional_count(func: OpOverload) -> int:
    return sum(not p.kwarg_only for p in func._schema.arguments)


@functools.cache
def _written_positions(func: OpOverload) -> tuple[int, ...]:
    return tuple(i for i, p in enumerate(func._schema.arguments) if p.alias_info is not None and p.alias_info.is_write)


def written(func: OpOverload, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that the call writes to (`self` of an in-place operator, `out=`, the lists of `_foreach_*_`)."""
    return [t for i in _written_positions(func) for t in tensors_in(arguments[i])]


def written_in_lists(func: OpOverload, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Those of the written tensors that are items of a list."""
    lists = [arguments[i] for i in _written_positions(func) if isinstance(arguments[i], (list, tuple))]
    return [t for t in tensors_in(lists) if not t.is_inference()]


@functools.cache
def returns_alias(func: OpOverload) -> bool:
    """Whether the result may be a view of an argument: then computing on a copy would be silently wrong."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


@functools.cache
def changes_metadata(func: OpOverload) -> bool:
    """Whether the operator changes shape, strides or storage of the tensor itself (`t_`, `resize_`, `set_`)."""
    return torch.Tag.inplace_view in func.tags or func._schema.name in _REBIND_STORAGE


def written_result(func: OpOverload, arguments: tuple[Any, ...]) -> Any:
    """What a writing operator returns: the very objects that it wrote to."""
    count = len(func._schema.returns)
    targets = [arguments[i] for i in _written_positions(func)]
    if count == 0:
        return None
    return targets[0] if count == 1 else tuple(targets[:count])


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in one argument, which may be a tensor, a list of (optional) tensors, or neither."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
