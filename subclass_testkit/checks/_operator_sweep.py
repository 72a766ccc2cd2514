"""Torch's own operator sample inputs (`op_db`), with one argument of the class: is the result that of its values?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from subclass_testkit import oracle
from subclass_testkit.outcome import CheckSkipped
from subclass_testkit.subject import Subject

SAMPLES = 4
# A screening bound, relative to the largest value of a result: operators differ in conditioning, and most results are bit-equal.
# Quantized classes get four of their own errors more: composite operators write in place into intermediate results of the class.
RELATIVE = 1e-3
QUANTIZATIONS = 4
# What gives no value to compare, or another one at each call; views of memory are the slicing group's.
LEFT_OUT = (
    "empty",
    "new_empty",
    "to_sparse",
    "sparse",
    "_upsample",
    "item",
    "as_strided",
    "geqrf",
    "svd",
    "eig",
    "qr",
    "pca",
    "lstsq",
    "lu",
)


@dataclass
class Sweep:
    """How many operators ended how; and what was wrong, as operator, position of the argument, and description."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, int, int, str]] = field(default_factory=list)

    def table(self) -> str:
        return ", ".join(f"{n} {word}" for word, n in sorted(self.counts.items()))


def operators() -> list[Any]:
    """The entries of `op_db` that a sweep runs.

    Raises:
        CheckSkipped: this torch doesn't ship them, or what they need isn't installed.
    """
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except Exception as error:
        raise CheckSkipped(
            f"torch's operator samples need expecttest (pip install expecttest): {oracle.describe(error)}"
        ) from error
    found = [op for op in op_db if torch.float32 in op.dtypes and not any(word in op.name for word in LEFT_OUT)]
    return list(found)


def sweep(subject: Subject, operations: list[Any]) -> Sweep:
    """Run every operator on its samples, each with one matrix replaced by a subclass."""
    result = Sweep()
    for operation in operations:
        words = Counter(word for word in _one(subject, operation, result))
        word = next((w for w in ("wrong", "error", "equal", "refused") if words[w]), "without a sample for the subject")
        result.counts[word] += 1
    return result


def _one(subject: Subject, operation: Any, result: Sweep) -> Iterator[str]:
    try:
        samples = list(operation.sample_inputs("cpu", torch.float32, requires_grad=False))
    except Exception:
        return
    tried = 0
    for i, sample in enumerate(samples):
        values = [sample.input, *sample.args]
        for j, value in enumerate(values):
            if tried >= SAMPLES or not _legal(subject, value):
                continue
            tried += 1
            word, text = judge(subject, operation, sample, j)
            if word == "wrong":
                result.wrong.append(
                    (f"{operation.name}{'.' * bool(operation.variant_test_name)}{operation.variant_test_name}", i, j, text)
                )
            yield word


def _legal(subject: Subject, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32 or value.dim() != 2 or value.numel() == 0:
        return False
    try:
        subject.build(value.detach().clone())
    except Exception:
        return False
    return True


def judge(subject: Subject, operation: Any, sample: Any, position: int) -> tuple[str, str]:
    """``equal``, ``refused``, ``error`` or ``wrong``, with a description, of an operator with its argument at ``position`` of the class."""
    values = [sample.input, *sample.args]
    w = subject.build(values[position].detach().clone())
    d = subject.plain(w).clone()
    source = values[position]
    relative = RELATIVE + QUANTIZATIONS * float((d - source).abs().amax() / source.abs().amax().clamp(min=1e-30))
    try:
        want = _run(operation, sample, values, position, d)
        again = _run(operation, sample, values, position, d)
    except Exception:
        return "skipped", ""
    try:
        got = _run(operation, sample, values, position, w)
        found = _different(subject, got, want, relative)
    except Exception as error:
        return ("error" if oracle.judge_exception(error, subject.refusals) == "accident" else "refused"), oracle.describe(error)
    if found and not _different(subject, again, want, 0):
        return "wrong", found
    return "equal", ""


def _run(operation: Any, sample: Any, values: list[Any], position: int, value: Any) -> Any:
    arguments = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
    arguments[position] = value
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        return operation.op(*arguments, **sample.kwargs)


def _different(subject: Subject, got: Any, want: Any, relative: float) -> str:
    got_leaves, want_leaves = tree_flatten(got)[0], tree_flatten(want)[0]
    if len(got_leaves) != len(want_leaves):
        return f"{len(got_leaves)} results, expected {len(want_leaves)}"
    for g, w in zip(got_leaves, want_leaves, strict=True):
        if not isinstance(w, torch.Tensor):
            continue
        g = subject.plain(g)
        largest = float(oracle.widen(w).nan_to_num(0, 0, 0).abs().amax()) if w.numel() else 0.0
        bound = torch.full(w.shape, relative * largest, dtype=torch.float64)
        found = oracle.compare(g, w, None if w.dtype.is_complex else bound, "the result")
        if found:
            return found.message
    return ""
