"""Not a wrapper: an ordinary tensor and one more attribute, which every result of an operation inherits."""

from __future__ import annotations

import copy

import torch
from torch.utils._pytree import tree_leaves

from tests.zoo.registry import correct


@correct(note="results of arithmetic are of the class too, as by torch's default; torch.compile isn't claimed")
class StorageSubclass(torch.Tensor):
    """A tensor with storage and an `origin`, made by _make_subclass."""

    origin: str = ""

    @staticmethod
    def __new__(cls, data, origin=""):
        out = torch.Tensor._make_subclass(cls, data)
        out.origin = origin
        return out

    @classmethod
    def from_hp(cls, hp: torch.Tensor):
        out = hp.clone().as_subclass(cls)
        out.origin = "weight"
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
        out = super().__torch_function__(func, types, args, kwargs or {})
        sources = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, StorageSubclass)]
        for leaf in tree_leaves(out):
            if isinstance(leaf, StorageSubclass) and not leaf.origin and sources:
                leaf.origin = sources[0].origin
        return out
