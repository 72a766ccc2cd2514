"""What is tested: the Subject, and the text by which its tensors are made and read."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from subclass_testkit.check import CLAIMS, did_you_mean

Recipe = Callable[..., Any] | str


class SubjectError(ValueError):
    """A subject can't be found, or can't be built; the text says what was tried and how to fix it."""


@dataclass(frozen=True)
class Subject:
    """A tensor subclass and how to use it.

    Args:
        cls: the ``torch.Tensor`` subclass.
        make: builds it from a plain tensor: a callable, or an expression over ``hp`` (``"MyTensor.from_hp(hp, 32)"``).
        to_plain: reads its values: a callable, or an expression over ``t``. Default: what :func:`resolve` infers.
        linear: how a linear layer is computed, as an expression over ``x, w, b`` (``b`` may be None). Default: ``F.linear``.
        imports: the import lines that textual recipes need.
        multiples_of: the factors that the trailing dimensions of a legal shape must have: ``(1, 32)`` is any number of rows
            by a multiple of 32 columns. One number stands for all dimensions.
        ndim: the numbers of dimensions that are legal.
        shapes: explicit legal shapes; found from ``multiples_of`` and ``ndim`` when not given.
        dtypes: the dtypes of plain tensors that ``make`` takes.
        claims: what it supports (names of ``subclass_testkit.CLAIMS``). What is declared must be found; the rest is probed.
        activation_bits: bits to which its linear rounds the activation per row (8 for dynamic int8); None: it doesn't.
        weight_bits: bits to which its linear rounds the values of the weight per row (8 for int8 mixed-precision training, 2 for
            ternary weights), beside what ``to_plain`` shows; None: it doesn't.
        max_error: the largest quantization error, element by element: an expression over ``hp`` and ``d``, or a callable of
            both, that gives a bound that broadcasts against ``hp``.
        stochastic: ``make`` and in-place writes round stochastically.
        refusals: a regular expression; an error of whatever type whose text it matches is a refusal.
        variants: other constructor arguments: name -> the fields that differ (``{"tensor": {"make": ...}}``), or just a ``make``.
        wrapper: False for a class that keeps its values in its own storage.
        parameter: False for one that is never a module's parameter, such as an activation or an optimizer's state.
        name: what reports call it; default: module and name of the class.

    Raises:
        TypeError: ``cls`` is no tensor class; ValueError: a claim or field is unknown.
    """

    cls: type[torch.Tensor]
    make: Recipe | None = field(default=None, kw_only=True)
    to_plain: Recipe | None = field(default=None, kw_only=True)
    linear: Recipe | None = field(default=None, kw_only=True)
    imports: str = field(default="", kw_only=True)
    multiples_of: tuple[int, ...] | int = field(default=1, kw_only=True)
    ndim: tuple[int, ...] = field(default=(2,), kw_only=True)
    shapes: tuple[tuple[int, ...], ...] | None = field(default=None, kw_only=True)
    dtypes: tuple[torch.dtype, ...] = field(default=(torch.float32,), kw_only=True)
    claims: Iterable[str] | None = field(default=None, kw_only=True)
    activation_bits: int | None = field(default=None, kw_only=True)
    weight_bits: int | None = field(default=None, kw_only=True)
    max_error: Recipe | None = field(default=None, kw_only=True)
    stochastic: bool = field(default=False, kw_only=True)
    refusals: str = field(default="", kw_only=True)
    variants: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    wrapper: bool = field(default=True, kw_only=True)
    parameter: bool = field(default=True, kw_only=True)
    name: str | None = field(default=None, kw_only=True)
    inferred: tuple[str, ...] = field(default=(), kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.cls, type) and issubclass(self.cls, torch.Tensor)):
            raise TypeError(f"Subject(cls=...) takes a subclass of torch.Tensor, got {self.cls!r}")
        for claim in self.claims or ():
            if claim not in CLAIMS:
                raise ValueError(f"Subject({self.cls.__name__}): unknown claim {claim!r}{did_you_mean(claim, CLAIMS)}")
        known = self.__dataclass_fields__
        for variant, change in self.variants.items():
            for key in change if isinstance(change, Mapping) else ():
                if key not in known:
                    raise ValueError(
                        f"Subject({self.cls.__name__}): variant {variant!r} sets {key!r}, which is no field of Subject"
                        f"{did_you_mean(key, known)}"
                    )

    @property
    def title(self) -> str:
        return self.name or f"{self.cls.__module__}.{self.cls.__qualname__}"

    @property
    def declared(self) -> frozenset[str]:
        return frozenset(self.claims or ())

    def variant_names(self) -> tuple[str, ...]:
        """The names of all variants; ``default`` is the subject as it stands."""
        return ("default", *self.variants)

    def at(self, variant: str) -> Subject:
        """The subject with a variant's constructor arguments, and without variants of its own."""
        if variant == "default":
            return replace(self, variants={})
        change = self.variants[variant]
        fields = change if isinstance(change, Mapping) else {"make": change}
        return replace(self, **{"name": self.title, "variants": {}, **fields})

    # --- the recipes as text, and as calls

    @functools.cached_property
    def namespace(self) -> dict[str, Any]:
        """The names that recipes and operations may use."""
        ns: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "math": math, self.cls.__name__: self.cls}
        if self.imports:
            exec(self.imports, ns)  # noqa: S102  # the subject's own import lines
        for recipe, name in ((self.make, "make"), (self.to_plain, "to_plain"), (self.linear, "linear")):
            if callable(recipe):
                ns[_spell(recipe, name).root] = _spell(recipe, name).value
        return ns

    @property
    def import_lines(self) -> list[str]:
        """The lines that the textual recipes need in a standalone script."""
        lines = [line for line in self.imports.splitlines() if line.strip()]
        for recipe, name in ((self.make, "make"), (self.to_plain, "to_plain"), (self.linear, "linear")):
            if callable(recipe):
                lines += [line for line in _spell(recipe, name).import_line.splitlines() if line not in lines]
        root = self.cls.__qualname__.split(".")[0]
        if self.cls is not torch.Tensor and not any(re.search(rf"import .*\b{root}\b", line) for line in lines):
            lines.insert(0, f"from {self.cls.__module__} import {root}")
        return sorted(lines, key=lambda line: not line.startswith(("from ", "import ")))

    @property
    def make_text(self) -> str:
        """An expression over ``hp`` that builds the subclass."""
        return self._text(self.make, "make", "hp")

    @property
    def to_plain_text(self) -> str:
        """An expression over ``t`` that reads the values."""
        return self._text(self.to_plain, "to_plain", "t")

    def _text(self, recipe: Recipe | None, name: str, argument: str) -> str:
        if recipe is None:
            raise SubjectError(f"{self.title}: {name} is not set")
        return recipe if isinstance(recipe, str) else f"{_spell(recipe, name).text}({argument})"

    def build(self, hp: torch.Tensor) -> Any:
        """``make(hp)``."""
        return eval(self.make_text, dict(self.namespace), {"hp": hp})  # noqa: S307  # the subject's own recipe

    def read(self, t: Any) -> Any:
        """``to_plain(t)``, still attached to the graph."""
        return eval(self.to_plain_text, dict(self.namespace), {"t": t})  # noqa: S307  # the subject's own recipe

    def plain(self, t: Any) -> Any:
        """The values of ``t`` without graph: of the subclass by ``to_plain``; a plain tensor stays as it is."""
        if not isinstance(t, torch.Tensor):
            return t
        if isinstance(t, self.cls) and self.cls is not torch.Tensor:
            t = self.read(t)
        return t.detach()


@dataclass(frozen=True)
class _Spelling:
    """How a callable is written in a script: an expression, the import that it needs, and its root name."""

    text: str
    import_line: str
    root: str
    value: Any


def _spell(recipe: Callable[..., Any], fallback: str) -> _Spelling:
    owner = getattr(recipe, "__self__", None)
    qualname = getattr(recipe, "__qualname__", "")
    module = getattr(recipe, "__module__", None)
    if isinstance(owner, type):
        root = owner.__qualname__.split(".")[0]
        text = f"{owner.__qualname__}.{getattr(recipe, '__name__', fallback)}"
        value = owner if root == owner.__qualname__ else _global(owner.__module__, root)
        return _importable(owner.__module__, root, text, value, recipe, fallback)
    if isinstance(recipe, type | types.FunctionType) and module and "<" not in qualname:
        root = qualname.split(".")[0]
        value = recipe if root == qualname else _global(module, root)
        return _importable(module, root, qualname, value, recipe, fallback)
    if qualname.endswith("<lambda>"):
        source = _lambda_source(recipe)
        if source:
            lines = [*_globals_as_imports(recipe), f"{fallback} = {source}"]
            return _Spelling(fallback, "\n".join(lines), fallback, recipe)
    return _Spelling(fallback, f"# {fallback}: {qualname or recipe!r} of {module}", fallback, recipe)


def _global(module: str, name: str) -> Any:
    """A module's global; None if it has none. ``__main__`` (a script, a notebook) is a module like any other."""
    return getattr(sys.modules.get(module) or importlib.import_module(module), name, None)


def _importable(module: str, root: str, text: str, value: Any, recipe: Any, fallback: str) -> _Spelling:
    if value is None or "<locals>" in text:
        return _Spelling(fallback, f"# {fallback}: {text} of {module}", fallback, recipe)
    return _Spelling(text, f"from {module} import {root}", root, value)


def _globals_as_imports(function: Any) -> list[str]:
    """Import lines for the global names that a lambda uses."""
    lines = []
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType) and value is not torch:
            lines.append(f"import {value.__name__} as {name}")
        elif isinstance(value, type | types.FunctionType) and value.__module__ != "__main__":
            lines.append(
                f"from {value.__module__} import {value.__qualname__}" + (f" as {name}" if name != value.__qualname__ else "")
            )
    return lines


def _lambda_source(function: Any) -> str | None:
    """The text of a lambda without free variables, if it can be cut out of its line."""
    import ast

    if function.__code__.co_freevars:
        return None
    try:
        tree = ast.parse(inspect.getsource(function).strip().rstrip(","))
    except (OSError, SyntaxError):
        return None
    found = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    return found[0] if len(found) == 1 else None
