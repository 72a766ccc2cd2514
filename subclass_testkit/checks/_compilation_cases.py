"""The operations that the compilation checks run, as text."""

from __future__ import annotations

BACKENDS = ("eager", "aot_eager")
PRODUCTS = (
    "linear",
    "linear-bias",
    "F.linear(x[:, 8:16], w[:, 8:16])",
    "F.linear(x, w[8:16])",
    "x @ w.t()",
    "torch.mm(x, w.t())",
    "w @ x.t()",
)
READS = ("to_plain", "F.embedding(torch.tensor([3, 1, 3]), w)", "w + 1", "w.sum(-1)")
RETURNED = (
    "w",
    "w.detach()",
    "w.clone()",
    "w.t()",
    "w[8:16]",
    "w[:, 8:16]",
    "w[3]",
    "w.view(w.shape)",
    "w.transpose(0, 1)[4:8]",
    "w.unsqueeze(0)",
    "w.chunk(2)[1]",
    "w.to(torch.bfloat16)",
)
WRITES = (
    "w.copy_(source)",
    "w.add_(source, alpha=-0.5)",
    "w.mul_(-1)",
    "w.add_(0.25)",
    "w.zero_()",
    "w.lerp_(source, 0.25)",
    "w[8:16].copy_(source[8:16])",
)
CHANGES = (
    ("load_state_dict", "m.load_state_dict(M(v).state_dict())"),
    ("load_state_dict assign", "m.load_state_dict(M(v).state_dict(), assign=True)"),
    ("another Parameter", "m.w = nn.Parameter(v, False)"),
    ("copy_", "with torch.no_grad():\n    m.w.copy_(v)"),
    ("to bfloat16", "m.to(torch.bfloat16); x = x.to(torch.bfloat16)"),
    ("half", "m.half(); x = x.half()"),
)
OTHERS = (
    ("another dtype", "to_plain", "w", "w.to(torch.bfloat16)"),
    ("a slice", "to_plain", "w", "w[8:16]"),
    ("the rows after it", "to_plain", "w[0:8]", "w[8:16]"),
    ("the transpose", "to_plain", "w", "w.t()"),
    ("another source", "linear", "w", "v"),
    ("plain values", "linear", "w", "d"),
    ("the subclass after plain values", "linear", "d", "w"),
)
TANGENTS = (
    ("contiguous", "out.backward(g)"),
    ("transposed", "out.backward(g.t().contiguous().t())"),
    ("expanded", "out.backward(g[:1].expand_as(out))"),
    ("sum", "out.sum().backward()"),
)
FAKE = (
    ("linear", "linear"),
    ("linear with bias", "linear-bias"),
    ("to_plain", "to_plain"),
    *(
        (text, text)
        for text in (
            "w.detach()",
            "w.clone()",
            "w.t()",
            "w.transpose(0, 1)",
            "w[8:16]",
            "w[:, 8:16]",
            "w[3]",
            "w[::2]",
            "w.narrow(0, 8, 8)",
            "w.chunk(2)[1]",
            "w.split(8)[0]",
            "w.unbind()[1]",
            "w.view(w.shape)",
            "w.view(-1)",
            "w.unsqueeze(0)",
            "w.expand(2, *w.shape)",
            "w.contiguous()",
            "w.t().contiguous()",
            "w.to(torch.bfloat16)",
            "w.half()",
            "w.to('meta')",
            "x @ w.t()",
            "w + 1",
            "w * w",
            "-w",
            "w.sum()",
            "w.sum(0)",
            "w.abs().amax(-1, keepdim=True)",
            "torch.cat([w, w])",
            "F.embedding(torch.tensor([3, 1, 3]), w)",
            "w.copy_(source)",
            "w.copy_(w.clone())",
            "w.add_(source)",
            "w.mul_(-1)",
            "w.zero_()",
            "w.fill_(2.0)",
            "torch.empty_like(w)",
            "torch.zeros_like(w)",
            "w.new_zeros(3, 2)",
            "w.as_strided((4, 4), (w.shape[1], 1), w.shape[1])",
            "torch.where(w > 0, w, 0)",
        )
    ),
)
FORMULAS = {"linear": "F.linear(x, w)", "linear-bias": "F.linear(x, w, b)"}
FAKE_ERRORS = {
    "fake impl": "a custom operator has no fake implementation (torch.library.register_fake).",
    "UnsupportedOperatorException": "an operator has no fake or meta kernel.",
    "DataDependentOutput": "the handler reads a value (.item(), bool(tensor), an if on a tensor).",
    "DynamicOutputShape": "the handler's output shape depends on values (nonzero, boolean indexing).",
    "data_ptr": "the handler takes the address of a tensor, which a fake one doesn't have.",
}
ALIAS = "assert {t.untyped_storage().data_ptr() for t in map(got.__getattribute__, got.__tensor_flatten__()[0])} & {t.untyped_storage().data_ptr() for t in map(w.__getattribute__, w.__tensor_flatten__()[0])}, 'a copy'"
SPY = """\
class Spy(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t is not torch.Tensor and not issubclass(t, nn.Parameter) for t in types):
            return NotImplemented  # let the class unwrap itself first
        if func.namespace not in ("aten", "prim", "prims", "profiler"):
            calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))"""


def times(backends: tuple[str, ...], cases: tuple[object, ...]) -> list[tuple[object, ...]]:
    """Each case with each backend: (name, backend, *case)."""
    rows = []
    for case in cases:
        parts = case if isinstance(case, tuple) else (case,)
        rows += [(f"{backend}: {parts[0]}", backend, *parts) for backend in backends]
    return rows
