"""What every group of checks is made of: the case it runs on, and `agree`, which compares an operation with its oracle."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from subclass_testkit import inputs, oracle
from subclass_testkit.oracle import EXACT, Tolerance
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Finding, NotClaimed, Refused
from subclass_testkit.script import Script, assertion, execute, last_line
from subclass_testkit.subject import Subject


@dataclass(frozen=True)
class Case:
    """A subject at one point of its axes.

    ``facts`` is what the claim probes measured (``activation_bits``, ``found`` claims, ...); shared by all cases of a run.
    ``others`` are the subject's other variants by name.
    """

    subject: Subject
    variant: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Subject] = field(default_factory=dict)

    @property
    def found(self) -> frozenset[str]:
        """The claims that hold for the subject, declared or found by probing."""
        return frozenset(self.facts.get("found", ()))

    @property
    def activation_bits(self) -> int | None:
        """Bits to which its linear rounds activations, declared or measured; None: not at all."""
        return self.subject.activation_bits or self.facts.get("activation_bits", {}).get(self.variant)


class CheckGroup:
    """Base of the mixins. A check is a method that `@check` marks; it returns when the rule holds.

    It ends a check early with `CheckFailed` (the rule is broken), `Refused` (the subject doesn't do that) or `CheckSkipped`
    (the environment can't). `Script` and `agree` raise these by themselves.
    """

    group: ClassVar[str] = ""
    takes_packed: bool = False  # the check is also about tensors that show their packed storage (bitsandbytes' parameters)
    case: Case

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        from subclass_testkit.testcase import expand_test_case

        expand_test_case(cls)

    # --- data, as source text

    @property
    def subject(self) -> Subject:
        return self.case.subject

    @property
    def shape(self) -> tuple[int, ...]:
        return self.case.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.case.dtype

    @property
    def out_features(self) -> int:
        return self.case.shape[-2] if len(self.case.shape) > 1 else 1

    @property
    def in_features(self) -> int:
        return self.case.shape[-1]

    def hp(self, seed: int = 0) -> str:
        """The source text of the standard plain weight of this case; another ``seed`` gives other values."""
        return inputs.weight(self.shape, self.dtype, self.case.seed + seed)

    def x(self, *lead: int, seed: int = 0) -> str:
        """The source text of an activation ``(*lead, in_features)``; default one of 5 rows."""
        return inputs.activation((*(lead or (5,)), self.in_features), self.dtype, seed)

    def grad(self, *lead: int) -> str:
        """The source text of an output gradient ``(*lead, out_features)``."""
        return inputs.activation((*(lead or (5,)), self.out_features), self.dtype, 7)

    def bias(self) -> str:
        """The source text of a bias ``(out_features,)``, too large to be dropped unnoticed."""
        return inputs.bias(self.out_features, self.dtype)

    @property
    def decays_by_design(self) -> bool:
        """A class with storage of its own that switched __torch_function__ off (nn.Buffer): torch makes all results plain."""
        off = self.subject.cls.__torch_function__ is torch._C._disabled_torch_function_impl
        return off and "wrapper" not in self.case.found

    def other(self, seed: int = 5) -> str:
        """The source text of a second tensor of the class, of the same shape, with other values and scales."""
        source = f"(({self.hp(seed)}) * -0.75)"
        return re.sub(r"\bhp\b(?!\s*=[^=])", lambda _: source, self.subject.make_text)

    def linear_tolerance(self) -> Tolerance:
        """The tolerance of a product over the in_features."""
        return oracle.multilinear(self.in_features)

    def need_shape(self, condition: bool, why: str) -> None:
        """Skip, with the reason, when this case's shape doesn't suit the check."""
        if not condition:
            raise CheckSkipped(f"shape {'x'.join(map(str, self.shape))}: {why}")

    def linear(self, x: str = "x", w: str = "w", b: str | None = None) -> str:
        """The text of a linear layer: ``F.linear(x, w, b)``, or the subject's own ``linear`` recipe."""
        if self.subject.linear is None:
            return f"F.linear({x}, {w}, {b})" if b else f"F.linear({x}, {w})"
        recipe = self.subject.linear if isinstance(self.subject.linear, str) else "linear(x, w, b)"
        names = {"x": x, "w": w, "b": b or "None"}
        return re.sub(r"\b[xwb]\b", lambda m: names[m[0]], recipe)

    # --- running

    def script(self, hp: str | None = None, **texts: str) -> Script:
        """A script with ``hp``, ``w`` and ``d`` made (from the standard weight unless ``hp`` is given), and ``texts`` as inputs."""
        script = Script(self.subject, self.hp() if hp is None else hp, texts)
        if hp != "" and not self.takes_packed and "wrapper" not in self.case.found:
            shown, values = (f"{list(script[n].shape)} {script[n].dtype}" for n in ("w", "d"))
            if shown != values:
                raise NotClaimed(f"no wrapper, and it shows its packed storage: {shown} for values of {values}")
        return script

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
            got = execute(_function(operation, script) + f"\n{call_got}" if "\n" in operation else operation, script.ns)
        except (CheckFailed, CheckSkipped, NotClaimed, Refused, KeyboardInterrupt):
            raise
        except BaseException as error:
            if isinstance(want, _Raised):
                return None
            script.note(call_got)
            script.blame(error, last_line(operation))
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
        if found:
            found.likely = self._diagnose(script, operation, suspects or {}, actual, want, got, bound) or likely
            found.reproduction = script.text(assertion(found, call_got + item, call_want + item, worst))
            raise CheckFailed(found)
        for name, snapshot in before.items():
            change = snapshot.changes(tensors[name])
            if change:
                state = f"repr({name}.__tensor_flatten__()[1])" if "context" in change else f"plain({name}).tolist()"
                script.note(f"before = {state}\n_ = {call_got}")
                end = f"assert {state} == before, 'changed'"
                raise CheckFailed(
                    Finding("mutated", f"{label} changed its operand {name}: {change}.", likely, script.text(end))
                )
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
                value = execute(
                    _function(operation, script) + f"\noperation({_arguments(script)})" if "\n" in operation else operation, ns
                )
        except Exception as error:
            return _Raised(oracle.describe(error))
        return _detached(value)

    def _calls(self, script: Script, operation: str) -> tuple[str, str]:
        """How the operation is called on the subclass and on plain values; defines it as a function where it is several lines."""
        if "\n" in operation:
            script.note(_function(operation, script))
            arguments = _arguments(script)
            return f"operation({arguments})", f"operation({self._plainly(arguments, script)})"
        return operation, self._plainly(operation, script)

    def _plainly(self, operation: str, script: Script) -> str:
        """The text with ``d`` for ``w``, and the plain values of further inputs of the class."""
        for name in script.inputs:
            if script[name] is not self._values(script[name]):
                operation = re.sub(rf"\b{name}\b", f"plain({name})", operation)
        return re.sub(r"\bw\b", "d", operation)

    def _values(self, value: Any) -> Any:
        """The values of an input of the class; all else as it is."""
        of_class = isinstance(value, self.subject.cls) and self.subject.cls is not torch.Tensor
        return self.subject.plain(value).clone() if of_class else value

    def _bound(
        self,
        tolerance: Tolerance,
        script: Script,
        operation: str,
        want: Any,
        rounded: tuple[str, ...] = (),
        magnitude_text: str = "",
    ) -> Any:
        if tolerance.kind == "exact":
            return None
        if tolerance.kind == "elementwise":
            return _map(want, lambda t: oracle.elementwise_bound(t, tolerance.roundings))
        operation = magnitude_text or operation
        magnitude = self._magnitude(script, operation, None)
        extra = None
        if self.case.activation_bits and ("x" in script.inputs or rounded):
            stepped = self._magnitude(script, operation, self.case.activation_bits, rounded)
            extra = _zip(stepped, magnitude, lambda s, m: (s - m).abs())
        return _zip2(want, magnitude, extra, tolerance.length)

    def _magnitude(self, script: Script, operation: str, bits: int | None, rounded: tuple[str, ...] = ()) -> Any:
        """The operation on absolute values in float64; with ``bits``, of operands increased by a step of that rounding."""
        ns = dict(script.ns)
        ns["w"] = oracle.absolute(script["d"])
        for name in script.inputs:
            ns[name] = oracle.absolute(self._values(script[name]))
        if bits:
            steps = 2 ** (bits - 1) - 1
            for name in rounded:
                ns[name] = ns[name] + ns[name].amax() / steps if ns[name].numel() else ns[name]
            if not rounded:
                largest = ns["x"].amax(-1, keepdim=True) if ns["x"].dim() else ns["x"]
                ns["x"] = ns["x"] + largest / steps
        for name in script.inputs:
            if isinstance(script[name], torch.Tensor) and script[name].requires_grad:
                ns[name] = ns[name].requires_grad_()
        source = _function(operation, script) + f"\noperation({_arguments(script)})" if "\n" in operation else operation
        try:
            return _detached(execute(source, ns))
        except Exception as error:
            raise CheckSkipped(f"no error bound: {last_line(operation)} on float64: {oracle.describe(error)}") from error

    def requantization(self, script: Script, want: torch.Tensor) -> torch.Tensor | float:
        """How far a tensor of the class that was given the values ``want`` may be from them, element by element, in float64.

        That is the declared ``max_error``; without one, twice the largest error that the subject's own ``make`` shows on these values
        (an element can be half a step off, and one that another rounding puts on the other side of a tie as well). Stochastic
        rounding errs by a whole step where the nearest errs by half of one.
        """
        if "quantized" not in self.case.found:
            return 0.0
        if not self.stochastic():
            return self._quantization_error(script, want, want.shape)
        return 2 * (
            self._quantization_error(script, want, want.shape) + self._quantization_error(script, script["hp"], want.shape)
        )

    def stochastic(self) -> bool:
        """Whether writes round stochastically: declared, or two equal ones under different seeds give different values."""
        known = self.case.facts.setdefault("stochastic", {})
        if self.case.variant not in known:
            known[self.case.variant] = self.subject.stochastic or self._draws()
        return bool(known[self.case.variant])

    def _draws(self) -> bool:
        source = eval(self.hp(), dict(self.subject.namespace))  # noqa: S307  # our own text
        values = []
        with torch.random.fork_rng(), torch.no_grad():
            for seed in (1, 2):
                torch.manual_seed(seed)
                try:
                    w = self.subject.build(source.clone())
                    w.copy_(source.flip(0) * 0.3)
                    values.append(self.subject.plain(w).clone())
                except Exception:  # no writes: nothing rounds
                    return False
        return not oracle.same_bits(*values)

    def _requantized(self, script: Script, got: Any, want: Any, bound: Any) -> Any:
        """The bound of a result, widened where that is a quantized tensor of the class."""
        if isinstance(bound, list | tuple) and isinstance(got, list | tuple) and len(got) == len(bound):
            return tuple(self._requantized(script, *item) for item in zip(got, want, bound, strict=True))
        if isinstance(bound, torch.Tensor) and isinstance(got, self.subject.cls) and want.shape == got.shape:
            return bound + self.requantization(script, want)
        return bound

    def _quantization_error(self, script: Script, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        values = values.detach()
        try:
            made = self.subject.plain(self.subject.build(values.clone()))
        except Exception:  # a shape or dtype that it doesn't take; then what it shows on the source, in proportion
            hp, d = script["hp"].detach().double(), script["d"].double()
            ratio = max(1.0, float(values.abs().amax()) / max(float(hp.abs().amax()), 1e-30))
            return torch.full(shape, 2 * ratio * float((hp - d).abs().amax()), dtype=torch.float64)
        error: torch.Tensor = (made.double() - values.double()).abs().amax() * 2
        recipe = self.subject.max_error
        if recipe is not None:
            ns = {**script.ns, "hp": values, "d": made}
            bound = eval(recipe, ns) if isinstance(recipe, str) else recipe(values, made)  # noqa: S307  # the subject's own recipe
            error = torch.as_tensor(bound).double()
        return error.expand(shape) if values.shape == shape else error.amax().expand(shape)

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
                value = _detached(execute(suspect, ns))
            except Exception:
                continue
            if oracle.compare(actual, value, bound if not isinstance(bound, list | tuple) else None, "") is None:
                return f"the result equals {sentence}."
        if isinstance(got, self.subject.cls):
            return _inner_story(script["w"], got)
        return ""


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


def _function(operation: str, script: Script) -> str:
    lines = operation.splitlines()
    body = [*lines[:-1], f"return {lines[-1]}"]
    return f"def operation({_arguments(script)}):\n" + textwrap.indent("\n".join(body), "    ")


def _arguments(script: Script) -> str:
    return ", ".join(["w", *script.inputs])


def _detached(value: Any) -> Any:
    return _map(value, lambda t: t.detach())


def _map(value: Any, f: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f(value)
    if isinstance(value, list | tuple):
        return tuple(_map(v, f) for v in value)
    return value


def _zip(a: Any, b: Any, f: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return f(a, b)
    if isinstance(a, list | tuple):
        return tuple(_zip(x, y, f) for x, y in zip(a, b, strict=True))
    return None


def _zip2(want: Any, magnitude: Any, extra: Any, length: int) -> Any:
    if isinstance(want, torch.Tensor):
        if not want.dtype.is_floating_point:
            return None
        return oracle.multilinear_bound(magnitude, want.dtype, length, extra)
    if isinstance(want, list | tuple):
        parts = extra if extra is not None else (None,) * len(want)
        return tuple(_zip2(w, m, e, length) for w, m, e in zip(want, magnitude, parts, strict=True))
    return None
