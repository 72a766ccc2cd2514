"""Write your first tensor subclass: an int8 weight for inference, from nothing to a passed conformance run.

    python docs/tutorials/first_subclass.py

Everything is in this file. Each part says what it is for, and what goes wrong without it.
"""

import torch
import torch.nn.functional as F

from subclass_testkit import Subject, check_subclass

aten = torch.ops.aten


# 1. The wrapper. The tensor itself holds no numbers: torch only knows its shape, strides, dtype and device. The numbers lie in
#    two inner tensors. If the strides were left out, a transposed source would be reported as contiguous.


class RowInt8(torch.Tensor):
    @staticmethod
    def __new__(cls, qdata, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(
            cls, qdata.shape, strides=qdata.stride(), storage_offset=qdata.storage_offset(), dtype=dtype, device=qdata.device
        )

    def __init__(self, qdata, scale, dtype):
        self.qdata, self.scale = qdata, scale

    # 2. From values and back. The smallest scale is a normal number, so that a row of zeros doesn't become NaN. Everything is
    #    computed in float32: in float16 the division would overflow.

    @classmethod
    def from_hp(cls, hp):
        values = hp.detach().float()
        scale = (values.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        return cls((values / scale).round().clamp(-127, 127).to(torch.int8), scale, hp.dtype)

    def dequantize(self):
        return (self.qdata.float() * self.scale).to(self.dtype)

    # 3. Taken apart and put together: torch.compile, export and FSDP see the inner tensors only. What decides how the tensor
    #    behaves, here its dtype, must be in the context, or two tensors that differ would share a compiled graph.

    def __tensor_flatten__(self):
        return ["qdata", "scale"], {"dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        return cls(inner["qdata"], inner["scale"], **context)

    def __repr__(self, *, tensor_contents=None):
        return f"RowInt8(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    # 4. Functions. A linear layer calls F.linear; a signature of our own takes bias= by position and by keyword.

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return cls._linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def _linear(cls, input, weight, bias=None):
        if isinstance(input, cls) or not isinstance(weight, cls):
            raise NotImplementedError("RowInt8: linear takes it as the weight only; dequantize() the input.")
        return F.linear(input, weight.dequantize(), bias)

    # 5. Operators. An allow-list, and a refusal with the operator's name for all else. That is worth more than a fallback that
    #    is silently wrong for some operator: what isn't here can't give a wrong result.

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self = args[0]
        if func is aten.detach.default:
            return cls(self.qdata.detach(), self.scale.detach(), self.dtype)
        if func is aten.clone.default:
            return cls(self.qdata.clone(**kwargs), self.scale.clone(), self.dtype)
        if func is aten._to_copy.default:
            # a cast changes the dtype that the tensor shows; codes and scale only move
            device, dtype = kwargs.get("device"), kwargs.get("dtype") or self.dtype
            if not dtype.is_floating_point:
                raise NotImplementedError(f"RowInt8 can't become {dtype}; dequantize() it first.")
            return cls(self.qdata.to(device, copy=True), self.scale.to(device, copy=True), dtype)
        raise NotImplementedError(f"RowInt8 does not implement {func}; dequantize() it first.")


# 6. Does it hold? The kit tries everything that people do with weights: slices, copies, moves, modules, optimizers, compile,
#    export, checkpoints. What the class refuses is counted as refused; what it does must be right.


def main():
    report = check_subclass(
        Subject(RowInt8, make=RowInt8.from_hp, to_plain=RowInt8.dequantize, dtypes=(torch.float32, torch.bfloat16))
    )
    print(report)
    if not report.ok:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
