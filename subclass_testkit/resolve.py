"""How a specification (``pkg.mod.Name``, ``pkg.mod:Name``, a class, a Subject) becomes a Subject that can be built."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from subclass_testkit import inputs
from subclass_testkit.calm import calm
from subclass_testkit.check import did_you_mean
from subclass_testkit.subject import Subject, SubjectError

ENTRY_POINTS = "subclass_testkit.subjects"
BUILDERS = ("from_hp", "from_float", "from_high_precision", "from_plain", "quantize")
READERS = ("dequantize", "to_plain", "get_original_weight", "to_original_precision", "get_plain", "full_tensor")
TRIED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Reads a lossless wrapper; taken only where it gives back the source exactly (codes of a quantized class only resemble it).
_FIRST_INNER = "getattr(t, t.__tensor_flatten__()[0][0])"
_COLUMNS = (48, 64, 128, 256, 512)


def resolve(spec: object) -> Subject:
    """The Subject that ``spec`` stands for, complete: buildable, readable, with legal shapes.

    Args:
        spec: ``"pkg.mod.Name"`` or ``"pkg.mod:Name"`` of a class, a Subject or a function that returns one; or the thing itself.

    Raises:
        SubjectError: the name doesn't exist, or the class can't be built or read; says what was tried and what fixes it.
    """
    if isinstance(spec, str):
        path = spec.replace(":", ".")
        found = _find(spec)
    else:
        found = spec
        path = f"{getattr(spec, '__module__', '')}.{getattr(spec, '__qualname__', '')}"
    return complete(_as_subject(found, path, spec))


def _find(spec: str) -> Any:
    """Import what a dotted path names."""
    module_path, _, attribute = spec.partition(":")
    if not attribute:
        module_path, _, attribute = spec.rpartition(".")
    if not module_path or not attribute:
        raise SubjectError(f"--subclass={spec}: write it as pkg.mod.Name or pkg.mod:Name")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    parts = module_path.split(".")
    for cut in range(len(parts), 0, -1):
        name = ".".join(parts[:cut])
        try:
            thing: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
                continue
            raise SubjectError(f"--subclass={spec}: importing {name} failed: {error}") from error
        except Exception as error:
            raise SubjectError(f"--subclass={spec}: importing {name} failed: {type(error).__name__}: {error}") from error
        for part in (*parts[cut:], *attribute.split(".")):
            if not hasattr(thing, part):
                where = getattr(thing, "__name__", repr(thing))
                names = [n for n in dir(thing) if not n.startswith("_")]
                classes = [n for n in names if inspect.isclass(getattr(thing, n, None))] or names
                raise SubjectError(f"--subclass={spec}: {where} has no {part!r}{did_you_mean(part, classes)}")
            thing = getattr(thing, part)
        return thing
    near = did_you_mean(parts[0], _top_level_names())
    raise SubjectError(f"--subclass={spec}: there is no module {parts[0]!r}{near} Is the package installed here?")


def _top_level_names() -> list[str]:
    return [*importlib.metadata.packages_distributions(), *(n for n in sys.modules if "." not in n)]


def _as_subject(found: Any, path: str, spec: object) -> Subject:
    if isinstance(found, Subject):
        return found
    if isinstance(found, type) and issubclass(found, torch.Tensor):
        return _class_subject(found, path)
    if callable(found) and not isinstance(found, type):
        returned = found()
        if isinstance(returned, Subject):
            return returned
        if isinstance(returned, type) and issubclass(returned, torch.Tensor):
            return _class_subject(returned, path)
        raise SubjectError(f"{spec}: the function returned {type(returned).__name__}, not a Subject or a tensor class")
    raise SubjectError(
        f"{spec}: {found!r} is neither a subclass of torch.Tensor, nor a Subject, nor a function that returns one"
    )


def _class_subject(cls: type[torch.Tensor], path: str) -> Subject:
    """A hook on the class, an entry point, a bundled adapter, or nothing but the class (conventions complete it)."""
    hook = cls.__dict__.get("__subclass_testkit__")
    if hook is not None:
        value = hook if isinstance(hook, Subject) else cls.__subclass_testkit__()  # type: ignore[attr-defined]
        if not isinstance(value, Subject):
            raise SubjectError(f"{cls.__qualname__}.__subclass_testkit__ gave {type(value).__name__}, not a Subject")
        return _noted(value, "subject: __subclass_testkit__ of the class")
    canonical = f"{cls.__module__}.{cls.__qualname__}"
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if entry.name in (path, canonical):
            loaded = entry.load()
            value = loaded if isinstance(loaded, Subject) else loaded()
            return _noted(value, f"subject: entry point {entry.value}")
    from subclass_testkit import adapters

    adapter = adapters.find(path, cls) or adapters.find(canonical, cls)
    if adapter is not None:
        return _noted(adapter, "subject: bundled adapter")
    return Subject(cls)


def _noted(subject: Subject, line: str) -> Subject:
    return replace(subject, inferred=(*subject.inferred, line))


def complete(subject: Subject) -> Subject:
    """Fill in what conventions answer: make, to_plain, legal shapes, dtypes.

    Raises:
        SubjectError: nothing that was tried works.
    """
    tried: list[str] = []
    given = subject.make is not None
    for candidate in _recipes(subject):
        with calm():
            shapes = _legal_shapes(candidate, tried, inferred=not given)
        if not shapes:
            continue
        notes = [] if given else [f"make: {candidate.make_text}", f"to_plain: {candidate.to_plain_text}"]
        if given and subject.to_plain is None:
            notes.append(f"to_plain: {candidate.to_plain_text}")
        if subject.shapes is None:
            notes.append("shapes: " + ", ".join(_shape(s) for s in shapes))
        dtypes = candidate.dtypes if given else _legal_dtypes(candidate, shapes[0])
        if not given:
            notes.append("dtypes: " + ", ".join(str(d).removeprefix("torch.") for d in dtypes))
        done = replace(candidate, shapes=shapes, dtypes=dtypes, inferred=(*subject.inferred, *notes))
        return replace(done, variants={name: _complete_variant(done, name) for name in subject.variants})
    raise SubjectError(_cannot_build(subject, tried))


def _complete_variant(subject: Subject, name: str) -> dict[str, object]:
    """A variant's fields, with the shapes and recipes that fit its own constructor arguments."""
    change = subject.variants[name]
    fields = dict(change) if isinstance(change, Mapping) else {"make": change}
    at = replace(subject.at(name), shapes=fields.get("shapes"))
    try:
        at = complete(at)
    except SubjectError as error:
        raise SubjectError(f"variant {name!r}: {error}") from None
    return {**fields, "make": at.make, "to_plain": at.to_plain, "shapes": at.shapes}


def _recipes(subject: Subject) -> Iterable[Subject]:
    """The subject with each combination of recipes that conventions suggest, the likeliest first."""
    cls = subject.cls
    name = cls.__qualname__
    if subject.make is not None:
        makes: list[Any] = [subject.make]
    else:
        makes = [f"{name}.{b}(hp)" for b in BUILDERS if callable(getattr(cls, b, None))]
        if {"__new__", "__init__"} & _own_names(cls):  # torch's own legacy constructor takes float32 only, and shares memory
            makes.append(f"{name}(hp)")
        makes.append(f"hp.as_subclass({name})")
    if subject.to_plain is not None:
        reads: list[Any] = [subject.to_plain]
    else:
        reads = [f"t.{r}()" for r in READERS if r in _own_names(cls)]
        own_storage = not hasattr(cls, "__tensor_flatten__")
        if own_storage:
            reads.append("t.as_subclass(torch.Tensor)")
        if subject.wrapper and "dequantize" not in _own_names(cls):
            reads.append("F.linear(torch.eye(t.shape[-1], dtype=t.dtype, device=t.device), t).t()")
        if not own_storage:
            reads.append(_FIRST_INNER)
    for make in makes:
        for read in reads:
            yield replace(subject, make=make, to_plain=read)


def _own_names(cls: type) -> set[str]:
    """Attributes that the class or its bases define below torch.Tensor (which has dequantize of its own)."""
    return {n for k in cls.__mro__ if k not in torch.Tensor.__mro__ for n in vars(k)}


def _legal_shapes(subject: Subject, tried: list[str], *, inferred: bool) -> tuple[tuple[int, ...], ...]:
    """Legal shapes: a non-square one first, then a square one, then (where legal) an odd one and a 3-D one."""
    if subject.shapes is not None:
        return tuple(s for s in subject.shapes if _buildable(subject, s, subject.dtypes[0], tried))
    first = _first_shape(subject, tried)
    if first is None:
        return ()
    found = [first]
    free = subject.multiples_of == 1
    if len(first) == 2:
        side = first[1] if free else math.lcm(*_factors(subject, 2), first[1])
        found += [(side, side)] if side <= 512 and (side, side) != first else []
        found += [(33, 17)] if free else []
    if len(first) != 3 and (3 in subject.ndim or inferred):
        found.append((3, *first[-2:]))
    quiet: list[str] = []
    return tuple(s for s in found if s == first or _buildable(subject, s, subject.dtypes[0], quiet))


def _first_shape(subject: Subject, tried: list[str]) -> tuple[int, ...] | None:
    ndim = 2 if 2 in subject.ndim else subject.ndim[0]
    if subject.multiples_of != 1:
        factors = _factors(subject, ndim)
        sizes = [f * max(2, -(-n // f)) if f > 1 else n for n, f in zip((3,) * (ndim - 2) + (32, 48), factors, strict=True)]
        shape = tuple(sizes[-ndim:])
        return shape if _buildable(subject, shape, subject.dtypes[0], tried) else None
    lead = (3,) * (ndim - 2) + (32,) * min(1, ndim - 1)
    for columns in _COLUMNS:
        if _buildable(subject, (*lead, columns), subject.dtypes[0], tried):
            wider = (*lead, 2 * columns)
            if columns > 48 and _buildable(subject, wider, subject.dtypes[0], tried):
                return wider
            return (*lead, columns)
    return None


def _factors(subject: Subject, ndim: int) -> tuple[int, ...]:
    given = subject.multiples_of
    factors = (given,) * ndim if isinstance(given, int) else tuple(given)
    return (1,) * (ndim - len(factors)) + factors[-ndim:]


def _buildable(subject: Subject, shape: tuple[int, ...], dtype: torch.dtype, tried: list[str]) -> bool:
    """Whether make and to_plain work for this shape and give values that resemble the source's."""
    hp = eval(inputs.weight(shape, dtype), {"torch": torch})  # noqa: S307  # our own text
    label = f"{subject.make_text} for {_shape(shape)} {dtype}"
    try:
        made = subject.build(hp)
        if not isinstance(made, subject.cls):
            tried.append(f"{label}: gave {type(made).__name__}, not {subject.cls.__name__}")
            return False
        values = subject.read(made)
    except Exception as error:
        text = str(error).splitlines()[0][:120] if str(error) else ""
        tried.append(f"{label}, {subject.to_plain_text}: {type(error).__name__}: {text}")
        return False
    if not isinstance(values, torch.Tensor) or (isinstance(values, subject.cls) and subject.cls is not torch.Tensor):
        tried.append(f"{label}, {subject.to_plain_text}: gave {type(values).__name__}, not a plain tensor")
        return False
    if tuple(values.shape) != shape:
        tried.append(f"{label}, {subject.to_plain_text}: has shape {_shape(tuple(values.shape))}")
        return False
    if subject.to_plain == _FIRST_INNER and not torch.equal(values, hp):
        tried.append(f"{label}, {subject.to_plain_text}: differs from the source")
        return False
    correlation = F.cosine_similarity(values.detach().double().flatten(), hp.double().flatten(), 0)
    if not correlation > 0.5:
        tried.append(f"{label}, {subject.to_plain_text}: values don't resemble the source's (cosine {float(correlation):.2f})")
        return False
    return True


def _legal_dtypes(subject: Subject, shape: tuple[int, ...]) -> tuple[torch.dtype, ...]:
    quiet: list[str] = []
    return tuple(d for d in TRIED_DTYPES if d in subject.dtypes or _buildable(subject, shape, d, quiet))


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _cannot_build(subject: Subject, tried: list[str]) -> str:
    name = subject.cls.__name__
    lines = list({re.sub(r"\d+x[x\d]+", "", line): line for line in reversed(tried)}.values())[
        ::-1
    ]  # one line a recipe and error
    shown = "\n".join(f"  {line}" for line in lines[:12]) or "  nothing applies to this class"
    more = f"\n  ... and {len(lines) - 12} more" if len(lines) > 12 else ""
    return (
        f"{subject.title} can't be built or read by conventions. Tried:\n{shown}{more}\n"
        f"Say how, in three lines of a module of yours (here: mysubject.py), and name it:\n"
        f"  from subclass_testkit import Subject\n"
        f"  from {subject.cls.__module__} import {name}\n"
        f"  subject = Subject({name}, make=lambda hp: {name}(hp, ...), to_plain=lambda t: t.dequantize(), multiples_of=(1, 32))\n"
        f"  pytest --subclass=mysubject:subject"
    )
