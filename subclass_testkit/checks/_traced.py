"""Compare what a compiled, exported or fake run of some code gives with what the same code gives in eager."""

from __future__ import annotations

import contextlib
import logging
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

from subclass_testkit import oracle
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Finding, Refused
from subclass_testkit.script import Script, execute

_ACCIDENTS = ("AttributeError", "IndexError", "KeyError", "NameError", "UnboundLocalError", "TypeError", "ZeroDivisionError")
_READS_A_VALUE = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException")
_OPERANDS = ("w", "v", "x", "b", "g", "source", "other")


class TracedGroup(CheckGroup):
    """What the compilation and export groups share. The code under test puts its results into ``want`` (eager) and ``got``."""

    def matrix(self, rows: int = 16, columns: int = 16) -> None:
        """Skip where the case isn't a matrix, or is too small for the slices that the check takes."""
        super().matrix(rows, columns)

    def made(self, source: str) -> str:
        """The text that makes another instance, of the plain tensor ``source`` (a name)."""
        return re.sub(r"\bhp\b", source, self.subject.make_text)

    def script(self, hp: str | None = None, **texts: str) -> Script:
        """As everywhere, but with recipes that dynamo can trace where they are functions."""
        script = super().script(hp, **texts)
        if callable(self.subject.to_plain):
            script.ns["to_plain"] = self.subject.to_plain
        return script

    def product_bound(self, script: Script, formula: str, **operands: torch.Tensor) -> torch.Tensor:
        """How far two ways to compute ``formula`` (multilinear in every operand) may be apart, for results in the dtype of x."""
        ns = {**script.ns, **operands}
        dtype = ns["x"].dtype if isinstance(ns.get("x"), torch.Tensor) else self.dtype
        for name in _OPERANDS:
            if isinstance(ns.get(name), torch.Tensor):
                ns[name] = oracle.absolute(self.subject.plain(ns[name]))
        magnitude = execute(formula, ns)
        extra = None
        if self.case.rounding and isinstance(ns.get("x"), torch.Tensor):
            for name in ("x", "w", "v", "other"):
                if isinstance(ns.get(name), torch.Tensor):
                    ns[name] = ns[name] + self.case.rounding.step("x" if name == "x" else "w", ns[name])
            extra = execute(formula, ns) - magnitude
        length = max(self.in_features, self.out_features)
        return oracle.multilinear_bound(magnitude, dtype, length, extra)

    def eager(self, script: Script, source: str) -> None:
        """Run the eager side. What it refuses is refused; what is broken in eager already is the other groups' matter."""
        try:
            script.run(source)
        except CheckFailed as failure:
            raise CheckSkipped(f"fails in eager already, which other checks report: {failure}") from None
        except Refused as refusal:
            raise Refused(str(refusal), kind=refusal.kind, reproduction=refusal.reproduction) from None

    def traced(self, script: Script, source: str, label: str) -> None:
        """Run the compiled side of what works in eager. A graph break is a failure, a NotImplementedError a refusal."""
        try:
            with quiet_logs():
                script.run(source)
        except Refused as refusal:
            # Dynamo itself doesn't trace every use of a class that isn't a wrapper; a graph break is its answer to these.
            claimed = refusal.odd and self.group in ("compilation", "export") and {"compile", "wrapper"} <= self.case.found
            unsupported = _graph_break(refusal.__cause__) if claimed else None
            if unsupported is None:
                raise self._retold(refusal, label) from refusal.__cause__
            text = f"{label} works in eager, and breaks the graph under fullgraph=True: {unsupported}"
            likely = "code that dynamo can't trace (reading a value, a C function, a disabled frame) on the way."
            raise CheckFailed(Finding("graph-break", text, likely, refusal.reproduction)) from refusal

    def _retold(self, refusal: Refused, label: str) -> Exception:
        """A refusal with the error that dynamo met on fake tensors, which it keeps as text only; a failure if that was an accident."""
        met = re.search(r"\bgot (\w+)\((['\"].*?['\"])?\)\s*$", str(refusal.__cause__), re.MULTILINE)
        if not refusal.odd or met is None:
            return refusal
        kind, text = f"raised:{met[1]}", f"{label} works in eager, and under torch.compile raises {met[1]}: {met[2] or ''}"
        if met[1] in _ACCIDENTS:
            return CheckFailed(
                Finding(kind, text, "a handler meets fake tensors (no values, symbolic sizes).", refusal.reproduction)
            )
        return Refused(text, kind=kind, odd=True, reproduction=refusal.reproduction)

    def same(
        self, script: Script, label: str, *, how: str = "compiled", bound: Any = None, strides: bool = False, likely: str = ""
    ) -> None:
        """``got`` has the class, flatten context, shape, dtype, device and values of ``want``."""
        script.expect(
            "type(got) is type(want)",
            f"{label} is a {{type(got).__name__}} {how}, and a {{type(want).__name__}} in eager.",
            kind="class",
            likely=likely,
        )
        got, want = script["got"], script["want"]
        if isinstance(want, self.subject.cls) and hasattr(want, "__tensor_flatten__"):
            for what in ("shape", "dtype", "device"):
                message = f"{label} reports {what} {{got.{what}}} {how}, and {{want.{what}}} in eager."
                script.expect(f"got.{what} == want.{what}", message, kind=what, likely=likely)
            if not same_context(got, want):
                message = f"{label} has the flatten context {{got.__tensor_flatten__()}} {how}, and {{want.__tensor_flatten__()}} in eager."
                script.expect("got.__tensor_flatten__() == want.__tensor_flatten__()", message, kind="context", likely=likely)
        script.equal("got", "want", label=f"{label}, {how},", bound=bound, strides=strides, likely=likely)


def same_context(a: Any, b: Any) -> bool:
    """Whether two tensors have the same inner names and an equal flatten context (True where contexts can't be compared)."""
    first, second = a.__tensor_flatten__(), b.__tensor_flatten__()
    if repr(first) == repr(second):
        return True
    try:
        equal = bool(first[0] == second[0] and first[1] == second[1])
    except Exception:
        return True
    comparable = any("__eq__" in vars(k) for k in type(first[1]).__mro__[:-1]) or first[0] != second[0]
    return equal or not comparable


def compile_text(function: str, backend: str, *, options: str = "fullgraph=True") -> str:
    """The text that compiles ``function``, with no compiled code left from before (which ``reset`` is not part of)."""
    torch._dynamo.reset()
    given = f", {options}" if options else ""
    return f"torch.compile({function}, backend={backend!r}{given})"


def definition(name: str, arguments: str, body: str) -> str:
    """``def name(arguments)`` of one expression, or of several lines of which the last is returned."""
    lines = textwrap.dedent(body).strip("\n").splitlines()
    return f"def {name}({arguments}):\n" + textwrap.indent("\n".join([*lines[:-1], f"return {lines[-1]}"]), "    ")


def renamed(text: str, old: str, new: str) -> str:
    """An expression over another name."""
    return re.sub(rf"(?<![\w.]){old}\b(?!=)", new, text)


def module_text(forward: str, arguments: str, *members: str) -> str:
    """The text of a module ``M`` that is made of ``arguments``, holds ``members`` and computes ``forward`` of ``x``."""
    lines = [f"        {line}" for line in ("super().__init__()", *members)]
    head = ["class M(nn.Module):", f"    def __init__(self, {arguments}):"]
    return "\n".join([*head, *lines, "    def forward(self, x):", f"        return {forward}"])


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Without torch's log lines: what they tell is in the exception that follows."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _graph_break(error: BaseException | None) -> str | None:
    """What dynamo said it can't do, if that is why ``error`` was raised."""
    while error is not None:
        if isinstance(error, torch._dynamo.exc.Unsupported) or type(error).__name__ in _READS_A_VALUE:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return " ".join(lines[:2])[:300]
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None
