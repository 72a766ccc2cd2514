"""Optimizer steps change the values as a dense step does, or are refused before anything changes."""

from __future__ import annotations

import functools
import re

import torch

from subclass_testkit import inputs, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._optimizer_cases import FEW, FOREACH, OPTIMIZERS, SINGLE, STATEFUL
from subclass_testkit.checks._writes import Watched, WriteChecks
from subclass_testkit.outcome import CheckSkipped
from subclass_testkit.script import Script

_WHY_STEP = "training goes wrong, or nowhere, without an error"
_FIX_STEP = "compute the update on dequantized values, quantize the result with a fresh scale, and write it into the inner tensors with copy_"
_FIX_LIST = (
    "unwrap tensors inside lists too (tree_map over all arguments), and write every result back; or raise NotImplementedError"
)

_STEP = """def step(i):
    p.grad = None; {linear}.backward(grad.roll(i, -1))
    q.data, q.grad = plain(p).clone(), plain(p.grad).clone()
    opt.step(); dense.step()"""

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


class OptimizerTests(WriteChecks):
    """Optimizer steps change the values as a dense step does, or are refused before anything changes."""

    group = "optimizers"

    # --- what the checks share

    def learning_rate(self, s: Script) -> str:
        """0.5, or what is eight half steps of a coarse format: smaller steps could drown in rounding."""
        return f"{max(0.5, 8 * self.half_step(s)):.3g}"

    def trained(self, cls: str, arguments: str, *, hp: str | None = None) -> Script:
        """A script with ``step(i)``: one step of the subject ``p``, and of its plain twin ``q`` from the same values and gradient."""
        self.matrix()
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
        """Skip for TwoTensor (as the subject, or as the control): it runs every operation on both halves, and so writes plain tensors twice."""
        if self.subject.cls.__name__ == "TwoTensor":
            raise CheckSkipped("TwoTensor applies an operation that writes a plain tensor twice, once for each of its halves")

    def follow(self, s: Script, label: str, writes: int, *, steps: int = 1, first: int = 0) -> None:
        """Steps, each judged by the dense step from the same values."""
        for i in range(first, first + steps):
            before = self.watch(s, "p")
            self.attempt(s, f"step({i})", before)
            self.written(s, before, "q", f"the parameter after step {i + 1} of {label}", writes=writes)

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
    @check(axes="each", why="every optimizer, EMA and weight loader is made of these", fix=_FIX_STEP)
    def test_single_update(self, operation: str) -> None:
        """An in-place operation leaves the values of the same operation on a plain tensor, up to requantization; or nothing changes and it is refused."""
        if ".t()" in operation:
            self.matrix()
        self._update(operation)

    @over(*FOREACH)
    @check(
        axes="dtype",
        why="foreach optimizers, FSDP2 and EMA pass lists of tensors: a handler that sees top-level arguments only loses the update",
        fix=_FIX_LIST,
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
        axes="one", why="a model's parameters are partly subclasses, partly plain (biases, norms), in one list", fix=_FIX_LIST
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
        s.equal(
            "(r, r2)",
            "(q_r, q_r2)",
            label=f"the plain tensors of the list after {label}",
            likely="the handler drops the plain members of the list, or works on copies of them.",
        )

    # --- steps

    @over(*OPTIMIZERS)
    @check(axes="dtype", needs=("training",), why=_WHY_STEP, fix=_FIX_STEP)
    def test_five_steps(self, name: str, cls: str, arguments: str, writes: int) -> None:
        """Each of five optimizer steps moves the values as the dense step does, up to requantization; or the first is refused with nothing changed."""
        if name in ("Adam-maximize-foreach", "SGD-momentum-fused"):
            self.writes_to_plain()  # weight decay goes into the negated gradients in place; the momentum is plain
        self.follow(self.trained(cls, arguments), name, writes, steps=5)

    @check(
        axes="dtype",
        needs=("training",),
        requires=("training",),
        why="a class that can be trained takes at least the simplest optimizer's step",
        fix=_FIX_STEP,
    )
    def test_sgd_works(self) -> None:
        """A step of plain SGD, without options, equals the dense one."""
        self.follow(self.trained("SGD", "lr={lr}"), "SGD", 1)

    @over(*FEW)
    @check(axes="each", needs=("training",), why=_WHY_STEP, fix=_FIX_STEP)
    def test_step(self, name: str, cls: str, arguments: str, writes: int) -> None:
        """Two steps equal the dense ones at every legal shape, dtype and variant."""
        self.follow(self.trained(cls, arguments), name, writes, steps=2)

    @over(*_JUMPS)
    @check(
        needs=("training",),
        why="values that grow beyond the first range are cut off, or are read with the wrong scale: the loss stalls or explodes",
        fix="compute scale and zero point anew from the updated values at every write",
    )
    def test_scale_is_refreshed(self, name: str, source: str, gradient: str) -> None:
        """After a step to values of quite another range, each is within half a step of the new scale."""
        self.matrix()
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
        axes="one",
        needs=("training",),
        why="decoupled weight decay is a mul_ of its own: a lost one changes the regularisation silently",
        fix=_FIX_STEP,
    )
    def test_weight_decay_alone_shrinks(self, name: str, cls: str, arguments: str, writes: int) -> None:
        """With a zero gradient, weight decay alone shrinks the values as the dense step does."""
        s = self.trained(cls, arguments)
        s.run("grad = grad * 0")
        self.follow(s, f"{name} with a zero gradient", writes, steps=2)

    @over(("SGD-single", "foreach=False"), ("SGD-foreach", "foreach=True"))
    @check(
        axes="one",
        needs=("training",),
        why="a model that drifts from the dense trajectory, or stalls, looks trained and isn't",
        fix=_FIX_STEP,
    )
    def test_loss_goes_down_with_the_dense_one(self, name: str, arguments: str) -> None:
        """Five free-running steps on a regression stay within five requantizations of the dense trajectory, and the loss goes down with it."""
        self.matrix()
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
        if self.case.activation_bits:
            step = x.abs().amax(-1, keepdim=True) / (2 ** (self.case.activation_bits - 1) - 1)
            noise += 9 * float(
                (step * before.values.double().abs().sum(-1)).norm()
            )  # five steps, each of 2 * lr * |x|**2 <= 1.8 times it
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

    # --- the optimizer's own state

    @over(*STATEFUL)
    @check(
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

    # --- around the step

    @over(
        ("SGD-single", "SGD", "lr={lr}, foreach=False", 1),
        ("SGD-foreach", "SGD", "lr={lr}, foreach=True", 1),
        ("AdamW-foreach", "AdamW", "lr={lr}, eps=1e-3, foreach=True", 2),
        ("AdamW-fused", "AdamW", "lr={lr}, eps=1e-3, fused=True", 2),
    )
    @check(
        axes="one",
        needs=("training",),
        why="biases and norms are plain parameters beside the subclass, often in groups of their own",
        fix=_FIX_LIST,
    )
    def test_step_beside_plain_parameters(self, name: str, cls: str, arguments: str, writes: int) -> None:
        """One optimizer over the subclass and plain parameters, in one group and in an added one, steps all of them rightly."""
        if "single" not in name:
            self.writes_to_plain()
        s = self.trained(cls, arguments)
        s.run(
            "b, c = nn.Parameter(grad[0].clone()), nn.Parameter(grad[1].clone())\nqb, qc = nn.Parameter(grad[0].clone()), nn.Parameter(grad[1].clone())"
        )
        s.run("b.grad, c.grad, qb.grad, qc.grad = grad[2], grad[3], grad[2], grad[3]")
        s.run(
            f"opt, dense = (torch.optim.{cls}(t, {arguments.format(lr=self.learning_rate(s))}) for t in ([b, p], [qb, q]))\nopt.add_param_group(dict(params=[c], lr=0.25)); dense.add_param_group(dict(params=[qc], lr=0.25))"
        )
        self.follow(s, name, writes)
        s.equal(
            "(b, c)",
            "(qb, qc)",
            label=f"the plain parameters after a step of {name}",
            likely="the handler drops the plain members of the list.",
        )

    @over(("SGD-single", "foreach=False"), ("SGD-foreach", "foreach=True"))
    @check(axes="one", needs=("training",), why="a later group is added when layers are unfrozen", fix=_FIX_STEP)
    def test_added_param_group(self, name: str, arguments: str) -> None:
        """A subclass parameter in a group added later is stepped with that group's settings."""
        s = self.trained("SGD", "lr={lr}")
        s.run("b, qb = nn.Parameter(grad[0].clone()), nn.Parameter(grad[0].clone())")
        s.run(
            f"opt, dense = (torch.optim.SGD([t], lr=99.0, {arguments}) for t in (b, qb))\nopt.add_param_group(dict(params=[p], lr=0.5)); dense.add_param_group(dict(params=[q], lr=0.5))"
        )
        self.follow(s, f"{name}, in an added group,", 1)

    @over(
        ("norm", "nn.utils.clip_grad_norm_([{}, {}], 0.5)"),
        ("norm-foreach", "nn.utils.clip_grad_norm_([{}, {}], 0.5, foreach=True)"),
        ("infinity-norm", "nn.utils.clip_grad_norm_([{}, {}], 0.5, norm_type=float('inf'))"),
        ("value", "nn.utils.clip_grad_value_([{}, {}], 0.1)"),
        ("value-foreach", "nn.utils.clip_grad_value_([{}, {}], 0.1, foreach=True)"),
        ("total", "nn.utils.get_total_norm([{}.grad, {}.grad])"),
    )
    @check(
        axes="one",
        needs=("training",),
        requires=("training",),
        why="an unclipped gradient ruins a run at its first spike",
        fix="give plain gradients, or support norm, mul_ and clamp_ on the gradient's class",
    )
    def test_gradient_clipping(self, name: str, call: str) -> None:
        """Clipping gives the same total norm and the same gradients as for dense parameters."""
        s = self.trained("SGD", "lr={lr}")
        s.run(
            f"b, qb = nn.Parameter(grad[0].clone()), nn.Parameter(grad[0].clone())\nb.grad, qb.grad = grad[1].clone(), grad[1].clone()\n{self.linear(w='p')}.backward(grad); q.grad = plain(p.grad).clone()"
        )
        s.run(f"got = {call.format('p', 'b')}\nwant = {call.format('q', 'qb')}")
        largest = float(s["grad"].double().abs().max()) * self.shape[-1]
        bound = 64 * torch.finfo(self.dtype).eps * largest
        s.equal("(p.grad, b.grad)", "(q.grad, qb.grad)", label=f"the gradients after clipping by {name}", bound=bound)
        if s["want"] is not None:
            s.equal("got", "want", label=f"the total norm ({name})", bound=bound * self.shape[0])

    @check(
        axes="one",
        needs=("training",),
        why="mixed-precision training steps through a GradScaler",
        fix="give plain gradients, or support the scaler's operations on the gradient's class",
    )
    def test_grad_scaler(self) -> None:
        """A step through GradScaler equals the unscaled dense step, and one with an infinite gradient is left out."""
        if self.dtype is torch.float16:
            raise CheckSkipped("GradScaler doesn't unscale float16 gradients")
        s = self.trained("SGD", "lr={lr}")
        s.run("scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)")
        loss = f"scaler.scale(({self.linear(w='p')} * grad).sum()).backward()"
        s.run(f"{loss}\nq.grad = plain(p.grad).clone() / 1024; dense.step()")
        before = self.watch(s, "p")
        self.attempt(s, "_ = scaler.step(opt); scaler.update()", before)
        self.written(s, before, "q", "the parameter after scaler.step(opt)")
        s.run(f"p.grad = None; grad[0, 0] = float('inf'); {loss}")
        before = self.watch(s, "p")
        self.attempt(s, "_ = scaler.step(opt); scaler.update()", before)
        if change := before.snapshot.changes(s["p"]):
            s.fail(
                f"scaler.step(opt) with an infinite gradient changed the parameter: {change}.",
                kind="inf-step",
                assertion="assert plain(p).isfinite().all()",
            )

    @over(
        ("ExponentialLR", "ExponentialLR({}, 0.5)"),
        ("OneCycleLR", "OneCycleLR({}, max_lr=1.0, total_steps=4)"),
        ("LambdaLR", "LambdaLR({}, lambda i: 1 / (i + 1))"),
    )
    @check(
        axes="one",
        needs=("training",),
        why="schedules change lr between steps: a handler that keeps the first one goes wrong",
        fix="take alpha and value from the call's arguments each time",
    )
    def test_learning_rate_schedule(self, name: str, scheduler: str) -> None:
        """Under a learning rate schedule every step equals the dense one."""
        s = self.trained("SGD", "lr={lr}, momentum=0.9")
        s.run("schedules = [torch.optim.lr_scheduler." + scheduler.format("o") + " for o in (opt, dense)]")
        for i in range(3):
            self.follow(s, f"SGD under {name}", 1, first=i)
            s.run("_ = [schedule.step() for schedule in schedules]")

    @over(
        *(
            f"{alias} ({name})"
            for name in ("SGD-single", "SGD-foreach", "AdamW-single", "AdamW-foreach")
            for alias in ("w", "p.detach()", "p.data", "nn.ParameterDict(dict(p=p)).state_dict()['p']", "p.view(p.shape)")
        )
    )
    @check(
        axes="one",
        needs=("training",),
        why="tied weights, EMA and checkpoints hold aliases: after the first step they show the old values",
        fix="write into the inner tensors (self.qdata.copy_(...)) instead of replacing them (self.qdata = ...)",
    )
    def test_aliases_see_the_step(self, alias_and_name: str) -> None:
        """What aliased the parameter before a step shows the values after it."""
        alias, name = alias_and_name.removesuffix(")").rsplit(" (", 1)
        cls, arguments = next((c[1], c[2]) for c in OPTIMIZERS if c[0] == name)
        s = self.trained(cls, arguments)
        s.run(f"alias = {alias}")
        self.attempt(s, "step(0)", self.watch(s, "p"))
        s.equal(
            "alias",
            "p",
            label=f"alias = {alias}, taken before a step of {name},",
            likely="the step replaced the parameter's inner tensors instead of writing into them, or the alias was a copy.",
        )

    @over(*(c for c in FEW if c[0] in ("SGD-single", "SGD-foreach", "AdamW-single")))
    @check(
        axes="one",
        needs=("training",),
        why="modules, optimizers and autograd refer to the object",
        fix="return self from in-place operations, and don't rebuild the tensor",
    )
    def test_parameter_stays_itself(self, name: str, cls: str, arguments: str, writes: int) -> None:
        """A step keeps the Parameter object, its class and leaf state, and raises its version counter."""
        s = self.trained(cls, arguments)
        s.run("kind, version = type(p), p._version")
        self.attempt(s, "step(0)", self.watch(s, "p"))
        s.expect(
            "opt.param_groups[0]['params'][0] is p and type(p) is kind",
            "the step replaced the parameter by another object or class.",
            kind="identity",
        )
        s.expect(
            "p.is_leaf and p.requires_grad and p.grad_fn is None",
            "after the step the parameter is no trainable leaf any more.",
            kind="leaf",
        )
        s.expect(
            "p._version > version",
            "the step left the version counter at {version}: autograd can't notice that a saved tensor changed.",
            kind="version",
            likely="the update ran outside of torch's in-place operators.",
        )

    @over(
        ("SGD", "SGD", "lr=0.1, momentum=0.9, weight_decay=0.1"),
        ("AdamW-single", "AdamW", "lr=0.1, foreach=False"),
        ("AdamW-foreach", "AdamW", "lr=0.1, foreach=True"),
        ("AdamW-fused", "AdamW", "lr=0.1, fused=True"),
    )
    @check(
        needs=("inference",),
        requires=("inference",),
        why="adapters train beside a frozen base; a base that moves, or adapters that don't, are found too late",
        fix="leave the tensor alone when it has no gradient",
    )
    def test_frozen_beside_trainable(self, name: str, cls: str, arguments: str) -> None:
        """Training plain adapters beside the frozen tensor moves them as beside a dense one, and leaves the frozen tensor alone, bit for bit."""
        self.matrix()
        s = self.script(x=self.x(), grad=self.grad())
        s.run(
            "A, B = inputs_a, inputs_b".replace("inputs_a", inputs.weight((4, self.in_features), self.dtype, 2)).replace(
                "inputs_b", inputs.weight((self.out_features, 4), self.dtype, 6)
            )
        )
        s.run("p = nn.Parameter(w, requires_grad=False)")
        forward = self.linear(w="base")
        s.run(
            f"def train(base):\n    a, b = nn.Parameter(A.clone()), nn.Parameter(B.clone())\n    opt = torch.optim.{cls}([base, a, b], {arguments})\n    for _ in range(3):\n        opt.zero_grad(); ({forward} + F.linear(F.linear(x, a), b)).backward(grad)\n        torch.nn.utils.clip_grad_norm_([base, a, b], 10.0); opt.step()\n    return a, b"
        )
        before = oracle.Snapshot.of(s["p"])
        s.run("got = train(p)")
        s.equal(
            "got",
            "train(nn.Parameter(d, requires_grad=False))",
            label="the adapters after three steps beside the frozen tensor",
        )
        s.expect("p.grad is None and not p.requires_grad", "the frozen tensor got a gradient.", kind="frozen")
        if change := before.changes(s["p"]):
            s.fail(
                f"the frozen tensor was changed by training the adapters: {change}.",
                kind="frozen",
                assertion="assert torch.equal(plain(p), d)",
            )

    # --- as an optimizer's state

    @over("hp * -0.3", "hp * 7", "hp.double()", "hp.t().contiguous().t()", "torch.zeros_like(hp)")
    @check(
        needs=("optimizer_state",),
        requires=("optimizer_state",),
        why="a low-bit optimizer writes its state back by copy_ at every step",
        fix=_FIX_STEP,
    )
    def test_state_takes_plain_values(self, source: str) -> None:
        """copy_ of plain values stores them within the format's error, in the same object; reading them into a plain tensor gives them back."""
        if ".t()" in source:
            self.matrix()
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
        fix=_FIX_STEP,
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
    @check(needs=("optimizer_state",), axes="one", why="code swaps the class into torch's own optimizers", fix=_FIX_LIST)
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
        fix="support deepcopy and .to(dtype, device) of the class",
    )
    def test_state_survives_a_state_dict(self) -> None:
        """An optimizer's state_dict with the state, loaded into a new optimizer, keeps the state's class and values."""
        s = self.script()
        s.run(
            "p = nn.Parameter(hp.clone()); opt = torch.optim.SGD([p], lr=0.1, momentum=0.9)\nopt.state[p]['momentum_buffer'] = w"
        )
        s.run(
            "new = torch.optim.SGD([p], lr=0.1, momentum=0.9); new.load_state_dict(copy.deepcopy(opt.state_dict()))\nv = new.state[p]['momentum_buffer']"
        )
        s.expect("type(v) is type(w)", "the loaded state is a {type(v).__name__}.", kind="class")
        s.equal("v", "w", label="the loaded state")


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
