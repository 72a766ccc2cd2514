"""Defects of moves between devices and dtypes."""

from __future__ import annotations

import torch

from tests.zoo.correct.lossless import Lossless
from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.correct.two_scales import TwoScales
from tests.zoo.registry import broken


@broken(group="devices", note="found live in torchao's Int8Tensor")
class ToDtypeIgnored(RowInt8):
    """.to(dtype) returns a copy with the old dtype."""

    @classmethod
    def op__to_copy(cls, func, w, dtype, *rest):
        return super().op__to_copy(func, w, None, *rest)


@broken(group="devices", ref="ao#698")
class ScaleLeftBehind(RowInt8):
    """.to(device) moves the codes and leaves the scale."""

    @classmethod
    def check_devices(cls, inner):
        pass

    @classmethod
    def op__to_copy(cls, func, w, *args):
        out = super().op__to_copy(func, w, *args)
        out.scale = w.scale
        return out


@broken(group="devices", ref="ao#1310")
class OptionalInnerLeftBehind(TwoScales):
    """.to(device) leaves the optional outer scale behind, where there is one."""

    @classmethod
    def check_devices(cls, inner):
        pass

    @classmethod
    def op__to_copy(cls, func, w, *args):
        out = super().op__to_copy(func, w, *args)
        out.outer_scale = w.outer_scale
        return out


@broken(group="devices")
class Bfloat16IsALie(RowInt8):
    """.to(bfloat16) reports bfloat16, and dequantizes to float32."""

    def values(self):
        return self.dense() if self.casts[-1] == torch.bfloat16 else super().values()


@broken(group="devices")
class HalfAppliedToCodes(RowInt8):
    """.half() casts the scaled codes: qdata is float16 and scaled values are rounded to integers again."""

    @classmethod
    def op__to_copy(cls, func, w, dtype, *rest):
        out = super().op__to_copy(func, w, dtype, *rest)
        if dtype == torch.float16:
            out.qdata = (out.qdata.to(dtype) * out.scale.to(dtype)).round().to(torch.int8)
        return out


@broken(group="devices", ref="ao#4297")
class NonBlockingTypeError(RowInt8):
    """.to(..., non_blocking=True) ends in TypeError."""

    @classmethod
    def op__to_copy(cls, func, w, dtype, layout, device, pin_memory, non_blocking, memory_format):
        if non_blocking:
            raise TypeError("_to_copy() got an unexpected keyword argument 'non_blocking'")
        return super().op__to_copy(func, w, dtype, layout, device, pin_memory, non_blocking, memory_format)


@broken(group="devices", ref="ao#2811")
class ToLosesTag(Lossless):
    """.to() gives the tag's default."""

    @classmethod
    def op__to_copy(cls, func, w, *args):
        out = super().op__to_copy(func, w, *args)
        out.tag = ""
        return out


@broken(group="devices")
class CopyTrueIsAlias(RowInt8):
    """.to(device, copy=True) on the same device shares the inner tensors."""

    @classmethod
    def op__to_copy(cls, func, w, dtype, layout, device, *rest):
        out = super().op__to_copy(func, w, dtype, layout, device, *rest)
        if dtype in (None, w.dtype) and device in (None, w.device):
            out.qdata, out.scale = w.qdata, w.scale
        return out


@broken(group="devices")
class DeviceAndDtypeTogether(RowInt8):
    """.to(device, dtype) in one call ignores the dtype."""

    @classmethod
    def op__to_copy(cls, func, w, dtype, layout, device, *rest):
        if device is not None and device != w.device:
            dtype = None
        return super().op__to_copy(func, w, dtype, layout, device, *rest)


@broken(group="devices")
class ModuleToLosesClass(RowInt8):
    """.to(dtype) dequantizes: Module.to() then silently keeps the old parameter."""

    @classmethod
    def op__to_copy(cls, func, w, dtype, layout, device, pin_memory, non_blocking, memory_format):
        if dtype in (None, w.dtype):
            return super().op__to_copy(func, w, dtype, layout, device, pin_memory, non_blocking, memory_format)
        return func(w.values(), dtype=dtype, device=device)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.data.__set__:  # as in most classes, which don't refuse it
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        return super().__torch_function__(func, types, args, kwargs)


@broken(group="devices")
class ZerosLikeIgnoresDevice(RowInt8):
    """zeros_like(w, device=...) stays on w's device."""

    @classmethod
    def op_zeros_like(cls, func, w, dtype, layout, device, pin_memory, memory_format):
        return func(w.values(), dtype=dtype)


@broken(group="devices")
class OnesLikeIsZero(RowInt8):
    """ones_like and full_like give zeros: only the shape was thought of."""

    @classmethod
    def op_ones_like(cls, func, w, dtype, layout, device, pin_memory, memory_format):
        return torch.zeros(w.shape, dtype=dtype or w.dtype, device=device or w.device)


@broken(group="devices")
class NewZerosIgnoresSize(RowInt8):
    """new_zeros(size) has w's own size."""

    @classmethod
    def op_new_zeros(cls, func, w, size, dtype, layout, device, pin_memory):
        return torch.zeros(w.shape, dtype=dtype or w.dtype, device=device or w.device)


@broken(group="devices")
class EmptyLikeIgnoresDtype(RowInt8):
    """empty_like(w, dtype=...) has w's dtype."""

    @classmethod
    def op_empty_like(cls, func, w, dtype, *rest):
        return super().op_empty_like(func, w, None, *rest)
