"""Defects of the protocol: flatten and unflatten, repr, storage access, global state, construction."""

from __future__ import annotations

import torch

from tests.zoo.broadcast import reduce_dims, wide
from tests.zoo.correct.asymmetric_uint8 import AsymmetricUint8
from tests.zoo.correct.lossless import Lossless
from tests.zoo.correct.packed_int4 import GROUP, PackedInt4
from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.correct.two_scales import TwoScales
from tests.zoo.registry import broken


@broken(group="protocol")
class ContextHoldsTensor(RowInt8):
    """The scale is in the flatten context, not among the inner tensors."""

    def __tensor_flatten__(self):
        return ["qdata"], (self.scale, self.group, self.casts)

    @classmethod
    def __tensor_unflatten__(cls, inner, ctx, outer_size, outer_stride):
        return cls(inner["qdata"], *ctx, size=outer_size, stride=outer_stride)


@broken(group="protocol")
class UnflattenLosesTag(Lossless):
    """The tag isn't in the flatten context: a rebuilt tensor has the default."""

    def __tensor_flatten__(self):
        return ["data_"], ()

    @classmethod
    def __tensor_unflatten__(cls, inner, ctx, outer_size, outer_stride):
        return cls(inner["data_"], "", size=outer_size, stride=outer_stride)


@broken(group="protocol", ref="ao#4575")
class UnflattenDropsOptional(TwoScales):
    """The optional outer scale isn't flattened: a rebuilt tensor has other values."""

    def __tensor_flatten__(self):
        return ["qdata", "scale"], (self.group, self.casts)


@broken(group="protocol", ref="ao#297")
class ReprCrashesOnMeta(RowInt8):
    """repr() prints the scale's range, which a meta tensor hasn't got."""

    def __repr__(self, *, tensor_contents=None):
        low, high = (float(self.scale.min()), float(self.scale.max())) if self.numel() else (0.0, 0.0)
        return f"{type(self).__name__}(shape={tuple(self.shape)}, scale={low:.3g}..{high:.3g})"


@broken(group="protocol", ref="ao#622")
class ReprPrintsEverything(RowInt8):
    """repr() prints every code."""

    def __repr__(self, *, tensor_contents=None):
        return f"{type(self).__name__}({self.qdata.tolist()}, {self.scale.tolist()})"


@broken(group="protocol")
class NumpyGivesCodes(RowInt8):
    """numpy() returns the integer codes as if they were the values."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.numpy:
            return args[0].qdata.numpy()
        return super().__torch_function__(func, types, args, kwargs)


@broken(group="protocol")
class ConstructorUsesGenerator(RowInt8):
    """from_hp draws a random number, so that seeded programs change."""

    @classmethod
    def quantize(cls, hp):
        torch.rand(1)
        return super().quantize(hp)


@broken(group="protocol")
class LeavesGradModeOff(RowInt8):
    """dequantize() turns grad mode off and doesn't turn it on again."""

    def dequantize(self):
        out = super().dequantize()
        torch.set_grad_enabled(False)
        return out


@broken(group="protocol")
class LinearSetsDefaultDtype(RowInt8):
    """linear sets torch's default dtype to the weight's."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        if w.dtype != torch.float32:
            torch.set_default_dtype(w.dtype)
        return super().linear_forward(x, w, bias)


@broken(group="protocol")
class ReferenceCycle(RowInt8):
    """Each tensor refers to itself: its memory waits for the cycle collector."""

    def __init__(self, *fields, size=None, stride=None):
        super().__init__(*fields, size=size, stride=stride)
        self.owner = [self]

    def extra_state(self):
        return {name: value for name, value in super().extra_state().items() if name != "owner"}


@broken(group="protocol", ref="ao#4713")
class ZeroRowIsNan(RowInt8):
    """A zero row has scale 0 and the values NaN."""

    @classmethod
    def encode(cls, hp, dims):
        qdata, scale = super().encode(hp, dims)
        return qdata, torch.where(reduce_dims(torch.amax, wide(hp).abs(), dims) == 0, torch.nan, scale)


@broken(group="protocol", ref="ao#4762")
class TinyRowsUnderflow(RowInt8):
    """The scale is rounded to float16 first: rows of tiny values become infinite or NaN."""

    @classmethod
    def encode(cls, hp, dims):
        values = wide(hp)
        scale = (reduce_dims(torch.amax, values.abs(), dims) / 127).half().to(values.dtype)
        codes = values / torch.where(values == 0, 1, scale)
        return cls.round_codes(codes), torch.where(scale == 0, torch.inf, scale)


@broken(group="protocol")
class NotIdempotent(RowInt8):
    """The scale has 5% of headroom: each round trip through from_hp shifts the values."""

    @classmethod
    def encode(cls, hp, dims):
        scale = super().encode(hp, dims)[1] * 1.05
        return cls.round_codes(wide(hp) / scale), scale


@broken(group="protocol", ref="ao#3664")
class NonContiguousSourceMisread(RowInt8):
    """from_hp reads a transposed source in memory order."""

    @classmethod
    def quantize(cls, hp):
        if hp.dim() == 2 and not hp.is_contiguous() and hp.t().is_contiguous():
            hp = hp.t().reshape(hp.shape)
        return super().quantize(hp)


@broken(group="protocol", ref="pt#162964")
class InnerRequiresGrad(RowInt8):
    """The scale requires grad."""

    @classmethod
    def quantize(cls, hp):
        qdata, scale, group, casts = super().quantize(hp)
        return qdata, scale.detach().requires_grad_(), group, casts

    def write(self, hp):
        with torch.no_grad():
            super().write(hp)


@broken(group="protocol", ref="ao#710")
class HidesDenseTensor(RowInt8):
    """The source is kept in an attribute that flatten doesn't name: nothing is saved, and moves forget it."""

    @classmethod
    def from_hp(cls, hp):
        out = super().from_hp(hp)
        out.original = hp.detach()
        return out


@broken(group="protocol", ref="pt#68265")
class ReportsFloat32(RowInt8):
    """The dtype is reported as float32 whatever the source's."""

    @classmethod
    def outer(cls, named):
        return *super().outer(named)[:3], torch.float32


@broken(group="protocol")
class FlattenNotRepeatable(RowInt8):
    """Each __tensor_flatten__ gives a different context: it counts its calls."""

    attr_names = ("group", "casts", "uses")

    @classmethod
    def quantize(cls, hp):
        return (*super().quantize(hp), 0)

    def __tensor_flatten__(self):
        self.uses += 1
        return super().__tensor_flatten__()


class _Sizes(list):
    """Sizes that are compared element by element, as an array's are."""

    def __eq__(self, other):
        return [a == b for a, b in zip(self, other, strict=False)]

    __hash__ = None


@broken(group="protocol")
class ContextEqualityIsAList(RowInt8):
    """Comparing two contexts gives a list, which is true even where they differ."""

    def __tensor_flatten__(self):
        names, ctx = super().__tensor_flatten__()
        return names, _Sizes(ctx)


@broken(group="protocol")
class ConstantRowsCollapse(AsymmetricUint8):
    """The range needn't include 0: a constant row has no range, and is 0."""

    @classmethod
    def encode(cls, hp, dims):
        qdata, scale, zero_point = super().encode(hp, dims)
        values = wide(hp)
        constant = reduce_dims(torch.amax, values, dims) == reduce_dims(torch.amin, values, dims)
        return torch.where(constant, zero_point.to(torch.uint8), qdata), scale, zero_point


@broken(group="protocol")
class OddTailDropped(PackedInt4):
    """Columns beyond the last full group are dropped without an error."""

    @classmethod
    def quantize(cls, hp):
        return super().quantize(hp[:, : hp.shape[1] // GROUP * GROUP] if hp.dim() == 2 else hp)


@broken(group="protocol", max_error="hp.double().abs().amax(-1, keepdim=True) * (0.5 / 127 + torch.finfo(d.dtype).eps)")
class OutlierSaturates(RowInt8):
    """The scale is clipped to ten times the row's mean: one huge outlier is cut off."""

    @classmethod
    def encode(cls, hp, dims):
        values = wide(hp).abs()
        limit = reduce_dims(torch.mean, values, dims) * 10 / 127
        scale = torch.minimum(super().encode(hp, dims)[1], limit.clamp(min=torch.finfo(torch.float32).tiny))
        return cls.round_codes(wide(hp) / scale), scale


@broken(group="protocol", ref="pt#162964")
class ForeignSubclassMisread(RowInt8):
    """An unknown other subclass in an operation is taken for zeros, not refused."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        known = [t for t in types if t is torch.nn.Parameter or t is torch.Tensor or issubclass(t, RowInt8)]
        foreign = set(types) - set(known)
        if foreign and not torch.compiler.is_compiling() and len(args) == 2:
            zero = lambda t: torch.zeros(t.shape, dtype=t.dtype) if type(t) in foreign else t  # noqa: E731
            args = tuple(zero(arg) for arg in args)
        return super().__torch_dispatch__(func, known, args, kwargs)
