"""The operations of `sequences`, as source text: ``{0}`` and ``{}`` stand for the tensor."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from subclass_testkit.checks._case import Case

COPIES = (
    "{0}.clone()",
    "copy.deepcopy({0})",
    "{0}.contiguous().clone()",
    "{0}.to({0}.device, copy=True)",
    "(torch.save({0}, f := io.BytesIO()), f.seek(0), torch.load(f, weights_only=False))[2]",
)
# In a write, the first {} is the tensor; all others are plain values of it.
WRITES = (
    "{}.mul_(-1)",
    "{}.add_(0.5)",
    "{}.zero_()",
    "{}.fill_(0.25)",
    "{}.copy_({}.flip(0))",
    "{}.copy_({}.mul(-2).movedim(0, -1).contiguous().movedim(-1, 0))",
    "{}.sub_({}, alpha=2)",
    "torch._foreach_mul_([{}], -1)",
    "{}.addcdiv_({} + 1, {}.abs() + 1, value=-2)",
    "{}.lerp_({}.flip(0), 0.75)",
)
OPTIMIZERS = (
    "SGD([p], lr=0.5)",
    "SGD([p], lr=3, momentum=0.9, foreach=True)",
    "AdamW([p], lr=0.5, weight_decay=0.5)",
    "AdamW([p], lr=0.5, foreach=True)",
)
PRODUCTS = (
    "F.linear(x, {})",
    "F.linear(x, {}, bias=y[0])",
    "F.linear(input=x, weight={}, bias=y[0])",
    "F.linear(x[0], {})",
    "F.linear(x[None], {}, y[0])",
    "F.linear(x[:0], {})",
    "F.linear(x.t().contiguous().t(), {})",
    "torch.autograd.grad(F.linear(z, {}, y[0]), z, y)[0]",
    "x @ {}.t()",
    "torch.mm(y, {})",
    "torch.addmm(y, x, {}.t(), beta=0.5, alpha=2)",
    "torch.matmul({}, x.t())",
    "torch.mv({}, x[0])",
    "{}.sum(1, keepdim=True)",
    "F.embedding(torch.tensor([0, {last}]), {})",
    "torch.autograd.grad(F.linear(x, p := nn.Parameter({}.detach())), p, y)[0]",
)
ELEMENTWISE = (
    "{} * -2.0",
    "1 - {}",
    "{} + {}",
    "-{}",
    "{}.clamp(max=0.1)",
    "torch.where({} > 0, {}, 2.0)",
    "torch.cat([{}, {}])",
    "torch.stack([{}, {}])",
    "{}.abs().amax(-1)",
    "torch.ones_like({})",
    "torch.zeros({shape}).copy_({})",
    "torch.add({}, 1, out=torch.empty({shape}))",
    "torch.equal({}, -{})",
    "{}.double()",
)
CASTS = ("{0}.to(torch.bfloat16)", "{0}.to(torch.float16)")
TURNS = ("{0}.t()", "{0}.transpose(-2, -1)", "{0}.permute(1, 0)")
_VIEWS = ("{0}[...]", "{0}.detach()", "{0}.unsqueeze(0)", "{0}.squeeze(0)", "{0}.view(-1)")
# For each dimension: %d is its number, and %s commas up to it; <k>, <n> and <a:b> stand for an index, a length and a window of it.
_OF_DIMENSION = (
    "{0}[%s<k>:]",
    "{0}[%s:<n>]",
    "{0}[%s<a:b>]",
    "{0}[%s::2]",
    "{0}.narrow(%d, <a, n>)",
    "{0}.split(<n>, %d)[-1]",
    "{0}.chunk(3, %d)[-1]",
    "{0}.chunk(2, %d)[0]",
)
_SELECTIONS = ("{0}[%s<k>]", "{0}.select(%d, <k>)", "{0}.unbind(%d)[<k>]")
_OF_ROWS = ("{}[<a:b>].copy_(torch.full_like({}[<a:b>], -0.75))", "{}[<k>].neg_()")


def choices(shape: torch.Size, case: Case) -> list[tuple[str, str]]:
    """(kind, text) of the operations that a tensor of that shape may go through; a text may have holes for `filled`."""
    # Hypothesis draws the first of a list more often than the others
    found = _repeated("write", [*WRITES, *(_OF_ROWS if shape and shape[0] else ())], 12)
    found += [*_repeated("view", views(shape), 24), *_repeated("copy", COPIES, 8)]
    found += [("another", "{}.copy_(%s)"), ("another", "{}.copy_(%s)")]
    if case.dtype is torch.float32:
        found += _repeated("cast", CASTS, 2)
    found += _repeated("elementwise", [text.replace("{shape}", ", ".join(map(str, shape)) or "()") for text in ELEMENTWISE], 12)
    if "training" in case.found:
        found += _repeated("write", [_step(shape, optimizer) for optimizer in OPTIMIZERS], 6)
    if len(shape) == 2 and all(shape) and "inference" in case.found and case.subject.linear is None:
        texts = [text for text in PRODUCTS if not case.rounding or "F.linear(" in text]
        texts = [text for text in texts if "nn.Parameter" not in text or "training" in case.found]
        found += _repeated("product", [text.replace("{last}", str(shape[0] - 1)) for text in texts], 18)
    return found


def _repeated(kind: str, texts: Sequence[str], count: int) -> list[tuple[str, str]]:
    """At least ``count`` choices of a kind, so that long lists don't crowd out short ones."""
    return [(kind, text) for text in texts] * max(1, round(count / len(texts)))


def _step(shape: torch.Size, optimizer: str) -> str:
    gradient = f"torch.linspace(-1, 2, {shape[0] if shape else 1}, dtype=p.dtype).reshape(-1{', 1' * (len(shape) - 1)})"
    return (
        f"p = nn.Parameter({{}}.detach()); p.grad = ({gradient}).expand({tuple(shape)}).clone(); torch.optim.{optimizer}.step()"
    )


def views(shape: torch.Size) -> list[str]:
    """Views that are legal for the shape, with holes."""
    found = [*_VIEWS, *(TURNS if len(shape) == 2 else ())]
    for dim, size in enumerate(shape):
        texts = [*_OF_DIMENSION, *(_SELECTIONS if len(shape) > 1 else ())] if size > 1 else []
        found += [
            _at(text, d).replace("<", f"<{dim}: ")
            for text in texts
            for d in ((dim, dim - len(shape)) if "%d" in text else (dim,))
        ]
        if size and not size % 2:
            found.append(f"{{0}}.unflatten({dim}, (2, {size // 2}))")
    return found


def _at(text: str, dim: int) -> str:
    return text.replace("%d", str(dim)).replace("%s", ":, " * dim)


def filled(text: str, shape: torch.Size) -> st.SearchStrategy[str]:
    """The text with numbers in its holes."""
    hole = re.search(r"<(?:(\d+): )?([^>]+)>", text)
    if hole is None:
        return st.just(text)
    size = shape[int(hole[1] or 0)]
    if hole[2] == "k":
        return st.integers(-size, size - 1).map(lambda k: text.replace(hole[0], str(k)))
    if hole[2] == "n":
        return st.integers(1, size).map(lambda n: text.replace(hole[0], str(n)))
    window = st.integers(0, size - 1).flatmap(lambda a: st.tuples(st.just(a), st.integers(1, size - a)))
    if hole[2] == "a, n":
        return window.map(lambda p: text.replace(hole[0], f"{p[0]}, {p[1]}"))
    return window.map(lambda p: text.replace(hole[0], f"{p[0]}:{p[0] + p[1]}"))
