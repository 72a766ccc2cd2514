"""How far a result may be from its oracle's: from the arithmetic, a declared rounding of activations, and requantization."""

from __future__ import annotations

from typing import Any

import torch

from subclass_testkit import oracle
from subclass_testkit.checks._case import CaseGroup
from subclass_testkit.oracle import Tolerance
from subclass_testkit.outcome import CheckSkipped
from subclass_testkit.rounding import Rounding
from subclass_testkit.script import Script, last_line, run_operation


class BoundedGroup(CaseGroup):
    """The bounds of an operation's results, element by element."""

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
        if self.case.rounding and ("x" in script.inputs or rounded):
            stepped = self._magnitude(script, operation, self.case.rounding, rounded)
            extra = _zip(stepped, magnitude, lambda s, m: (s - m).abs())
        return _zip2(want, magnitude, extra, tolerance.length)

    def _magnitude(self, script: Script, operation: str, rounding: Rounding | None, rounded: tuple[str, ...] = ()) -> Any:
        """The operation on absolute values in float64; with ``rounding``, of operands increased by a step of it.

        That is a step of the operand's row, or of all of it where ``rounded`` names it: in the products of a backward, rows are summed.
        """
        ns = dict(script.ns)
        ns["w"] = oracle.absolute(script["d"])
        for name in script.inputs:
            ns[name] = oracle.absolute(self._values(script[name]))
        if rounding:
            for name in rounded or ("x", "w"):
                ns[name] = ns[name] + rounding.step(name, ns[name], by_row=not rounded)
        for name in script.inputs:
            if isinstance(script[name], torch.Tensor) and script[name].requires_grad:
                ns[name] = ns[name].requires_grad_()
        try:
            return detached(run_operation(operation, script, ns))
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


def detached(value: Any) -> Any:
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
