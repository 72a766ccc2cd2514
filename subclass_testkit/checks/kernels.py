"""Which kernel ran: seen from outside, by the operators that a linear calls."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from subclass_testkit.check import check, over
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Finding, Refused
from subclass_testkit.script import Script, execute

# Bookkeeping that differs between spellings without being a kernel; views are left out by their schema.
_QUIET = ("_unsafe_view", "reshape", "clone", "_to_copy", "lift_fresh")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes the operators that run on plain tensors, and the floating tensors that they create."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[str] = []
        self.created: list[tuple[str, torch.Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is not torch.Tensor and not issubclass(t, torch.nn.Parameter) for t in types):
            return NotImplemented  # let the class unwrap itself first
        result = func(*args, **(kwargs or {}))
        name, view = func._schema.name, any(ret.alias_info is not None for ret in func._schema.returns)
        if not view and name.split("::")[1] not in _QUIET:
            self.kernels.append(name)
        if not view and isinstance(result, torch.Tensor) and result.is_floating_point():
            self.created.append((name, result.shape))
        return result

    @property
    def custom(self) -> list[str]:
        """The operators of other libraries than torch's core."""
        return [name for name in self.kernels if name.split("::")[0] not in ("aten", "prim", "prims")]


def watched(script: Script, call: str) -> _Watch:
    """Run ``call``, and note what it calls."""
    watch = _Watch()
    try:
        with watch:
            execute(call, script.ns)
    except Exception as error:
        script.note(call)
        script.blame(error, call)
    return watch


class KernelTests(CheckGroup):
    """Which kernel ran."""

    group = "kernels"

    @over(
        ("bias by keyword", "F.linear(x, w, bias=b)"),
        ("all by keyword", "F.linear(input=x, weight=w, bias=b)"),
        ("Parameter", "F.linear(x, nn.Parameter(w, False), b)"),
        ("module", "torch.func.functional_call(m, {'weight': w, 'bias': b}, (x,))"),
        ("3-D input", "F.linear(x[None], w, b)"),
    )
    @check(
        level="should",
        needs=("wrapper", "quantized", "inference"),
        axes="variant",
        why="a spelling that misses the fused kernel and takes the dense fallback gives right values slowly",
        fix="bind arguments by the operator's schema before choosing the kernel",
    )
    def test_same_kernel_for_every_spelling(self, what: str, call: str) -> None:
        """However a linear is written, it runs the same operators."""
        if self.subject.linear is not None:
            raise CheckSkipped("the subject has its own linear")
        script = self.script(x=self.x(), b=self.bias())
        script.run(f"m = nn.Linear({self.in_features}, {self.out_features})")
        usual = watched(script, "F.linear(x, w, b)")
        try:
            other = watched(script, call)
        except CheckFailed as failure:
            raise CheckSkipped(f"fails, which equivalence checks report: {failure}") from None
        except Refused as refusal:
            raise Refused(str(refusal), kind=refusal.kind, reproduction=refusal.reproduction) from None
        # torch itself computes a product of more dimensions by other operators
        expected, ran = (usual.custom, other.custom) if "3-D" in what else (usual.kernels, other.kernels)
        difference = set(expected) ^ set(ran)
        if difference:
            text = f"{call} ({what}) runs {_list(ran)}; F.linear(x, w, b) runs {_list(expected)}."
            raise CheckFailed(
                Finding(
                    "kernel",
                    text,
                    f"the difference is {_list(sorted(difference))}.",
                    _reproduction(script, call, sorted(difference)[0]),
                )
            )

    @check(
        level="should",
        needs=("wrapper", "quantized", "inference"),
        axes="variant",
        why="a fused kernel is there to save the dense weight's memory and time; expanding the weight beside it loses both",
        fix="hand the inner tensors to the kernel, also on the way to it (checks, autocast, autograd)",
    )
    def test_no_dense_weight_beside_a_kernel(self) -> None:
        """A linear that calls a custom kernel creates no floating tensor of the weight's size beside it."""
        self.need_shape(len(self.shape) == 2, "the check needs a matrix")
        script = self.script(x=self.x(3))
        watch = watched(script, self.linear())
        if not watch.custom:
            raise CheckSkipped("linear calls no kernel of its own, so nothing says that it doesn't expand the weight")
        numel = script["w"].numel()
        dense = [name for name, shape in watch.created if shape.numel() == numel and shape != (3, self.out_features)]
        if dense:
            text = f"{self.linear()} calls {_list(watch.custom)}, and makes {len(dense)} dense tensors of the weight's {numel} elements beside it: {_list(dense)}."
            raise CheckFailed(
                Finding(
                    "dense",
                    text,
                    reproduction=script.text(
                        _WATCH
                        + f"\nwith Watch() as watch:\n    {self.linear()}\nassert all(t.numel() != w.numel() for _, t in watch.ran if t.is_floating_point())"
                    ),
                )
            )


# The least of _Watch that a standalone script needs.
_WATCH = """\
from torch.utils._python_dispatch import TorchDispatchMode
class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t is not torch.Tensor and not issubclass(t, torch.nn.Parameter) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.ran = [*getattr(self, "ran", []), (func._schema.name, result)]
        return result"""


def _reproduction(script: Script, call: str, kernel: str) -> str:
    """A script that shows that only one of the two calls runs ``kernel``."""
    runs = f"with Watch() as one:\n    F.linear(x, w, b)\nwith Watch() as two:\n    {call}"
    same = f"assert ({kernel!r} in [n for n, _ in one.ran]) == ({kernel!r} in [n for n, _ in two.ran])"
    return script.text("\n".join([_WATCH, runs, same]))


def _list(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names)) or "none"
