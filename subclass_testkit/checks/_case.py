"""The case that a check runs on: a subject at one point of its axes, and its data as source text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch

from subclass_testkit import inputs, oracle
from subclass_testkit.oracle import Tolerance
from subclass_testkit.outcome import CheckSkipped, NotClaimed
from subclass_testkit.rounding import Rounding
from subclass_testkit.script import Script
from subclass_testkit.subject import Subject


@dataclass(frozen=True)
class Case:
    """A subject at one point of its axes.

    ``facts`` is what the claim probes measured (``rounding``, ``found`` claims, ...); shared by all cases of a run.
    ``others`` are the subject's other variants by name.
    """

    subject: Subject
    variant: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Subject] = field(default_factory=dict)

    @property
    def found(self) -> frozenset[str]:
        """The claims that hold for the subject, declared or found by probing."""
        return frozenset(self.facts.get("found", ()))

    @property
    def rounding(self) -> Rounding | None:
        """How its linear rounds its operands, declared or measured; None: not at all."""
        declared = Rounding(self.subject.activation_bits, self.subject.weight_bits)
        measured: Rounding | None = self.facts.get("rounding", {}).get(self.variant)
        return declared if any(declared) else measured


class CaseGroup:
    """What a check reads of its case, and the script that it begins with."""

    takes_packed: bool = False  # the check is also about tensors that show their packed storage (bitsandbytes' parameters)
    case: Case

    @property
    def subject(self) -> Subject:
        return self.case.subject

    @property
    def shape(self) -> tuple[int, ...]:
        return self.case.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.case.dtype

    @property
    def out_features(self) -> int:
        return self.case.shape[-2] if len(self.case.shape) > 1 else 1

    @property
    def in_features(self) -> int:
        return self.case.shape[-1]

    def hp(self, seed: int = 0) -> str:
        """The source text of the standard plain weight of this case; another ``seed`` gives other values."""
        return inputs.weight(self.shape, self.dtype, self.case.seed + seed)

    def x(self, *lead: int, seed: int = 0) -> str:
        """The source text of an activation ``(*lead, in_features)``; default one of 5 rows."""
        return inputs.activation((*(lead or (5,)), self.in_features), self.dtype, seed)

    def grad(self, *lead: int) -> str:
        """The source text of an output gradient ``(*lead, out_features)``."""
        return inputs.activation((*(lead or (5,)), self.out_features), self.dtype, 7)

    def bias(self) -> str:
        """The source text of a bias ``(out_features,)``, too large to be dropped unnoticed."""
        return inputs.bias(self.out_features, self.dtype)

    @property
    def decays_by_design(self) -> bool:
        """A class with storage of its own that switched __torch_function__ off (nn.Buffer): torch makes all results plain."""
        off = self.subject.cls.__torch_function__ is torch._C._disabled_torch_function_impl
        return off and "wrapper" not in self.case.found

    def other(self, seed: int = 5) -> str:
        """The source text of a second tensor of the class, of the same shape, with other values and scales."""
        source = f"(({self.hp(seed)}) * -0.75)"
        return re.sub(r"\bhp\b(?!\s*=[^=])", lambda _: source, self.subject.make_text)

    def linear_tolerance(self) -> Tolerance:
        """The tolerance of a product over the in_features."""
        return oracle.multilinear(self.in_features)

    def need_shape(self, condition: bool, why: str) -> None:
        """Skip, with the reason, when this case's shape doesn't suit the check."""
        if not condition:
            raise CheckSkipped(f"shape {'x'.join(map(str, self.shape))}: {why}")

    def matrix(self, rows: int = 4, columns: int = 4) -> None:
        """Skip where the case isn't a matrix of at least that size."""
        large = len(self.shape) == 2 and self.shape[0] >= rows and self.shape[1] >= columns
        self.need_shape(large, f"the check needs a matrix of at least {rows}x{columns}")

    def rows_and_columns(self) -> None:
        """Skip where the last two dimensions are smaller than 3 x 4."""
        self.need_shape(len(self.shape) >= 2 and self.shape[-2] > 2 and self.shape[-1] > 3, "this data needs a matrix of 3 x 4")

    def linear(self, x: str = "x", w: str = "w", b: str | None = None) -> str:
        """The text of a linear layer: ``F.linear(x, w, b)``, or the subject's own ``linear`` recipe."""
        if self.subject.linear is None:
            return f"F.linear({x}, {w}, {b})" if b else f"F.linear({x}, {w})"
        recipe = self.subject.linear if isinstance(self.subject.linear, str) else "linear(x, w, b)"
        names = {"x": x, "w": w, "b": b or "None"}
        return re.sub(r"\b[xwb]\b", lambda m: names[m[0]], recipe)

    # --- running

    def script(self, hp: str | None = None, **texts: str) -> Script:
        """A script with ``hp``, ``w`` and ``d`` made (from the standard weight unless ``hp`` is given), and ``texts`` as inputs."""
        script = Script(self.subject, self.hp() if hp is None else hp, texts)
        if hp != "" and not self.takes_packed and "wrapper" not in self.case.found:
            shown, values = (f"{list(script[n].shape)} {script[n].dtype}" for n in ("w", "d"))
            if shown != values:
                raise NotClaimed(f"no wrapper, and it shows its packed storage: {shown} for values of {values}")
        return script
