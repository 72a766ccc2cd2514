"""The optimizers and single updates that the optimizer checks run, as text."""

from __future__ import annotations

# name -> (class, arguments with {lr} for the learning rate, writes into the parameter per step).
# eps is large so that float16 doesn't turn it into zero. RMSprop's first step is ten times its learning rate.
_PLAIN: dict[str, tuple[str, str, int]] = {
    "SGD": ("SGD", "lr={lr}", 1),
    "SGD-momentum": ("SGD", "lr={lr}, momentum=0.9, nesterov=True, weight_decay=0.1", 1),
    "SGD-maximize": ("SGD", "lr={lr}, maximize=True", 1),
    "Adam": ("Adam", "lr={lr}, eps=1e-3", 1),
    "Adam-maximize": ("Adam", "lr={lr}, eps=1e-3, weight_decay=0.1, maximize=True", 1),
    "AdamW": ("AdamW", "lr={lr}, eps=1e-3, weight_decay=0.1", 2),
    "AdamW-amsgrad": ("AdamW", "lr={lr}, eps=1e-3, amsgrad=True", 2),
    "Adagrad": ("Adagrad", "lr={lr}, eps=1e-3", 1),
    "RMSprop": ("RMSprop", "lr={lr} / 10, eps=1e-3, momentum=0.5", 1),
    "Adamax": ("Adamax", "lr={lr}, eps=1e-3", 1),
    "NAdam": ("NAdam", "lr={lr}, eps=1e-3", 2),
    "RAdam": ("RAdam", "lr={lr}, eps=1e-3", 1),
}
_FUSED = ("SGD", "SGD-momentum", "Adam", "AdamW", "Adagrad")


def _with(name: str, label: str, extra: str) -> tuple[str, str, str, int]:
    cls, arguments, writes = _PLAIN[name]
    return f"{name}-{label}", cls, f"{arguments}, {extra}", writes


def _all() -> tuple[tuple[str, str, str, int], ...]:
    cases = [_with(name, "single", "foreach=False") for name in _PLAIN]
    cases += [_with(name, "foreach", "foreach=True") for name in _PLAIN]
    cases += [_with(name, "fused", "fused=True") for name in _FUSED]
    cases.append(("SGD-tensor-lr", "SGD", "lr=torch.tensor({lr}), foreach=False", 1))
    cases.append(("AdamW-tensor-lr", "AdamW", "lr=torch.tensor({lr}), eps=1e-3, weight_decay=0.1, foreach=False", 2))
    return tuple(cases)


OPTIMIZERS = _all()
FEW = tuple(c for c in OPTIMIZERS if c[0] in ("SGD-single", "SGD-foreach", "AdamW-single", "AdamW-foreach", "AdamW-fused"))
STATEFUL = tuple(c for c in OPTIMIZERS if c[0].endswith("-single") and c[0] not in ("SGD-single", "SGD-maximize-single"))

# Single updates. g and h are plain; the operation runs on w, and on a plain tensor in its place.
SINGLE = (
    "w.add_(g)",
    "w.add_(g, alpha=-0.75)",
    "w.add_(other=g, alpha=-0.75)",
    "w.add_(0.4)",
    "w.sub_(g)",
    "w.sub_(g, alpha=0.75)",
    "w.mul_(-0.9)",
    "w.mul_(torch.tensor(-0.9))",
    "w.mul_(g)",
    "w.div_(-1.7)",
    "w.div_(h)",
    "w.addcmul_(g, h, value=-0.75)",
    "w.addcdiv_(g, h, value=-0.75)",
    "w.addcdiv_(tensor1=g, tensor2=h)",
    "w.lerp_(g, 0.3)",
    "w.lerp_(end=g, weight=0.3)",
    "w.lerp_(g, torch.full_like(g, 0.3))",
    "w.copy_(g)",
    "w.copy_(g.t().contiguous().t())",
    "w.zero_()",
    "w.fill_(0.5)",
    "w.neg_()",
    "w.clamp_(-0.5, 0.75)",
    "torch.add(w, g, alpha=-0.75, out=w)",
)
FOREACH = (
    "torch._foreach_add_([w], [g], alpha=-0.75)",
    "torch._foreach_add_([w], 0.4)",
    "torch._foreach_sub_([w], [g])",
    "torch._foreach_mul_([w], -0.9)",
    "torch._foreach_mul_([w], [-0.9])",
    "torch._foreach_mul_([w], [g])",
    "torch._foreach_div_([w], [h])",
    "torch._foreach_addcmul_([w], [g], [h], value=-0.75)",
    "torch._foreach_addcdiv_([w], [g], [h], value=-0.75)",
    "torch._foreach_addcdiv_([w], [g], [h], [-0.75])",
    "torch._foreach_lerp_([w], [g], 0.3)",
    "torch._foreach_copy_([w], [g])",
    "torch._foreach_neg_([w])",
)
