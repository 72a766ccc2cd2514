"""The state of an optimizer: what it creates for the subject, and the subject used as such a state."""

from __future__ import annotations

import re

import torch

from subclass_testkit import oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._optimizer_cases import STATEFUL
from subclass_testkit.checks._steps import FIX_LIST, FIX_STEP, StepChecks


class StateChecks(StepChecks):
    """States for the subject, and the subject as a state."""

    # --- the optimizer's own state

    @over(*STATEFUL)
    @check(
        of_parameters=True,
        axes="one",
        needs=("training",),
        why="a state made by zeros_like in the parameter's own coarse format loses small gradients",
        fix="let zeros_like and full_like give plain tensors in the outer dtype (unless the class is lossless)",
    )
    def test_state_is_precise(self, name: str, cls: str, arguments: str, writes: int) -> None:
        """The state that an optimizer creates has the dtype, device, shape and values that it has for a dense parameter."""
        s = self.trained(cls, arguments)
        for i in range(2):
            self.attempt(s, f"step({i})", self.watch(s, "p"))
        eps = torch.finfo(self.dtype).eps
        for key, value in s["dense"].state[s["q"]].items():
            if isinstance(value, torch.Tensor):
                got = f"opt.state[p][{key!r}]"
                s.equal(
                    got,
                    f"dense.state[q][{key!r}]",
                    label=f"the state {key!r} of {name}",
                    bound=32 * eps * float(value.abs().max()),
                    likely="zeros_like gave a tensor of the quantized class, which rounds the state."
                    if isinstance(s.value(got, extend=False), self.subject.cls)
                    else "",
                )

    @over(*(c for c in STATEFUL if c[0].split("-")[0] in ("SGD", "Adam", "AdamW", "Adagrad")))
    @check(
        of_parameters=True,
        axes="one",
        needs=("training",),
        why="a resumed training run goes on from another state than it was saved in",
        fix="keep the state plain; else support deepcopy, .to and torch.save for the class",
    )
    def test_state_dict_continues(self, name: str, cls: str, arguments: str, writes: int) -> None:
        """A new optimizer that loads the old one's saved state_dict continues as the old one would."""
        s = self.trained(cls, arguments)
        self.follow(s, name, writes, steps=2)
        s.run("f = io.BytesIO(); torch.save(opt.state_dict(), f); _ = f.seek(0)")
        s.run(
            f"opt = torch.optim.{cls}([p], {arguments.format(lr='123.0')})\nopt.load_state_dict(torch.load(f, weights_only=False))"
        )
        self.follow(s, f"{name} with a loaded state", writes, steps=2, first=2)

    # --- as an optimizer's state

    @over("hp * -0.3", "hp * 7", "hp.double()", "hp.t().contiguous().t()", "torch.zeros_like(hp)")
    @check(
        needs=("optimizer_state",),
        requires=("optimizer_state",),
        why="a low-bit optimizer writes its state back by copy_ at every step",
        fix=FIX_STEP,
    )
    def test_state_takes_plain_values(self, source: str) -> None:
        """copy_ of plain values stores them within the format's error, in the same object; reading them into a plain tensor gives them back."""
        if ".t()" in source:
            self.only_matrices()
        s = self.script()
        s.run(f"source = {source}\nq = plain(w).clone().copy_(source)")
        before = self.watch(s, "w")
        self.attempt(s, "out = w.copy_(source)", before)
        self.written(s, before, "q", f"w after w.copy_({source})")
        s.expect("out is w", "copy_ returns another object than w.", kind="identity")
        s.equal("torch.empty_like(d).copy_(w)", "w", label="a plain tensor after copy_(w)")

    @over(
        "w.lerp(g, 0.3)",
        "w + g",
        "g + w",
        "w * 0.9",
        "w.mul(0.9).add(g, alpha=0.1)",
        "torch.add(w, g, alpha=0.1)",
        "w.float()",
        "w.to(torch.float32).lerp(g.float(), 0.1)",
        "w.abs().sqrt()",
        "g.addcdiv(w, g.abs() + 1, value=-0.5)",
    )
    @check(needs=("optimizer_state",), why="the update reads the state in these ways", fix="dequantize in arithmetic")
    def test_state_arithmetic(self, expression: str) -> None:
        """Arithmetic on a state is that of its values, or is refused."""
        s = self.script(g=self.second(11))
        s.run(f"got = {expression}")
        s.run("want = " + re.sub(r"\bw\b", "d", expression))
        # A state may keep more digits than its outer dtype, which to_plain rounds to.
        size = s["d"].double().abs() + s["g"].double().abs() + s["want"].double().abs()
        s.equal("got", "want", label=expression, bound=size * 8 * torch.finfo(self.dtype).eps)

    @check(
        needs=("optimizer_state",),
        requires=("optimizer_state",),
        why="a moving average that loses its updates to rounding, or to a stale scale, ruins the optimizer",
        fix=FIX_STEP,
    )
    def test_state_keeps_a_moving_average(self) -> None:
        """A moving average kept in the state, from zero on, stays within its rounding at each step."""
        s = self.script(g=self.second(11))
        s.run("m = " + self.made("torch.zeros_like(hp)"))
        s.equal("m", "torch.zeros_like(hp)", label="a state of zeros")
        for i in range(4):
            s.run(f"q = plain(m).lerp(g * {(-2) ** i}.0, 0.1)")
            before = self.watch(s, "m")
            self.attempt(s, "_ = m.copy_(q)", before)
            self.written(s, before, "q", f"the moving average after update {i + 1}")

    @over(("Adam-single", "foreach=False"), ("Adam-foreach", "foreach=True"), ("Adam-fused", "fused=True"))
    @check(needs=("optimizer_state",), axes="one", why="code swaps the class into torch's own optimizers", fix=FIX_LIST)
    def test_state_in_torch_adam(self, name: str, arguments: str) -> None:
        """As exp_avg of torch's own Adam it gives the step that its values give, or the step is refused with the parameter unchanged."""
        self.writes_to_plain()
        s = self.script(g=self.second(11))
        s.run(
            f"p, q = nn.Parameter(hp.clone()), nn.Parameter(hp.clone())\nopt, dense = (torch.optim.Adam([t], lr=0.5, eps=1e-3, {arguments}) for t in (p, q))\np.grad, q.grad = g.clone(), g.clone()"
        )
        s.run("opt.step(); dense.step()\nopt.state[p]['exp_avg'], dense.state[q]['exp_avg'] = w, d.clone()\ndense.step()")
        before, state = self.watch(s, "p"), self.watch(s, "w")
        self.attempt(s, "opt.step()", before)
        self.written(s, state, "dense.state[q]['exp_avg']", f"exp_avg after a step of {name}")
        largest = self.rounding(state.values, s["dense"].state[s["q"]]["exp_avg"], 1).bound
        spread = largest / (s["dense"].state[s["q"]]["exp_avg_sq"].double().sqrt() / 0.04 + 1e-3) / 0.19 * 0.5
        s.equal("p", "q", label=f"the parameter after a step of {name}", bound=spread + oracle.elementwise_bound(s["q"], 16))

    @check(
        needs=("optimizer_state",),
        requires=("optimizer_state",),
        axes="one",
        why="a checkpoint of the optimizer must keep the state's format and values",
        fix="support torch.save, torch.load and .to(dtype, device) of the class",
    )
    def test_state_survives_a_state_dict(self) -> None:
        """An optimizer's state_dict with the state, loaded into a new optimizer, keeps the state's class and values."""
        s = self.script()
        s.run(
            "p = nn.Parameter(hp.clone()); opt = torch.optim.SGD([p], lr=0.1, momentum=0.9)\nopt.state[p]['momentum_buffer'] = w"
        )
        s.run("f = io.BytesIO(); torch.save(opt.state_dict(), f); _ = f.seek(0)")
        s.run(
            "new = torch.optim.SGD([p], lr=0.1, momentum=0.9); new.load_state_dict(torch.load(f, weights_only=False))\nv = new.state[p]['momentum_buffer']"
        )
        s.expect("type(v) is type(w)", "the loaded state is a {type(v).__name__}.", kind="class")
        s.equal("v", "w", label="the loaded state")
