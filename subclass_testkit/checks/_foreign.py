"""A tensor subclass that no subject knows: it handles its own kind and plain tensors, and nothing else."""

from __future__ import annotations

FOREIGN = """class Foreign(torch.Tensor):
    __new__ = lambda cls, t: torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype)
    __init__ = lambda self, t: setattr(self, "t", t)
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if not set(types) <= {torch.Tensor, Foreign}:
            return NotImplemented
        return func(*torch.utils._pytree.tree_map_only(Foreign, lambda f: f.t, args), **(kwargs or {}))"""
