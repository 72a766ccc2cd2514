"""A tensor's move to a device or a dtype takes everything along."""

from __future__ import annotations

import torch

from subclass_testkit import oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks._device_cases import (
    DTYPES,
    META,
    SAME,
)
from subclass_testkit.checks._simulated import SimulatedGroup
from subclass_testkit.checks._traced import renamed
from subclass_testkit.outcome import CheckSkipped
from subclass_testkit.script import execute

WHY_MOVE = "a tensor whose parts lie on two devices fails at its first use, or computes on the wrong one"
FIX_MOVE = "in aten._to_copy, pass device, non_blocking and the rest on to every inner tensor, and build the result with the new outer device"
_FIX_DTYPE = "in aten._to_copy, keep the codes as they are, change the dtype that the tensor shows (and dequantizes to), or raise NotImplementedError"


class MoveChecks(SimulatedGroup):
    """Moves to meta, to where it is, to another dtype, and what is computed after them."""

    # --- moves

    @over(*META)
    @check(needs=("devices",), axes="variant", why=WHY_MOVE + "; models are built on meta", fix=FIX_MOVE)
    def test_move_to_meta(self, text: str) -> None:
        """A move to meta gives the same class on meta, with every inner tensor, the flatten context and the shape."""
        script = self.script()
        script.run(f"v = {text}")
        self.arrived(script, "v", "meta", text, moved_dtype=text.endswith("bfloat16)"))

    @over(*SAME)
    @check(
        axes="one",
        why="code that moves tensors to be sure relies on no copy being made: memory doubles, and a tied weight is untied",
        fix="let torch's own .to decide; it calls aten._to_copy only where something changes",
        upstream="torch.Tensor.to: 'self is returned' if it has the dtype and device already",
    )
    def test_move_to_where_it_is(self, text: str) -> None:
        """A move to the device and dtype that the tensor has returns the tensor itself."""
        script = self.script()
        script.run(f"v = {text}")
        script.expect(
            "v is w",
            f"{text} gives another object ({{type(v).__name__}}, {{v.dtype}} on {{v.device}}), expected w itself.",
            kind="identity",
        )

    @over("w.to('cpu', copy=True)", "w.to(w.dtype, copy=True)", "w.to(w, copy=True)")
    @check(axes="variant", why="copy=True is how code gets a tensor of its own", fix="copy every inner tensor in aten._to_copy")
    def test_forced_copy(self, text: str) -> None:
        """With copy=True the result has the same class, context and values, bit for bit, and shares no memory."""
        script = self.script()
        script.run(f"v = {text}")
        script.expect("v is not w", f"{text} gives w itself.", kind="identity")
        if "devices" in self.case.found:
            self.arrived(script, "v", "cpu", text)
        script.equal("v", "d", label=text)
        for name, inner in oracle.inner_tensors(script["w"]).items():
            moved = oracle.inner_tensors(script["v"]).get(name)
            if moved is not None and moved.numel() and moved.untyped_storage().data_ptr() == inner.untyped_storage().data_ptr():
                script.fail(
                    f"{text}: inner tensor {name!r} shares memory with w's.",
                    kind="alias",
                    assertion=f"assert v.{name}.data_ptr() != w.{name}.data_ptr()",
                )

    @check(
        needs=("devices", "inference"),
        axes="variant",
        why="shape propagation on meta is how loaders and planners find sizes",
        fix="let handlers work on meta tensors: no values read",
    )
    def test_linear_on_meta(self) -> None:
        """A linear on meta gives a meta tensor of the right shape and dtype."""
        script = self.script(x=self.x(), b=self.bias())
        script.run("w = w.to('meta'); x = x.to('meta'); b = b.to('meta')")
        script.run(f"v = {self.linear(b='b')}")
        script.expect("v.device.type == 'meta'", "linear on meta gives a tensor on {v.device}.", kind="device")
        script.equal("v", f"torch.empty(5, {self.out_features}, dtype=x.dtype, device='meta')", label="linear on meta")

    @check(
        needs=("devices",),
        axes="variant",
        why="large models are quantized layer by layer where they lie",
        fix="create the inner tensors on the source's device",
    )
    def test_made_on_meta(self) -> None:
        """A subclass made from a meta tensor is wholly on meta, with the metadata of one made on the CPU."""
        script = self.script()
        script.run(f"v = {self.made('hp_meta')}".join(("hp_meta = hp.to('meta')\n", "")))
        self.made_like(script, "v", "meta")

    # --- dtypes

    @over(*DTYPES)
    @check(
        why="a dtype move that is ignored makes the next matmul fail; one that is applied to the codes destroys the values",
        fix=_FIX_DTYPE,
    )
    def test_dtype_move(self, text: str, dtype: torch.dtype) -> None:
        """A move to another floating dtype gives that dtype and the values rounded to it, with the codes as they were; or it is refused."""
        script = self.script()
        script.run(f"v = {text}")
        script.expect(
            f"v.dtype == {dtype}",
            f"{text} reports dtype {{v.dtype}}, expected {dtype}.",
            kind="dtype",
            likely="the move was ignored." if script["v"].dtype == self.dtype else "",
        )
        script.equal("v", renamed(text, "w", "d"), label=text, bound=self.rounding(script, "d", dtype, text.count(".to(")))
        self.codes_untouched(script, "w", "v", text)

    @over("w.to(torch.bfloat16)", "w.half()", "w.double()", "w.float()")
    @check(needs=("inference",), why="a model is moved to the dtype in which it then computes", fix=_FIX_DTYPE)
    def test_linear_after_dtype_move(self, text: str) -> None:
        """After a dtype move the linear computes in the new dtype, with the moved tensor's values."""
        script = self.script(x=self.x(), b=self.bias())
        self.eager(script, f"v = {text}")
        try:
            before = script.read(execute(self.linear(b="b"), script.ns), "linear")
            known = oracle.compare(
                before, execute("F.linear(x, d, b)", script.ns), self.product_bound(script, "F.linear(x, w, b)"), ""
            )
        except Exception as error:
            raise CheckSkipped(f"linear fails before the move already: {oracle.describe(error)}") from error
        if known:
            raise CheckSkipped("linear is wrong before the move already, which equivalence checks report")
        script.run("x = x.to(v.dtype); b = b.to(v.dtype)")
        bound = self.product_bound(script, "F.linear(x, v, b)")
        script.run(f"got = {self.linear(w='v', b='b')}")
        script.equal("got", "F.linear(x, plain(v), b)", label=f"linear after {text}", bound=bound)

    @over("w.to(torch.int32)", "w.long()", "w.to(torch.bool)", "w.to(torch.complex64)")
    @check(
        axes="one",
        why="a cast that takes the codes for the values gives plausible nonsense",
        fix="dequantize first, or raise NotImplementedError",
    )
    def test_move_to_non_float(self, text: str) -> None:
        """A cast to an integer, boolean or complex dtype is that of the values, or is refused."""
        self.agree(text, suspects={})
