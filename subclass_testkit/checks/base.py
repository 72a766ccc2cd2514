"""What every group of checks is made of: `agree`, which compares an operation with its oracle."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from subclass_testkit import oracle
from subclass_testkit.checks._bounds import BoundedGroup, detached
from subclass_testkit.checks._case import Case
from subclass_testkit.diagnosis import guess
from subclass_testkit.oracle import EXACT, Tolerance
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Finding, NotClaimed, Refused
from subclass_testkit.script import (
    Script,
    arguments_of,
    as_function,
    assertion,
    execute,
    failing_line,
    last_line,
    run_operation,
)

__all__ = ["Case", "CheckGroup"]


class CheckGroup(BoundedGroup):
    """Base of the mixins. A check is a method that `@check` marks; it returns when the rule holds.

    It ends a check early with `CheckFailed` (the rule is broken), `Refused` (the subject doesn't do that) or `CheckSkipped`
    (the environment can't). `Script` and `agree` raise these by themselves.
    """

    group: ClassVar[str] = ""
    of_parameters: ClassVar[bool] = False  # the checks are about a module's parameters

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        from subclass_testkit.testcase import expand_test_case

        expand_test_case(cls)

    def agree(
        self,
        operation: str,
        *,
        tolerance: Tolerance = EXACT,
        hp: str | None = None,
        setup: str = "",
        strides: bool = False,
        mutates: bool = False,
        rounded: tuple[str, ...] = (),
        magnitude: str = "",
        requantized: bool | str = False,
        suspects: dict[str, str] | None = None,
        likely: str = "",
        operands: Mapping[str, str] | None = None,
        **texts: str,
    ) -> Any:
        """Run ``operation`` on the subclass and on its plain values; the two must agree.

        Args:
            operation: an expression over ``w`` (``"w[8:16]"``), or several lines of which the last is an expression (what is compared:
                a tensor, a number, or a tuple of these).
            tolerance: how near; products and gradients that are linear in every input take ``multilinear``.
            setup: lines that run once before, in the script.
            strides: where the class is kept, strides must be those of the plain result.
            mutates: the operation is meant to change ``w``; otherwise no operand may change.
            rounded: the operands that a class which rounds activations may round, each by a step of its largest magnitude; default:
                ``x``, by row.
            magnitude: the operation whose value on absolute values bounds the error; default: ``operation`` (``w - y`` takes ``w + y``).
            requantized: a result of the class may be that of a quantization of the right values (arithmetic; not views and copies); or an
                expression over ``d``: the values whose quantization it may be as coarse as (a softmax has a fixed range, 0 to 1).
            suspects: what a wrong result may be: sentence -> operation on plain values that gives it
                (``{"the result without bias": "F.linear(x, w)"}``); the first that fits becomes the diagnosis.
            operands: as ``texts``, as a mapping.
            texts: further inputs by name, as source text (``x=self.x()``, or ``o=self.other()`` for one of the class).

        Returns:
            What the operation returned on the subclass.
        """
        texts = {**(operands or {}), **texts}
        script = self.script(hp, **texts)
        if setup:
            script.run(setup)
        operation = textwrap.dedent(operation).strip("\n")
        want = self._oracle(script, operation)
        tensors = {name: script[name] for name in ("w", *texts) if isinstance(script[name], torch.Tensor)}
        before = {} if mutates else {name: oracle.Snapshot.of(t) for name, t in tensors.items()}
        call_got, call_want = self._calls(script, operation)
        try:
            got = run_operation(operation, script, script.ns)
        except (CheckFailed, CheckSkipped, NotClaimed, Refused, KeyboardInterrupt):
            raise
        except BaseException as error:
            if isinstance(want, _Raised):
                return None
            script.note(call_got)
            script.blame(error, failing_line(error) or last_line(operation))
        if isinstance(want, _Raised):
            raise CheckSkipped(f"torch itself can't: {last_line(operation)} on plain {self.dtype}: {want.text}")
        label = last_line(operation) if "\n" not in operation else last_line(operation).join(("the result of `", "`"))
        script.ns["got"] = got
        actual = script.read(got, call_got)
        bound = self._bound(tolerance, script, operation, want, rounded, magnitude)
        kept = isinstance(got, self.subject.cls)
        if (
            strides
            and kept
            and isinstance(want, torch.Tensor)
            and got.stride() != want.stride()
            and got.shape == want.shape
            and got.numel() > 1
        ):
            script.note(f"assert ({call_got}).stride() == ({call_want}).stride()")
            raise CheckFailed(
                Finding("stride", f"{label} reports stride {got.stride()}, expected {want.stride()}.", likely, script.text())
            )
        if requantized:
            coarsest = want if requantized is True else execute(str(requantized), dict(script.ns))
            bound = self._requantized(script, got, coarsest, bound)
        found, item, worst = self._difference(got, actual, want, bound, label)
        changes = {name: change for name, snapshot in before.items() if (change := snapshot.changes(tensors[name]))}
        if found:
            found.likely = self._diagnose(script, operation, suspects or {}, actual, want, got, bound) or likely
            if changes:  # then the oracle must run first
                script.note(f"want = {call_want}")
                call_want = "want"
                also = "; ".join(f"it changed its operand {name}: {change}" for name, change in changes.items())
                found.likely = f"{found.likely} {also}.".strip()
            found.reproduction = script.text(assertion(found, call_got + item, call_want + item, worst))
            raise CheckFailed(found)
        for name, change in changes.items():
            state = f"repr({name}.__tensor_flatten__()[1])" if "context" in change else f"plain({name}).tolist()"
            script.note(f"before = {state}\n_ = {call_got}")
            end = f"assert {state} == before, 'changed'"
            raise CheckFailed(Finding("mutated", f"{label} changed its operand {name}: {change}.", likely, script.text(end)))
        return got

    def refuses_or_raises(self, script: Script, source: str, message: str) -> BaseException:
        """Run what must raise; the error, whatever it is except an accident. ``message`` says what it means when nothing is raised."""
        script.note(source)
        try:
            execute(textwrap.dedent(source).strip("\n"), script.ns)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if oracle.judge_exception(error, self.subject.refusals) == "accident" and not isinstance(
                error, TypeError | IndexError
            ):
                script.blame(error, last_line(source))
            return error
        lines = textwrap.dedent(source).strip("\n").splitlines()
        del script.lines[-len(lines) :]
        block = textwrap.indent("\n".join(lines), "    ")
        end = f"try:\n{block}\nexcept Exception:\n    pass\nelse:\n    raise AssertionError({message!r})"
        raise CheckFailed(Finding("no-error", message, reproduction=script.text(end)))

    # --- parts of agree

    def _oracle(self, script: Script, operation: str) -> Any:
        ns = {**script.ns, "w": script["d"].clone()}
        try:
            for name, text in script.inputs.items():
                ns[name] = self._values(execute(text, ns))  # a fresh copy: the oracle's run and the subject's must not meet
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = run_operation(operation, script, ns)
        except Exception as error:
            return _Raised(oracle.describe(error))
        return detached(value)

    def _calls(self, script: Script, operation: str) -> tuple[str, str]:
        """How the operation is called on the subclass and on plain values; defines it as a function where it is several lines."""
        if "\n" in operation:
            script.note(as_function(operation, script))
            arguments = arguments_of(script)
            return f"operation({arguments})", f"operation({self._plainly(arguments, script)})"
        return operation, self._plainly(operation, script)

    def _plainly(self, operation: str, script: Script) -> str:
        """The text with ``d`` for ``w``, and the plain values of further inputs of the class."""
        for name in script.inputs:
            if script[name] is not self._values(script[name]):
                operation = re.sub(rf"\b{name}\b", f"plain({name})", operation)
        return re.sub(r"\bw\b", "d", operation)

    def _difference(
        self, got: Any, actual: Any, want: Any, bound: Any, label: str
    ) -> tuple[Finding | None, str, torch.Tensor | None]:
        """The first way in which a result is wrong, in which item of it (``[1]``; empty: the result itself), and the bound there."""
        if isinstance(want, list | tuple) and isinstance(got, list | tuple) and len(got) == len(want):
            bounds = bound if isinstance(bound, list | tuple) else [bound] * len(want)
            for i, (g, a, w, b) in enumerate(zip(got, actual, want, bounds, strict=True)):
                found, item, worst = self._difference(g, a, w, b, f"{label}, item {i}")
                if found:
                    return found, f"[{i}]{item}", worst
            return None, "", None
        found = self._outer(got, want, label) or oracle.compare(actual, want, bound, label)
        return found, "", bound if isinstance(bound, torch.Tensor) else None

    def _outer(self, got: Any, want: Any, label: str) -> Finding | None:
        """The outer report of a subclass result (its shape and dtype), which reading its values would hide."""
        if not (isinstance(got, self.subject.cls) and isinstance(want, torch.Tensor)):
            return None
        for what in ("shape", "dtype"):
            g, w = getattr(got, what), getattr(want, what)
            if g != w:
                g, w = (list(g), list(w)) if what == "shape" else (g, w)
                return Finding(what, f"{label} reports {what} {g}, expected {w}.")
        return None

    def _diagnose(
        self, script: Script, operation: str, suspects: dict[str, str], actual: Any, want: Any, got: Any, bound: Any
    ) -> str:
        for sentence, suspect in suspects.items():
            ns = {**script.ns, "w": script["d"].clone()}
            try:
                value = detached(execute(suspect, ns))
            except Exception:
                continue
            if oracle.compare(actual, value, bound if not isinstance(bound, list | tuple) else None, "") is None:
                return f"the result equals {sentence}."
        story = _inner_story(script["w"], got) if isinstance(got, self.subject.cls) else ""
        plainly = isinstance(actual, torch.Tensor) and isinstance(want, torch.Tensor)
        guessed = guess(actual, want, bound if isinstance(bound, torch.Tensor) else None) if plainly else ""
        return " ".join(part for part in (guessed, story) if part)


@dataclass(frozen=True)
class _Raised:
    """The oracle itself raised."""

    text: str


def _inner_story(w: torch.Tensor, got: torch.Tensor) -> str:
    """Which inner tensors an operation changed in shape, and which it left whole."""
    before, after = oracle.inner_tensors(w), oracle.inner_tensors(got)
    parts = []
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if old.shape == new.shape and old.device.type != "meta" and oracle.same_bits(old, new):
            parts.append(f"{name} {list(old.shape)} is unchanged")
        else:
            parts.append(f"{name} {list(old.shape)} -> {list(new.shape)}")
    return f"inner tensors: {', '.join(sorted(parts))}." if parts else ""
