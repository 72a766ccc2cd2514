"""What "the same tensor again" means, in terms that every tensor subclass has: class, report, context, values, memory."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import torch

from subclass_testkit import oracle
from subclass_testkit.outcome import CheckFailed, CheckSkipped
from subclass_testkit.script import Script

REBUILD = """names, ctx = {s}.__tensor_flatten__()
r = type({s}).__tensor_unflatten__({{n: getattr({s}, n) for n in names}}, ctx, {s}.size(), {s}.stride())"""


def is_wrapper(t: Any) -> bool:
    """Whether its values live in inner tensors."""
    return isinstance(t, torch.Tensor) and hasattr(t, "__tensor_flatten__")


def expect_kept(
    script: Script,
    got: str = "v",
    want: str = "w",
    *,
    label: str = "",
    context: bool = True,
    strides: bool = True,
    device: bool = True,
    klass: bool = True,
) -> None:
    """Fail unless ``got`` is ``want`` again: class, shape, strides, dtype, device, requires_grad, flatten context and values."""
    label = label or got
    if klass:
        message = f"{label} is a {{type({got}).__name__}}, expected {{type({want}).__name__}}."
        script.expect(f"type({got}) is type({want})", message, kind="class")
    attributes = ["shape", "dtype", "requires_grad"] + ["device"] * device
    for what in attributes:
        message = f"{label} has {what} {{{got}.{what}}}, expected {{{want}.{what}}}."
        script.expect(f"{got}.{what} == {want}.{what}", message, kind=what)
    if strides and script[want].numel() > 1:
        message = f"{label} has stride {{{got}.stride()}}, expected {{{want}.stride()}}."
        script.expect(f"{got}.stride() == {want}.stride()", message, kind="stride")
    if context and is_wrapper(script[want]) and is_wrapper(script[got]):
        expect_same_context(script, got, want, label)
    if device or script[got].device.type != "meta":
        script.equal(got, want, label=label)


def expect_same_context(script: Script, got: str, want: str, label: str) -> None:
    """Fail unless both flatten to the same names and an equal context."""
    (names, context), (other_names, other) = script[want].__tensor_flatten__(), script[got].__tensor_flatten__()
    if list(names) != list(other_names):
        script.fail(
            f"{label} flattens to the inner tensors {list(other_names)}, expected {list(names)}.",
            kind="names",
            assertion=f"assert list({got}.__tensor_flatten__()[0]) == list({want}.__tensor_flatten__()[0])",
        )
    if not same_context(context, other):
        script.fail(
            f"{label} has the flatten context {short(other)}, expected {short(context)}.",
            kind="context",
            likely="an attribute was not passed on to the copy.",
            assertion=f"assert {got}.__tensor_flatten__()[1] == {want}.__tensor_flatten__()[1]",
        )


def context_of(t: Any) -> Any:
    """The second thing that ``__tensor_flatten__`` gives."""
    return t.__tensor_flatten__()[1]


def same_context(a: Any, b: Any) -> bool:
    """Equal by ``==`` or, for objects that have none, by their text."""
    try:
        return bool(a == b) or repr(a) == repr(b)
    except Exception:
        return repr(a) == repr(b)


def short(value: Any) -> str:
    """A text that fits into a message."""
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


def take(script: Script, name: str, view: str) -> None:
    """Name a view; skip where taking it fails by accident, which the slicing checks report."""
    try:
        script.run(f"{name} = {view}")
    except CheckFailed as failure:
        raise CheckSkipped(f"{view} fails by itself: {failure}") from failure


def need_pickle(script: Script, expression: str) -> None:
    """Skip where torch itself can't pickle plain tensors of a dtype that the inner tensors have (float8 on torch 2.13)."""
    if "pickle" not in expression:
        return
    for dtype in {t.dtype for t in oracle.inner_tensors(script["w"]).values()}:
        try:
            pickle.loads(pickle.dumps(torch.empty(1, dtype=dtype)))
        except Exception as error:
            raise CheckSkipped(
                f"torch {torch.__version__} can't pickle a plain {dtype} tensor: {oracle.describe(error)}"
            ) from error


def need_wrapper(script: Script, name: str, text: str) -> None:
    """Skip where an operation gave a plain tensor (decay is allowed)."""
    if not is_wrapper(script[name]):
        raise CheckSkipped(f"{text} gives a plain {type(script[name]).__name__}")


def tensors_in(value: Any, path: str, seen: frozenset[int] = frozenset()) -> Iterator[str]:
    """The paths of all tensors in a nest of containers and of objects with attributes."""
    if id(value) in seen or isinstance(value, type):
        return
    if isinstance(value, torch.Tensor):
        yield path
        return
    seen = seen | {id(value)}
    if isinstance(value, dict):
        items = [(f"{path}[{k!r}]", v) for k, v in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        items = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
    elif hasattr(value, "__dict__") and not callable(value):
        items = [(f"{path}.{k}", v) for k, v in vars(value).items()]
    else:
        return
    for where, item in items:
        yield from tensors_in(item, where, seen)


def homes(t: torch.Tensor) -> dict[str, int]:
    """Where the inner tensors (or its own values) lie: dotted path -> address of the storage. Empty ones are left out."""
    inner: dict[str, torch.Tensor] = oracle.inner_tensors(t)
    found = {}
    for name, x in (inner or {"": t}).items():
        try:
            address = x.untyped_storage().data_ptr() if x.numel() else 0
        except (RuntimeError, NotImplementedError):
            continue
        if address:
            found[name] = address
    return found


def expect_independent(script: Script, got: str, want: str, other: str, label: str) -> None:
    """Fail if ``got`` shares memory with ``want``; what an independent ``other`` shares too is a constant of the class."""
    constants = set(homes(script[want]).values()) & set(homes(script[other]).values())
    taken = set(homes(script[want]).values()) - constants
    for name, address in homes(script[got]).items():
        if address in taken:
            dotted = f".{name}" if name else ""
            what = f"its inner tensor {name!r}" if name else "its memory"
            script.fail(
                f"{label} shares {what} with the original: a write into one changes the other.",
                kind="shared",
                likely="the handler passes the inner tensor on, instead of copying it.",
                assertion=f"assert {got}{dotted}.untyped_storage().data_ptr() != {want}{dotted}.untyped_storage().data_ptr()",
            )
