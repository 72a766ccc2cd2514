"""A row scale, and an optional second scale for the whole tensor: an inner tensor that may be absent."""

from __future__ import annotations

from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.registry import correct


@correct(note="from_hp makes it with the outer scale when a value exceeds 1, and without it otherwise")
class TwoScales(RowInt8):
    """Int8 whose row scales are fractions of an optional `outer_scale`; without it they are absolute."""

    inner_names = ("qdata", "scale", "outer_scale")

    @classmethod
    def quantize(cls, hp):
        qdata, scale, group, casts = super().quantize(hp)
        if scale.numel() == 0 or hp.is_meta or not bool((hp.detach().abs() > 1).any()):
            return qdata, scale, None, group, casts
        outer = scale.amax(dim=list(range(scale.dim())), keepdim=True)
        return qdata, scale / outer, outer, group, casts

    def dense(self):
        scale = self.scale if self.outer_scale is None else self.scale * self.outer_scale
        return self.qdata.to(self.scale.dtype) * scale

    def write(self, hp):
        # Each row's own scale takes all of the update: the outer scale belongs to the other rows, too.
        dims = [d for d in range(self.dim()) if self.scale.shape[d] == 1]
        qdata, scale = self.encode(hp, dims)
        self.qdata.copy_(qdata)
        self.scale.copy_(scale if self.outer_scale is None else scale / self.outer_scale)

    @classmethod
    def op_copy_(cls, func, w, src, non_blocking):
        # Copying the inner tensors would overwrite an outer scale that other rows share.
        return cls.fallback(func, (w, src, non_blocking), {})
