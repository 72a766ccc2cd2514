"""Device and dtype moves take everything along."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

import torch

from subclass_testkit import devices, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._traced import TracedGroup, module_text, renamed, same_context
from subclass_testkit.oracle import ELEMENTWISE
from subclass_testkit.outcome import CheckSkipped, Refused
from subclass_testkit.script import Script

_META = ("w.to('meta')", "w.to(device='meta')", "w.to(torch.device('meta'), non_blocking=True)", "w.to('meta', copy=True)", "w.to(torch.empty(0, dtype=w.dtype, device='meta'))", "w.to('meta', torch.bfloat16)")
_SAME = ("w.to('cpu')", "w.cpu()", "w.to(w.device)", "w.to(w.dtype)", "w.to(w)", "w.to(device='cpu', dtype=w.dtype)", "w.type_as(w)")
_DTYPES = (
    ("w.to(torch.bfloat16)", torch.bfloat16),
    ("w.to(dtype=torch.float16)", torch.float16),
    ("w.half()", torch.float16),
    ("w.bfloat16()", torch.bfloat16),
    ("w.float()", torch.float32),
    ("w.double()", torch.float64),
    ("w.to('cpu', torch.bfloat16)", torch.bfloat16),
    ("w.to(torch.empty(0, dtype=torch.float16))", torch.float16),
    ("w.to(torch.float64, copy=True)", torch.float64),
    ("w.type(torch.bfloat16)", torch.bfloat16),
    ("w.to(torch.bfloat16).to(torch.float32)", torch.float32),
)
_MODULE = (
    ("m.half()", torch.float16, "cpu"),
    ("m.bfloat16()", torch.bfloat16, "cpu"),
    ("m.double()", torch.float64, "cpu"),
    ("m.to(torch.bfloat16)", torch.bfloat16, "cpu"),
    ("m.to('cpu', torch.float16)", torch.float16, "cpu"),
    ("m.to('cpu')", None, "cpu"),
    ("m.to('meta')", None, "meta"),
    ("m.to_empty(device='meta')", None, "meta"),
    ("m.to_empty(device='cpu')", None, "cpu"),
    ("m.to('meta').to_empty(device='cpu')", None, "cpu"),
)
_FACTORIES = (
    "torch.zeros_like(w)",
    "torch.ones_like(w)",
    "torch.full_like(w, 2.0)",
    "torch.zeros_like(w, dtype=torch.bfloat16)",
    "torch.ones_like(w, dtype=torch.int32)",
    "torch.zeros_like(w, device='meta')",
    "torch.ones_like(w, requires_grad=True)",
    "torch.zeros_like(w.t())",
    "w.new_zeros(3, 2)",
    "w.new_ones((3, 2))",
    "w.new_full((2, 3), 2.0)",
    "w.new_zeros(3, dtype=torch.int64)",
    "w.new_zeros((3, 2), device='meta')",
    "w.new_tensor([1.0, 2.0])",
)
_UNSET = ("torch.empty_like(w)", "torch.empty_like(w, dtype=torch.float16)", "torch.empty_like(w, device='meta')", "torch.rand_like(w)", "torch.randn_like(w)", "w.new_empty(3, 2)", "w.new_empty_strided((3, 2), (2, 1))", "torch.empty_like(w, device='meta', dtype=torch.float16)")
# Families of cases: each family is one child process, which costs more than its cases.
_SIM_MOVES = (
    ("to a device", "w.to('sim')", "w.to('sim:0')", "w.to('sim:1')", "w.to(device='sim')", "w.to('sim', non_blocking=True)", "w.to('sim', copy=True)", "w.sim()"),
    ("like another tensor", "w.to(torch.empty(0, dtype=w.dtype, device='sim'))"),
    ("to a device and dtype", "w.to('sim', torch.bfloat16)", "w.to('sim').half()"),
    ("there and on", "w.to('sim').cpu()", "w.to('sim').to('cpu')", "w.to('sim').to('sim:1')", "w.to('sim').to('meta')"),
    ("copies", "copy.deepcopy(w.to('sim'))", "nn.Parameter(w.to('sim'))", "w.to('sim').detach().clone()"),
    ("views", "w.t().to('sim')", "w[8:16].to('sim')"),
)
_SIM_OPERATIONS = (
    ("linear", "linear", "linear-bias", "to_plain"),
    ("views", "w[8:16]", "w[:, 8:16]", "w[3]", "w.t()", "w.chunk(2)[1]", "w.contiguous()"),
    ("arithmetic", "w + 1", "x @ w.t()", "torch.cat([w, w])", "w.sum()"),
    ("writes", "w.copy_(on_cpu)", "on_cpu.copy_(w)", "w.mul_(-1)"),
    ("new tensors", "torch.zeros_like(w)", "torch.empty_like(w)", "w.new_zeros(3)", "torch.ones_like(w, device='cpu')"),
)
_SIM_MODULE = (
    ("to", "m.to('sim')", "m.to('sim', torch.bfloat16)", "m.sim()", "m.to('sim').cpu()"),
    ("to_empty", "m.to_empty(device='sim')", "m.to('meta').to_empty(device='sim')"),
)
_SIM_ENDS = {"'sim:1')": "sim:1", ".cpu()": "cpu", "'cpu')": "cpu", "'meta')": "meta"}
_WHY_MOVE = "a tensor whose parts lie on two devices fails at its first use, or computes on the wrong one"
_FIX_MOVE = "in aten._to_copy, pass device, non_blocking and the rest on to every inner tensor, and build the result with the new outer device"
_FIX_DTYPE = "in aten._to_copy, keep the codes as they are, change the dtype that the tensor shows (and dequantizes to), or raise NotImplementedError"


class DeviceTests(TracedGroup):
    """Device and dtype moves take everything along."""

    group = "devices"

    # --- moves

    @over(*_META)
    @check(needs=("devices",), axes="variant", why=_WHY_MOVE + "; models are built on meta", fix=_FIX_MOVE)
    def test_move_to_meta(self, text: str) -> None:
        """A move to meta gives the same class on meta, with every inner tensor, the flatten context and the shape."""
        script = self.script()
        script.run(f"v = {text}")
        self.arrived(script, "v", "meta", text, moved_dtype=text.endswith("bfloat16)"))

    @over(*_SAME)
    @check(axes="variant", why="code that moves tensors to be sure relies on no copy being made: memory doubles, and a tied weight is untied", fix="let torch's own .to decide; it calls aten._to_copy only where something changes", upstream="torch.Tensor.to: 'self is returned' if it has the dtype and device already")
    def test_move_to_where_it_is(self, text: str) -> None:
        """A move to the device and dtype that the tensor has returns the tensor itself."""
        script = self.script()
        script.run(f"v = {text}")
        script.expect("v is w", f"{text} gives another object ({{type(v).__name__}}, {{v.dtype}} on {{v.device}}), expected w itself.", kind="identity")

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
                script.fail(f"{text}: inner tensor {name!r} shares memory with w's.", kind="alias", assertion=f"assert v.{name}.data_ptr() != w.{name}.data_ptr()")

    def arrived(self, script: Script, name: str, device: str, label: str, *, moved_dtype: bool = False) -> None:
        """The tensor ``name`` is of the class, wholly on ``device``, and has w's shape and context (``moved_dtype``: not its dtype)."""
        cls = self.subject.cls.__name__
        script.expect(f"isinstance({name}, {cls})", f"{label} gives a plain {{type({name}).__name__}}.", kind="class", likely="aten._to_copy falls back to plain values: a moved model silently takes the memory and the speed of a plain one.")
        script.expect(f"str({name}.device) == {device!r}", f"{label} reports device {{{name}.device}}, expected {device}.", kind="device")
        stayed = [n for n, t in oracle.inner_tensors(script[name]).items() if str(t.device) != device]
        if stayed:
            where = oracle.inner_tensors(script[name])[stayed[0]].device
            names = ", ".join(f"`{n}`" for n in stayed)
            text = f"after {label}, inner tensor {names} is on {where}, the tensor itself on {device}."
            script.fail(text, kind="inner-device", likely=f"inner tensor {names} stayed on {where}: the move doesn't name it.", assertion=f"assert str({name}.{stayed[0]}.device) == {device!r}, {text!r}")
        if not moved_dtype and "[" not in label and ".t()" not in label:
            script.expect(f"{name}.shape == w.shape and {name}.dtype == w.dtype", f"{label} has shape {{{name}.shape}} and dtype {{{name}.dtype}}, expected {{w.shape}}, {{w.dtype}}.", kind="metadata")
            if not _same_but_device(script[name], script["w"]):
                script.expect(f"{name}.__tensor_flatten__() == w.__tensor_flatten__()", f"{label} changes the flatten context: {{{name}.__tensor_flatten__()}}, was {{w.__tensor_flatten__()}}.", kind="context")

    @check(needs=("devices", "inference"), axes="variant", why="shape propagation on meta is how loaders and planners find sizes", fix="let handlers work on meta tensors: no values read")
    def test_linear_on_meta(self) -> None:
        """A linear on meta gives a meta tensor of the right shape and dtype."""
        script = self.script(x=self.x(), b=self.bias())
        script.run("w = w.to('meta'); x = x.to('meta'); b = b.to('meta')")
        script.run(f"v = {self.linear(b='b')}")
        script.expect("v.device.type == 'meta'", "linear on meta gives a tensor on {v.device}.", kind="device")
        script.equal("v", f"torch.empty(5, {self.out_features}, dtype=x.dtype, device='meta')", label="linear on meta")

    @check(needs=("devices",), axes="variant", why="large models are quantized layer by layer where they lie", fix="create the inner tensors on the source's device")
    def test_made_on_meta(self) -> None:
        """A subclass made from a meta tensor is wholly on meta, with the metadata of one made on the CPU."""
        script = self.script()
        script.run(f"v = {self.made('hp_meta')}".join(("hp_meta = hp.to('meta')\n", "")))
        self._made_like(script, "v", "meta")

    def _made_like(self, script: Script, name: str, device: str) -> None:
        script.expect(f"str({name}.device) == {device!r}", f"made from a tensor on {device}, it is on {{{name}.device}}.", kind="device")
        script.expect(f"{name}.shape == w.shape and {name}.dtype == w.dtype", f"made from a tensor on {device}, it has shape {{{name}.shape}} and dtype {{{name}.dtype}}.", kind="metadata")
        for inner, tensor in oracle.inner_tensors(script[name]).items():
            if str(tensor.device) != device:
                script.fail(f"made from a tensor on {device}, its inner tensor {inner!r} is on {tensor.device}.", kind="inner-device", likely=f"inner tensor `{inner}` is created without device=.", assertion=f"assert str({name}.{inner}.device) == {device!r}")

    # --- dtypes

    @over(*_DTYPES)
    @check(why="a dtype move that is ignored makes the next matmul fail; one that is applied to the codes destroys the values", fix=_FIX_DTYPE)
    def test_dtype_move(self, text: str, dtype: torch.dtype) -> None:
        """A move to another floating dtype gives that dtype and the values rounded to it, with the codes as they were; or it is refused."""
        script = self.script()
        script.run(f"v = {text}")
        script.expect(f"v.dtype == {dtype}", f"{text} reports dtype {{v.dtype}}, expected {dtype}.", kind="dtype", likely="the move was ignored." if script["v"].dtype == self.dtype else "")
        script.equal("v", renamed(text, "w", "d"), label=text, bound=self._rounding(script, "d", dtype, text.count(".to(")))
        self._codes_untouched(script, "w", "v", text)

    def _rounding(self, script: Script, source: str, dtype: torch.dtype, moves: int = 1) -> torch.Tensor | None:
        """How far a moved tensor's values may be from its values moved: what the scale, the zero point, the product and the result are rounded by.

        A zero point in floating point is rounded relative to itself, not to the value: hence the row's largest magnitude.
        """
        if "quantized" not in self.case.found:
            return None
        values = self.subject.plain(script[source]).double().abs()
        eps = max(torch.finfo(t).eps for t in (self.dtype, dtype, torch.bfloat16 if moves > 1 else dtype))
        return max(moves, 1) * (4 * eps * values + eps * values.amax(-1, keepdim=True)) + 4 * torch.finfo(dtype).tiny

    def _codes_untouched(self, script: Script, before: str, after: str, label: str) -> None:
        old, new = oracle.inner_tensors(script[before]), oracle.inner_tensors(script[after])
        for name in old.keys() & new.keys():
            coded = not old[name].dtype.is_floating_point or old[name].element_size() == 1
            if coded and old[name].dtype != new[name].dtype:
                script.expect(f"{after}.{name}.dtype == {before}.{name}.dtype", f"{label} converted the codes: inner tensor {name!r} was {old[name].dtype}, is {new[name].dtype}.", kind="codes", likely="the move maps .to(dtype) over all inner tensors.")

    @over("w.to(torch.bfloat16)", "w.half()", "w.double()", "w.float()")
    @check(needs=("inference",), why="a model is moved to the dtype in which it then computes", fix=_FIX_DTYPE)
    def test_linear_after_dtype_move(self, text: str) -> None:
        """After a dtype move the linear computes in the new dtype, with the moved tensor's values."""
        script = self.script(x=self.x(), b=self.bias())
        self.eager(script, f"v = {text}")
        script.run("x = x.to(v.dtype); b = b.to(v.dtype)")
        bound = self.product_bound(script, "F.linear(x, v, b)")
        script.run(f"got = {self.linear(w='v', b='b')}")
        script.equal("got", "F.linear(x, plain(v), b)", label=f"linear after {text}", bound=bound)

    @over("w.to(torch.int32)", "w.long()", "w.to(torch.bool)", "w.to(torch.complex64)")
    @check(axes="one", why="a cast that takes the codes for the values gives plausible nonsense", fix="dequantize first, or raise NotImplementedError")
    def test_move_to_non_float(self, text: str) -> None:
        """A cast to an integer, boolean or complex dtype is that of the values, or is refused."""
        self.agree(text, suspects={})

    # --- modules

    def holder(self, trainable: bool = False) -> Script:
        """A script with a module ``m`` whose ``m.w`` is a Parameter ``p`` of the subclass."""
        script = self.script(x=self.x(), g=self.grad())
        script.run(module_text(self.linear(w="self.w"), "w", f"self.w = nn.Parameter(w, {trainable})") + "\nm = M(w); p = m.w")
        return script

    @over(*_MODULE)
    @check(needs=("devices",), axes="variant", why="model.half() and model.to(device) are how everybody moves models; a weight that loses its class, or keeps old inner tensors, does so silently", fix="return the class from aten._to_copy and aten.empty_like, with every inner tensor moved", upstream="pytorch#187008")
    def test_module_move(self, text: str, dtype: torch.dtype | None, device: str) -> None:
        """A module's move keeps the Parameter object and its class, and gives it the asked device, dtype and values."""
        script = self.holder()
        script.run(text)
        likely = "the moved tensor is plain: Module.to then sets .data, which keeps the old inner tensors and the class."
        if "wrapper" in self.case.found or device == "cpu" and "to_empty" not in text:
            script.expect("m.w is p", f"{text} replaced the Parameter object.", kind="identity")
        script.run("p = m.w")
        script.expect("isinstance(m.w, nn.Parameter)", f"{text} left a {{type(m.w).__name__}} that is no Parameter.", kind="parameter")
        self.arrived(script, "p", device, text, moved_dtype=True)
        want = dtype or self.dtype
        script.expect(f"p.dtype == {want} and p.shape == d.shape", f"{text}: the weight has dtype {{p.dtype}} and shape {{p.shape}}, expected {want}, {{d.shape}}.", kind="dtype", likely=likely)
        if device == "cpu" and "to_empty" not in text:
            script.equal("p", f"d.to({want})", label=f"the weight after {text}", bound=self._rounding(script, "d", want), likely=likely)

    @over("m.half()", "m.to(torch.bfloat16)", "m.double()", "m.to('meta')")
    @check(needs=("devices", "training"), axes="one", why="a gradient that stays behind breaks the next step", fix="return the class from aten._to_copy; Module.to moves .grad by itself", upstream="pytorch#187008")
    def test_module_move_takes_the_gradient(self, text: str) -> None:
        """A module's move moves the weight's gradient too, with its values."""
        script = self.holder(trainable=True)
        self.eager(script, "m(x).backward(g)\nbefore = plain(p.grad).clone()")
        script.run(text)
        script.expect("m.w.grad is not None", f"{text} lost the gradient.", kind="grad")
        script.expect("m.w.grad.dtype == m.w.dtype and m.w.grad.device == m.w.device", f"{text}: the gradient is {{m.w.grad.dtype}} on {{m.w.grad.device}}, the weight {{m.w.dtype}} on {{m.w.device}}.", kind="grad")
        if "meta" not in text:
            script.equal("m.w.grad", "before.to(m.w.dtype)", label=f"the gradient after {text}")

    @over("m.half()", "m.to(torch.bfloat16)", "m.to('meta')", "m.to_empty(device='cpu')")
    @check(needs=("devices",), axes="one", why="tied embeddings are one tensor in two modules; untied, they train and load apart", fix="keep the class in aten._to_copy and aten.empty_like, so that Module.to swaps the tensor in place", upstream="transformers#37905")
    def test_tied_weights_stay_tied(self, text: str) -> None:
        """A Parameter that two modules share is still shared after a move."""
        if "wrapper" not in self.case.found and ("meta" in text or "to_empty" in text):
            raise CheckSkipped("torch replaces each Parameter that is no wrapper subclass when it moves it to another kind of device")
        script = self.script()
        script.run("m = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])\nm[0].weight = m[1].weight = nn.Parameter(w, False)")
        script.run(text)
        script.expect("m[0].weight is m[1].weight", f"after {text} the two modules have different weights.", kind="untied")
        script.expect("m[0].weight.dtype == m[1].weight.dtype", "the two have different dtypes.", kind="untied")

    @over("m.bfloat16()", "m.to(torch.float64)", "m.to('cpu')")
    @check(needs=("devices", "training"), axes="one", why="an optimizer that is made before the move would train a tensor that the model no longer uses", fix="keep the class in aten._to_copy, so that Module.to swaps the tensor in place", upstream="pytorch#187008")
    def test_optimizer_follows(self, text: str) -> None:
        """An optimizer made before a move refers to the module's Parameter after it, and its step changes it."""
        script = self.holder(trainable=True)
        script.run("opt = torch.optim.SGD(m.parameters(), lr=0.5)")
        script.run(text)
        script.expect("opt.param_groups[0]['params'][0] is m.w", f"after {text} the optimizer holds another object than the module.", kind="identity")
        script.run(f"before = plain(m.w).clone()\nm.w.grad = ({self.hp(seed=3)}).to(m.w.dtype)\nopt.step()")
        script.expect("not torch.equal(before, plain(m.w))", f"after {text}, a step of the optimizer leaves the module's weight as it was.", kind="no-op")

    # --- new tensors

    @over(*_FACTORIES)
    @check(axes="variant", why="optimizers make their state by zeros_like(p); a wrong dtype, device or value there spoils the training", fix="return a plain tensor of the asked shape, dtype and device, or the class with these values")
    def test_new_tensor_like_it(self, text: str) -> None:
        """zeros_like, ones_like, full_like and new_* have the shape, dtype, device and values asked for; of the class, or plain."""
        self.agree(text, tolerance=ELEMENTWISE)

    @over(*_UNSET)
    @check(axes="variant", why="code that allocates like a tensor writes into what it gets", fix="honour shape, dtype and device of the call; build all inner tensors on that device")
    def test_unset_tensor_like_it(self, text: str) -> None:
        """empty_like, rand_like and new_empty have the shape, dtype and device asked for; inner tensors lie on that device."""
        script = self.script()
        script.run(f"v = {text}")
        script.run(f"expected = {re.sub(r'(?<![.])w(?=[.)])', 'd', text).replace('_like(w', '_like(d')}")
        for what in ("shape", "dtype", "device"):
            script.expect(f"v.{what} == expected.{what}", f"{text} has {what} {{v.{what}}}, expected {{expected.{what}}}.", kind=what)
        for name, inner in oracle.inner_tensors(script["v"]).items():
            script.expect(f"v.{name}.device == v.device", f"{text}: inner tensor `{name}` is on {inner.device}, the tensor on {{v.device}}.", kind="inner-device")
        if "rand" in text and script["v"].device.type == "cpu":
            values = self.subject.plain(script["v"])
            script.ns["values"] = values
            if "randn" not in text and not (bool((values >= 0).all()) and bool((values <= 1).all())):
                script.fail(f"{text} has values outside 0..1.", kind="value", assertion="assert ((plain(v) >= 0) & (plain(v) <= 1)).all()")
            if values.unique().numel() < 2:
                script.fail(f"{text}: all values are equal.", kind="value", assertion="assert plain(v).unique().numel() > 1")
        elif isinstance(script["v"], self.subject.cls) and script["v"].device.type == "cpu":
            script.equal("plain(v).shape", "expected.shape", label=f"the values of {text}: shape")

    # --- the simulated accelerator

    def simulated(self, **texts: str) -> Script:
        """A script with a fake copy ``w`` on the CPU, and ``mode``, under which device ``sim`` works."""
        devices.simulate()
        script = self.script(**texts)
        script.note(devices.SETUP)
        names = ", ".join(["w", "hp", *texts])
        self.traced(script, f"mode = FakeTensorMode(allow_non_fake_inputs=True)\n{names} = map(mode.from_tensor, ({names}))", "a fake copy")
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

    @over(*((name, texts) for name, *texts in _SIM_MOVES))
    @check(tier="standard", own_process=True, needs=("devices", "wrapper"), axes="one", why=_WHY_MOVE, fix=_FIX_MOVE)
    def test_simulated_move(self, _: str, texts: list[str]) -> None:
        """A move to an accelerator and back, however it is written, takes every inner tensor along and keeps class and context."""
        self.matrix()
        self.each(texts, self._sim_move)

    def _sim_move(self, text: str) -> None:
        device = next((end for tail, end in _SIM_ENDS.items() if text.endswith(tail)), "sim:0")
        script = self.simulated()
        self.on_sim(script, f"v = {text}")
        self.arrived(script, "v", device, text, moved_dtype="bfloat16" in text or "half" in text)
        dtype = {"bfloat16": torch.bfloat16, "half": torch.float16}.get("bfloat16" if "bfloat16" in text else "half" if "half" in text else "", self.dtype)
        script.expect(f"v.dtype == {dtype}", f"{text} reports dtype {{v.dtype}}, expected {dtype}.", kind="dtype")
        self._codes_untouched(script, "w", "v", text)

    @over(*((name, texts) for name, *texts in _SIM_OPERATIONS))
    @check(tier="standard", own_process=True, needs=("devices", "wrapper"), axes="one", why="an operation that creates a tensor without device= works on the CPU, and fails on every accelerator", fix="create tensors in handlers with device=self.device, or from the inner tensors (new_*, *_like)")
    def test_simulated_operation(self, _: str, texts: list[str]) -> None:
        """Operations on a tensor that lies on an accelerator give results that lie there, inner tensors included."""
        self.matrix()
        self.each(texts, self._sim_operation)

    def _sim_operation(self, text: str) -> None:
        code = {"linear": self.linear(), "linear-bias": self.linear(b="b"), "to_plain": renamed(self.subject.to_plain_text, "t", "w")}.get(text, text)
        script = self.simulated(x=self.x(), b=self.bias())
        script.run(f"on_cpu = w\nrun = lambda w, x, b, on_cpu: {code}")
        self.eager(script, "with mode, torch.no_grad():\n    want = run(w.clone(), x, b, on_cpu.clone())")
        self.on_sim(script, "with torch.no_grad():\n    got = run(w.to('sim'), x.to('sim'), b.to('sim'), on_cpu)")
        device = "cpu" if "on_cpu.copy_" in code or "device='cpu'" in code else "sim:0"
        script.expect(f"str(got.device) == {device!r}", f"{code} on sim gives a result on {{got.device}}, expected {device}.", kind="device")
        for name, inner in oracle.inner_tensors(script["got"]).items():
            script.expect(f"str(got.{name}.device) == {device!r}", f"{code} on sim: inner tensor `{name}` of the result is on {inner.device}.", kind="inner-device", likely=f"inner tensor `{name}` stayed on {inner.device}.")
        script.expect("got.shape == want.shape and got.dtype == want.dtype", f"{code} on sim gives {{got.shape}} {{got.dtype}}, on the CPU {{want.shape}} {{want.dtype}}.", kind="metadata")

    @check(tier="standard", own_process=True, needs=("devices", "wrapper", "inference"), axes="one", why="an operand that is moved silently costs a transfer at every call, and hides the mistake", fix="don't move operands in the linear; let torch raise")
    def test_simulated_mixed_devices(self) -> None:
        """A linear whose input is on another device than the weight raises."""
        for where in ("w.to('sim'), x", "w, x.to('sim')"):
            script = self.simulated(x=self.x())
            self.on_sim(script, f"w, x = {where}")
            self.refuses_or_raises(script, f"with mode:\n    v = {self.linear()}", f"a linear of {where.replace('w', 'the weight', 1)} raised no error.")

    @over(*((name, texts) for name, *texts in _SIM_MODULE))
    @check(tier="standard", own_process=True, needs=("devices", "wrapper"), axes="one", why="model.to(device) is how everybody moves models", fix="return the class from aten._to_copy and aten.empty_like, with every inner tensor moved", upstream="pytorch#187008")
    def test_simulated_module(self, _: str, texts: list[str]) -> None:
        """Moving a module to an accelerator keeps the Parameter object and its class, moves every inner tensor, and keeps ties."""
        self.each(texts, self._sim_module)

    def _sim_module(self, text: str) -> None:
        script = self.simulated()
        members = ("self.w = nn.Parameter(w, False)", "self.tied = self.w", "self.register_buffer('buffer', w.detach().clone())")
        self.on_sim(script, module_text("x", "w", *members) + "\nm = M(w); p = m.w")
        self.on_sim(script, text)
        device = "cpu" if text.endswith("cpu()") else "sim:0"
        script.expect("m.w is p and m.tied is p", f"{text} replaced the Parameter object.", kind="identity")
        for name in ("p", "m.buffer"):
            script.ns[name] = script.value(name, extend=False)
            self.arrived(script, name, device, text, moved_dtype=True)

    @check(tier="standard", own_process=True, needs=("devices", "wrapper", "training"), axes="one", why="training runs on accelerators; a gradient or a temporary on the CPU ends it", fix="create tensors in handlers and backward formulas on the operand's device")
    def test_simulated_training(self) -> None:
        """A forward, backward and optimizer step on an accelerator work there, and leave weight, gradients and state there."""
        self.matrix()
        script = self.simulated(x=self.x(), g=self.grad())
        self.on_sim(script, "p = nn.Parameter(w.to('sim')); x = x.to('sim').requires_grad_(); g = g.to('sim')\nopt = torch.optim.SGD([p], lr=0.1, momentum=0.9)")
        self.on_sim(script, f"({self.linear(w='p')}).backward(g)")
        for name in ("p.grad", "x.grad"):
            script.expect(f"{name} is not None and str({name}.device) == 'sim:0'", f"after a backward on sim, {name} is {{{name} if {name} is None else {name}.device}}.", kind="grad")
        self.on_sim(script, "opt.step()")
        script.ns["state"] = [t for t in script["opt"].state[script["p"]].values() if isinstance(t, torch.Tensor) and t.dim()]
        script.expect("all(str(t.device) == 'sim:0' for t in opt.state[p].values() if isinstance(t, torch.Tensor) and t.dim())", "the optimizer's state is not on sim.", kind="state")
        self.arrived(script, "p", "sim:0", "an optimizer step on sim", moved_dtype=True)

    @check(tier="standard", own_process=True, needs=("devices", "wrapper"), axes="one", why="large models are quantized where they lie", fix="create the inner tensors on the source's device")
    def test_simulated_creation(self) -> None:
        """A subclass made from a tensor on an accelerator lies there wholly, with the metadata of one made on the CPU and moved."""
        script = self.simulated()
        self.on_sim(script, f"hp = hp.to('sim')\nv = {self.subject.make_text}")
        self._made_like(script, "v", "sim:0")

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

    @check(own_process=True, needs=("devices", "inference"), axes="variant", why="a kernel for one device only shows on that device", fix="test the kernel against the plain linear on each device")
    def test_accelerator_linear(self) -> None:
        """A linear on the machine's accelerator gives what the values give on the CPU."""
        device = devices.accelerator()
        script = self.script(x=self.x(), b=self.bias())
        bound = self.product_bound(script, "F.linear(x, w, b)")
        script.run(f"w, x, b = (t.to({device!r}) for t in (w, x, b))\ngot = ({self.linear(b='b')}).cpu()")
        script.equal("got", "F.linear(x.cpu(), d, b.cpu())", label=f"linear on {device}", bound=2 * bound)

    @check(own_process=True, needs=("devices",), axes="one", why="pinned memory makes asynchronous transfers; a loader that pins batches meets the subclass", fix="implement aten._pin_memory and aten.is_pinned over all inner tensors")
    def test_pin_memory(self) -> None:
        """pin_memory pins every inner tensor and keeps class and values, or is refused."""
        devices.accelerator()
        script = self.script()
        script.run("v = w.pin_memory()")
        self.arrived(script, "v", "cpu", "w.pin_memory()")
        script.expect("v.is_pinned()", "w.pin_memory().is_pinned() is false.", kind="pinned")
        script.equal("v", "d", label="the pinned tensor")


def _same_but_device(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether inner names and flatten contexts agree, apart from devices that they name."""
    if not hasattr(b, "__tensor_flatten__") or same_context(a, b):
        return True
    first, second = (re.sub(r"\b(cpu|meta|sim|cuda|xpu|mps)(:\d+)?", "device", repr(t.__tensor_flatten__())) for t in (a, b))
    return re.sub(r", index=\d+", "", first) == re.sub(r", index=\d+", "", second)

