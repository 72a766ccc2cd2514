"""Single updates, optimizer steps and the rounding that they do: each leaves the values that the dense one leaves."""

from __future__ import annotations

import re

import torch

from subclass_testkit import inputs
from subclass_testkit.check import check, over
from subclass_testkit.checks._optimizer_cases import FEW, FOREACH, OPTIMIZERS, SINGLE
from subclass_testkit.checks._steps import FIX_LIST, FIX_STEP, StepChecks
from subclass_testkit.checks._writes import Watched
from subclass_testkit.script import Script

_WHY_STEP = "training goes wrong, or nowhere, without an error"

# A jump: its name, the source weight, the gradient of an SGD step with lr=1 (d: the values before).
_JUMPS = (
    ("three times as large", "", "-2 * d"),
    ("a tenth as large", "", "0.9 * d"),
    ("other signs", "", "2 * d"),
    ("one row far out", "", "torch.zeros_like(d).index_fill(0, torch.tensor([1]), 20)"),
    (
        "one element far out",
        "",
        "torch.zeros_like(d).index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(50.).to(d.dtype))",
    ),
    ("a zero row starts to move", "zero", "-(hp + 1).sin()"),
    ("all become positive", "", "-2 * d.abs().max() - d"),
    ("all become zero", "", "d"),
)


class UpdateChecks(StepChecks):
    """In-place operations, steps, and rounding at random."""

    # --- single updates

    def _update(self, operation: str) -> None:
        """One in-place operation on w, judged by the same one on its plain values."""
        h = f"({inputs.activation(self.shape, self.dtype, 5)}).abs() + 0.5"
        s = self.script(g=self.second(11), h=h)
        on_plain = re.sub(r"\bw\b", "q", operation)
        s.run(f"q = plain(w).clone()\nwith torch.no_grad():\n    _ = {on_plain}")
        before = self.watch(s, "w")
        self.attempt(s, f"with torch.no_grad():\n    out = {operation}", before)
        self.written(s, before, "q", f"w after {operation}")

    @over(*SINGLE)
    @check(axes="each", why="every optimizer, EMA and weight loader is made of these", fix=FIX_STEP)
    def test_single_update(self, operation: str) -> None:
        """An in-place operation leaves the values of the same operation on a plain tensor, up to requantization; or nothing changes and it is refused."""
        if ".t()" in operation:
            self.only_matrices()
        self._update(operation)

    @over(*FOREACH)
    @check(
        axes="dtype",
        why="foreach optimizers, FSDP2 and EMA pass lists of tensors: a handler that sees top-level arguments only loses the update",
        fix=FIX_LIST,
    )
    def test_foreach_update(self, operation: str) -> None:
        """A _foreach_ operation on a list with the tensor updates it as one on plain tensors does, or is refused with nothing changed."""
        self._update(operation)

    @over(
        "torch._foreach_add_([{}, r], [g, g], alpha=-0.75)",
        "torch._foreach_add_([r, {}], [g, g], alpha=-0.75)",
        "torch._foreach_mul_([r, {}, r2], -0.9)",
        "torch._foreach_lerp_([r, {}], [g, g], 0.3)",
    )
    @check(
        axes="one", why="a model's parameters are partly subclasses, partly plain (biases, norms), in one list", fix=FIX_LIST
    )
    def test_foreach_update_of_a_mixed_list(self, operation: str) -> None:
        """A _foreach_ operation on a list of subclass and plain tensors updates every one of them, or refuses before the first."""
        self.writes_to_plain()
        s = self.script(g=self.second(11))
        s.run("q, r, r2 = plain(w).clone(), g * 2, g * 3\nq_r, q_r2 = r.clone(), r2.clone()")
        s.run(
            f"with torch.no_grad():\n    _ = {operation.format('q').replace('r2', 'q_r2').replace('[r,', '[q_r,').replace(' r]', ' q_r]')}"
        )
        before = [self.watch(s, name) for name in ("w", "r", "r2")]
        self.attempt(s, f"with torch.no_grad():\n    _ = {operation.format('w')}", *before)
        label = operation.format("w")
        self.written(s, before[0], "q", f"w after {label}")
        likely = "the handler drops the plain members of the list, or works on copies of them."
        for got in ("r", "r2"):
            bound = 16 * torch.finfo(self.dtype).eps * float(s[f"q_{got}"].abs().max())
            s.equal(got, f"q_{got}", label=f"the plain tensor {got} of the list after {label}", bound=bound, likely=likely)

    # --- steps

    @over(*OPTIMIZERS)
    @check(of_parameters=True, axes="dtype", needs=("training",), why=_WHY_STEP, fix=FIX_STEP)
    def test_five_steps(self, name: str, cls: str, arguments: str, writes: int) -> None:
        """Each of five optimizer steps moves the values as the dense step does, up to requantization; or the first is refused with nothing changed."""
        if name in ("Adam-maximize-foreach", "SGD-momentum-fused"):
            self.writes_to_plain()  # weight decay goes into the negated gradients in place; the momentum is plain
        self.follow(self.trained(cls, arguments), name, writes, steps=5)

    @check(
        of_parameters=True,
        axes="dtype",
        needs=("training",),
        requires=("training",),
        why="a class that can be trained takes at least the simplest optimizer's step",
        fix=FIX_STEP,
    )
    def test_sgd_works(self) -> None:
        """A step of plain SGD, without options, equals the dense one."""
        self.follow(self.trained("SGD", "lr={lr}"), "SGD", 1)

    @over(*FEW)
    @check(of_parameters=True, axes="each", needs=("training",), why=_WHY_STEP, fix=FIX_STEP)
    def test_step(self, name: str, cls: str, arguments: str, writes: int) -> None:
        """Two steps equal the dense ones at every legal shape, dtype and variant."""
        self.follow(self.trained(cls, arguments), name, writes, steps=2)

    @over(*_JUMPS)
    @check(
        of_parameters=True,
        needs=("training",),
        why="values that grow beyond the first range are cut off, or are read with the wrong scale: the loss stalls or explodes",
        fix="compute scale and zero point anew from the updated values at every write",
    )
    def test_scale_is_refreshed(self, name: str, source: str, gradient: str) -> None:
        """After a step to values of quite another range, each is within half a step of the new scale."""
        self.only_matrices()
        s = self.script(inputs.with_zero_row(self.shape, self.dtype) if source else None)
        s.run(
            "p, q = nn.Parameter(w), nn.Parameter(plain(w).clone())\nopt, dense = (torch.optim.SGD([t], lr=1.0) for t in (p, q))"
        )
        s.run(f"p.grad = {gradient}\nq.grad = p.grad.clone()\ndense.step()")
        before = self.watch(s, "p")
        self.attempt(s, "opt.step()", before)
        self.written(s, before, "q", f"the parameter after a step ({name})")

    @over(*(c for c in FEW if c[0] != "SGD-foreach"))
    @check(
        of_parameters=True,
        axes="one",
        needs=("training",),
        why="warm-up and schedules step with lr=0",
        fix="write back what was read: quantizing dequantized values must reproduce them",
    )
    def test_zero_learning_rate_changes_nothing(self, name: str, cls: str, arguments: str, writes: int) -> None:
        """A step with lr=0 changes nothing but by requantization."""
        s = self.trained(cls, arguments.replace("{lr}", "0.0"))
        self.follow(s, f"{name} with lr=0", writes)

    @over(
        ("SGD", "SGD", "lr={lr}, weight_decay=0.5", 1),
        ("SGD-foreach", "SGD", "lr={lr}, weight_decay=0.5, foreach=True", 1),
        ("AdamW", "AdamW", "lr={lr}, weight_decay=0.5", 2),
        ("AdamW-foreach", "AdamW", "lr={lr}, weight_decay=0.5, foreach=True", 2),
        ("AdamW-fused", "AdamW", "lr={lr}, weight_decay=0.5, fused=True", 2),
    )
    @check(
        of_parameters=True,
        axes="one",
        needs=("training",),
        why="decoupled weight decay is a mul_ of its own: a lost one changes the regularisation silently",
        fix=FIX_STEP,
    )
    def test_weight_decay_alone_shrinks(self, name: str, cls: str, arguments: str, writes: int) -> None:
        """With a zero gradient, weight decay alone shrinks the values as the dense step does."""
        s = self.trained(cls, arguments)
        s.run("grad = grad * 0")
        self.follow(s, f"{name} with a zero gradient", writes, steps=2)

    @over(("SGD-single", "foreach=False"), ("SGD-foreach", "foreach=True"))
    @check(
        of_parameters=True,
        axes="one",
        needs=("training",),
        why="a model that drifts from the dense trajectory, or stalls, looks trained and isn't",
        fix=FIX_STEP,
    )
    def test_loss_goes_down_with_the_dense_one(self, name: str, arguments: str) -> None:
        """Five free-running steps on a regression stay within five requantizations of the dense trajectory, and the loss goes down with it."""
        self.only_matrices()
        s = self.script(x=self.x(), target=self.hp(seed=3))
        rate = 0.9 / float(torch.linalg.matrix_norm(s["x"].double(), 2)) ** 2
        s.run(
            "y = F.linear(x, target)\np, q, r = nn.Parameter(w), nn.Parameter(plain(w).clone()), nn.Parameter(plain(w).clone())"
        )
        s.run(f"opt = [torch.optim.SGD([t], lr={rate:.3g}, {arguments}) for t in (p, q, r)]")
        loss = f"({self.linear(w='t')} - y).float().square().sum()".replace("F.linear(x, t)", "F.linear(x, t)")
        s.run(f"loss = lambda t: {loss}")
        before = self.watch(s, "p")
        for _ in range(5):
            now = self.watch(s, "p")
            s.run("p.grad = r.grad = None; loss(p).backward(); loss(r).backward()")
            s.run("q.grad = plain(p.grad).clone()")
            self.attempt(s, "_ = [o.step() for o in opt]", now)
        self.written(s, before, "q", f"the parameter after five steps of {name}, without correction on the way,", writes=5)
        self._loss(s, before)

    def _loss(self, s: Script, before: Watched) -> None:
        """The dense loss at the subject's values is that of the dense run, but for what five requantizations can add."""
        x, r = s["x"].double(), s["r"].detach()
        noise = float(torch.linalg.matrix_norm(x, 2)) * self.rounding(before.values, r, 5).norm
        if self.case.rounding:
            w, steps = before.values.double().abs(), self.case.rounding.step
            exact, rounded = x.abs() @ w.t(), (x.abs() + steps("x", x.abs())) @ (w + steps("w", w)).t()
            noise += 9 * float((rounded - exact).norm())  # five steps, each of 2 * lr * |x|**2 <= 1.8 times it
        got, dense = (float((x @ t.double().t() - s["y"].double()).norm()) for t in (s.read(s["p"], "p"), r))
        if got > dense * 1.001 + noise:
            s.fail(
                f"after five steps the distance to the target is {got:.4g}; the dense run's is {dense:.4g}, and rounding explains {noise:.3g} more.",
                kind="drift",
                likely="gradients or steps are lost on the way.",
                assertion=f"assert (F.linear(x, plain(p)) - y).norm() <= {dense * 1.001 + noise:.4g}",
            )

    # --- rounding at random

    @check(
        of_parameters=True,
        axes="one",
        why="with a biased rounding, small steps are lost or exaggerated, and training drifts",
        fix="round up with a chance that equals the fraction: (v / scale + rand).floor(), and take the randomness from torch's generator",
    )
    def test_rounding_is_reproducible_and_unbiased(self) -> None:
        """The same seed gives the same update; where updates are rounded at random, their mean over seeds is the wanted value."""
        s = self.script()
        half = self.half_step(s)
        s.run(f"step = ({inputs.activation(self.shape, self.dtype, 3)}) * {half / 2:.3g}")
        s.run(
            f"def error(seed):\n    torch.manual_seed(seed); w = {self.made('hp.clone()')}\n    want = plain(w).double() + step.double()\n    with torch.no_grad(): w.add_(step)\n    return plain(w).double() - want"
        )
        s.expect(
            "torch.equal(error(0), error(0))",
            "two updates under the same seed differ.",
            kind="not-reproducible",
            likely="the randomness doesn't come from torch's default generator.",
        )
        if s.value("all(torch.equal(error(0), error(i)) for i in (1, 2, 3))", extend=False):
            return
        s.run(
            "e = torch.stack([error(i) for i in range(128)])\npairs = (e[0::2] * e[1::2]).flatten(1).mean(1)  # independent: 0 on average, or the squared bias"
        )
        arithmetic = float((s["d"].double().abs() * torch.finfo(self.dtype).eps).square().mean())
        s.expect(
            f"pairs.mean() <= 4 * pairs.std() / 8 + {arithmetic:.3g}",
            "the mean error over 128 seeds is {pairs.mean().clamp(min=0).sqrt():.3g} (root mean square over elements), four standard errors allow {(4 * pairs.std() / 8).sqrt():.3g}.",
            kind="biased",
            likely="the fraction isn't the chance of rounding up (a cut-off, a scale that isn't the one of the codes).",
        )
