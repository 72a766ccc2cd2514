"""Code that a check runs: written once as text, run on the subclass and on its plain values, printed as the reproduction."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
import textwrap
import types
from typing import Any

import torch

from subclass_testkit import oracle
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Finding, NotClaimed, Refused
from subclass_testkit.subject import Subject

_MODULES = {
    "F": "import torch.nn.functional as F",
    "nn": "from torch import nn",
    "copy": "import copy",
    "contextlib": "import contextlib",
    "gc": "import gc",
    "io": "import io",
    "itertools": "import itertools",
    "math": "import math",
    "multiprocessing": "import multiprocessing",
    "operator": "import operator",
    "os": "import os",
    "pickle": "import pickle",
    "subprocess": "import subprocess",
    "sys": "import sys",
    "tempfile": "import tempfile",
    "warnings": "import warnings",
    "weakref": "import weakref",
    "FakeTensorMode": "from torch._subclasses.fake_tensor import FakeTensorMode",
    "TwoTensor": "from torch.testing._internal.two_tensor import TwoTensor",
    "is_traceable_wrapper_subclass": "from torch.utils._python_dispatch import is_traceable_wrapper_subclass",
}
_PLAIN = "d = plain(w).clone()"  # a lossless wrapper may hand out its own memory
_counter = itertools.count()


class Script:
    """Lines run one after the other in a namespace of their own; what ran is the reproduction.

    The namespace has ``hp`` (the plain source), ``w`` (the subclass made from it), ``d`` (its plain values), ``plain(t)`` (values of
    subclass or plain tensors, detached), ``to_plain(t)`` (differentiable) and the modules that tests use.

    Args:
        subject: a subject without variants.
        hp: the source text of the plain tensor; an empty text makes neither hp, w nor d.
        inputs: source texts of further plain tensors, by name.
    """

    def __init__(self, subject: Subject, hp: str, inputs: dict[str, str] | None = None) -> None:
        self.subject = subject
        self.lines: list[str] = []
        self.ns: dict[str, Any] = dict(subject.namespace)
        self.ns.update(plain=subject.plain, to_plain=subject.read, make=self.ns.get("make", subject.build))
        self.ns.update(_modules())
        self.inputs = dict(inputs or {})
        for name, text in self.inputs.items():
            self.run(f"{name} = {text}")
        if hp:
            self.run(f"hp = {hp}")
            self.run(f"w = {subject.make_text}")
            self.run(_PLAIN)

    def __getitem__(self, name: str) -> Any:
        return self.ns[name]

    def run(self, source: str) -> Any:
        """Run statements; the value of the last line if that is an expression.

        Raises:
            Refused: the operation refused (or raised a deliberate error).
            CheckFailed: it raised by accident.
        """
        source = textwrap.dedent(source).strip("\n")
        self.lines.extend(source.splitlines())
        try:
            return execute(source, self.ns)
        except (CheckFailed, CheckSkipped, NotClaimed, Refused, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.blame(error, failing_line(error) or last_line(source))

    def note(self, source: str) -> None:
        """Add lines to the reproduction that the check has run by itself."""
        self.lines.extend(textwrap.dedent(source).strip("\n").splitlines())

    def blame(self, error: BaseException, label: str) -> None:
        """Turn an exception of the subject's into Refused or CheckFailed."""
        verdict = oracle.judge_exception(error, self.subject.refusals)
        kind = f"raised:{type(oracle.root_cause(error)).__name__}"
        message = f"{label} raised {oracle.describe(error)}"
        if verdict == "accident":
            raise CheckFailed(Finding(kind, message, reproduction=self.text())) from error
        raise Refused(message, kind=kind, odd=verdict == "odd", reproduction=self.text()) from error

    def expect(self, condition: str, message: str, *, kind: str = "condition", likely: str = "") -> None:
        """Fail with ``message`` unless the expression ``condition`` is true. Braces in the message are filled from the namespace."""
        value = self.value(condition, extend=False)
        if isinstance(value, torch.Tensor):
            value = bool(self.subject.plain(value).all())
        if not value:
            text = self._fill(message)
            raise CheckFailed(Finding(kind, text, self._fill(likely), self.text(f"assert {condition}, {text!r}")))

    def value(self, expression: str, *, extend: bool = True) -> Any:
        """The value of an expression, with errors judged as in :meth:`run`."""
        try:
            value = execute(expression, self.ns)
        except (CheckFailed, CheckSkipped, NotClaimed, Refused, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.lines.append(expression)
            self.blame(error, last_line(expression))
        if extend:
            self.lines.append(expression)
        return value

    def equal(
        self, got: str, want: str, *, label: str = "", bound: Any = None, strides: bool = False, likely: str = ""
    ) -> None:
        """Fail unless the two expressions have equal plain values (within ``bound``: a float64 tensor, or a number, or None: exact)."""
        actual = self.read(self.value(got, extend=False), got)
        expected = self.read(self.value(want, extend=False), want)
        if isinstance(bound, int | float) and isinstance(expected, torch.Tensor):
            bound = torch.full(expected.shape, float(bound), dtype=torch.float64)
        found = oracle.compare(actual, expected, bound, label or got, strides=strides)
        if found:
            found.likely = found.likely or self._fill(likely)
            found.reproduction = self.text(assertion(found, got, want, bound))
            raise CheckFailed(found)

    def read(self, value: Any, label: str) -> Any:
        """Plain values of a result (tensors inside lists and tuples too)."""
        if isinstance(value, list | tuple):
            return (
                type(value)(self.read(v, label) for v in value)
                if type(value) in (list, tuple)
                else [self.read(v, label) for v in value]
            )
        if isinstance(value, torch.Tensor):
            try:
                return self.subject.plain(value)
            except Exception as error:
                self.lines.append(f"plain({label})")
                self.blame(error, f"reading the values of the result of {label}")
        return value

    def fail(self, message: str, *, kind: str = "condition", likely: str = "", assertion: str = "") -> None:
        """Fail with what ran so far as the reproduction, ended by ``assertion``."""
        raise CheckFailed(Finding(kind, self._fill(message), self._fill(likely), self.text(assertion)))

    def _fill(self, text: str) -> str:
        if "{" not in text:
            return text
        try:
            return eval(f"f{text!r}", self.ns)  # type: ignore[no-any-return]  # noqa: S307  # our own text
        except Exception:
            return text

    def text(self, end: str = "") -> str:
        """The standalone script: imports, what ran, and ``end``."""
        body = [*self.lines, *end.splitlines()]
        if not self._uses(r"\bd\b", [line for line in body if not line.startswith("d = ")]):
            body = [line for line in body if line != _PLAIN]
        helpers = []
        name = self.subject.cls.__name__
        read = re.sub(r"\bt\b", "t", self.subject.to_plain_text)
        if self._uses(r"\bplain\(", body):
            helpers.append(f"plain = lambda t: ({read} if isinstance(t, {name}) else t).detach()")
        if self._uses(r"\bto_plain\(", body):
            helpers.append(f"to_plain = lambda t: {read}")
        everything = [*helpers, *body]
        modules = [line for key, line in _MODULES.items() if self._uses(rf"\b{key}\b", everything)]
        modules = [line for line in modules if line not in self.subject.import_lines]
        return "\n".join(["import torch", *modules, *self.subject.import_lines, "", *helpers, *body])

    @staticmethod
    def _uses(pattern: str, lines: list[str]) -> bool:
        return any(re.search(pattern, line) for line in lines)


def execute(source: str, ns: dict[str, Any]) -> Any:
    """Run statements in ``ns``; the value of the last one if it is an expression. Tracebacks show the text."""
    body, value = _compiled(source)
    if body is not None:
        exec(body, ns)  # noqa: S102  # the check's own text
    return eval(value, ns) if value is not None else None  # noqa: S307  # the check's own text


@functools.lru_cache(maxsize=4096)
def _compiled(source: str) -> tuple[types.CodeType | None, types.CodeType | None]:
    """The code of the statements, and of the expression at the end (either may be missing)."""
    tree = ast.parse(source)
    name = f"<check {next(_counter)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    value = None
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        tree.body.pop()
        value = compile(ast.Expression(last.value), name, "eval")
    return (compile(tree, name, "exec") if tree.body else None), value


def as_function(operation: str, script: Script) -> str:
    """An operation of several lines as the definition of ``operation(w, ...)``, which returns its last line."""
    lines = operation.splitlines()
    body = [*lines[:-1], f"return {lines[-1]}"]
    return f"def operation({arguments_of(script)}):\n" + textwrap.indent("\n".join(body), "    ")


def arguments_of(script: Script) -> str:
    """``w, x, b``: what an operation takes."""
    return ", ".join(["w", *script.inputs])


def run_operation(operation: str, script: Script, ns: dict[str, Any]) -> Any:
    """The value of an operation (an expression, or several lines) in ``ns``."""
    several = "\n" in operation
    return execute(f"{as_function(operation, script)}\noperation({arguments_of(script)})" if several else operation, ns)


@functools.cache
def _modules() -> dict[str, Any]:
    """The modules that every script may use, by the names that it knows them by."""
    ns: dict[str, Any] = {}
    for line in _MODULES.values():
        exec(line, ns)  # noqa: S102  # our own import lines
    del ns["__builtins__"]
    return ns


def failing_line(error: BaseException) -> str:
    """The line of the check's own text that raised; empty if it is not in the traceback."""
    line, tb = "", error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename.startswith("<check "):
            line = linecache.getline(tb.tb_frame.f_code.co_filename, tb.tb_lineno).strip() or line
        tb = tb.tb_next
    return line.removeprefix("return ")


def last_line(source: str) -> str:
    """The line that names an operation in a message."""
    return source.strip().splitlines()[-1].strip().removeprefix("return ")


def assertion(found: Finding, got: str, want: str, bound: Any) -> str:
    """The line that fails in the reproduction as the check failed."""
    if found.kind in ("shape", "dtype", "device"):
        return f"assert ({got}).{found.kind} == plain({got}).{found.kind} == ({want}).{found.kind}"
    if found.kind == "stride":
        return f"assert ({got}).stride() == ({want}).stride()"
    atol = f"{float(bound.nan_to_num(0).max()):.3g}" if isinstance(bound, torch.Tensor) and bound.numel() else "0"
    return f"torch.testing.assert_close(plain({got}), plain({want}), rtol=0, atol={atol}, equal_nan=True)"
