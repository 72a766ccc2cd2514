"""Device and dtype moves take everything along."""

from __future__ import annotations

import re

import torch

from subclass_testkit import devices, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._device_cases import (
    FACTORIES,
    SIM_MOVES,
    SIM_OPERATIONS,
    UNSET,
)
from subclass_testkit.checks._module_moves import ModuleMoveChecks
from subclass_testkit.checks._parts import with_checks_of_its_parts
from subclass_testkit.checks._tensor_moves import FIX_MOVE, WHY_MOVE, MoveChecks
from subclass_testkit.checks.kernels import watched
from subclass_testkit.oracle import ELEMENTWISE
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Refused


@with_checks_of_its_parts
class DeviceTests(MoveChecks, ModuleMoveChecks):
    """Device and dtype moves take everything along."""

    group = "devices"

    # --- new tensors

    @over(*FACTORIES)
    @check(
        axes="one",
        why="optimizers make their state by zeros_like(p); a wrong dtype, device or value there spoils the training",
        fix="return a plain tensor of the asked shape, dtype and device, or the class with these values",
    )
    def test_new_tensor_like_it(self, text: str) -> None:
        """zeros_like, ones_like, full_like and new_* have the shape, dtype, device and values asked for; of the class, or plain."""
        self.agree(text, tolerance=ELEMENTWISE)

    @over(*UNSET)
    @check(
        axes="one",
        why="code that allocates like a tensor writes into what it gets",
        fix="honour shape, dtype and device of the call; build all inner tensors on that device",
    )
    def test_unset_tensor_like_it(self, text: str) -> None:
        """empty_like, rand_like and new_empty have the shape, dtype and device asked for; inner tensors lie on that device."""
        script = self.script()
        script.run(f"v = {text}")
        script.run(f"expected = {re.sub(r'(?<![.])w(?=[.)])', 'd', text).replace('_like(w', '_like(d')}")
        for what in ("shape", "dtype", "device"):
            script.expect(
                f"v.{what} == expected.{what}", f"{text} has {what} {{v.{what}}}, expected {{expected.{what}}}.", kind=what
            )
        for name, inner in oracle.inner_tensors(script["v"]).items():
            script.expect(
                f"v.{name}.device == v.device",
                f"{text}: inner tensor `{name}` is on {inner.device}, the tensor on {{v.device}}.",
                kind="inner-device",
            )
        if "rand" in text and script["v"].device.type == "cpu":
            values = self.subject.plain(script["v"])
            script.ns["values"] = values
            if "randn" not in text and not (bool((values >= 0).all()) and bool((values <= 1).all())):
                script.fail(
                    f"{text} has values outside 0..1.",
                    kind="value",
                    assertion="assert ((plain(v) >= 0) & (plain(v) <= 1)).all()",
                )
            if values.unique().numel() < 2:
                script.fail(f"{text}: all values are equal.", kind="value", assertion="assert plain(v).unique().numel() > 1")
        elif isinstance(script["v"], self.subject.cls) and script["v"].device.type == "cpu":
            script.equal("plain(v).shape", "expected.shape", label=f"the values of {text}: shape")

    # --- the simulated accelerator

    @over(*((name, texts) for name, *texts in SIM_MOVES))
    @check(tier="standard", own_process=True, needs=("devices", "wrapper"), axes="one", why=WHY_MOVE, fix=FIX_MOVE)
    def test_simulated_move(self, case: str, texts: list[str]) -> None:
        """A move to an accelerator and back, however it is written, takes every inner tensor along and keeps class and context."""
        self.matrix()
        self.each(texts, self.sim_move)

    @over(*((name, texts) for name, *texts in SIM_OPERATIONS))
    @check(
        tier="standard",
        own_process=True,
        needs=("devices", "wrapper"),
        axes="one",
        why="an operation that creates a tensor without device= works on the CPU, and fails on every accelerator",
        fix="create tensors in handlers with device=self.device, or from the inner tensors (new_*, *_like)",
    )
    def test_simulated_operation(self, case: str, texts: list[str]) -> None:
        """Operations on a tensor that lies on an accelerator give results that lie there, inner tensors included."""
        self.matrix()
        self.each(texts, self.sim_operation)

    @check(
        tier="standard",
        own_process=True,
        needs=("devices", "wrapper", "inference"),
        axes="one",
        why="an operand that is moved silently costs a transfer at every call, and hides the mistake",
        fix="don't move operands in the linear; let torch raise",
    )
    def test_simulated_mixed_devices(self) -> None:
        """A linear whose input is on another device than the weight raises."""
        try:
            custom = watched(self.script(x=self.x()), self.linear()).custom
        except (CheckFailed, Refused) as error:
            raise CheckSkipped(f"linear fails on one device already: {error}") from None
        for where in ("w.to('sim'), x", "w, x.to('sim')"):
            script = self.simulated(x=self.x())
            self.on_sim(script, f"w, x = {where}")
            message = f"a linear of {where.replace('w', 'the weight', 1)} raised no error."
            try:
                self.refuses_or_raises(script, f"with mode:\n    v = {self.linear()}", message)
            except CheckFailed as failure:
                if custom and failure.finding.kind == "no-error":
                    why = f"linear calls {custom[0]}, and the fake implementation of a custom operator need not check devices"
                    raise CheckSkipped(why) from None
                raise

    @check(
        tier="standard",
        own_process=True,
        needs=("devices", "wrapper", "training"),
        axes="one",
        why="training runs on accelerators; a gradient or a temporary on the CPU ends it",
        fix="create tensors in handlers and backward formulas on the operand's device",
    )
    def test_simulated_training(self) -> None:
        """A forward, backward and optimizer step on an accelerator work there, and leave weight, gradients and state there."""
        self.matrix()
        script = self.simulated(x=self.x(), g=self.grad())
        self.on_sim(
            script,
            "p = nn.Parameter(w.to('sim')); x = x.to('sim').requires_grad_(); g = g.to('sim')\nopt = torch.optim.SGD([p], lr=0.1, momentum=0.9)",
        )
        self.on_sim(script, f"({self.linear(w='p')}).backward(g)")
        for name in ("p.grad", "x.grad"):
            script.expect(
                f"{name} is not None and str({name}.device) == 'sim:0'",
                f"after a backward on sim, {name} is {{{name} if {name} is None else {name}.device}}.",
                kind="grad",
            )
        self.on_sim(script, "opt.step()")
        script.ns["state"] = [t for t in script["opt"].state[script["p"]].values() if isinstance(t, torch.Tensor) and t.dim()]
        script.expect(
            "all(str(t.device) == 'sim:0' for t in opt.state[p].values() if isinstance(t, torch.Tensor) and t.dim())",
            "the optimizer's state is not on sim.",
            kind="state",
        )
        self.arrived(script, "p", "sim:0", "an optimizer step on sim", moved_dtype=True)

    @check(
        tier="standard",
        own_process=True,
        needs=("devices", "wrapper"),
        axes="one",
        why="large models are quantized where they lie",
        fix="create the inner tensors on the source's device",
    )
    def test_simulated_creation(self) -> None:
        """A subclass made from a tensor on an accelerator lies there wholly, with the metadata of one made on the CPU and moved."""
        script = self.simulated()
        self.on_sim(script, f"hp = hp.to('sim')\nv = {self.subject.make_text}")
        self.made_like(script, "v", "sim:0")

    # --- the real accelerator

    @check(own_process=True, needs=("devices",), axes="variant", why=WHY_MOVE, fix=FIX_MOVE)
    def test_accelerator_round_trip(self) -> None:
        """A move to the machine's accelerator and back gives the same class, context and values, bit for bit."""
        device = devices.accelerator()
        script = self.script()
        script.run(f"there = w.to({device!r}, non_blocking=True)\ntorch.accelerator.synchronize()")
        self.arrived(script, "there", f"{device}:0", f"w.to({device!r})")
        script.run("back = there.cpu()")
        self.arrived(script, "back", "cpu", f"w.to({device!r}).cpu()")
        script.equal("back", "d", label="the values after the round trip")

    @check(
        own_process=True,
        needs=("devices", "inference"),
        axes="variant",
        why="a kernel for one device only shows on that device",
        fix="test the kernel against the plain linear on each device",
    )
    def test_accelerator_linear(self) -> None:
        """A linear on the machine's accelerator gives what the values give on the CPU."""
        device = devices.accelerator()
        script = self.script(x=self.x(), b=self.bias())
        bound = self.product_bound(script, "F.linear(x, w, b)")
        script.run(f"w, x, b = (t.to({device!r}) for t in (w, x, b))\ngot = ({self.linear(b='b')}).cpu()")
        script.equal("got", "F.linear(x.cpu(), d, b.cpu())", label=f"linear on {device}", bound=2 * bound)

    @check(
        own_process=True,
        needs=("devices",),
        axes="one",
        why="pinned memory makes asynchronous transfers; a loader that pins batches meets the subclass",
        fix="implement aten._pin_memory and aten.is_pinned over all inner tensors",
    )
    def test_pin_memory(self) -> None:
        """pin_memory pins every inner tensor and keeps class and values, or is refused."""
        devices.accelerator()
        script = self.script()
        script.run("v = w.pin_memory()")
        self.arrived(script, "v", "cpu", "w.pin_memory()")
        script.expect("v.is_pinned()", "w.pin_memory().is_pinned() is false.", kind="pinned")
        script.equal("v", "d", label="the pinned tensor")
