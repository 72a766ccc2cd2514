"""What the witnesses are made of: programs that are true of a class with a certain kind of defect.

Written apart from the kit's checks, so that no class of the zoo is correct by accident.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable

import torch
import torch._dynamo.testing
import torch.nn.functional as F

from tests.zoo.base import ZooTensor

Witness = Callable[[type], bool]


def source(rows: int = 6, cols: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that encode their position; every row has its own magnitude, and both signs."""
    values = torch.arange(1.0, rows * cols + 1).reshape(rows, cols)
    return (values.sin() * torch.arange(1, rows + 1).unsqueeze(1)).to(dtype)


def plain(value):
    return value.dequantize() if isinstance(value, ZooTensor) else value


def same(a, b, tolerance: float = 1e-5) -> bool:
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    a, b = plain(a), plain(b)
    if not isinstance(a, torch.Tensor):
        return a == b
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def differs(op, rows=6, cols=16, dtype=torch.float32, tolerance=1e-5) -> Witness:
    """Whether `op` gives another value on the subclass than on its plain values, or ends by accident."""

    def witness(cls):
        w = cls.from_hp(source(rows, cols, dtype))
        try:
            return not same(op(w), op(w.dequantize()), tolerance)
        except NotImplementedError:
            return False
        except (AttributeError, IndexError, TypeError):
            return True

    return witness


def write_differs(view, value=3.0, rows=6, cols=16) -> Witness:
    """Whether writing into a view leaves the whole tensor otherwise than on plain values."""

    def witness(cls):
        w = cls.from_hp(source(rows, cols))
        d = w.dequantize().clone()
        target, expected = view(w), view(d)
        new = torch.linspace(-value, value, expected.numel()).reshape(expected.shape)
        try:
            target.copy_(new)
        except NotImplementedError:
            return False
        expected.copy_(new)
        return not same(w, d, 0.05)

    return witness


def update_differs(update, hp=None, tolerance=0.05) -> Witness:
    """Whether an in-place update leaves other values than on a plain copy."""

    def witness(cls):
        w = torch.nn.Parameter(cls.from_hp(source() if hp is None else hp))
        d = torch.nn.Parameter(w.detach().dequantize().clone())
        with torch.no_grad():
            update(w)
            update(d)
        return not same(w.detach(), d.detach(), tolerance)

    return witness


def step(optimizer, steps=1, **options):
    def update(p):
        opt = optimizer([p], **options)
        for i in range(steps):
            p.grad = (source() * (i + 1)).cos().to(p.dtype)
            opt.step()
        p.grad = None

    return update


def grads_differ(run, rows=6, cols=16, frozen=False, x_shape=(3, 4, 16), tolerance=1e-4) -> Witness:
    """Whether the gradients of x, w and bias differ from the dense ones after `run(x, w, bias)`."""

    def grads(w, x, bias):
        run(x, w, bias)
        return [t.grad for t in (x, w, bias)]

    def witness(cls):
        w = torch.nn.Parameter(cls.from_hp(source(rows, cols)), requires_grad=not frozen)
        d = torch.nn.Parameter(w.detach().dequantize().clone(), requires_grad=not frozen)
        leaves = [
            (torch.linspace(-2, 2, torch.Size(x_shape).numel()).reshape(x_shape), torch.arange(float(rows))) for _ in range(2)
        ]
        got = grads(w, *(t.requires_grad_() for t in leaves[0]))
        want = grads(d, *(t.requires_grad_() for t in leaves[1]))
        return any(
            (a is None) != (b is None) or (a is not None and not same(a, b, tolerance)) for a, b in zip(got, want, strict=True)
        )

    return witness


def squared(x, w, bias):
    F.linear(x, w, bias).square().sum().backward()


def transposed_grad(x, w, bias):
    out = F.linear(x, w, bias)
    out.backward(torch.arange(float(out.numel())).reshape(out.shape[::-1]).t())


def mutated_grad(cls) -> bool:
    w = torch.nn.Parameter(cls.from_hp(source()))
    out = F.linear(torch.ones(2, 16), w)
    grad = torch.ones_like(out)
    out.backward(grad)
    return not torch.equal(grad, torch.ones_like(out))


def mutation_unnoticed(cls) -> bool:
    w = torch.nn.Parameter(cls.from_hp(source()))
    x = torch.ones(2, 16, requires_grad=True)
    out = F.linear(x, w).sum()
    with torch.no_grad():
        w.mul_(-1)
    try:
        out.backward()
    except RuntimeError:
        return False
    return True


def compiled(op, backend="aot_eager", **inputs) -> Witness:
    """Whether the compiled `op` gives another value or class than the eager one, or doesn't compile whole."""

    def witness(cls):
        torch._dynamo.reset()
        dtype = inputs.get("dtype", torch.float32)
        a, b = (cls.from_hp(source(dtype=dtype)) for _ in range(2))
        want = op(a)
        try:
            got = torch.compile(op, backend=backend, fullgraph=True)(b)
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError):
            return True
        return type(got) is not type(want) or not same(got, want) or not same(a, b)

    return witness


def compiled_grad(cls) -> bool:
    torch._dynamo.reset()
    a, b = (torch.nn.Parameter(cls.from_hp(source())) for _ in range(2))
    run = lambda w: F.linear(torch.ones(2, 16), w).square().sum()  # noqa: E731
    run(a).backward()
    torch.compile(run, backend="aot_eager")(b).backward()
    return not same(a.grad, b.grad)


def recompiles(cls) -> bool:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    run = torch.compile(lambda w: F.linear(torch.ones(2, 16), w), backend=counter)
    for _ in range(2):
        run(cls.from_hp(source()))
    return counter.frame_count > 1


def no_recompilation(cls) -> bool:
    torch._dynamo.reset()
    w = cls.from_hp(source())
    other = w.negated() if hasattr(w, "negated") else w
    run = torch.compile(lambda w: F.linear(torch.ones(2, 16), w), backend="aot_eager")
    run(w)
    return not same(run(other), F.linear(torch.ones(2, 16), other))


def metadata_differs(op, *names) -> Witness:
    def witness(cls):
        w = cls.from_hp(source())
        a, b = op(w), op(w.dequantize())
        return any(getattr(a, n)() != getattr(b, n)() for n in names)

    return witness


def loses(op, attribute) -> Witness:
    def witness(cls):
        w = cls.from_hp(source())
        w.loader = "set by a user"
        return getattr(op(w), attribute, None) != getattr(w, attribute)

    return witness


def not_independent(duplicate, change=lambda t: t.mul_(-3)) -> Witness:
    """Whether changing a duplicate changes the original."""

    def witness(cls):
        w = cls.from_hp(source())
        before = w.dequantize().clone()
        change(duplicate(w))
        return not torch.equal(w.dequantize(), before)

    return witness


def raises(op, *errors) -> Witness:
    def witness(cls):
        try:
            op(cls)
        except NotImplementedError:
            return False
        except errors:
            return True
        return False

    return witness


def inner_devices_wrong(cls) -> bool:
    moved = cls.from_hp(source()).to("meta")
    return any(getattr(moved, name).device.type != "meta" for name in moved.__tensor_flatten__()[0])


def rebuilt(w):
    names, ctx = w.__tensor_flatten__()
    return type(w).__tensor_unflatten__({n: getattr(w, n) for n in names}, ctx, w.shape, w.stride())


def saved(w):
    buffer = io.BytesIO()
    torch.save(w, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def module(cls, hp=None):
    out = torch.nn.Linear(16, 6, bias=False)
    out.weight = torch.nn.Parameter(cls.from_hp(source() if hp is None else hp))
    return out


def loading_differs(*, from_plain=False, run_first=False) -> Witness:
    def witness(cls):
        target, origin = module(cls), module(cls, source().flip(0))
        if run_first:
            target(torch.ones(1, 16))
        state = origin.state_dict()
        if from_plain:
            state = {"weight": origin.weight.detach().dequantize()}
        target.load_state_dict(state)
        x = torch.linspace(-1, 1, 16)
        return not same(target(x), origin(x), 0.05)

    return witness


def untied(cls) -> bool:
    w = cls.from_hp(source())
    first, second = copy.deepcopy([torch.nn.Parameter(w, False), torch.nn.Parameter(w, False)])
    first.mul_(-1)
    return not same(first, second)


def half_overflows(cls) -> bool:
    w = cls.from_hp(source(dtype=torch.float16).abs())
    return not same(F.linear(torch.full((2, 16), 60.0).half(), w), w.dequantize().sum(1).mul(60).expand(2, 6), 0.02)


def rounds_alike(cls) -> bool:
    w = [cls.from_hp(source()) for _ in range(2)]
    for t in w:
        t.copy_(source() + 0.001)
    return torch.equal(w[0].qdata, w[1].qdata)


def to_bfloat16_ignored(cls) -> bool:
    m = module(cls).to(torch.bfloat16)
    return m.weight.detach().dequantize().dtype != torch.bfloat16


def to_empty_loses_class(cls) -> bool:
    m = module(cls).to("meta").to_empty(device="cpu")
    return type(m.weight) is not cls or m.weight.qdata.device.type != "cpu"


def leaks(cls) -> bool:
    gc.collect()
    gc.disable()
    try:
        w = cls.from_hp(source())
        alive = weakref.ref(w.qdata)
        del w
        return alive() is not None
    finally:
        gc.enable()


def changes_global(read, op) -> Witness:
    def witness(cls):
        w = cls.from_hp(source(dtype=torch.float64))
        before = read()
        op(cls, w)
        after = read()
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        return not (torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after)

    return witness


def far_from(hp, bound=0.02) -> Witness:
    """Whether from_hp(hp) is finite and within `bound` of each row's largest value."""

    def witness(cls):
        try:
            d = cls.from_hp(hp).dequantize()
        except ValueError:
            return False
        if d.shape != hp.shape:
            return True
        limit = hp.abs().amax(-1, keepdim=True) * bound + 1e-36
        return not bool(((d - hp).abs() <= limit).all())

    return witness


def biased(cls) -> bool:
    hp = torch.full((1, 4096), 0.5)
    hp[0, 0] = 127.0
    w = cls.from_hp(hp)
    w.copy_(hp)
    return abs(float(w.dequantize()[0, 1:].mean()) - 0.5) > 0.05


def trained_alias_stale(cls) -> bool:
    p = torch.nn.Parameter(cls.from_hp(source()))
    alias = p.detach()
    with torch.no_grad():
        p.add_(1.0)
    return not same(alias, p.detach())


def changed_by_refusal(cls) -> bool:
    w = cls.from_hp(source())
    before = w.dequantize().clone()
    try:
        w.add_(5.0)
    except NotImplementedError:
        return not same(w, before)
    return False


def update_shrinks(w):
    for _ in range(2):
        w.mul_(0.01)


def context_changed(op) -> Witness:
    def witness(cls):
        w = cls.from_hp(source())
        before = w.__tensor_flatten__()[1]
        op(w)
        return w.__tensor_flatten__()[1] != before

    return witness


def foreign_accepted(cls) -> bool:
    from torch.testing._internal.two_tensor import TwoTensor

    foreign = TwoTensor(torch.ones(6, 16), torch.ones(6, 16))
    w = cls.from_hp(source())
    try:
        return not same(plain(w + foreign), TwoTensor.__add__(foreign, w.dequantize()).a) and True
    except TypeError:
        return False


def load_assign_loses_tag(cls) -> bool:
    target, origin = module(cls), module(cls)
    origin.weight.tag = "expert"
    target.load_state_dict(origin.state_dict(), assign=True)
    return target.weight.tag != "expert"


def copy_outer_scale_wrong(cls) -> bool:
    small, large = cls.from_hp(source() / 10), cls.from_hp(source())
    return not same(small.copy_(large), large, 0.05)


def two_sources_share(cls) -> bool:
    first = cls.from_hp(source())
    before = first.dequantize().clone()
    cls.from_hp(source().flip(0))
    return not same(first, before)


def vector(cols=16):
    return torch.linspace(-1, 1, cols)


def matrix(rows=4, cols=16):
    return torch.linspace(-2, 2, rows * cols).reshape(rows, cols)


def with_grad(cls):
    p = torch.nn.Parameter(cls.from_hp(source()))
    p.grad = torch.ones(6, 16)
    return copy.deepcopy(p)
