"""What the device checks share: where everything of a tensor lies after a move, and the simulated accelerator."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any

import torch

from subclass_testkit import devices, oracle
from subclass_testkit.checks._device_cases import SIM_ENDS
from subclass_testkit.checks._traced import TracedGroup, renamed, same_context
from subclass_testkit.outcome import Refused
from subclass_testkit.script import Script, execute


class MovedGroup(TracedGroup):
    """What is asked of a tensor that was moved."""

    def arrived(self, script: Script, name: str, device: str, label: str, *, moved_dtype: bool = False) -> None:
        """The tensor ``name`` is of the class, wholly on ``device``, and has w's shape and context (``moved_dtype``: not its dtype)."""
        cls = self.subject.cls.__name__
        script.expect(
            f"isinstance({name}, {'torch.Tensor' if self.decays_by_design else cls})",
            f"{label} gives a plain {{type({name}).__name__}}.",
            kind="class",
            likely="aten._to_copy falls back to plain values: a moved model silently takes the memory and the speed of a plain one.",
        )
        script.expect(
            f"str({name}.device) == {device!r}", f"{label} reports device {{{name}.device}}, expected {device}.", kind="device"
        )
        stayed = [n for n, t in oracle.inner_tensors(script[name]).items() if str(t.device) != device]
        if stayed:
            where = oracle.inner_tensors(script[name])[stayed[0]].device
            names = ", ".join(f"`{n}`" for n in stayed)
            text = f"after {label}, inner tensor {names} is on {where}, the tensor itself on {device}."
            script.fail(
                text,
                kind="inner-device",
                likely=f"inner tensor {names} stayed on {where}: the move doesn't name it.",
                assertion=f"assert str({name}.{stayed[0]}.device) == {device!r}, {text!r}",
            )
        if not moved_dtype and "[" not in label and ".t()" not in label:
            script.expect(
                f"{name}.shape == w.shape and {name}.dtype == w.dtype",
                f"{label} has shape {{{name}.shape}} and dtype {{{name}.dtype}}, expected {{w.shape}}, {{w.dtype}}.",
                kind="metadata",
            )
            if not _same_but_device(script[name], script["w"]):
                script.expect(
                    f"{name}.__tensor_flatten__() == w.__tensor_flatten__()",
                    f"{label} changes the flatten context: {{{name}.__tensor_flatten__()}}, was {{w.__tensor_flatten__()}}.",
                    kind="context",
                )

    def made_like(self, script: Script, name: str, device: str) -> None:
        script.expect(
            f"str({name}.device) == {device!r}", f"made from a tensor on {device}, it is on {{{name}.device}}.", kind="device"
        )
        script.expect(
            f"{name}.shape == w.shape and {name}.dtype == w.dtype",
            f"made from a tensor on {device}, it has shape {{{name}.shape}} and dtype {{{name}.dtype}}.",
            kind="metadata",
        )
        for inner, tensor in oracle.inner_tensors(script[name]).items():
            if str(tensor.device) != device:
                script.fail(
                    f"made from a tensor on {device}, its inner tensor {inner!r} is on {tensor.device}.",
                    kind="inner-device",
                    likely=f"inner tensor `{inner}` is created without device=.",
                    assertion=f"assert str({name}.{inner}.device) == {device!r}",
                )

    def codes_untouched(self, script: Script, before: str, after: str, label: str) -> None:
        old, new = oracle.inner_tensors(script[before]), oracle.inner_tensors(script[after])
        for name in old.keys() & new.keys():
            coded = not old[name].dtype.is_floating_point or old[name].element_size() == 1
            if coded and old[name].dtype != new[name].dtype:
                script.expect(
                    f"{after}.{name}.dtype == {before}.{name}.dtype",
                    f"{label} converted the codes: inner tensor {name!r} was {old[name].dtype}, is {new[name].dtype}.",
                    kind="codes",
                    likely="the move maps .to(dtype) over all inner tensors.",
                )

    def rounding(self, script: Script, source: str, dtype: torch.dtype, moves: int = 1) -> torch.Tensor | None:
        """How far a moved tensor's values may be from its values moved: what the scale, the zero point, the product and the result are rounded by.

        A zero point in floating point is rounded relative to itself, not to the value: hence the row's largest magnitude.
        """
        if "quantized" not in self.case.found:
            return None
        values = self.subject.plain(script[source]).double().abs()
        eps = max(torch.finfo(t).eps for t in (self.dtype, dtype, torch.bfloat16 if moves > 1 else dtype))
        bound: torch.Tensor = (
            max(moves, 1) * (4 * eps * values + eps * values.amax(-1, keepdim=True)) + 4 * torch.finfo(dtype).tiny
        )
        return bound


class SimulatedGroup(MovedGroup):
    """Cases on the simulated accelerator; each runs in a child process."""

    def simulated(self, **texts: str) -> Script:
        """A script with a fake copy ``w`` on the CPU, and ``mode``, under which device ``sim`` works."""
        devices.simulate()
        script = self.script(**texts)
        script.note(devices.SETUP)
        names = ", ".join(["w", "hp", *texts])
        self.traced(
            script,
            f"mode = FakeTensorMode(allow_non_fake_inputs=True)\n{names} = map(mode.from_tensor, ({names}))",
            "a fake copy",
        )
        return script

    def each(self, texts: list[str], one: Callable[[str], None]) -> None:
        """Run ``one`` for each text in this one process; refused if every one is."""
        refusals = []
        for text in texts:
            try:
                one(text)
            except Refused as refusal:
                refusals.append(refusal)
        if len(refusals) == len(texts):
            raise refusals[0]

    def on_sim(self, script: Script, source: str) -> None:
        self.traced(script, "with mode:\n" + textwrap.indent(source, "    "), source.splitlines()[-1])

    def sim_move(self, text: str) -> None:
        device = next((end for tail, end in SIM_ENDS.items() if text.endswith(tail)), "sim:0")
        script = self.simulated()
        self.on_sim(script, f"v = {text}")
        here = text.replace(".to('sim')", "")
        if here not in (text, "w") and not isinstance(execute(here, dict(script.ns)), self.subject.cls):
            return  # the copy or view decays on the CPU too: no matter of devices
        self.arrived(script, "v", device, text, moved_dtype="bfloat16" in text or "half" in text)
        dtype = {"bfloat16": torch.bfloat16, "half": torch.float16}.get(
            "bfloat16" if "bfloat16" in text else "half" if "half" in text else "", self.dtype
        )
        script.expect(f"v.dtype == {dtype}", f"{text} reports dtype {{v.dtype}}, expected {dtype}.", kind="dtype")
        self.codes_untouched(script, "w", "v", text)

    def sim_operation(self, text: str) -> None:
        code = {
            "linear": self.linear(),
            "linear-bias": self.linear(b="b"),
            "to_plain": renamed(self.subject.to_plain_text, "t", "w"),
        }.get(text, text)
        script = self.simulated(x=self.x(), b=self.bias())
        script.run(f"on_cpu = w\nrun = lambda w, x, b, on_cpu: {code}")
        self.eager(script, "with mode, torch.no_grad():\n    want = run(w.clone(), x, b, on_cpu.clone())")
        self.on_sim(script, "with torch.no_grad():\n    got = run(w.to('sim'), x.to('sim'), b.to('sim'), on_cpu)")
        device = "cpu" if "on_cpu.copy_" in code or "device='cpu'" in code else "sim:0"
        script.expect(
            f"str(got.device) == {device!r}",
            f"{code} on sim gives a result on {{got.device}}, expected {device}.",
            kind="device",
        )
        for name, inner in oracle.inner_tensors(script["got"]).items():
            script.expect(
                f"str(got.{name}.device) == {device!r}",
                f"{code} on sim: inner tensor `{name}` of the result is on {inner.device}.",
                kind="inner-device",
                likely=f"inner tensor `{name}` stayed on {inner.device}.",
            )
        script.expect(
            "got.shape == want.shape and got.dtype == want.dtype",
            f"{code} on sim gives {{got.shape}} {{got.dtype}}, on the CPU {{want.shape}} {{want.dtype}}.",
            kind="metadata",
        )


def _same_but_device(a: Any, b: Any) -> bool:
    """Whether inner names and flatten contexts agree, apart from devices that they name."""
    if not hasattr(b, "__tensor_flatten__") or same_context(a, b):
        return True
    first, second = (re.sub(r"\b(cpu|meta|sim|cuda|xpu|mps)(:\d+)?", "device", repr(t.__tensor_flatten__())) for t in (a, b))
    return re.sub(r", index=\d+", "", first) == re.sub(r", index=\d+", "", second)
