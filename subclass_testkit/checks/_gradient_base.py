"""What the gradient checks share: the comparison with the dense gradient, and the inputs of a linear."""

from __future__ import annotations

import re

import torch

from subclass_testkit import inputs
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.oracle import multilinear
from subclass_testkit.outcome import CheckFailed, Finding, Refused
from subclass_testkit.script import last_line

WHY_CUT = "parameters before the operation get no gradient and never learn, without an error"
FIX_CUT = "compute in a torch.autograd.Function with a backward for every differentiable input, or raise NotImplementedError"
WHY = "a wrong gradient trains another model; nobody sees it but in the loss"
FIX = "compute the gradient from the dequantized weight, in the dtype of the input, for every number of batch dims"
_CUT = re.compile("does not require grad|to not have been used in the graph")


class GradientGroup(CheckGroup):
    """The gradients of an operation, beside those of its values."""

    def same_gradient(
        self,
        operation: str,
        *,
        suspects: dict[str, str] | None = None,
        operands: dict[str, str] | None = None,
        **texts: str,
    ) -> None:
        """What ``operation`` returns (gradients of ``x``, ``p``, ... for the output gradient ``g``) equals that of the values.

        A class that rounds activations may round all operands of the products of the backward.
        """
        texts = {**(operands or {}), **texts}
        lengths = (*self.shape, *(n for name in texts if name in "xg" for n in self._size(texts[name])))
        rounded = tuple(n for n in ("w", "x", "z", "g", "y") if n in ("w", *texts))
        try:
            self.agree(operation, tolerance=multilinear(max(lengths)), rounded=rounded, suspects=suspects, operands=texts)
        except Refused as refusal:
            if _CUT.search(str(refusal)) and "create_graph" not in operation:
                message = f"{last_line(operation)}: the result doesn't depend on what requires grad ({refusal})"
                likely = "a path without autograd formula computes the result."
                raise CheckFailed(Finding("cut", message, likely, refusal.reproduction)) from refusal
            raise

    def _size(self, text: str) -> torch.Size:
        return eval(text, {"torch": torch}).shape  # type: ignore[no-any-return]  # noqa: S307  # our own text

    def leaf(self, *lead: int) -> str:
        """The source text of an activation that requires grad."""
        return self._lead_x(lead or (5,)) + ".requires_grad_()"

    def _lead_x(self, lead: tuple[int, ...]) -> str:
        return inputs.activation((*lead, self.in_features), self.dtype)

    def _lead_grad(self, lead: tuple[int, ...]) -> str:
        return inputs.activation((*lead, self.out_features), self.dtype, 7)

    def _operands(self, operation: str) -> dict[str, str]:
        texts = {
            "x": self.x(),
            "y": inputs.activation(self.shape, self.dtype, 3),
            "b": self.bias(),
            "i": f"torch.tensor([1, 0, {min(self.shape) - 1}, 1])",
            "m": f"torch.arange({torch.Size(self.shape).numel()}).reshape({', '.join(map(str, self.shape))}) % 3 == 0",
        }
        words = (
            operation.replace("(", " ")
            .replace(")", " ")
            .replace(",", " ")
            .replace("[", " ")
            .replace("]", " ")
            .replace("=", " ")
            .replace(".", " ")
            .split()
        )
        return {name: text for name, text in texts.items() if name in words}
