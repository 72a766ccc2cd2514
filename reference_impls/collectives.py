"""Collectives that only move data, on each inner tensor by itself.

The schemas of torch.ops.c10d don't say that these operators write to their arguments, so nothing general can treat
them right: running them on a copy of the values would lose what was received. What isn't here is refused.
"""

from typing import Any

import torch
from torch._ops import OpOverload

from reference_impls.base import WrapperTensor

if torch.distributed.is_available():

    @WrapperTensor.implements(torch.ops.c10d.broadcast_.default)
    def _broadcast_(func: OpOverload, tensors: list[WrapperTensor], *arguments: Any) -> tuple[Any, Any]:
        works = [func([t], *arguments)[1] for t in _inner_of(tensors[0])]
        return tensors, _last_of(works)

    @WrapperTensor.implements(torch.ops.c10d.scatter_.default)
    def _scatter_(
        func: OpOverload, outputs: list[WrapperTensor], inputs: list[list[WrapperTensor]], *arguments: Any
    ) -> tuple[Any, Any]:
        received = _inner_of(outputs[0])
        # only the source rank sends: one list of inner tensors for each of them
        sent = zip(*(_inner_of(t) for t in inputs[0]), strict=True) if inputs and inputs[0] else None
        lists = [inputs] * len(received) if sent is None else [[[t.contiguous() for t in parts]] for parts in sent]
        works = [func([out], parts, *arguments)[1] for out, parts in zip(received, lists, strict=True)]
        return outputs, _last_of(works)


def _inner_of(tensor: WrapperTensor) -> list[torch.Tensor]:
    if not isinstance(tensor, WrapperTensor):
        raise NotImplementedError(f"a collective of both wrapped and plain tensors: found a {type(tensor).__name__}.")
    return list(tensor.inner_tensors.values())


def _last_of(works: list[Any]) -> Any:
    """One handle for several collectives: the last one's, after the others are done."""
    for work in works[:-1]:
        work.wait()
    return works[-1]
