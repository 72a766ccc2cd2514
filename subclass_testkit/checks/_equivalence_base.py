"""What the equivalence checks share: operands, the rules of a write and of a misfit, and diagnoses of wrong results."""

from __future__ import annotations

import re

import torch

from subclass_testkit import inputs, oracle
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.oracle import Snapshot, multilinear
from subclass_testkit.outcome import CheckSkipped
from subclass_testkit.script import Script


class EquivalenceGroup(CheckGroup):
    """Operands and helpers of `EquivalenceTests`."""

    def operands(self, operation: str) -> dict[str, str]:
        """The source texts of the plain operands that an operation names (see `_equivalence_ops`)."""
        *lead, rows, columns = self.shape
        numel = torch.Size(self.shape).numel()

        def plain(*shape: int, seed: int) -> str:
            return inputs.activation((*lead, *shape), self.dtype, seed)

        texts = {
            "x": plain(5, columns, seed=0),
            "y": inputs.activation(self.shape, self.dtype, 3),
            "v": inputs.activation((columns,), self.dtype, 1),
            "u": inputs.activation((rows,), self.dtype, 2),
            "z": plain(columns, 4, seed=4),
            "a": plain(5, rows, seed=6),
            "b": self.bias(),
            "c": inputs.activation((2, rows, columns + 3), self.dtype, 8),
            # the same codes under other scales, in formats whose scale follows the magnitude
            "e": re.sub(r"\bhp\b(?!\s*=[^=])", lambda _: f"(({self.hp()}) * 2)", self.subject.make_text),
            "m": f"torch.arange({numel}).reshape({', '.join(map(str, self.shape))}) % 3 == 0",
            "i": f"torch.tensor([1, 0, {min(rows, columns) - 1}])",
            "o": self.other(),
        }
        used = set(re.findall(r"\b[a-z]\b", operation))
        return {name: text for name, text in texts.items() if name in used}

    def product(self, operation: str, suspects: dict[str, str] | None = None, hp: str | None = None) -> None:
        """A sum of products equals that of the values; a class that rounds activations may round each operand."""
        texts = self.operands(operation)
        length = torch.Size(self.shape).numel() if "conv" in operation or "bilinear" in operation else max(self.shape)
        rounded = tuple(n for n in ("w", *texts) if n not in ("b", "i", "m"))
        self.agree(
            operation,
            hp=hp,
            tolerance=multilinear(length),
            rounded=rounded,
            requantized=True,
            suspects=suspects,
            operands=texts,
        )

    def twins(self) -> bool:
        """Whether the class carries several full copies (TwoTensor), each of which an operation is run on, random and in-place ones too."""
        w = self.subject.build(torch.zeros(self.shape, dtype=self.dtype))
        copies: int = sum(t.shape == w.shape and t.dtype == w.dtype for t in oracle.inner_tensors(w).values())
        return copies > 1

    def run_on_plain(self, script: Script, operation: str) -> None:
        """``want``: the operation on plain values."""
        script.note("want = d.clone()")
        script.ns["want"] = script["d"].clone()
        text = self._plainly(re.sub(r"\bw\b", "want", operation), script)
        try:
            script.run(text)
        except Exception as error:
            raise CheckSkipped(f"torch itself can't: {operation} on plain {self.dtype}: {error}") from error

    def nothing_changed(self, script: Script, operation: str, snapshots: dict[str, Snapshot]) -> None:
        """Fail if an operand isn't what it was; the reproduction runs the operation anew, for what comes before it has run."""
        for name, snapshot in snapshots.items():
            change = snapshot.changes(script[name])
            if not change:
                continue
            for line in (f"    {operation}", "with torch.no_grad():", operation, "v_ = w"):
                if script.lines[-1] == line:
                    script.lines.pop()
            end = (
                f"before = plain({name}).clone()\ntry:\n    with torch.no_grad():\n        {operation}\n    done = {name == 'w'}\n"
                f"except Exception:\n    done = False\nassert done or torch.equal(plain({name}), before), '{name} changed'"
            )
            script.fail(f"{operation} was refused or done, but {name} changed: {change}.", kind="mutated", assertion=end)

    def inner_changes(self, script: Script) -> str:
        """Which inner tensors a write changed."""
        script.ns["w_before"] = self.subject.build(script["hp"])
        before, after = oracle.inner_tensors(script["w_before"]), oracle.inner_tensors(script["w"])
        same = [n for n in before if n in after and oracle.same_bits(before[n], after[n])]
        changed = [n for n in after if n not in same]
        return f"inner tensors written: {', '.join(changed) or 'none'}; left as they were: {', '.join(same) or 'none'}."

    def misfit(self, operation: str) -> BaseException:
        self.matrix()
        texts = self.operands(operation)
        script = self.script(**texts)
        snapshots = {name: Snapshot.of(script[name]) for name in ("w", *texts)}
        with torch.no_grad():
            error = self.refuses_or_raises(script, operation, f"{operation} gives a result although the sizes don't fit.")
        self.nothing_changed(script, operation, snapshots)
        return error


def near_source(out: torch.Tensor, hp: torch.Tensor, script: Script) -> bool:
    """Whether a linear's output is nearer to that of the source values than to that of the new ones."""
    x = script["x"].double()
    old, new = x @ hp.double().t(), x @ script["d"].double().t()
    out = out.detach().double()
    return old.shape == out.shape and bool((out - old).norm() < (out - new).norm())


def wrong_rows(linear: str) -> dict[str, str]:
    """What a linear's result may be if the weight's rows are wrong, as fits of ``got`` to these (over two rows of x or more)."""
    s = "x.sum(-1, keepdim=True)"
    return {
        "a linear in which each row of the weight is shifted by a number of its own, as by a zero point that is left out": f"{linear} + {s} * ((got - {linear}) * {s}).sum(0) / ({s} ** 2).sum()",
        "the right one with each output feature times a number of its own, as by a scale that is missing or another row's": f"{linear} * (got * {linear}).sum(0) / ({linear} ** 2).sum(0)",
    }


def swapped(operation: str) -> str:
    """``a - b`` as ``b - a``."""
    match = re.fullmatch(r"(.+) ([-/]) (.+)", operation)
    return f"({match[3]}) {match[2]} ({match[1]})" if match else operation
