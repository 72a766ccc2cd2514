"""A module's move keeps its parameters: the object, the class, gradients, ties, and the optimizer that refers to them."""

from __future__ import annotations

import torch

from subclass_testkit.check import check, over
from subclass_testkit.checks._device_cases import (
    MODULE,
    SIM_MODULE,
)
from subclass_testkit.checks._simulated import SimulatedGroup
from subclass_testkit.checks._traced import module_text
from subclass_testkit.outcome import CheckSkipped, NotClaimed
from subclass_testkit.script import Script


class ModuleMoveChecks(SimulatedGroup):
    """Module.to and its kin, with a Parameter of the subclass."""

    def holder(self, trainable: bool = False) -> Script:
        """A script with a module ``m`` whose ``m.w`` is a Parameter ``p`` of the subclass."""
        script = self.script(x=self.x(), g=self.grad())
        script.run(module_text(self.linear(w="self.w"), "w", f"self.w = nn.Parameter(w, {trainable})") + "\nm = M(w); p = m.w")
        return script

    @over(*MODULE)
    @check(
        of_parameters=True,
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
                "p", f"d.to({want})", label=f"the weight after {text}", bound=self.rounding(script, "d", want), likely=likely
            )

    @check(
        of_parameters=True,
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
        of_parameters=True,
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
        of_parameters=True,
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
        of_parameters=True,
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

    @over(*((name, texts) for name, *texts in SIM_MODULE))
    @check(
        of_parameters=True,
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

    def needs_empty_like(self, script: Script, text: str) -> None:
        """End where the text is about to_empty(), and the class decays in empty_like, as it may: another check says what that means."""
        if "to_empty" not in text or "wrapper" not in self.case.found:
            return
        try:
            decays = not isinstance(torch.empty_like(script["w"]), self.subject.cls)
        except Exception:  # to_empty() itself will say so
            return
        if decays:
            raise NotClaimed(
                "torch.empty_like(w) is plain, so to_empty() makes a plain Parameter: see devices/to-empty-keeps-the-class"
            )

    def sim_module(self, text: str) -> None:
        script = self.simulated()
        self.needs_empty_like(script, text)
        members = (
            "self.w = nn.Parameter(w, False)",
            "self.tied = self.w",
            "self.register_buffer('buffer', w.detach())",
        )
        self.on_sim(script, module_text("x", "w", *members) + "\nm = M(w); p = m.w")
        self.on_sim(script, text)
        device = "cpu" if text.endswith("cpu()") else "sim:0"
        script.expect("m.w is p and m.tied is p", f"{text} replaced the Parameter object.", kind="identity")
        for name in ("p", "m.buffer"):
            script.ns[name] = script.value(name, extend=False)
            self.arrived(script, name, device, text, moved_dtype=True)
