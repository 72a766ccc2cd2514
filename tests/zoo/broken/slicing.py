"""Defects of views: wrong rows' scales, lost sharing, lies about the layout, writes that spill."""

from __future__ import annotations

import torch

from tests.zoo.broadcast import compress
from tests.zoo.correct.asymmetric_uint8 import AsymmetricUint8
from tests.zoo.correct.lossless import Lossless
from tests.zoo.correct.packed_int4 import GROUP, PackedInt4
from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.correct.tensor_int8 import TensorInt8
from tests.zoo.correct.two_scales import TwoScales
from tests.zoo.registry import broken


@broken(group="slicing", ref="ao#1078")
class SliceKeepsFirstScales(RowInt8):
    """w[a:b] takes the scales of rows 0 to b-a."""

    @classmethod
    def op_slice(cls, func, w, dim, start, end, step):
        out = super().op_slice(func, w, dim, start, end, step)
        if dim % w.dim() == 0 and w.scale.shape[0] > 1:
            out.scale = w.scale[: out.shape[0]]
        return out


@broken(group="slicing")
class SteppedSliceIgnoresStep(RowInt8):
    """w[::2] takes consecutive scales: the step isn't passed on."""

    @classmethod
    def op_slice(cls, func, w, dim, start, end, step):
        out = super().op_slice(func, w, dim, start, end, step)
        if dim % w.dim() == 0 and w.scale.shape[0] > 1 and step != 1:
            out.scale = w.scale.narrow(0, start or 0, out.shape[0])
        return out


@broken(group="slicing")
class NegativeStartOnCodesOnly(RowInt8):
    """w[-a:] slices the codes from the end and the scales from the front."""

    @classmethod
    def op_slice(cls, func, w, dim, start, end, step):
        out = super().op_slice(func, w, dim, start, end, step)
        if dim % w.dim() == 0 and w.scale.shape[0] > 1 and start is not None and start < 0:
            out.scale = w.scale[: out.shape[0]]
        return out


@broken(group="slicing", ref="ao#2288")
class SelectUsesFirstScale(RowInt8):
    """w[k] is dequantized with the scale of row 0."""

    @classmethod
    def op_select(cls, func, w, dim, index):
        out = super().op_select(func, w, dim, index)
        if dim % w.dim() == 0:
            out.scale = compress(w.scale.expand(w.shape).select(dim, 0))
        return out


@broken(group="slicing")
class NegativeSelectOffByOne(RowInt8):
    """w[-k] takes the scale of the row before."""

    @classmethod
    def op_select(cls, func, w, dim, index):
        out = super().op_select(func, w, dim, index)
        if index < 0 and dim % w.dim() == 0:
            out.scale = compress(w.scale.expand(w.shape).select(dim, (index - 1) % w.shape[0]))
        return out


@broken(group="slicing")
class ExpertUsesFirstScales(RowInt8):
    """w[e] of a 3-D weight keeps expert 0's scales; 2-D weights are right."""

    @classmethod
    def op_select(cls, func, w, dim, index):
        out = super().op_select(func, w, dim, index)
        if w.dim() == 3 and dim % 3 == 0:
            out.scale = w.scale[0]
        return out


@broken(group="slicing")
class LastUnevenChunkWrong(RowInt8):
    """The last, shorter chunk takes its scales from the front of the tensor."""

    @classmethod
    def op_split(cls, func, w, size, dim):
        parts = super().op_split(func, w, size, dim)
        uneven = isinstance(size, int) and parts[-1].shape[0] < size
        if uneven and dim % w.dim() == 0 and w.scale.shape[0] > 1:
            parts[-1].scale = w.scale[: parts[-1].shape[0]]
        return parts


@broken(group="slicing", note="found live: chunk edits the metadata it shares with the original")
class ChunkShrinksOriginal(RowInt8):
    """chunk() along the columns shrinks the original's group size in place."""

    @classmethod
    def op_split(cls, func, w, size, dim):
        parts = super().op_split(func, w, size, dim)
        if dim % w.dim() == w.dim() - 1:
            w.group = parts[0].shape[dim]
        return parts


@broken(group="slicing")
class SquareTransposeKeepsScale(RowInt8):
    """t() of a square weight forgets to transpose the scale, which still broadcasts."""

    @classmethod
    def op_t(cls, func, w):
        out = super().op_t(func, w)
        if w.shape[0] == w.shape[1]:
            out.scale = w.scale
        return out


@broken(group="slicing")
class TransposedSliceWrong(RowInt8):
    """w.t()[:, a:b] takes the scales of the first b-a rows: the layout after t() isn't considered."""

    @classmethod
    def op_slice(cls, func, w, dim, start, end, step):
        out = super().op_slice(func, w, dim, start, end, step)
        if w.dim() == 2 and dim % 2 == 1 and w.scale.shape[0] == 1 and w.scale.shape[1] > 1:
            out.scale = w.scale[:, : out.shape[1]]
        return out


@broken(group="slicing", ref="ao#2174")
class SliceCopies(RowInt8):
    """w[a:b] copies its inner tensors: writes into it are lost."""

    @classmethod
    def op_slice(cls, func, w, *args):
        return super().op_slice(func, w, *args).map_inner(torch.clone)


@broken(group="slicing")
class SelectedRowDoesNotWriteBack(RowInt8):
    """w[k] shares the codes with w and copies the scale: a write into it corrupts row k."""

    @classmethod
    def op_select(cls, func, w, dim, index):
        out = super().op_select(func, w, dim, index)
        out.scale = out.scale.clone()
        return out


@broken(group="slicing")
class SliceDecaysToPlain(RowInt8):
    """w[a:b] is a plain, dequantized copy: the class is lost and writes are, too."""

    @classmethod
    def op_slice(cls, func, w, *args):
        return func(w.values(), *args)


@broken(group="slicing", ref="ao#2015")
class EmptySliceIndexError(RowInt8):
    """w[0:0] ends in IndexError."""

    @classmethod
    def op_slice(cls, func, w, *args):
        out = super().op_slice(func, w, *args)
        range(out.shape[args[0]])[0]
        return out


@broken(group="slicing")
class ColumnSliceReturnsAll(RowInt8):
    """narrow() along the columns keeps every column from the start on."""

    @classmethod
    def op_slice(cls, func, w, dim, start, end, step):
        if dim % w.dim() == w.dim() - 1:
            end = None
        return super().op_slice(func, w, dim, start, end, step)


@broken(group="slicing", note="live in several libraries")
class TensorScaleClobberedBySlice(TensorInt8):
    """Writing into w[a:b] replaces the scale that all other rows share."""

    def check_writable(self):
        pass


@broken(group="slicing")
class ColumnWriteRescalesRow(RowInt8):
    """Writing into w[:, a:b] replaces the row's scale and so changes the other columns."""

    def check_writable(self):
        pass


@broken(group="slicing")
class StrideIsAlwaysContiguous(RowInt8):
    """A transposed or stepped view reports contiguous strides."""

    @classmethod
    def outer(cls, named):
        size, _, offset, dtype = super().outer(named)
        return size, torch.empty(size, device="meta").stride(), offset, dtype


@broken(group="slicing")
class PackedSliceCutsGroups(PackedInt4):
    """A column slice inside a group isn't refused: it gets the scales of the first groups."""

    @classmethod
    def op_slice(cls, func, w, dim, start, end, step):
        begin, end_, _ = slice(start, end, step).indices(w.shape[dim])
        if dim % 2 == 0 or step != 1 or begin % 2 or (end_ - begin) % GROUP:
            return super().op_slice(func, w, dim, start, end, step)
        groups = (end_ - begin) // GROUP
        first = begin // GROUP
        return cls(w.qdata[:, begin // 2 : end_ // 2], w.scale[:, first : first + groups], w.casts)


@broken(group="slicing")
class ZeroPointOfFirstRows(AsymmetricUint8):
    """w[a:b] slices codes and scale, and takes the zero points of rows 0 to b-a."""

    @classmethod
    def op_slice(cls, func, w, dim, start, end, step):
        out = super().op_slice(func, w, dim, start, end, step)
        if dim % w.dim() == 0 and w.zero_point.shape[0] > 1:
            out.zero_point = w.zero_point[: out.shape[0]]
        return out


@broken(group="slicing")
class SliceDropsOuterScale(TwoScales):
    """A slice keeps the row scales and forgets the optional outer scale."""

    @classmethod
    def op_slice(cls, func, w, *args):
        out = super().op_slice(func, w, *args)
        out.outer_scale = None
        return out


@broken(group="slicing")
class UnbindReverses(RowInt8):
    """unbind() pairs each row's codes with the scales in reverse order."""

    @classmethod
    def op_unbind(cls, func, w, dim):
        parts = super().op_unbind(func, w, dim)
        scales = [part.scale for part in parts]
        for part, scale in zip(parts, reversed(scales), strict=True):
            part.scale = scale
        return parts


@broken(group="slicing")
class UnsqueezeCopies(Lossless):
    """w[None] copies the data: writes into it are lost; the other views share."""

    @classmethod
    def op_unsqueeze(cls, func, w, dim):
        return w.map_inner(lambda t: func(t, dim).clone())


@broken(group="slicing", note="the handler is right: only negative dimensions are not normalised")
class NegativeDimSlicesRows(RowInt8):
    """narrow(-1, ...) leaves the columns and slices the rows."""

    @classmethod
    def op_slice(cls, func, w, dim, start, end, step):
        return super().op_slice(func, w, 0 if dim < 0 else dim, start, end, step)
