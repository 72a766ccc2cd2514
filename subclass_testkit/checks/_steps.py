"""Optimizer steps of a subject and of its dense twin: what the checks of optimizers share."""

from __future__ import annotations

import functools
import re

import torch

from subclass_testkit import oracle
from subclass_testkit.checks._writes import WriteChecks
from subclass_testkit.outcome import CheckSkipped
from subclass_testkit.script import Script

FIX_STEP = "compute the update on dequantized values, quantize the result with a fresh scale, and write it into the inner tensors with copy_"
FIX_LIST = (
    "unwrap tensors inside lists too (tree_map over all arguments), and write every result back; or raise NotImplementedError"
)

_STEP = """def step(i):
    p.grad = None; {linear}.backward(grad.roll(i, -1))
    q.data, q.grad = plain(p).clone(), plain(p.grad).clone()
    opt.step(); dense.step()"""


class StepChecks(WriteChecks):
    """Scripts with an optimizer step of the subject beside the dense one."""

    def learning_rate(self, s: Script) -> str:
        """0.5, or what is eight half steps of a coarse format: smaller steps could drown in rounding."""
        return f"{max(0.5, 8 * self.half_step(s)):.3g}"

    def trained(self, cls: str, arguments: str, *, hp: str | None = None) -> Script:
        """A script with ``step(i)``: one step of the subject ``p``, and of its plain twin ``q`` from the same values and gradient."""
        self.only_matrices()
        s = self.script(hp, x=self.x(), grad=self.grad())
        arguments = arguments.format(lr=self.learning_rate(s))
        if limit := _torch_limit(cls, arguments, self.dtype):
            raise CheckSkipped(f"torch itself can't: torch.optim.{cls}({arguments}): {limit}")
        optimizer = f"torch.optim.{cls}([t], {arguments})"
        s.run("p, q = nn.Parameter(w), nn.Parameter(plain(w).clone())")
        s.run(f"opt, dense = ({optimizer} for t in (p, q))")
        s.run(_STEP.format(linear=self.linear(w="p")))
        return s

    def writes_to_plain(self) -> None:
        """Skip for TwoTensor (as the subject, as the control, inside the subject): it runs every operation on both halves, and so writes
        plain tensors twice."""
        from torch.testing._internal.two_tensor import TwoTensor

        if any(isinstance(t, TwoTensor) for t in oracle.tower(self.script()["w"])):
            raise CheckSkipped("TwoTensor applies an operation that writes a plain tensor twice, once for each of its halves")

    def follow(self, s: Script, label: str, writes: int, *, steps: int = 1, first: int = 0) -> None:
        """Steps, each judged by the dense step from the same values."""
        for i in range(first, first + steps):
            before = self.watch(s, "p")
            self.attempt(s, f"step({i})", before)
            self.written(s, before, "q", f"the parameter after step {i + 1} of {label}", writes=writes)


@functools.cache
def _torch_limit(cls: str, arguments: str, dtype: torch.dtype) -> str:
    """Why torch can't do that with a plain parameter (a fused form that doesn't exist, or goes wrong itself); empty if it can."""
    results = []
    for text in (arguments, re.sub("(fused|foreach)=True", "foreach=False", arguments)):
        t = torch.nn.Parameter(torch.linspace(-1, 1, 256, dtype=torch.float64).reshape(8, 32).to(dtype))
        try:
            optimizer = eval(f"torch.optim.{cls}([t], {text})", {"torch": torch, "t": t})  # noqa: S307  # our own text
            for _ in range(3):
                t.grad = torch.full_like(t, 0.5)
                optimizer.step()
        except Exception as error:
            return oracle.describe(error)
        results.append(t.detach().double())
    away = float((results[0] - results[1]).abs().max())
    limit = 64 * torch.finfo(dtype).eps * float(results[1].abs().max())
    return "" if away <= limit else f"on a plain {dtype} parameter it differs from the unfused form by {away:.3g}"
