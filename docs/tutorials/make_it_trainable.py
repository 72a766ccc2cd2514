"""Make it trainable: a weight that is stored in int8, and that any optimizer trains.

    python docs/tutorials/make_it_trainable.py

It needs three things more than the class of `first_subclass.py`: a gradient that passes straight through the rounding, a linear
with a backward, and writes that quantize anew into the same inner tensors. The last part trains one weight for ten steps and
prints what happened to it, and then runs the kit.
"""

import torch
import torch.nn.functional as F

from subclass_testkit import Subject, check_subclass

aten = torch.ops.aten


def scale_of(values):
    return (values.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)


def codes_of(values, scale):
    return (values / scale).round().clamp(-127, 127).to(torch.int8)


class Int8(torch.Tensor):
    @staticmethod
    def __new__(cls, qdata, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            qdata.shape,
            strides=qdata.stride(),
            storage_offset=qdata.storage_offset(),
            dtype=scale.dtype,
            device=qdata.device,
        )

    def __init__(self, qdata, scale):
        self.qdata, self.scale = qdata, scale

    def __tensor_flatten__(self):
        return ["qdata", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        return cls(inner["qdata"], inner["scale"])

    def __repr__(self, *, tensor_contents=None):
        return f"Int8(shape={tuple(self.shape)}, device={self.device})"

    # 1. Making it and reading it are autograd Functions, whose gradients pass straight through: the rounding has no useful one.

    @classmethod
    def from_hp(cls, hp):
        return Quantize.apply(hp)

    def dequantize(self):
        return Dequantize.apply(self)

    # 2. The linear has a backward. The weight's gradient is dense: it is that of the values.

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return cls._linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def _linear(cls, input, weight, bias=None):
        if isinstance(input, cls) or isinstance(bias, cls) or not isinstance(weight, cls):
            raise NotImplementedError("Int8: linear takes it as the weight only; dequantize() the others.")
        return Linear.apply(input, weight, bias)

    # 3. Optimizers write in place: p.add_(grad, alpha=-lr), p.addcdiv_(...). Each such operator runs on the values, which are then
    #    written back into the *same* inner tensors with fresh scales. New inner tensors would leave every alias (a detached tensor, a
    #    state dict) with the old values; the old scale would clip what has grown. Lists (foreach optimizers) are refused: torch
    #    then says so, and `foreach=False` works. Returning without writing would be worse: a training that does nothing, in silence.

    WRITES = ("add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "lerp_", "copy_", "zero_", "fill_")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self = args[0]
        name = func._schema.name.removeprefix("aten::")
        if func is aten.detach.default:
            return cls(self.qdata.detach(), self.scale.detach())
        if func is aten.clone.default:
            return cls(self.qdata.clone(**kwargs), self.scale.clone())
        if name in cls.WRITES and isinstance(self, cls):
            values = self._values()
            func(values, *map(plain, args[1:]), **{k: plain(v) for k, v in kwargs.items()})
            self._write(values)
            return self
        if func in (aten.copy_.default, aten.add_.Tensor):  # a plain tensor is written, from values of this one
            return func(self, *map(plain, args[1:]), **kwargs)
        if func is aten.zeros_like.default:  # an optimizer's state is plain
            return torch.zeros_like(self._values(), **kwargs)
        raise NotImplementedError(f"Int8 does not implement {func}; dequantize() it first.")

    def _values(self):
        return self.qdata * self.scale

    def _write(self, values):
        scale = scale_of(values)
        self.qdata.copy_(codes_of(values, scale))
        self.scale.copy_(scale)


def plain(value):
    return value._values() if isinstance(value, Int8) else value


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hp):
        scale = scale_of(hp)
        return Int8(codes_of(hp, scale), scale)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight._values()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight._values(), bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])  # a bias and a weight see all batch dimensions at once
        grad_x = grad @ Dequantize.apply(weight) if ctx.needs_input_grad[0] else None
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


def ten_steps():
    """Fit a linear map; show the weight's first element on the way."""
    torch.manual_seed(0)
    target, weight = torch.randn(4, 8), torch.nn.Parameter(Int8.from_hp(torch.randn(4, 8)).detach())
    optimizer = torch.optim.SGD([weight], lr=0.3, foreach=False)
    print("step   loss      weight.grad[0, 0]   code   scale      value      target")
    for step in range(10):
        x = torch.randn(64, 8)
        optimizer.zero_grad()
        loss = (F.linear(x, weight) - F.linear(x, target)).square().mean()
        loss.backward()
        optimizer.step()
        code, scale = int(weight.qdata[0, 0]), float(weight.scale[0])
        print(
            f"{step:>4}   {float(loss.detach()):<9.5f} {float(weight.grad[0, 0]):>17.5f} {code:>6}   {scale:<9.6f} {code * scale:>8.4f} "
            f"{float(target[0, 0]):>11.4f}"
        )


def main():
    ten_steps()
    report = check_subclass(Subject(Int8, make=Int8.from_hp, to_plain=Int8.dequantize))
    print(report)
    if not report.ok:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
