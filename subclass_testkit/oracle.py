"""Judge what an operation did: is an exception a refusal or an accident, is a value right, was an operand changed."""

from __future__ import annotations

import dis
import math
import re
import types
from dataclasses import dataclass
from typing import Any, Literal

import torch

from subclass_testkit.outcome import Finding

_NO_IMPLEMENTATION = re.compile(r"no implementation found|[Mm]ultiple dispatch failed")
# What Python says of a call that doesn't fit a signature; also when somebody raises it by hand.
_MISFIT = re.compile(r"unexpected keyword argument|missing \d+ required|takes \d+ positional|multiple values for")
_RAISE = dis.opmap["RAISE_VARARGS"]
_ACCIDENTS = (
    AttributeError,
    LookupError,
    NameError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    ImportError,
    SystemError,
    StopIteration,
    UnicodeError,
)

Verdict = Literal["refused", "odd", "accident"]


def judge_exception(error: BaseException, refusals: str = "") -> Verdict:
    """Whether an error is a refusal, a deliberate error of an unusual type (``odd``), or an accident.

    ``refusals`` is the subject's own pattern: a matching text is a deliberate error of whatever type it is.
    """
    chain = _causes(error)
    if any(isinstance(e, RecursionError) for e in chain):
        return "accident"
    if any(isinstance(e, NotImplementedError) for e in chain):
        return "refused"
    if any(isinstance(e, TypeError) and _NO_IMPLEMENTATION.search(str(e)) for e in chain):
        return "refused"
    if refusals and any(re.search(refusals, str(e)) for e in chain):
        return "odd"
    root = chain[-1]
    if isinstance(root, _ACCIDENTS) or not isinstance(root, Exception):
        return "accident"
    if "NotImplementedError" in str(error):
        return "refused"  # a refusal that another layer turned into text (load_state_dict does)
    if isinstance(root, TypeError):
        return "odd" if _was_raised_on_purpose(root) and not _MISFIT.search(str(root)) else "accident"
    if not str(root).strip():
        return "accident"
    return "odd"


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it wraps, outermost first."""
    chain = [error]
    while True:
        inner = getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__
        if not isinstance(inner, BaseException) or inner in chain:
            return chain
        chain.append(inner)


def root_cause(error: BaseException) -> BaseException:
    """The innermost error that ``error`` wraps (torch.compile and pickle wrap)."""
    return _causes(error)[-1]


def _was_raised_on_purpose(error: BaseException) -> bool:
    """Whether a ``raise`` (or ``assert``) statement raised the error, rather than Python or C++ in the middle of an expression."""
    tb = error.__traceback__
    if tb is None:
        return False
    while tb.tb_next is not None:
        tb = tb.tb_next
    code: types.CodeType = tb.tb_frame.f_code
    return 0 <= tb.tb_lasti < len(code.co_code) and code.co_code[tb.tb_lasti] == _RAISE


def describe(error: BaseException) -> str:
    """``IndexError: list index out of range``: type and first line, of the innermost error."""
    root = root_cause(error)
    text = str(root).strip().splitlines()
    return f"{type(root).__name__}: {text[0][:300]}" if text else type(root).__name__


# --- tolerances


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from the oracle's, and where the bound comes from.

    ``kind``: ``exact`` (views, moves, copies); ``elementwise`` (a few roundings in the result's dtype); ``multilinear``
    (matrix products: a bound from dtype, accumulation length and magnitude).
    """

    kind: Literal["exact", "elementwise", "multilinear"] = "exact"
    roundings: int = 4
    length: int = 1


EXACT = Tolerance("exact")
ELEMENTWISE = Tolerance("elementwise")


def multilinear(length: int) -> Tolerance:
    """The tolerance of sums of ``length`` products (``length`` = the inner dimension of a matmul)."""
    return Tolerance("multilinear", length=length)


def elementwise_bound(want: torch.Tensor, roundings: int) -> torch.Tensor:
    """``roundings`` half-ulps of relative error, and as many of the smallest normal number."""
    if not want.dtype.is_floating_point:
        return torch.zeros(want.shape, dtype=torch.float64)
    info = torch.finfo(want.dtype)
    return want.detach().double().abs() * (roundings * info.eps) + roundings * info.tiny


def multilinear_bound(magnitude: torch.Tensor, dtype: torch.dtype, length: int, extra: torch.Tensor | None) -> torch.Tensor:
    """Error bound of a sum of ``length`` products, element by element.

    ``magnitude`` is the same operation on absolute values. Each product's factors are rounded to ``dtype`` once (a kernel may scale
    after the product, where the oracle scales before), partial sums of a blocked summation add ``log2(length)`` roundings, and accumulation
    in float32 adds ``length`` of its roundings (Higham, Accuracy and Stability of Numerical Algorithms, chapters 3 and 4).
    ``extra`` is the analytic error of a declared activation rounding.
    """
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    wide = torch.finfo(torch.float32).eps if dtype is not torch.float64 else torch.finfo(torch.float64).eps
    factor = (math.log2(max(length, 2)) + 4) * eps + length * wide
    bound = magnitude.double() * factor + 4 * (torch.finfo(dtype).tiny if dtype.is_floating_point else 0)
    return bound if extra is None else bound + extra.double()


# --- comparing


def compare(got: Any, want: Any, bound: Any, label: str, *, strides: bool = False) -> Finding | None:
    """The first way in which ``got`` differs from ``want``, or None. ``bound`` is of want's structure (tensors or None: exact)."""
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return Finding("type", f"{label} gives {type(got).__name__} ({got!r:.80}), expected a tensor.")
        return _compare_tensors(got, want, bound, label, strides)
    if isinstance(want, list | tuple):
        if not isinstance(got, list | tuple) or len(got) != len(want):
            size = f"{len(got)} items" if isinstance(got, list | tuple) else type(got).__name__
            return Finding("length", f"{label} gives {size}, expected {len(want)} items.")
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            part = bound[i] if isinstance(bound, list | tuple) else bound
            found = compare(g, w, part, f"{label}, item {i}", strides=strides)
            if found:
                return found
        return None
    if isinstance(want, float) and isinstance(got, int | float):
        limit = float(bound) if isinstance(bound, int | float) else 0.0
        same = math.isclose(got, want, rel_tol=1e-6, abs_tol=limit) or (math.isnan(got) and math.isnan(want))
        return None if same else Finding("value", f"{label} gives {got}, expected {want}.")
    if type(got) is not type(want) or got != want:
        return Finding("value", f"{label} gives {got!r:.120}, expected {want!r:.120}.")
    return None


def _compare_tensors(got: torch.Tensor, want: torch.Tensor, bound: Any, label: str, strides: bool) -> Finding | None:
    for what in ("shape", "dtype", "device"):
        g, w = getattr(got, what), getattr(want, what)
        if g != w:
            g, w = (list(g), list(w)) if what == "shape" else (g, w)
            return Finding(what, f"{label} has {what} {g}, expected {w}.")
    if strides and got.stride() != want.stride() and got.numel() > 1:
        return Finding("stride", f"{label} has stride {got.stride()}, expected {want.stride()}.")
    if got.device.type == "meta" or got.numel() == 0:
        return None
    return value_finding(got, want, bound if isinstance(bound, torch.Tensor) else None, label)


def value_finding(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor | None, label: str) -> Finding | None:
    """Where the values differ by more than ``bound`` (None: at all), with the first differing positions."""
    g, w = widen(got), widen(want)
    wrong = ~((g == w) | (g.isnan() & w.isnan()))
    if bound is not None:
        near = (g - w).abs() <= bound.to(g.device)
        wrong &= ~near
    count = int(wrong.sum())
    if not count:
        return None
    distance = torch.where(wrong, (g - w).abs(), torch.zeros_like(g)).nan_to_num(math.inf)
    worst = _position(int(distance.flatten().argmax()), distance.shape)
    first = _position(int(wrong.flatten().int().argmax()), wrong.shape)
    where = f"largest difference {distance.max():.4g} at {list(worst)}" if distance.max() > 0 else ""
    sample = f"first at {list(first)}: got {got[first].item():.6g}, expected {want[first].item():.6g}"
    return Finding("value", f"{label} is wrong in {count} of {g.numel()} elements; {where}; {sample}.")


def widen(t: torch.Tensor) -> torch.Tensor:
    """float64 (or int64, complex128): every value that a test compares fits exactly."""
    t = t.detach()
    if t.dtype.is_complex:
        return torch.view_as_real(t.to(torch.complex128))
    return t.to(torch.float64)


def _position(index: int, shape: torch.Size) -> tuple[int, ...]:
    position = []
    for size in reversed(shape):
        index, i = divmod(index, size)
        position.append(i)
    return tuple(reversed(position))


# --- inner tensors and snapshots


def inner_tensors(t: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The plain tensors inside a wrapper subclass by dotted path, through ``__tensor_flatten__``; recursive."""
    if not hasattr(t, "__tensor_flatten__"):
        return {}
    found: dict[str, torch.Tensor] = {}
    for name in t.__tensor_flatten__()[0]:
        inner = getattr(t, name)
        if not isinstance(inner, torch.Tensor):
            continue
        nested = inner_tensors(inner, f"{prefix}{name}.")
        found.update(nested or {prefix + name: inner})
    return found


def tower(t: Any) -> list[Any]:
    """``t`` and the tensors inside it, however deep."""
    inner = [getattr(t, name) for name in t.__tensor_flatten__()[0]] if hasattr(t, "__tensor_flatten__") else []
    return [t, *(x for part in inner for x in tower(part))]


def shares_memory(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether any inner tensor of ``view`` lies in the storage of one of ``base``."""
    homes = {t.untyped_storage().data_ptr() for t in (inner_tensors(base) or {"": base}).values()} - {0}
    return any(t.untyped_storage().data_ptr() in homes for t in (inner_tensors(view) or {"": view}).values())


@dataclass
class Snapshot:
    """What must not change in an operand."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    context: str
    inner: dict[str, torch.Tensor]

    @classmethod
    def of(cls, t: torch.Tensor) -> Snapshot:
        inner = inner_tensors(t)
        context = repr(t.__tensor_flatten__()[1]) if hasattr(t, "__tensor_flatten__") else ""
        if not inner:
            inner = {"values": t.detach().as_subclass(torch.Tensor)}
        copies = {name: x.detach().clone() for name, x in inner.items()}
        return cls(t.shape, t.stride(), t.dtype, t.requires_grad, context, copies)

    def changes(self, t: torch.Tensor) -> str:
        """What differs in ``t`` now, as a sentence without subject; empty if nothing."""
        now = Snapshot.of(t)
        for what in ("shape", "stride", "dtype", "requires_grad"):
            before, after = getattr(self, what), getattr(now, what)
            if before != after:
                return f"its {what} changed from {before} to {after}"
        if self.context != now.context:
            return f"its flatten context changed from {self.context:.120} to {now.context:.120}"
        if self.inner.keys() != now.inner.keys():
            return f"its inner tensors changed from {sorted(self.inner)} to {sorted(now.inner)}"
        for name, before in self.inner.items():
            after = now.inner[name]
            if before.shape != after.shape or before.dtype != after.dtype or before.device != after.device:
                return f"its inner tensor {name!r} changed from {_meta(before)} to {_meta(after)}"
            if before.device.type != "meta" and not same_bits(before, after):
                return f"the values of its inner tensor {name!r} changed"
        return ""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes; NaNs included, and for dtypes that have no ``equal``."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(*(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _meta(t: torch.Tensor) -> str:
    return f"{list(t.shape)} {t.dtype} {t.device}"


def absolute(value: Any) -> Any:
    """``abs`` in float64 of floating tensors; all else unchanged."""
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
        return value.detach().double().abs()
    return value
