"""Views: every slice, transpose and reshape is that of the values, shares memory, and writes only where it should."""

from __future__ import annotations

import re

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from subclass_testkit import oracle
from subclass_testkit.check import check, over
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import CheckFailed, Finding, NotClaimed, Refused
from subclass_testkit.script import Script, execute

_EMPTY = "w[0:0]"
_ROWS = ("w[8:16]", "w[8:]", "w[:8]", "w[-8:]", "w[3:4]", "w[8:10**9]", _EMPTY, "w[-9:-2]", "w[16:]")
_COLUMNS = ("w[:, 8:16]", "w[:, 16:]", "w[:, :16]", "w[:, -16:]", "w[:, 5:6]", "w[..., 8:16]")
_BLOCKS = ("w[8:16, 4:12]", "w[2:, :16]", "w[16:, 16:]", "w[1:9, 16:32]")
_STEPS = ("w[::2]", "w[1::3]", "w[2:15:3]", "w[:, ::2]", "w[:, 1::3]", "w[::2, ::2]")
_SELECTS = (
    "w[3]",
    "w[-2]",
    "w[:, 5]",
    "w[:, -1]",
    "w.select(0, 3)",
    "w.select(1, 5)",
    "w.select(-1, -2)",
    "w[3, 5]",
    "w.select(dim=0, index=3)",
)
_WHOLE = ("w[...]", "w[:]", "w[None]", "w[:, None]", "w[:, :]")
_NARROWS = (
    "w.narrow(0, 8, 8)",
    "w.narrow(1, 8, 8)",
    "w.narrow(-1, 8, 8)",
    "w.narrow(-2, 8, 8)",
    "w.narrow(0, -8, 8)",
    "w.narrow(dim=0, start=8, length=8)",
    "torch.narrow(w, 0, 16, 8)",
)
_PIECES = (
    "w.chunk(2)",
    "w.chunk(3)",
    "w.chunk(2, 1)",
    "w.chunk(2, dim=-1)",
    "w.chunk(100)",
    "w.split(8)",
    "w.split(7)",
    "w.split(16, 1)",
    "w.split(16, dim=-1)",
    "w.split([8, w.shape[0] - 8])",
    "w.split([16, w.shape[1] - 16], dim=1)",
    "w.tensor_split(2)",
    "w.tensor_split((4, 8), dim=1)",
    "w.unbind()",
    "w.unbind(1)",
    "w.unbind(dim=-1)",
    "torch.chunk(w, chunks=2, dim=0)",
    "torch.split(w, 8, 0)",
)
_TRANSPOSES = (
    "w.t()",
    "w.T",
    "w.mT",
    "w.transpose(0, 1)",
    "w.transpose(-1, -2)",
    "w.transpose(dim0=1, dim1=0)",
    "w.permute(1, 0)",
    "w.permute(0, 1)",
    "w.permute(-1, -2)",
    "w.swapaxes(0, 1)",
    "w.swapdims(-2, -1)",
    "w.movedim(0, 1)",
    "torch.t(w)",
)
_RESHAPES = (
    "w.view(w.shape)",
    "w.view(-1)",
    "w.view(1, *w.shape)",
    "w.view(w.shape[0], -1)",
    "w.view(w.shape[1], w.shape[0])",
    "w.view(-1, 1, w.shape[1])",
    "w.reshape(-1)",
    "w.reshape(w.shape[1], w.shape[0])",
    "w.reshape(w.shape)",
    "w.flatten()",
    "w.flatten(0, 1)",
    "w.unflatten(0, (-1, 1))",
    "w.unsqueeze(0)",
    "w.unsqueeze(-1)",
    "w.unsqueeze(0).squeeze(0)",
    "w.squeeze()",
    "w.expand(2, *w.shape)",
    "w.expand(w.shape)",
    "w.view_as(w)",
    "w.ravel()",
)
_OTHER = (
    "w.diagonal()",
    "w.diagonal(1)",
    "w.unfold(0, 4, 2)",
    "w.unfold(1, 4, 4)",
    "w.as_strided((4, 4), (w.shape[1], 1))",
    "w.as_strided((4, 4), (w.shape[1], 1), w.shape[1] + 2)",
)
_CHAINS = (
    "w.t()[8:16]",
    "w[8:16].t()",
    "w[4:16][2:8]",
    "w[:, 4:16][3]",
    "w.t().t()",
    "w[8:16].t()[2:6]",
    "w[:, 4:][:, 2:8]",
    "w[8:][:4].chunk(2)",
    "w.t()[:, 8:16]",
    "w[None][0]",
    "w[8:16][1:].t().contiguous()",
    "w.t()[5]",
    "w[::2][1:4]",
)
_EXPERTS = (
    "w[1]",
    "w[-1]",
    "w[1][8:16]",
    "w[1:3]",
    "w[:, 8:16]",
    "w[:, :, 4:12]",
    "w[1, 3]",
    "w[0].t()",
    "w.transpose(1, 2)",
    "w.transpose(-1, -2)[1]",
    "w.unbind()",
    "w.chunk(3)",
    "w[2].narrow(0, 8, 8)",
    "w.permute(0, 2, 1)",
    "w.permute(2, 0, 1)",
    "w.view(-1, w.shape[-1])",
    "w.flatten(0, 1)",
    "w[1:2].squeeze(0)",
)
_WINDOWS = (
    "w[8:16]",
    "w[3]",
    "w[:, 8:16]",
    "w[8:16, 4:12]",
    "w.t()",
    "w.t()[8:16]",
    "w.narrow(0, 16, 8)",
    "w.chunk(2)[1]",
    "w.split(8)[1]",
    "w[::2]",
    "w.view(-1)",
    "w.detach()",
    "w[8:16].detach()",
    "w[:]",
    "w.unsqueeze(0)",
    "w.unbind()[2]",
    "w.transpose(0, 1)",
)

_UPDATED = ("w[8:16]", "w.t()", "w[:, 8:16]", "w.detach()")
_UPDATES = ("v.add_(torch.full_like(plain(v), 3.0))", "v.neg_()")

_WHY_VALUES = "servers and sharding code take slices of weights; wrong rows or scales give wrong outputs, without an error"
_FIX_SLICE = "slice every inner tensor that varies along the dimension (scales, zero points) together with the data, or raise NotImplementedError"


class SlicingTests(CheckGroup):
    """Views of a subclass."""

    group = "slicing"

    def view(self, expression: str) -> None:
        """One view operation equals that of the values, with the right shape."""
        self.agree(expression, suspects={"the un-sliced tensor": "w"})

    def two_dim(self) -> None:
        """Skip where the case isn't a matrix."""
        self.need_shape(len(self.shape) == 2, "this view is one of a matrix")

    @over(*_ROWS)
    @check(axes="all", why=_WHY_VALUES, fix=_FIX_SLICE)
    def test_row_slice_carries_its_scales(self, expression: str) -> None:
        """A slice of rows is the slice of the values: each row keeps its own scale."""
        try:
            self.view(expression)
        except CheckFailed as failure:
            if expression == _EMPTY and failure.finding.kind.startswith("raised"):
                raise NotClaimed(f"no slice without rows: {failure}; see slicing/empty-slice") from failure
            raise

    @check(
        level="should",
        axes="variant",
        why="a shard of a small tensor over many ranks, or the end of a loop over chunks, is empty",
        fix="let the arithmetic of blocks take a size of 0, or raise NotImplementedError",
    )
    def test_empty_slice(self) -> None:
        """A slice without rows is empty, or is refused."""
        self.view(_EMPTY)

    @over(*_COLUMNS)
    @check(axes="all", why=_WHY_VALUES, fix=_FIX_SLICE)
    def test_column_slice(self, expression: str) -> None:
        """A slice of columns is the slice of the values, also across the border of a group; or it is refused."""
        self.two_dim()
        self.view(expression)

    @over(*_BLOCKS)
    @check(axes="all", why=_WHY_VALUES, fix=_FIX_SLICE)
    def test_block_slice(self, expression: str) -> None:
        """A slice of rows and columns at once is the slice of the values, or is refused."""
        self.two_dim()
        self.view(expression)

    @over(*_STEPS)
    @check(why=_WHY_VALUES, fix="honour the step of aten.slice for every inner tensor, or raise NotImplementedError")
    def test_strided_slice(self, expression: str) -> None:
        """A slice with a step takes every step-th row or column, or is refused."""
        self.two_dim()
        self.view(expression)

    @over(*_SELECTS)
    @check(why=_WHY_VALUES, fix="implement aten.select by the index and dim, negative ones too, or raise NotImplementedError")
    def test_select(self, expression: str) -> None:
        """A single row or column is that of the values, or is refused."""
        self.two_dim()
        self.view(expression)

    @over(*_WHOLE)
    @check(
        why="generic code indexes with `...` and `None`",
        fix="pass the arguments of aten.slice / alias / unsqueeze on to the inner tensors",
    )
    def test_trivial_index(self, expression: str) -> None:
        """An index that keeps everything keeps all values."""
        self.two_dim()
        self.view(expression)

    @over(*_NARROWS)
    @check(why="tensor-parallel weight loaders call narrow, with negative dims and keywords", fix=_FIX_SLICE)
    def test_narrow(self, expression: str) -> None:
        """narrow takes the asked part along the asked dim, negative dims and starts too, or refuses."""
        self.two_dim()
        self.view(expression)

    @over(*_PIECES)
    @check(
        why="fused projections (qkv, gate_up) are split; a lost or shifted piece changes the model",
        fix="give every piece its part of every inner tensor; mind the last, shorter piece",
    )
    def test_pieces(self, expression: str) -> None:
        """chunk, split, tensor_split and unbind give the pieces of the values, uneven ones too, or refuse."""
        self.two_dim()
        self.view(expression)

    @over(*_TRANSPOSES)
    @check(
        axes="all",
        why="aten.linear is t + mm: a transpose with wrong shape or scales breaks it",
        fix="transpose the data and swap the dims of scales and block sizes, and report the transposed shape and strides",
    )
    def test_transpose(self, expression: str) -> None:
        """A transpose has the transposed shape, strides and values; twice is the original."""
        self.two_dim()
        self.view(expression)

    @over(*_RESHAPES)
    @check(
        why="generic code flattens and unsqueezes; a view that ignores its size gives a tensor whose shape lies",
        fix="support view where groups stay intact, and raise NotImplementedError with both shapes elsewhere",
    )
    def test_reshape(self, expression: str) -> None:
        """view, reshape, flatten, unsqueeze, squeeze and expand give the values in the asked shape, or refuse."""
        self.two_dim()
        self.view(expression)

    @over(*_OTHER)
    @check(
        why="AOTAutograd replays outputs that alias inputs by as_strided",
        fix="implement it for what the format represents, and raise NotImplementedError elsewhere",
    )
    def test_other_view(self, expression: str) -> None:
        """diagonal, unfold and as_strided are right or refused."""
        self.two_dim()
        self.agree(expression)

    @over(*_CHAINS)
    @check(
        why="real code takes views of views; handlers that assume an untouched tensor go wrong at the second",
        fix="derive everything from the inner tensors' own shapes and strides, not from attributes of the first tensor",
    )
    def test_view_of_view(self, expression: str) -> None:
        """A view of a view is that of the values, or is refused."""
        self.two_dim()
        self.view(expression)

    @over(*_EXPERTS)
    @check(
        axes="experts",
        why="mixture-of-experts weights are 3-D, and servers take one expert's rows",
        fix="count dims from the end for scales and blocks, not from the front",
    )
    def test_expert_view(self, expression: str) -> None:
        """Views of a 3-D weight are those of its values, or are refused."""
        self.view(expression)

    @over(
        "F.linear(x, w[8:16])",
        "F.linear(x[:, 8:24], w[:, 8:24])",
        "F.linear(x, w[8:16][2:4])",
        "F.linear(x, w[-7:])",
        "x @ w[8:16].t()",
        "x @ w.t()[:, 8:16]",
    )
    @check(
        needs=("inference",),
        why="a sharded layer computes with slices",
        fix="make the sliced tensor's shape, scales and group size what the linear kernel expects",
    )
    def test_linear_on_slice(self, expression: str) -> None:
        """A linear with a sliced weight equals the linear with the sliced values."""
        self.two_dim()
        self.agree(
            expression,
            tolerance=self.linear_tolerance(),
            x=self.x(),
            suspects={"the result with the un-sliced weight": "F.linear(x, w)"},
        )

    @over(*_WINDOWS)
    @check(
        why="a write into a view that doesn't reach the base is lost without an error (weight loading, EMA, tensor parallel)",
        fix="make the view's inner tensors views of the base's, or refuse the write",
    )
    def test_write_through_view_reaches_the_base(self, window: str) -> None:
        """A write into a view is seen in the base, in exactly the view's elements; or the write is refused with nothing changed."""
        self.two_dim()
        script = self.script(source=self.hp(seed=3))
        script.run(f"before = plain(w).clone()\nv = {window}")
        changed = script["before"].clone()
        self._write(script, window)
        view = f"plain({window})"
        script.run("after = plain(w)")
        if not script.value("isinstance(v, type(w))", extend=False):
            script.expect(
                "torch.equal(plain(v), " + view + ")",
                f"v = {window} is a plain copy: a write into it is lost, without an error.",
                kind="lost-write",
                likely="the view decays to a new plain tensor, which shares nothing with the base.",
            )
            return
        script.expect(
            f"torch.equal(plain(v), {view})",
            f"after a write into v = {window}, v and the same view of the base differ.",
            kind="lost-write",
            likely="the view holds a copy of the data.",
        )
        mask = self._mask(window, changed)
        outside = script["after"][~mask]
        if not oracle.same_bits(outside, script["before"][~mask]):
            n = int((outside != script["before"][~mask]).sum())
            script.fail(
                f"a write into v = {window} changed {n} elements of the base outside of it.",
                kind="clobbered",
                likely="the write replaced a scale that the view shares with elements outside of it.",
                assertion="raise AssertionError('elements outside the view changed: compare before and after')",
            )

    def _write(self, script: Script, window: str) -> None:
        try:
            script.run(f"with torch.no_grad():\n    v.copy_({window.replace('w', 'source', 1)} * 0.75)")
        except Refused:
            if not oracle.same_bits(script.subject.plain(script["w"]), script["before"]):
                raise CheckFailed(
                    Finding(
                        "half-done",
                        f"the write into {window} was refused, but after it had changed the base.",
                        reproduction=script.text(),
                    )
                ) from None
            raise

    def _mask(self, window: str, like: torch.Tensor) -> torch.Tensor:
        """True at the base's elements that the window covers."""
        mask = torch.zeros(like.shape, dtype=torch.bool)
        eval(window, {"w": mask, "torch": torch}).fill_(True)  # noqa: S307  # our own text
        return mask

    @over(*((f"v = {window}; {update}", window, update) for window in _UPDATED for update in _UPDATES))
    @check(
        why="a step on a parameter that is a view (a tied head, a transposed weight) is lost without an error",
        fix="write through the view's own inner tensors (a .contiguous() of them is a copy), or refuse the update",
    )
    def test_update_of_a_view(self, name: str, window: str, update: str) -> None:
        """An in-place update of a view gives the updated values, to within a requantization, in the view and in the base; or is refused."""
        self.two_dim()
        script = self.script()
        script.run(f"v = {window}")
        if not script.value("isinstance(v, type(w))", extend=False):
            return  # the check of writes through views is about these
        # The oracle updates the same view of the plain base: an error bound holds for the base's own rows and groups.
        plain_update = re.sub(r"\bv\b", _on_plain(window), update)
        base = script["d"].clone()
        execute(plain_update, {**script.ns, "d": base})
        bound = self.requantization(script, base)
        if isinstance(bound, torch.Tensor):
            bound = execute(_on_plain(window), {"d": bound})
        script.run(f"with torch.no_grad(): _ = {update}")
        script.run(f"_ = {plain_update}\nwanted = {_on_plain(window)}")
        likely = "the update went into a copy of the inner tensors."
        script.equal("plain(v)", "wanted", label=f"v = {window} after {update}", bound=bound, likely=likely)
        script.equal(f"plain({window})", "plain(v)", label=f"{window} of the base after {update}", likely=likely)

    @over(*_WINDOWS)
    @check(
        why="code that holds a view (a tied weight, a fused projection) must see updates of the base",
        fix="make the view's inner tensors views of the base's",
    )
    def test_write_into_base_reaches_the_view(self, window: str) -> None:
        """A view taken before a write into the base shows the written values; or the write is refused."""
        self.two_dim()
        script = self.script(source=self.hp(seed=3))
        script.run(f"v = {window}\nwith torch.no_grad():\n    w.copy_(source)")
        if script.value("isinstance(v, type(w))", extend=False):
            script.equal(
                "plain(v)",
                f"plain({window})",
                label=f"v = {window}, taken before w.copy_(...),",
                likely="copy_ replaced the base's inner tensors instead of writing into them, or the view holds copies.",
            )

    @over("w[8:16]", "w.t()", "w.detach()", "w.view(w.shape)", "w[3]", "w[:, 8:16]", "w.chunk(2)[0]", "w.unsqueeze(0)")
    @check(
        level="should",
        why="code that checks isinstance, or dispatches on the class, silently takes the plain path",
        fix="return an instance of the class from view handlers",
    )
    def test_view_keeps_the_class(self, expression: str) -> None:
        """A view of the subclass is of the subclass."""
        if self.decays_by_design:
            raise NotClaimed("the class switches __torch_function__ off: what comes of it is plain")
        self.two_dim()
        script = self.script()
        script.run(f"v = {expression}")
        script.expect("isinstance(v, type(w))", f"{expression} is a plain {{type(v).__name__}}.", kind="class")

    @over(
        "w[8:16]",
        "w[::2]",
        "w[:, 8:16]",
        "w.t()",
        "w.t()[8:16]",
        "w[8:16].t()",
        "w.transpose(0, 1)",
        "w.unsqueeze(0)",
        "w.view(-1)",
        "w.expand(2, *w.shape)",
        "w[3]",
        "w[:, 5]",
    )
    @check(
        axes="one",
        why="compiled code and kernels compute addresses from the reported strides",
        fix="pass the strides of the data (after the view) to _make_wrapper_subclass",
    )
    def test_view_reports_true_strides(self, expression: str) -> None:
        """A view that shares its base's memory reports the strides that the view of a plain tensor has."""
        self.two_dim()
        script = self.script()
        script.run(f"v = {expression}")
        if script.value("isinstance(v, type(w)) and v.numel() > 1", extend=False) and shares_memory(script["w"], script["v"]):
            script.expect(
                f"v.stride() == ({_on_plain(expression)}).stride()",
                f"{expression} reports stride {{v.stride()}}, a plain tensor's is {{({_on_plain(expression)}).stride()}}.",
                kind="stride",
                likely="_make_wrapper_subclass was not given strides, so it assumed a contiguous tensor.",
            )

    @over(
        "w[8:16]",
        "w[3]",
        "w.t()",
        "w.chunk(2)",
        "w.chunk(3)",
        "w.split(8)",
        "w.unbind()",
        "w.view(-1)",
        "w.reshape(-1)",
        "w.narrow(0, 8, 8)",
        "w[:, 8:16]",
        "w.unsqueeze(0)",
        "w.expand(2, *w.shape)",
        "w.detach()",
        "w.permute(1, 0)",
    )
    @check(
        why="an operation that edits its input (a block size, a shape) breaks every later use of it",
        fix="build new attributes for the result; don't assign to self",
    )
    def test_view_leaves_its_input_alone(self, expression: str) -> None:
        """A view operation changes neither the values nor the flatten context of its input, also at the second call."""
        self.two_dim()
        script = self.script()
        before = oracle.Snapshot.of(script["w"])
        script.run(f"_ = {expression}")
        script.run(f"_ = {expression}")
        change = before.changes(script["w"])
        if change:
            script.fail(
                f"{expression} changed its input: {change}.",
                kind="mutated",
                assertion="assert repr(w.__tensor_flatten__()[1]) == before, 'the context changed'",
            )

    @over("w[8:16]", "w.t()", "w[:, 8:16]", "w[3]", "w.chunk(2)[1]", "w.detach()")
    @check(why="evaluation runs without grad", fix="don't depend on grad mode in view handlers")
    def test_view_under_no_grad(self, expression: str) -> None:
        """Views are the same under no_grad."""
        self.two_dim()
        self.agree(f"with torch.no_grad():\n    v = {expression}\nv")

    @over("w[8:16]", "w.t()", "w[:, 8:16]", "w[3]", "w.chunk(2)[1]", "w.view(-1)")
    @check(
        why="inference servers run under inference_mode, where composite operations reach the class undecomposed",
        fix="handle the composite operations (chunk, reshape, matmul) too",
        upstream="pytorch#164872, pytorch#170419",
    )
    def test_view_under_inference_mode(self, expression: str) -> None:
        """Views are the same under inference_mode, as far as torch allows."""
        self.two_dim()
        self.agree(f"with torch.inference_mode():\n    v = {expression}\nv")

    @check(axes="each", timeout=60, why=_WHY_VALUES, fix=_FIX_SLICE)
    def test_random_index(self) -> None:
        """Any index expression gives the values at that index, or is refused."""
        self.two_dim()
        rows, columns = self.shape
        texts = _index_texts(rows, columns)
        refusals: list[Refused] = []
        good = 0

        @settings(
            max_examples=25,
            derandomize=self.case.seed == 0,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        @given(texts)
        def one(text: str) -> None:
            nonlocal good
            try:
                self.agree(text)
                good += 1
            except Refused as refusal:
                refusals.append(refusal)

        one()
        if not good and refusals:
            raise refusals[0]


def _on_plain(expression: str) -> str:
    return re.sub(r"\bw\b", "d", expression)


def shares_memory(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether any inner tensor of ``view`` lies in the storage of one of ``base``."""
    homes = {t.untyped_storage().data_ptr() for t in (oracle.inner_tensors(base) or {"": base}).values()} - {0}
    return any(t.untyped_storage().data_ptr() in homes for t in (oracle.inner_tensors(view) or {"": view}).values())


def _index_texts(rows: int, columns: int) -> st.SearchStrategy[str]:
    """``w[index]`` or ``w[index, index]``, of slices, integers, ``None`` and ``...``."""

    def bound(n: int) -> st.SearchStrategy[str]:
        return st.one_of(st.just(""), st.integers(-n - 2, n + 2).map(str))

    def one(n: int) -> st.SearchStrategy[str]:
        slices = st.tuples(bound(n), bound(n), st.sampled_from(["", ":2", ":3"])).map(lambda p: f"{p[0]}:{p[1]}{p[2]}")
        return st.one_of(slices, st.integers(-n, n - 1).map(str))

    pair = st.tuples(one(rows), one(columns)).map(lambda p: f"w[{p[0]}, {p[1]}]")
    return st.one_of(one(rows).map(lambda i: f"w[{i}]"), pair, one(columns).map(lambda i: f"w[..., {i}]"))
