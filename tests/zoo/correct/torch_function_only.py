"""Not a wrapper: an ordinary tensor with a unit, by __torch_function__ alone; results are plain."""

from __future__ import annotations

import copy

import torch
from torch.utils._pytree import tree_map

from tests.zoo.registry import correct

KEEPING_NAMES = """
    __getitem__ narrow select chunk split tensor_split unbind t transpose permute swapaxes view reshape
    flatten unflatten unsqueeze squeeze expand movedim diagonal unfold as_strided detach clone contiguous
    to cpu half float double bfloat16 requires_grad_ pin_memory
"""
KEEPING = {getattr(torch.Tensor, name) for name in KEEPING_NAMES.split()}
KEEPING |= {torch.Tensor.T.__get__, torch.Tensor.mT.__get__, torch.Tensor.data.__get__, torch.empty_like}


@correct(note="torch.compile is not claimed: its __torch_function__ is not traceable")
class UnitTensor(torch.Tensor):
    """A tensor with storage and a unit; only __torch_function__, no dispatch."""

    unit: str = ""

    @classmethod
    def from_hp(cls, hp: torch.Tensor):
        return cls.mark(hp.clone(), "m")

    @classmethod
    def mark(cls, plain, unit):
        out = plain.as_subclass(cls)
        out.unit = unit
        return out

    def dequantize(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo):
        # The stock one wants new_empty() to return the class, which is no use elsewhere.
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only a leaf tensor can be deep-copied: detach() it first")
        out = copy.deepcopy(self.detach().as_subclass(torch.Tensor), memo).as_subclass(type(self))
        memo[id(self)] = out
        out.__dict__.update(copy.deepcopy(self.__dict__, memo))
        out.requires_grad_(self.requires_grad)
        out.grad = copy.deepcopy(self.grad, memo)
        return out

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.module_load and (kwargs or {}).get("assign"):
            # The stock one would make the Parameter where subclasses are switched off, and lose this one.
            return torch.nn.Parameter(args[1], args[0].requires_grad)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if func not in KEEPING or not isinstance(args[0], UnitTensor):
            return out
        first = args[0]
        plain = lambda t: isinstance(t, torch.Tensor) and t is not first  # noqa: E731
        return tree_map(lambda t: type(first).mark(t, first.unit) if plain(t) else t, out)
