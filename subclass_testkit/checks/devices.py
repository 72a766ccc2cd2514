"""Device and dtype moves take everything along."""

from __future__ import annotations

import re

import torch

from subclass_testkit import devices, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._device_cases import (
    DTYPES,
    FACTORIES,
    META,
    MODULE,
    SAME,
    SIM_MODULE,
    SIM_MOVES,
    SIM_OPERATIONS,
    UNSET,
)
from subclass_testkit.checks._simulated import SimulatedGroup
from subclass_testkit.checks._traced import module_text, renamed
from subclass_testkit.checks.kernels import watched
from subclass_testkit.oracle import ELEMENTWISE
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Refused
from subclass_testkit.script import Script, execute

_WHY_MOVE = "a tensor whose parts lie on two devices fails at its first use, or computes on the wrong one"
_FIX_MOVE = "in aten._to_copy, pass device, non_blocking and the rest on to every inner tensor, and build the result with the new outer device"
_FIX_DTYPE = "in aten._to_copy, keep the codes as they are, change the dtype that the tensor shows (and dequantizes to), or raise NotImplementedError"


class DeviceTests(SimulatedGroup):
    """Device and dtype moves take everything along."""

    group = "devices"

    # --- moves

    @over(*META)
    @check(needs=("devices",), axes="variant", why=_WHY_MOVE + "; models are built on meta", fix=_FIX_MOVE)
    def test_move_to_meta(self, text: str) -> None:
        """A move to meta gives the same class on meta, with every inner tensor, the flatten context and the shape."""
        script = self.script()
        script.run(f"v = {text}")
        self.arrived(script, "v", "meta", text, moved_dtype=text.endswith("bfloat16)"))

    @over(*SAME)
    @check(
        axes="one",
        why="code that moves tensors to be sure relies on no copy being made: memory doubles, and a tied weight is untied",
        fix="let torch's own .to decide; it calls aten._to_copy only where something changes",
        upstream="torch.Tensor.to: 'self is returned' if it has the dtype and device already",
    )
    def test_move_to_where_it_is(self, text: str) -> None:
        """A move to the device and dtype that the tensor has returns the tensor itself."""
        script = self.script()
        script.run(f"v = {text}")
        script.expect(
            "v is w",
            f"{text} gives another object ({{type(v).__name__}}, {{v.dtype}} on {{v.device}}), expected w itself.",
            kind="identity",
        )

    @over("w.to('cpu', copy=True)", "w.to(w.dtype, copy=True)", "w.to(w, copy=True)")
    @check(axes="variant", why="copy=True is how code gets a tensor of its own", fix="copy every inner tensor in aten._to_copy")
    def test_forced_copy(self, text: str) -> None:
        """With copy=True the result has the same class, context and values, bit for bit, and shares no memory."""
        script = self.script()
        script.run(f"v = {text}")
        script.expect("v is not w", f"{text} gives w itself.", kind="identity")
        if "devices" in self.case.found:
            self.arrived(script, "v", "cpu", text)
        script.equal("v", "d", label=text)
        for name, inner in oracle.inner_tensors(script["w"]).items():
            moved = oracle.inner_tensors(script["v"]).get(name)
            if moved is not None and moved.numel() and moved.untyped_storage().data_ptr() == inner.untyped_storage().data_ptr():
                script.fail(
                    f"{text}: inner tensor {name!r} shares memory with w's.",
                    kind="alias",
                    assertion=f"assert v.{name}.data_ptr() != w.{name}.data_ptr()",
                )

    @check(
        needs=("devices", "inference"),
        axes="variant",
        why="shape propagation on meta is how loaders and planners find sizes",
        fix="let handlers work on meta tensors: no values read",
    )
    def test_linear_on_meta(self) -> None:
        """A linear on meta gives a meta tensor of the right shape and dtype."""
        script = self.script(x=self.x(), b=self.bias())
        script.run("w = w.to('meta'); x = x.to('meta'); b = b.to('meta')")
        script.run(f"v = {self.linear(b='b')}")
        script.expect("v.device.type == 'meta'", "linear on meta gives a tensor on {v.device}.", kind="device")
        script.equal("v", f"torch.empty(5, {self.out_features}, dtype=x.dtype, device='meta')", label="linear on meta")

    @check(
        needs=("devices",),
        axes="variant",
        why="large models are quantized layer by layer where they lie",
        fix="create the inner tensors on the source's device",
    )
    def test_made_on_meta(self) -> None:
        """A subclass made from a meta tensor is wholly on meta, with the metadata of one made on the CPU."""
        script = self.script()
        script.run(f"v = {self.made('hp_meta')}".join(("hp_meta = hp.to('meta')\n", "")))
        self.made_like(script, "v", "meta")

    # --- dtypes

    @over(*DTYPES)
    @check(
        why="a dtype move that is ignored makes the next matmul fail; one that is applied to the codes destroys the values",
        fix=_FIX_DTYPE,
    )
    def test_dtype_move(self, text: str, dtype: torch.dtype) -> None:
        """A move to another floating dtype gives that dtype and the values rounded to it, with the codes as they were; or it is refused."""
        script = self.script()
        script.run(f"v = {text}")
        script.expect(
            f"v.dtype == {dtype}",
            f"{text} reports dtype {{v.dtype}}, expected {dtype}.",
            kind="dtype",
            likely="the move was ignored." if script["v"].dtype == self.dtype else "",
        )
        script.equal("v", renamed(text, "w", "d"), label=text, bound=self._rounding(script, "d", dtype, text.count(".to(")))
        self.codes_untouched(script, "w", "v", text)

    def _rounding(self, script: Script, source: str, dtype: torch.dtype, moves: int = 1) -> torch.Tensor | None:
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

    @over("w.to(torch.bfloat16)", "w.half()", "w.double()", "w.float()")
    @check(needs=("inference",), why="a model is moved to the dtype in which it then computes", fix=_FIX_DTYPE)
    def test_linear_after_dtype_move(self, text: str) -> None:
        """After a dtype move the linear computes in the new dtype, with the moved tensor's values."""
        script = self.script(x=self.x(), b=self.bias())
        self.eager(script, f"v = {text}")
        try:
            before = script.read(execute(self.linear(b="b"), script.ns), "linear")
            known = oracle.compare(
                before, execute("F.linear(x, d, b)", script.ns), self.product_bound(script, "F.linear(x, w, b)"), ""
            )
        except Exception as error:
            raise CheckSkipped(f"linear fails before the move already: {oracle.describe(error)}") from error
        if known:
            raise CheckSkipped("linear is wrong before the move already, which equivalence checks report")
        script.run("x = x.to(v.dtype); b = b.to(v.dtype)")
        bound = self.product_bound(script, "F.linear(x, v, b)")
        script.run(f"got = {self.linear(w='v', b='b')}")
        script.equal("got", "F.linear(x, plain(v), b)", label=f"linear after {text}", bound=bound)

    @over("w.to(torch.int32)", "w.long()", "w.to(torch.bool)", "w.to(torch.complex64)")
    @check(
        axes="one",
        why="a cast that takes the codes for the values gives plausible nonsense",
        fix="dequantize first, or raise NotImplementedError",
    )
    def test_move_to_non_float(self, text: str) -> None:
        """A cast to an integer, boolean or complex dtype is that of the values, or is refused."""
        self.agree(text, suspects={})

    # --- modules

    def holder(self, trainable: bool = False) -> Script:
        """A script with a module ``m`` whose ``m.w`` is a Parameter ``p`` of the subclass."""
        script = self.script(x=self.x(), g=self.grad())
        script.run(module_text(self.linear(w="self.w"), "w", f"self.w = nn.Parameter(w, {trainable})") + "\nm = M(w); p = m.w")
        return script

    @over(*MODULE)
    @check(
        needs=("devices",),
        axes="variant",
        why="model.half() and model.to(device) are how everybody moves models; a weight that loses its class, or keeps old inner tensors, does so silently",
        fix="return the class from aten._to_copy and aten.empty_like, with every inner tensor moved",
        upstream="pytorch#187008",
    )
    def test_module_move(self, text: str, dtype: torch.dtype | None, device: str) -> None:
        """A module's move keeps the Parameter object and its class, and gives it the asked device, dtype and values."""
        script = self.holder()
        self.needs_empty_like(script, text)
        script.run(text)
        likely = self._why_not_moved(script, dtype)
        if "wrapper" in self.case.found or (device == "cpu" and "to_empty" not in text):
            script.expect(
                "m.w is p",
                f"{text} replaced the Parameter object by another {{type(m.w).__name__}}.",
                kind="identity",
                likely=likely
                or "the moved tensor isn't of the class, or can't take the Parameter's place by torch.utils.swap_tensors.",
            )
        script.run("p = m.w")
        script.expect(
            "isinstance(m.w, nn.Parameter)", f"{text} left a {{type(m.w).__name__}} that is no Parameter.", kind="parameter"
        )
        self.arrived(script, "p", device, text, moved_dtype=True)
        want = dtype or self.dtype
        script.expect(
            f"p.dtype == {want} and p.shape == d.shape",
            f"{text}: the weight has dtype {{p.dtype}} and shape {{p.shape}}, expected {want}, {{d.shape}}.",
            kind="dtype",
            likely=likely,
        )
        if device == "cpu" and "to_empty" not in text:
            script.equal(
                "p", f"d.to({want})", label=f"the weight after {text}", bound=self._rounding(script, "d", want), likely=likely
            )

    @check(
        level="should",
        needs=("devices", "wrapper", "serving"),
        axes="variant",
        why="a model that is built on the meta device becomes dense in to_empty(), and then loads dense weights, without a word",
        fix="implement aten.empty_like: the class, around empty inner tensors on the asked device",
    )
    def test_to_empty_keeps_the_class(self) -> None:
        """Module.to_empty() gives a Parameter of the class."""
        script = self.holder()
        script.run("m.to('meta').to_empty(device='cpu')")
        script.expect(
            f"isinstance(m.w, {self.subject.cls.__name__})",
            "after m.to('meta').to_empty(device='cpu') the weight is a plain {type(m.w).__name__}.",
            kind="class",
            likely="torch.empty_like(w), by which to_empty() makes the new weight, is plain.",
        )

    def _why_not_moved(self, script: Script, dtype: torch.dtype | None) -> str:
        """What the class's own .to(dtype) does, where a module's move went wrong."""
        if dtype is None or "wrapper" not in self.case.found:
            return ""
        try:
            moved = self.subject.build(script["hp"]).to(dtype)
        except Exception:
            return ""
        if not isinstance(moved, self.subject.cls):
            return "the moved tensor is plain: Module.to then sets .data, which keeps the old inner tensors and the class."
        return "" if moved.dtype == dtype else f"w.to({dtype}) is ignored: it gives {moved.dtype}."

    @over("m.half()", "m.to(torch.bfloat16)", "m.double()", "m.to('meta')")
    @check(
        needs=("devices", "training"),
        axes="one",
        why="a gradient that stays behind breaks the next step",
        fix="return the class from aten._to_copy; Module.to moves .grad by itself",
        upstream="pytorch#187008",
    )
    def test_module_move_takes_the_gradient(self, text: str) -> None:
        """A module's move moves the weight's gradient too, with its values."""
        script = self.holder(trainable=True)
        self.eager(script, "m(x).backward(g)\nbefore = plain(p.grad).clone()")
        script.run(text)
        script.expect("m.w.grad is not None", f"{text} lost the gradient.", kind="grad")
        script.expect(
            "m.w.grad.dtype == m.w.dtype and m.w.grad.device == m.w.device",
            f"{text}: the gradient is {{m.w.grad.dtype}} on {{m.w.grad.device}}, the weight {{m.w.dtype}} on {{m.w.device}}.",
            kind="grad",
        )
        if "meta" not in text:
            script.equal("m.w.grad", "before.to(m.w.dtype)", label=f"the gradient after {text}")

    @over("m.half()", "m.to(torch.bfloat16)", "m.to('meta')", "m.to_empty(device='cpu')")
    @check(
        needs=("devices",),
        axes="one",
        why="tied embeddings are one tensor in two modules; untied, they train and load apart",
        fix="keep the class in aten._to_copy and aten.empty_like, so that Module.to swaps the tensor in place",
        upstream="transformers#37905",
    )
    def test_tied_weights_stay_tied(self, text: str) -> None:
        """A Parameter that two modules share is still shared after a move."""
        if "wrapper" not in self.case.found and ("meta" in text or "to_empty" in text):
            raise CheckSkipped(
                "torch replaces each Parameter that is no wrapper subclass when it moves it to another kind of device"
            )
        script = self.script()
        self.needs_empty_like(script, text)
        script.run("m = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])\nm[0].weight = m[1].weight = nn.Parameter(w, False)")
        script.run(text)
        script.expect("m[0].weight is m[1].weight", f"after {text} the two modules have different weights.", kind="untied")
        script.expect("m[0].weight.dtype == m[1].weight.dtype", "the two have different dtypes.", kind="untied")

    @over("m.bfloat16()", "m.to(torch.float64)", "m.to('cpu')")
    @check(
        needs=("devices", "training"),
        axes="one",
        why="an optimizer that is made before the move would train a tensor that the model no longer uses",
        fix="keep the class in aten._to_copy, so that Module.to swaps the tensor in place",
        upstream="pytorch#187008",
    )
    def test_optimizer_follows(self, text: str) -> None:
        """An optimizer made before a move refers to the module's Parameter after it, and its step changes it."""
        if not self._steps_in_place():
            raise CheckSkipped(
                "a step of SGD leaves the weight as it was without a move already, which optimizers checks report"
            )
        script = self.holder(trainable=True)
        script.run("opt = torch.optim.SGD(m.parameters(), lr=0.5)")
        script.run(text)
        script.expect(
            "opt.param_groups[0]['params'][0] is m.w",
            f"after {text} the optimizer holds another object than the module.",
            kind="identity",
        )
        script.run(f"before = plain(m.w).clone()\nm.w.grad = ({self.hp(seed=3)}).to(m.w.dtype)\nopt.step()")
        script.expect(
            "not torch.equal(before, plain(m.w))",
            f"after {text}, a step of the optimizer leaves the module's weight as it was.",
            kind="no-op",
        )

    def _steps_in_place(self) -> bool:
        """Whether a step of SGD changes a Parameter of the subclass at all."""
        script = self.script()
        script.run(f"p = nn.Parameter(w); p.grad = {self.hp(seed=3)}\ntorch.optim.SGD([p], lr=0.5).step()")
        return not torch.equal(self.subject.plain(script["p"]), script["d"])

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
    @check(tier="standard", own_process=True, needs=("devices", "wrapper"), axes="one", why=_WHY_MOVE, fix=_FIX_MOVE)
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

    @over(*((name, texts) for name, *texts in SIM_MODULE))
    @check(
        tier="standard",
        own_process=True,
        needs=("devices", "wrapper"),
        axes="one",
        why="model.to(device) is how everybody moves models",
        fix="return the class from aten._to_copy and aten.empty_like, with every inner tensor moved",
        upstream="pytorch#187008",
    )
    def test_simulated_module(self, case: str, texts: list[str]) -> None:
        """Moving a module to an accelerator keeps the Parameter object and its class, moves every inner tensor, and keeps ties."""
        self.each(texts, self.sim_module)

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

    @check(own_process=True, needs=("devices",), axes="variant", why=_WHY_MOVE, fix=_FIX_MOVE)
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
