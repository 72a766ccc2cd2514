"""Classes that kill, hang or exhaust the interpreter in one operation: the run has to survive them."""

from __future__ import annotations

import ctypes
import os
import time

from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.registry import broken


@broken(group="isolation")
class HangsInTranspose(RowInt8):
    """t() sleeps for a day."""

    @classmethod
    def op_t(cls, func, w):
        time.sleep(86400)
        return super().op_t(func, w)


@broken(group="isolation")
class ExitsInSlice(RowInt8):
    """w[a:b] ends the process, without clean-up."""

    @classmethod
    def op_slice(cls, func, w, *args):
        os._exit(3)


@broken(group="isolation")
class RecursesInClone(RowInt8):
    """clone() calls itself without end."""

    @classmethod
    def op_clone(cls, func, w, memory_format):
        return w.clone(memory_format=memory_format)


@broken(group="isolation")
class SegfaultsInTo(RowInt8):
    """.to() reads from address 0."""

    @classmethod
    def op__to_copy(cls, func, w, *args):
        ctypes.string_at(0)
        return super().op__to_copy(func, w, *args)
