"""Which kernel a linear runs: named kernels, each with a condition, in an explicit order.

A weight's class has many ways to compute a linear: with a quantized activation or without, fused or not. Each is
registered once, from any package and at any time:

    @register_linear_kernel(MyTensor, "my_kernel", precedence=10, when=why_not)
    def _(x, weight, bias): ...

- **Order.** Kernels are tried by precedence, the highest first. Two of one class can't have the same. Of kernels of
  different classes with the same precedence, the child's comes first, and then in Python's method resolution order.
- **Condition.** `when(x, weight, bias)` says why the kernel doesn't apply, or None. Without it, it always does.
- **Inheritance.** A class has the kernels of its parents, also those that are registered later. One of the same name
  replaces the parent's, for the child only.
- **Override.** `override_kernels(cls, ...)` replaces the whole list of one class, which is what an autotuner needs.
- **Direct call.** `run_kernel(name, x, weight, bias)` asks no condition.
- **Observation.** `with record_kernels() as ran:` lists the names of the kernels that run in it; `kernels_in(graph)` finds
  them in a traced program.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from reference_impls.values import ValueTensor

Run = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
Condition = Callable[[torch.Tensor, Any, torch.Tensor | None], str | None]


@dataclass(frozen=True)
class LinearKernel:
    """A way to compute x (..., K) @ weight (N, K).T + bias (N,).

    `op` is the custom operator that the kernel calls, by which it is found in a traced program (None: it can't be).
    """

    name: str
    precedence: int
    run: Run
    when: Condition
    op: Any = None


class QuantizedLinearNotImplementedError(NotImplementedError):
    """No kernel of the weight's class applies; the text says what was looked for, and why each kernel declined."""


# Registries: class -> kernels by name; class -> its whole list. Only the functions below write to them.
_KERNELS: dict[type, dict[str, LinearKernel]] = {}
_OVERRIDES: dict[type, tuple[LinearKernel, ...]] = {}
_RECORDS: contextvars.ContextVar[tuple[list[str], ...]] = contextvars.ContextVar("reference_impls.linear", default=())


def _always(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> None:
    return None


def register_linear_kernel(
    cls: type, name: str, *, precedence: int, when: Condition = _always, op: Any = None
) -> Callable[[Run], Run]:
    """Register the decorated function, `run(x, weight, bias)`, as a kernel of `cls` and its children.

    It is called below autograd, with a plain `x` and `bias` whose sizes, dtypes and devices fit the weight's.

    Raises ValueError where `cls` itself already has a kernel of that name or precedence.
    """
    own = _KERNELS.setdefault(cls, {})
    if name in own:
        raise ValueError(f"{cls.__name__} already has a linear kernel {name!r}; choose another name, or override_kernels().")
    for other in own.values():
        if other.precedence == precedence:
            raise ValueError(
                f"linear kernels {name!r} and {other.name!r} of {cls.__name__} both have precedence {precedence}, so that nothing "
                "says which is tried first; give one of them another."
            )

    def decorate(run: Run) -> Run:
        own[name] = LinearKernel(name, precedence, run, when, op)
        return run

    return decorate


def kernels_for(cls: type) -> tuple[LinearKernel, ...]:
    """The kernels of a class in the order in which they are tried."""
    found: dict[str, LinearKernel] = {}
    for klass in cls.__mro__:
        if klass in _OVERRIDES:
            return (*_ordered(found), *(k for k in _OVERRIDES[klass] if k.name not in found))
        for kernel in _KERNELS.get(klass, {}).values():
            found.setdefault(kernel.name, kernel)
    return _ordered(found)


def _ordered(kernels: dict[str, LinearKernel]) -> tuple[LinearKernel, ...]:
    return tuple(sorted(kernels.values(), key=lambda kernel: -kernel.precedence))


def find_kernel(cls: type, name: str) -> LinearKernel:
    """The kernel of that name of a class or its parents, whether an override leaves it out or not.

    Raises ValueError that lists the names there are.
    """
    known = {n: k for klass in reversed(cls.__mro__) for n, k in _KERNELS.get(klass, {}).items()}
    known.update({k.name: k for k in kernels_for(cls)})
    if name not in known:
        raise ValueError(f"{cls.__name__} has no linear kernel {name!r}; it has {', '.join(sorted(known)) or 'none'}.")
    return known[name]


@contextlib.contextmanager
def override_kernels(cls: type, kernels: Sequence[str | LinearKernel] | None) -> Iterator[None]:
    """While the block runs, a linear with weights of `cls` tries only these kernels (names or new ones), in this order.

    Children get them in the place of what they inherit from `cls`. An empty list refuses every linear. See `set_kernels`.
    """
    before = _OVERRIDES.get(cls)
    set_kernels(cls, kernels)
    try:
        yield
    finally:
        set_kernels(cls, before)


def set_kernels(cls: type, kernels: Sequence[str | LinearKernel] | None) -> None:
    """As `override_kernels`, for good; None goes back to what is registered."""
    if kernels is None:
        _OVERRIDES.pop(cls, None)
    else:
        _OVERRIDES[cls] = tuple(find_kernel(cls, k) if isinstance(k, str) else k for k in kernels)


def run_kernel(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Run a kernel by name, without asking its condition. Differentiable as far as its operator is."""
    return _run(find_kernel(type(weight), name), x, weight, bias)


@contextlib.contextmanager
def record_kernels() -> Iterator[list[str]]:
    """A list of the names of the kernels that run in the block, in this thread; blocks may be nested.

    A compiled function chooses its kernels when it is traced, and then runs without asking again: look at its graph with
    `kernels_in`.
    """
    ran: list[str] = []
    token = _RECORDS.set((*_RECORDS.get(), ran))
    try:
        yield ran
    finally:
        _RECORDS.reset(token)


def kernels_in(program: Any) -> list[str]:
    """The names of the kernels whose operators a program calls, in its order.

    Args:
        program: a `torch.fx.GraphModule`, a `torch.export.ExportedProgram`, or generated code as text.
    """
    named = {_qualified(k.op): k.name for own in _KERNELS.values() for k in own.values() if k.op is not None}
    if isinstance(program, str):
        places = {program.find(op.replace("::", ".")): name for op, name in named.items()}
        return [name for place, name in sorted(places.items()) if place >= 0]
    module = getattr(program, "graph_module", program)
    calls = [
        _qualified(n.target) for m in module.modules() if hasattr(m, "graph") for n in m.graph.nodes if n.op == "call_function"
    ]
    return [named[op] for op in calls if op in named]


def _qualified(op: Any) -> str:
    """`reference_impls::int8_weight_only_linear`, of whatever stands for an operator."""
    return getattr(op, "_qualname", None) or (op._schema.name if isinstance(op, OpOverload) else str(op))


def run_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Run the first kernel that applies.

    Raises QuantizedLinearNotImplementedError where none does.
    """
    declined = []
    for kernel in kernels_for(type(weight)):
        reason = kernel.when(x, weight, bias)
        if reason is None:
            return _run(kernel, x, weight, bias)
        declined.append(f"{kernel.name}: {reason}")
    raise QuantizedLinearNotImplementedError(_nothing_applies(x, weight, declined))


def _run(kernel: LinearKernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    for ran in _RECORDS.get():
        ran.append(kernel.name)
    return kernel.run(x, weight, bias)


def _nothing_applies(x: torch.Tensor, weight: torch.Tensor, declined: Iterable[str]) -> str:
    name = type(weight).__name__
    reasons = "; ".join(declined) or "it has none"
    return (
        f"no linear kernel of {name} applies to an input of {x.dtype} {tuple(x.shape)} on {x.device} and a weight of shape "
        f"{tuple(weight.shape)} ({reasons}). To add one: @register_linear_kernel({name}, 'name', precedence=...)."
    )


@ValueTensor.implements(torch.ops.reference_impls.linear.default)
def _linear(func: OpOverload, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return run_linear(x, weight, bias)
