"""The state machine of `sequences`: tensors of the class, each with a plain twin that has the same views and copies.

A **handle** is a tensor of the class (``w``, ``v1``), its twin (``d``, ``d1``) and its slack. The twin is a plain tensor that is
viewed, copied and written as the handle is, so that it shares memory with the twins of the handle's aliases. The slack says how far
each element may be off; it is zero but for what was just written, and shares memory as the twin does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from subclass_testkit import inputs, oracle
from subclass_testkit.checks import _sequence_ops as ops
from subclass_testkit.checks._bounds import BoundedGroup
from subclass_testkit.outcome import Refused
from subclass_testkit.script import Script, execute

_MOST = 4  # handles that live at once; the oldest but the first goes


@dataclass(frozen=True)
class Handle:
    """A tensor of the class, by number: 0 is ``w``.

    ``root`` is the handle whose memory it shares (None: its own); ``turned``: rows became columns on the way from ``w``.
    """

    number: int
    root: Handle | None = None
    turned: bool = False

    @property
    def name(self) -> str:
        return f"v{self.number}" if self.number else "w"

    @property
    def twin(self) -> str:
        return f"d{self.number or ''}"

    @property
    def slack(self) -> str:
        return f"slack{self.number}"

    @property
    def owner(self) -> Handle:
        return self.root or self


def machine_of(group: BoundedGroup) -> type[RuleBasedStateMachine]:
    """The machine for one case; a class of its own, as Hypothesis wants it."""

    class Operations(_Machine):
        of = group

    return Operations


class _Machine(RuleBasedStateMachine):
    of: BoundedGroup

    def __init__(self) -> None:
        super().__init__()
        self.script: Script = self.of.script()
        self.script.ns["slack0"] = torch.zeros(self.script["d"].shape, dtype=torch.float64)
        self.handles = [Handle(0)]
        self.count = 0

    # --- what may happen

    @rule(data=st.data())
    def operate(self, data: st.DataObject) -> None:
        """One rule for all: Hypothesis switches half of a machine's rules off in each example, and rarely draws from nested lists."""
        handle = data.draw(st.sampled_from(self.handles), label="tensor")
        shape = self.shape_of(handle)
        kind, text = data.draw(st.sampled_from(ops.choices(shape, self.of.case)), label="operation")
        if kind == "view":
            text = data.draw(ops.filled(text, shape), label="view")
            self.derive(handle, text, handle.owner, handle.turned != (text in ops.TURNS))
        elif kind == "copy":
            self.derive(handle, text, None, handle.turned)
        elif kind == "write":
            self.change(handle, data.draw(ops.filled(text, shape), label="write"))
        elif kind == "another":
            other = data.draw(st.sampled_from(self.handles), label="source")
            if handle.owner != other.owner and shape == self.shape_of(other):
                self.change(handle, text, (other.name, other.twin))
        elif kind == "product":
            self.product(handle, text, shape)
        elif kind == "cast":
            self.cast(handle, text)
        else:
            self.compute(handle, text)

    # --- how it is done

    def shape_of(self, handle: Handle) -> torch.Size:
        return torch.Size(self.script[handle.twin].shape)

    def attempt(self, act: Any) -> bool:
        """Whether the class did it; a refusal is fine, if it leaves everything as it was."""
        lines = len(self.script.lines)
        try:
            act()
        except Refused:
            refused = self.script.lines[lines:]
            del self.script.lines[lines:]
            block = "\n".join(f"    {line}" for line in refused)
            before = len(self.script.lines)
            self.script.note(f"try:\n{block}\nexcept Exception: pass  # refused")
            self.all_agree()
            del self.script.lines[before:]
            return False
        return True

    def derive(self, handle: Handle, text: str, root: Handle | None, turned: bool) -> None:
        """Make a new handle by an expression over ``{0}``: a view of ``root``, or (None) a copy."""
        new = Handle(self.count + 1, root, turned)
        if not self.attempt(lambda: self.script.run(f"{new.name} = {text.format(handle.name)}")):
            return
        self.script.run(f"{new.twin} = {text.format(handle.twin) if root else f'{handle.twin}.clone()'}")
        self.script.equal(new.name, new.twin, label=text.format(handle.name))
        if not isinstance(self.script[new.name], self.of.subject.cls):
            return  # decayed to a plain tensor, with the right values
        slack = self.script[handle.slack]
        self.script.ns[new.slack] = execute(text.format("t"), {"t": slack}) if root else slack.clone()
        self.count += 1
        self.handles.append(new)
        if len(self.handles) > _MOST:
            self.handles.pop(1)
        self.all_agree()

    def change(self, handle: Handle, text: str, source: tuple[str, str] = ("", "")) -> None:
        """Write into a handle, and into its twin; its aliases see it, and nothing else changes.

        ``source`` is what ``%s`` in the text stands for, of the class and plain.
        """
        owner = handle.owner
        of_class, plain = (text.replace("%s", name) for name in source)
        wanted = self._after(handle, plain)
        if not self.attempt(lambda: self.script.run(f"with torch.no_grad(): {_for(of_class, handle.name)}")):
            return
        self.script.run(f"with torch.no_grad(): {_for(plain, handle.twin)}")
        self.script[owner.slack].copy_(self._requantized(wanted, owner.turned))
        self.all_agree()
        self.script[owner.slack].zero_()
        for each in self.handles:
            if each.owner == owner:  # from here on, the twin has the rounded values
                self.script.run(f"_ = {each.twin}.copy_(plain({each.name}))")
        self.all_agree()

    def _after(self, handle: Handle, text: str) -> torch.Tensor:
        """What the owner's twin will be after a write into the handle's; it is left as it is."""
        owner: torch.Tensor = self.script[handle.owner.twin]
        before = owner.clone()
        with torch.no_grad():
            execute(_for(text, handle.twin), dict(self.script.ns))
        wanted = owner.clone()
        owner.copy_(before)
        return wanted

    def _requantized(self, wanted: torch.Tensor, turned: bool) -> torch.Tensor:
        """How far the written values may be off: as rows, and as columns where the tensor was turned on the way."""
        bound = torch.as_tensor(self.of.requantization(self.script, wanted), dtype=torch.float64).expand(wanted.shape)
        if turned:
            flipped = torch.as_tensor(self.of.requantization(self.script, wanted.t().contiguous()), dtype=torch.float64)
            bound = torch.maximum(bound, flipped.expand(wanted.t().shape).t())
        rounding = wanted.double().abs() * torch.finfo(wanted.dtype).eps * 4
        return bound + rounding

    def product(self, handle: Handle, text: str, shape: torch.Size) -> None:
        x, y = (inputs.activation((3, n), self.of.dtype, n) for n in (shape[1], shape[0]))
        self.script.run(f"x, y = {x}, {y}" + ("\nz = x.clone().requires_grad_()" if "z" in text else ""))
        if not self.attempt(lambda: self.script.run(f"out = {text.replace('{}', handle.name)}")):
            return
        ns: dict[str, Any] = {**self.script.ns, "w": self.script[handle.twin].double().abs()}
        ns.update({n: self.script[n].double().abs() for n in "xy"}, z=self.script["x"].double().abs().requires_grad_())
        magnitude = execute(text.replace("{}", "w"), ns).detach()
        extra = None
        if self.of.case.rounding:
            by_row = "grad" not in text
            ns.update({n: ns[n] + self.of.case.rounding.step(n, ns[n], by_row=by_row) for n in "xyw"})
            ns["z"] = ns["x"].detach().requires_grad_()
            extra = execute(text.replace("{}", "w"), ns).detach() - magnitude
        self.same(handle, text, oracle.multilinear_bound(magnitude, self.of.dtype, max(shape), extra))

    def compute(self, handle: Handle, text: str) -> None:
        if self.attempt(lambda: self.script.run(f"out = {text.replace('{}', handle.name)}")):
            wanted = self.script.value(text.replace("{}", handle.twin), extend=False)
            exact = not isinstance(wanted, torch.Tensor) or not wanted.is_floating_point()
            self.same(handle, text, None if exact else oracle.elementwise_bound(wanted, 2))

    def cast(self, handle: Handle, text: str) -> None:
        """Its result is compared, and not used further: a class may round when it is read, and forget it when widened."""
        if self.attempt(lambda: self.script.run(f"v = {text.format(handle.name)}")):
            self.script.equal("v", text.format(handle.twin), label=text.format(handle.name))
        self.all_agree()

    def same(self, handle: Handle, text: str, bound: torch.Tensor | None) -> None:
        """``out`` is what the operation gives on the twin; a result of the class may have been quantized."""
        twin = text.replace("{}", handle.twin)
        if bound is not None and isinstance(self.script["out"], self.of.subject.cls):
            bound = bound + self.of.requantization(self.script, self.script.value(twin, extend=False))
        self.script.equal("out", twin, label=text.replace("{}", handle.name), bound=bound)
        self.all_agree()

    def all_agree(self) -> None:
        """Every handle equals its twin, within its slack."""
        for handle in self.handles:
            tensor, twin = self.script[handle.name], self.script[handle.twin]
            if tensor.shape != twin.shape:
                self.script.fail(
                    f"{handle.name} has shape {tuple(tensor.shape)}, its plain twin {tuple(twin.shape)}.",
                    kind="shape",
                    assertion=f"assert {handle.name}.shape == {handle.twin}.shape",
                )
            self.script.equal(handle.name, handle.twin, label=f"{handle.name}, after this,", bound=self.script[handle.slack])


def _for(text: str, name: str) -> str:
    """The text of a write for a handle or a twin; only its target is of the class, what it reads are plain values."""
    first, *rest = text.split("{}")
    source = f"plain({name})" if name[0] in "wv" else name
    return first + name + source.join(rest)
