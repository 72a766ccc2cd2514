"""What a subject supports: each claim is probed by the smallest operation that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from subclass_testkit import oracle
from subclass_testkit.calm import calm
from subclass_testkit.check import CLAIMS
from subclass_testkit.checks.base import Case, CheckGroup
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Refused
from subclass_testkit.rounding import Rounding
from subclass_testkit.script import Script


@dataclass
class Claim:
    """A claim after probing. ``reason`` says what was seen."""

    name: str
    declared: bool
    found: bool
    reason: str

    @property
    def status(self) -> str:
        word = "found" if self.found else "not found"
        return f"declared, {word}" if self.declared else word


class Probes(CheckGroup):
    """One method a claim; it returns the reason when found, and raises when not. Not a group of checks."""

    takes_packed = True

    def wrapper(self) -> str:
        if not self.subject.wrapper:
            raise CheckSkipped("the subject says wrapper=False")
        w = self.script()["w"]
        if hasattr(w, "__tensor_flatten__"):
            return "has __tensor_flatten__"
        if w.numel() and _storage_pointer(w):
            raise CheckSkipped("keeps its values in its own storage, has no __tensor_flatten__")
        return "has no storage of its own"

    def quantized(self) -> str:
        script = self.script()
        if torch.equal(script["d"].to(self.dtype), script["hp"]):
            raise CheckSkipped("to_plain(make(hp)) equals hp")
        return "to_plain(make(hp)) differs from hp"

    def inference(self) -> str:
        script = self.script(x=self.x())
        call = self.linear()
        got = script.read(script.value(call), call)
        if self.subject.activation_bits is None and self.subject.weight_bits is None:
            rounding = self._rounding(got, script)
            if rounding:
                self.case.facts.setdefault("rounding", {})[self.case.variant] = rounding
                also = " and the weight's values" if rounding.weight else ""
                return f"{call} works; it rounds activations{also} to 8 bits"
        return f"{call} works"

    def _rounding(self, got: Any, script: Script) -> Rounding | None:
        """To 8 bits, if that explains how far the linear is from the dense one: of the activation, or of the weight as well.

        Of the weight only where its values are those of the source: integers needn't be rounded again.
        """
        x, d = script["x"], script["d"]
        if not isinstance(got, torch.Tensor) or got.shape != (*x.shape[:-1], d.shape[0]):
            return None
        x, d, got = x.double(), d.double(), got.double()
        error = (got - x @ d.t()).abs()
        exact = oracle.multilinear_bound(x.abs() @ d.abs().t(), self.dtype, x.shape[-1], None)
        if bool((error <= exact).all()):
            return None
        x, d, lossless = x.abs(), d.abs(), torch.equal(script["d"].to(self.dtype), script["hp"])
        for rounding in (Rounding(8), Rounding(8, 8))[: 1 + lossless]:
            rounded = (x + rounding.step("x", x)) @ (d + rounding.step("w", d)).t()
            if bool((error <= exact + rounded - x @ d.t()).all()):
                return rounding
        return None

    def training(self) -> str:
        script = self.script(x=self.x())
        script.run("p = nn.Parameter(w)")
        script.run(f"{self.linear(w='p')}.sum().backward()")
        if script["p"].grad is None:
            raise CheckSkipped("a Parameter of it gets no gradient from a linear")
        script.run("torch.optim.SGD([p], lr=0.1).step()")
        return "a Parameter gets a gradient, and SGD steps"

    def compile(self) -> str:
        script = self.script(x=self.x())
        torch._dynamo.reset()
        # A class that dynamo leaves alone, by graph breaks, isn't compiled.
        wrapper = hasattr(script["w"], "__tensor_flatten__")
        how = "backend='eager'" if wrapper else "backend='aot_eager', fullgraph=True"
        script.run(f"torch.compile(lambda x, w: {self.linear()}, {how})(x, w)")
        return f"torch.compile(linear, {how}) works"

    def export(self) -> str:
        script = self.script(x=self.x())
        script.run(
            f"class M(nn.Module):\n    def __init__(self, w):\n        super().__init__()\n        self.w = nn.Parameter(w, False)\n"
            f"    def forward(self, x):\n        return {self.linear(w='self.w')}\n"
            f"torch.export.export(M(w), (x,), strict=False)"
        )
        return "torch.export.export of a linear works"

    def serialization(self) -> str:
        script = self.script()
        script.run("f = io.BytesIO(); torch.save(w, f); _ = f.seek(0)\nv = torch.load(f, weights_only=False)")
        return "torch.save and torch.load work"

    def devices(self) -> str:
        script = self.script()
        script.run("v = w.to('meta')")
        if script["v"].device.type != "meta":
            raise CheckSkipped(f"w.to('meta') stays on {script['v'].device}")
        return "w.to('meta') works"

    def serving(self) -> str:
        script = self.script()
        script.run("p = nn.Parameter(w, False)\nwith torch.no_grad():\n    p.narrow(0, 0, 1).copy_(w.narrow(0, 0, 1))")
        return "p.narrow(0, 0, 1).copy_(shard) works"

    def optimizer_state(self) -> str:
        script = self.script()
        if "optimizer_state" not in self.subject.declared:
            raise CheckSkipped("only when declared")
        script.run("w.copy_(hp * 0.5)")
        return "copy_ from plain values works"

    def tensor_parallel(self) -> str:
        raise CheckSkipped("this version of the kit has no distributed checks")

    def fsdp2(self) -> str:
        raise CheckSkipped("this version of the kit has no distributed checks")


def _storage_pointer(w: torch.Tensor) -> int:
    """The address of the tensor's own storage; 0 where it has none."""
    try:
        return w.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0


def probe(case: Case, name: str) -> Claim:
    """Probe one claim; what the probe measures on the way goes into ``case.facts``."""
    probes = object.__new__(Probes)
    probes.case = case
    method: Callable[[], str] = getattr(probes, name)
    declared = name in case.subject.declared
    try:
        with calm():
            return Claim(name, declared, True, method())
    except (Refused, CheckSkipped) as error:
        return Claim(name, declared, False, str(error))
    except CheckFailed as error:
        # An accident is no refusal: the checks of this claim shall run, and find it.
        return Claim(name, declared, True, f"probing it: {error}")


NAMES = tuple(CLAIMS)
