"""A linear layer whose weight is the subject: what the checks of modules share."""

from __future__ import annotations

import torch

from subclass_testkit import oracle
from subclass_testkit.checks._writes import WriteChecks
from subclass_testkit.outcome import CheckSkipped
from subclass_testkit.script import Script


class LayerChecks(WriteChecks):
    """Scripts with a linear layer, and its forward as a check."""

    def layer_lines(self, name: str = "m", weight: str = "nn.Parameter(w, requires_grad=False)") -> str:
        """The lines of a linear layer with the subject as its weight."""
        n, k = self.shape
        dtype = "" if self.dtype is torch.float32 else f", dtype={self.dtype}"
        return f"{name} = nn.Linear({k}, {n}{dtype}); {name}.weight = {weight}"

    def layer(self, **texts: str) -> Script:
        """A script with ``m``, a linear layer whose weight is the subject."""
        self.only_matrices()
        s = self.script(**texts)
        s.run(self.layer_lines())
        return s

    def second_subject(self, s: Script) -> None:
        """Make ``v``, a second subject with other values, and ``source``, its plain values."""
        s.run(f"hp2 = {self.second()}\nv = {self.made('hp2')}\nsource = plain(v).clone()")

    def nn_linear(self) -> None:
        """Skip where nn.Linear can't be what uses the weight."""
        self.only_matrices()
        if self.subject.linear is not None:
            raise CheckSkipped("the subject has a linear of its own: nn.Linear isn't it")

    def forward(self, s: Script, module: str, label: str) -> None:
        """The module's forward is the linear with the values that its weight shows (where the class does linears)."""
        if "inference" not in self.case.found or self.subject.linear is not None or self.case.rounding:
            return
        s.ns["x"] = s.value(self.x(), extend=False)
        if self._linear_error(s, "F.linear(x, w)", "F.linear(x, plain(w))", "w") is not None:
            return  # the class's linear is wrong by itself: the equivalence checks report that
        found = self._linear_error(s, f"{module}(x)", f"F.linear(x, plain({module}.weight), {module}.bias)", f"{module}.weight")
        if found is not None:
            s.note(f"x = {self.x()}")
            s.equal(
                f"{module}(x)", f"F.linear(x, plain({module}.weight), {module}.bias)", label=f"the forward {label}", bound=found
            )

    def _linear_error(self, s: Script, got: str, want: str, weight: str) -> torch.Tensor | None:
        """The bound, if ``got`` exceeds it; None if the two agree within it."""
        magnitude = s["x"].double().abs() @ s.value(f"plain({weight})", extend=False).double().abs().t()
        wanted = s.value(want, extend=False)
        bound = oracle.multilinear_bound(magnitude + wanted.double().abs(), self.dtype, self.in_features, None)
        return bound if oracle.compare(s.read(s.value(got, extend=False), got), wanted, bound, got) else None
