"""A view is the view of the values, in every way to write it."""

from __future__ import annotations

from subclass_testkit.check import check, over
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import CheckFailed, NotClaimed

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
WHY_VALUES = "servers and sharding code take slices of weights; wrong rows or scales give wrong outputs, without an error"
FIX_SLICE = "slice every inner tensor that varies along the dimension (scales, zero points) together with the data, or raise NotImplementedError"


class ViewValueChecks(CheckGroup):
    """Slices, selects, transposes and reshapes, and linears with them."""

    def view(self, expression: str) -> None:
        """One view operation equals that of the values, with the right shape."""
        self.agree(expression, suspects={"the un-sliced tensor": "w"})

    def two_dim(self) -> None:
        """Skip where the case isn't a matrix."""
        self.need_shape(len(self.shape) == 2, "this view is one of a matrix")

    @over(*_ROWS)
    @check(axes="all", why=WHY_VALUES, fix=FIX_SLICE)
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
    @check(axes="all", why=WHY_VALUES, fix=FIX_SLICE)
    def test_column_slice(self, expression: str) -> None:
        """A slice of columns is the slice of the values, also across the border of a group; or it is refused."""
        self.two_dim()
        self.view(expression)

    @over(*_BLOCKS)
    @check(axes="all", why=WHY_VALUES, fix=FIX_SLICE)
    def test_block_slice(self, expression: str) -> None:
        """A slice of rows and columns at once is the slice of the values, or is refused."""
        self.two_dim()
        self.view(expression)

    @over(*_STEPS)
    @check(why=WHY_VALUES, fix="honour the step of aten.slice for every inner tensor, or raise NotImplementedError")
    def test_strided_slice(self, expression: str) -> None:
        """A slice with a step takes every step-th row or column, or is refused."""
        self.two_dim()
        self.view(expression)

    @over(*_SELECTS)
    @check(why=WHY_VALUES, fix="implement aten.select by the index and dim, negative ones too, or raise NotImplementedError")
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
    @check(why="tensor-parallel weight loaders call narrow, with negative dims and keywords", fix=FIX_SLICE)
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
