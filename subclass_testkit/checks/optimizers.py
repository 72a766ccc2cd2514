"""Optimizer steps change the values as a dense step does, or are refused before anything changes."""

from __future__ import annotations

import torch

from subclass_testkit import inputs, oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._optimizer_cases import FEW, OPTIMIZERS
from subclass_testkit.checks._parts import with_checks_of_its_parts
from subclass_testkit.checks._states import StateChecks
from subclass_testkit.checks._steps import FIX_LIST, FIX_STEP
from subclass_testkit.checks._updates import UpdateChecks
from subclass_testkit.outcome import CheckSkipped


@with_checks_of_its_parts
class OptimizerTests(UpdateChecks, StateChecks):
    """Optimizer steps change the values as a dense step does, or are refused before anything changes."""

    group = "optimizers"

    # --- around the step

    @over(
        ("SGD-single", "SGD", "lr={lr}, foreach=False", 1),
        ("SGD-foreach", "SGD", "lr={lr}, foreach=True", 1),
        ("AdamW-foreach", "AdamW", "lr={lr}, eps=1e-3, foreach=True", 2),
        ("AdamW-fused", "AdamW", "lr={lr}, eps=1e-3, fused=True", 2),
    )
    @check(
        of_parameters=True,
        axes="one",
        needs=("training",),
        why="biases and norms are plain parameters beside the subclass, often in groups of their own",
        fix=FIX_LIST,
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
        for got, want in (("b", "qb"), ("c", "qc")):
            likely = "the handler drops the plain members of the list."
            bound = 16 * torch.finfo(self.dtype).eps * float(s[want].detach().abs().max() + 1)
            s.equal(got, want, label=f"the plain parameter {got} after a step of {name}", bound=bound, likely=likely)

    @over(("SGD-single", "foreach=False"), ("SGD-foreach", "foreach=True"))
    @check(
        of_parameters=True, axes="one", needs=("training",), why="a later group is added when layers are unfrozen", fix=FIX_STEP
    )
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
        of_parameters=True,
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
        for got, want in (("p", "q"), ("b", "qb")):
            s.equal(f"{got}.grad", f"{want}.grad", label=f"{got}.grad after clipping by {name}", bound=bound)
        if s["want"] is not None:
            s.equal("got", "want", label=f"the total norm ({name})", bound=bound * self.shape[0])

    @check(
        of_parameters=True,
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
        of_parameters=True,
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
        of_parameters=True,
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
        of_parameters=True,
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
        of_parameters=True,
        needs=("inference",),
        requires=("inference",),
        why="adapters train beside a frozen base; a base that moves, or adapters that don't, are found too late",
        fix="leave the tensor alone when it has no gradient",
    )
    def test_frozen_beside_trainable(self, name: str, cls: str, arguments: str) -> None:
        """Training plain adapters beside the frozen tensor moves them as beside a dense one, and leaves the frozen tensor alone, bit for bit."""
        self.only_matrices()
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
        s.run("got, want = train(p), train(nn.Parameter(d, requires_grad=False))")
        for i in (0, 1):
            s.equal(f"got[{i}]", f"want[{i}]", label=f"adapter {'AB'[i]} after three steps beside the frozen tensor")
        s.expect("p.grad is None and not p.requires_grad", "the frozen tensor got a gradient.", kind="frozen")
        if change := before.changes(s["p"]):
            s.fail(
                f"the frozen tensor was changed by training the adapters: {change}.",
                kind="frozen",
                assertion="assert torch.equal(plain(p), d)",
            )
