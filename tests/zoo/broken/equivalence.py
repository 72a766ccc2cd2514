"""Defects of arithmetic: values, shapes or dtypes that differ from the dequantized tensor's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.zoo.correct.asymmetric_uint8 import AsymmetricUint8
from tests.zoo.correct.dynamic_int8 import DynamicInt8
from tests.zoo.correct.packed_int4 import GROUP, PackedInt4
from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.registry import broken


@broken(group="equivalence", note="found live in several libraries")
class KeywordBiasDropped(RowInt8):
    """linear(x, w, bias=b) forgets b; linear(x, w, b) doesn't."""

    @classmethod
    def fn_linear(cls, *args, **kwargs):
        args = args + tuple(kwargs[name] for name in ("input", "weight")[len(args) :])
        return super().fn_linear(args[0], args[1], args[2] if len(args) > 2 else None)


@broken(group="equivalence")
class BiasDroppedIn3D(RowInt8):
    """linear leaves out the bias when x has more than two dimensions."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        return super().linear_forward(x, w, None if x.dim() > 2 else bias)


@broken(group="equivalence", note="found live: asymmetric weights through a symmetric kernel")
class ZeroPointIgnoredByLinear(AsymmetricUint8):
    """linear multiplies with qdata * scale and ignores the zero point."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        return F.linear(x, (w.qdata.to(w.scale.dtype) * w.scale).to(w.dtype), bias)


@broken(group="equivalence")
class LinearOfVectorKeepsBatch(RowInt8):
    """linear of a 1-D x has a batch dimension of 1 too many."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        return super().linear_forward(x.unsqueeze(0) if x.dim() == 1 else x, w, bias)


@broken(group="equivalence")
class LinearUpcastsBfloat16(RowInt8):
    """linear in bfloat16 returns float32."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        out = super().linear_forward(x, w, bias)
        return out.float() if out.dtype == torch.bfloat16 else out


@broken(group="equivalence", ref="ao#1698")
class HalfLinearOverflows(RowInt8):
    """linear in float16 multiplies with the codes first and overflows before it is scaled down."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        if x.dtype != torch.float16 or w.dtype != torch.float16:
            return super().linear_forward(x, w, bias)
        out = F.linear(x, w.qdata.to(x.dtype)) * w.scale.expand(w.shape)[:, 0].to(x.dtype)
        return out if bias is None else out + bias


@broken(group="equivalence")
class NonContiguousInputMisread(RowInt8):
    """linear reads a transposed x in memory order."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        if x.dim() == 2 and not x.is_contiguous() and x.t().is_contiguous():
            x = x.t().reshape(x.shape)
        return super().linear_forward(x, w, bias)


@broken(group="equivalence")
class EmptyBatchIndexError(RowInt8):
    """linear of an empty batch ends in IndexError."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        range(x.numel())[0]  # the kernel looks at the first element to choose its path
        return super().linear_forward(x, w, bias)


@broken(group="equivalence")
class LinearClampsInput(RowInt8):
    """linear clamps its input in place."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        x.detach().clamp_(-1, 1)
        return super().linear_forward(x, w, bias)


@broken(group="equivalence")
class AddmmIgnoresAlphaBeta(RowInt8):
    """addmm leaves out alpha and beta."""

    @classmethod
    def op_addmm(cls, func, bias, a, b, beta, alpha):
        return cls.fallback(func, (bias, a, b), {})


@broken(group="equivalence")
class SquareMmTransposed(RowInt8):
    """mm(w, x) of a square w multiplies with its transpose."""

    @classmethod
    def op_mm(cls, func, a, b):
        if isinstance(a, cls) and a.shape[0] == a.shape[1]:
            a = a.values().t()
        return cls.fallback(func, (a, b), {})


@broken(group="equivalence")
class CatUsesFirstScales(RowInt8):
    """cat of two subclasses uses the first one's scales for both."""

    @classmethod
    def op_cat(cls, func, tensors, dim):
        first = tensors[0]
        if all(isinstance(t, cls) and t.shape == first.shape for t in tensors):
            values = [(t.qdata.to(first.scale.dtype) * first.scale).to(t.dtype) for t in tensors]
            return func(values, dim)
        return cls.fallback(func, (tensors, dim), {})


@broken(group="equivalence")
class EmbeddingUsesFirstScale(RowInt8):
    """embedding dequantizes every row with the scale of row 0."""

    @classmethod
    def op_embedding(cls, func, w, indices, *rest):
        return func((w.qdata.to(w.scale.dtype) * w.scale[:1]).to(w.dtype), indices, *rest)


@broken(group="equivalence")
class ScalarMulLosesSign(RowInt8):
    """w * s keeps the class and scales by the absolute value of s: a scale can't be negative."""

    @classmethod
    def op_mul(cls, func, a, b, *out):
        if isinstance(a, cls) and isinstance(b, float | int) and not out:
            return cls(a.qdata.clone(), a.scale * abs(b), a.group, a.casts)
        return cls.fallback(func, (a, b), {"out": out[0]} if out else {})


@broken(group="equivalence")
class ReversedSubtraction(RowInt8):
    """plain - w gives w - plain."""

    @classmethod
    def op_sub(cls, func, a, b, alpha, *out):
        if not isinstance(a, cls):
            a, b = b, a
        return cls.fallback(func, (a, b), {"alpha": alpha} | ({"out": out[0]} if out else {}))


@broken(group="equivalence")
class SumIgnoresKeepdim(RowInt8):
    """sum(dim, keepdim=True) drops the dimension."""

    @classmethod
    def op_sum(cls, func, w, *args):
        if len(args) == 3:
            return cls.fallback(func, (w, args[0]), {"dtype": args[2]})
        return cls.fallback(func, (w,), {"dtype": args[0]} if args else {})


@broken(group="equivalence")
class EqualComparesCodes(RowInt8):
    """torch.equal compares the codes, and not the scales."""

    @classmethod
    def op_equal(cls, func, a, b):
        if isinstance(a, cls) and isinstance(b, cls):
            return func(a.qdata, b.qdata)
        return cls.fallback(func, (a, b), {})


@broken(group="equivalence")
class ClampIgnoresMax(RowInt8):
    """clamp(max=m) without min is ignored."""

    @classmethod
    def op_clamp(cls, func, w, low, high, *out):
        return w.values() if low is None else cls.fallback(func, (w, low, high), {"out": out[0]} if out else {})


@broken(group="equivalence")
class OutNotWritten(RowInt8):
    """torch.add(w, x, out=o) returns the sum and leaves o as it was."""

    @classmethod
    def op_add(cls, func, a, b, alpha, *out):
        return cls.fallback(torch.ops.aten.add.Tensor, (a, b), {"alpha": alpha})


@broken(group="equivalence")
class LastGroupUsesPreviousScale(PackedInt4):
    """linear uses the last but one group's scale for the last group."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        groups = w.scale.shape[1]
        index = torch.arange(groups).clamp(max=max(groups - 2, 0))
        return F.linear(x, cls(w.qdata, w.scale[:, index], w.casts).values(), bias)


@broken(group="equivalence", note=f"groups are {GROUP} wide")
class MmUsesFirstGroupScale(PackedInt4):
    """x @ w dequantizes with each row's first group scale; linear and dequantize() are right."""

    @classmethod
    def op_mm(cls, func, a, b):
        first = lambda t: cls(t.qdata, t.scale[:, :1].expand(t.scale.shape), t.casts)  # noqa: E731
        return func(*(first(t).values() if isinstance(t, cls) else t for t in (a, b)))


@broken(group="equivalence")
class ActivationScaleOfFirstRow(DynamicInt8):
    """Every activation row is quantized with the first row's scale, and larger ones are clipped."""

    @classmethod
    def linear_forward(cls, x, w, bias):
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] > 1:
            codes_scale = cls.encode(rows[:1], [1])[1]
            codes = (rows / codes_scale).round().clamp(-127, 127)
            x = (codes * codes_scale).to(x.dtype).reshape(x.shape)
        return super().linear_forward(x, w, bias)


@broken(group="equivalence")
class KeywordWeightIgnoresScale(RowInt8):
    """linear(x, weight=w) takes a different path, which multiplies with row 0's scale."""

    @classmethod
    def fn_linear(cls, *args, **kwargs):
        if "weight" in kwargs and isinstance(kwargs["weight"], cls):
            w = kwargs["weight"]
            kwargs["weight"] = cls(w.qdata, w.scale[:1].expand(w.scale.shape), w.group, w.casts)
        return super().fn_linear(*args, **kwargs)


@broken(group="equivalence")
class OddMvDropsLast(RowInt8):
    """mv(w, x) drops the result's last element when w has an odd number of rows."""

    @classmethod
    def op_mv(cls, func, w, x):
        out = cls.fallback(func, (w, x), {})
        return out[:-1] if w.shape[0] % 2 else out
