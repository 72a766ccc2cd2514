"""Known-good subclasses on which a failing check is run again: where they fail in the same way, it is torch's limit."""

from __future__ import annotations

import functools
import re

import torch

from subclass_testkit.checks.base import Case
from subclass_testkit.subject import Subject


@functools.cache
def _two_tensor() -> Subject:
    from torch.testing._internal.two_tensor import TwoTensor

    return Subject(
        TwoTensor,
        make="TwoTensor(hp, hp.clone())",
        to_plain="t.a",
        imports="from torch.testing._internal.two_tensor import TwoTensor",
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    )


@functools.cache
def _wrapper_subclass() -> Subject:
    from torch.testing._internal.subclasses import WrapperSubclass

    return Subject(
        WrapperSubclass,
        make="WrapperSubclass(hp)",
        to_plain="t.a",
        imports="from torch.testing._internal.subclasses import WrapperSubclass",
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    )


def pick(subject: Subject) -> Subject:
    """The control for a subject: TwoTensor, or another one where that is the subject itself."""
    two = _two_tensor()
    return _wrapper_subclass() if issubclass(subject.cls, two.cls) else two


def case_for(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...] | None, seed: int) -> Case | None:
    """The control at the same point of the axes."""
    chosen = pick(subject)
    if dtype not in chosen.dtypes or shape is None:
        return None
    found = ("wrapper", "inference", "training", "compile", "export", "serialization", "devices", "serving")
    return Case(chosen, "default", dtype, shape, seed, {"found": found})


def same_text(a: str, b: str) -> bool:
    """Whether two messages say the same, apart from numbers and class names."""
    return _bare(a) == _bare(b)


def _bare(text: str) -> str:
    text = re.sub(r"'?\b[A-Z]\w*(Tensor|Subclass|Weight)\w*\b'?", "T", text)
    return re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "0", text)
