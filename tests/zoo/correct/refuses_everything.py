"""Only construct, dequantize, detach, clone and flatten; every other operation is refused, clearly."""

from __future__ import annotations

from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.registry import correct


@correct()
class RefusesEverything(RowInt8):
    """Per-row int8 that does next to nothing."""

    KEPT = ("detach", "alias", "clone")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name not in cls.KEPT:
            raise NotImplementedError(f"{cls.__name__} refuses {func}: dequantize() it first")
        return super().__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def fn_linear(cls, input, weight, bias=None):
        raise NotImplementedError(f"{cls.__name__} refuses linear: dequantize() it first")

    def share_inner_memory(self):
        raise NotImplementedError(f"{type(self).__name__} refuses share_memory_()")
