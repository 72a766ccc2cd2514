"""What this environment can check, and what it lacks."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Iterator
from typing import NamedTuple

_OPTIONAL = {
    "safetensors": "checks of safetensors files",
    "pytest-xdist": "pytest -n 2: several processes",
    "torchao": "its bundled subjects",
    "optimum-quanto": "its bundled subjects",
    "bitsandbytes": "its bundled subjects",
}


class Answer(NamedTuple):
    """One line: whether it is there, what it is, and what that means for a run."""

    there: bool
    name: str
    text: str
    needed: bool = False


def examine() -> list[Answer]:
    """Look at everything that checks may need."""
    return [*_software(), *_torch(), *_optional()]


def render(answers: list[Answer]) -> str:
    """A line an answer, and what lacks at the end."""
    width = max(len(a.name) for a in answers)
    lines = [f"{'yes' if a.there else 'no ':<4} {a.name:<{width}}  {a.text}" for a in answers]
    missing = [a.name for a in answers if a.needed and not a.there]
    lines.append(f"\nThe kit can't run: {', '.join(missing)}." if missing else "\nThe kit can run here.")
    return "\n".join(lines)


def _software() -> Iterator[Answer]:
    yield Answer(sys.version_info >= (3, 10), "python", f"{platform.python_version()} on {platform.system()}", True)
    for name in ("torch", "pytest", "hypothesis", "parameterized"):
        version = _version(name)
        yield Answer(bool(version), name, version or f"pip install {name}", True)


def _torch() -> Iterator[Answer]:
    try:
        import torch
    except Exception as error:  # a broken installation can raise anything
        yield Answer(False, "import torch", f"{type(error).__name__}: {error}", True)
        return
    from subclass_testkit.isolation import can_fork, cores

    reason = can_fork()
    yield Answer(not reason, "isolation", reason or "checks run in child processes: a crash or a hang becomes a finding")
    yield Answer(
        cores() > 1, "processors", f"{cores()}: a second process works ahead" if cores() > 1 else "1: a run takes twice as long"
    )
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), "")
    yield Answer(bool(compiler), "C++ compiler", compiler or "the tier `full` compiles with inductor, which needs one")
    yield Answer(torch.distributed.is_available(), "distributed", "checks of sharding")
    for name in ("cuda", "mps", "xpu"):
        there = getattr(torch, name).is_available()
        yield Answer(there, name, "a real accelerator" if there else "the simulated device stands in for it")


def _optional() -> Iterator[Answer]:
    for name, use in _OPTIONAL.items():
        version = _version(name)
        yield Answer(bool(version), name, f"{version}: {use}" if version else f"pip install {name}: {use}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
