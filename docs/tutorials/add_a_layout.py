"""Add a layout and a kernel: ternary weights in two bit-planes, with a linear that has no multiplications.

    python docs/tutorials/add_a_layout.py

`AffineQuantizedTensor` holds weights in any affine format; how codes are packed is its layout's business. This script adds a layout
from outside: nothing in `reference_impls` is changed, and everything below could be a package of yours.

The format is that of BitNet b1.58 (Ma et al. 2024): each weight is -1, 0 or 1 times a scale. In memory that is two planes of bits: one
has a 1 where the weight is +1, the other where it is -1.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd

from reference_impls import AffineQuantizedTensor
from reference_impls.affine import Layout, TensorImpl
from reference_impls.block_tensor import checked_dtype
from reference_impls.kernels.affine_linear import affine_linear
from reference_impls.kernels.packing import pack, unpack
from reference_impls.linear import QuantizedLinearNotImplementedError, kernels_for, kernels_in, override_kernels, record_kernels
from reference_impls.linear import register_linear_kernel as register
from reference_impls.packed_tensor import PackedTensor, packed_wrapper
from subclass_testkit import Subject, check_subclass

# 1. The layout: a value that says how codes are packed. It refuses what it can't hold; silently clipped codes would be silently wrong
#    weights. Parameters of a packing would be fields: two layouts with equal fields are equal, and a compiled graph is made for each.


@dataclass(frozen=True)
class TernaryLayout(Layout):
    """Codes -1, 0 and 1, symmetric, eight to a byte in each of two planes along the last dimension."""

    def pack(self, codes, scale, zero_point, quant_min, quant_max):
        if (quant_min, quant_max) != (-1, 1) or zero_point is not None:
            raise ValueError(f"TernaryLayout holds symmetric codes -1..1, not {quant_min}..{quant_max}; mapping='symmetric'.")
        plus, minus = planes_of(codes, dim=-1)
        return TernaryImpl(plus, minus, scale, packed_dim=codes.dim() - 1, dtype=scale.dtype)


def planes_of(codes, dim):
    (plus,), (minus,) = pack((codes > 0).to(torch.uint8), 1, dim), pack((codes < 0).to(torch.uint8), 1, dim)
    return plus, minus


# 2. The impl: what is held. Its inner tensors are named once; taking it apart, copies, moves, files and views follow from the names. Views
#    act on each plane by itself, because a plane is an ordinary tensor with an eighth of the entries along one dimension: rows can be
#    sliced freely, columns at whole bytes. Codes equal to 0 must be bytes equal to 0: zero_() and padding rely on it.


class TernaryImpl(TensorImpl, PackedTensor):
    inner_names = ("plus", "minus", "scale")
    attribute_names = ("packed_dim", "quant_min", "quant_max", "dtype", "shares_scale")
    code_names = ("plus", "minus")
    zero_point = None  # symmetric

    @staticmethod
    def __new__(
        cls,
        plus,
        minus,
        scale,
        packed_dim=1,
        quant_min=-1,
        quant_max=1,
        dtype=torch.float32,
        shares_scale=False,
        outer_size=None,
        outer_stride=None,
    ):
        checked_dtype(scale, dtype, plus=plus, minus=minus)
        return packed_wrapper(cls, plus, 1, packed_dim, dtype, outer_size, outer_stride)

    @property
    def _layout(self):
        return TernaryLayout()

    def codes(self):
        plus, minus = (unpack([plane], 1, self.packed_dim).to(torch.int8) for plane in (self.plus, self.minus))
        return plus - minus

    def write_codes(self, codes):
        # into the tensors that are there: new ones would leave every alias with the old values
        for plane, new in zip((self.plus, self.minus), planes_of(codes, self.packed_dim), strict=True):
            plane.copy_(new)

    def packed_along(self, dim):
        return list(planes_of(self.codes(), dim))


torch.serialization.add_safe_globals([TernaryLayout, TernaryImpl])  # torch.load loads nothing that isn't listed


# 3. The operator. A custom operator is one call for torch.compile and torch.export, and can get a CUDA implementation later. Its `fake` says
#    shape and dtype of the result without computing it. It needs no gradient: the linear around it has one.
#
#    A sum of the inputs where the weight is +1, less the sum where it is -1; one scale a row is left for the end. The sums are as
#    precise as the scale or more: in float16 they could overflow before the scale makes them small. (This implementation shows what is computed,
#    not how fast it could be: it multiplies by the bits.)


@torch.library.custom_op("tutorial::ternary_linear", mutates_args=())
def ternary_linear(
    x: torch.Tensor, plus: torch.Tensor, minus: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (..., K) with planes (N, K / 8) of bits along K, scales (N, 1), bias (N,)."""
    exact = x.to(torch.promote_types(x.dtype, scale.dtype))
    added, subtracted = (exact @ unpack([plane], 1).to(exact.dtype).t() for plane in (plus, minus))
    out = ((added - subtracted) * scale.flatten()).to(x.dtype)
    return out if bias is None else out + bias


@ternary_linear.register_fake
def _(x, plus, minus, scale, bias=None):
    return x.new_empty((*x.shape[:-1], plus.shape[0]))


# 4. The kernels. Each has a name, a precedence, which must differ from all others of the class, and a condition, which says why the kernel
#    doesn't apply, or None. The fast one is tried first. The other takes any scales and a transposed weight, so that the format has no
#    holes; it uses an operator that is there.


def why_not_ternary(x, weight, bias):
    return None if isinstance(weight.tensor_impl, TernaryImpl) else f"its layout is {weight._layout}"


def why_not_rows(x, weight, bias):
    if reason := why_not_ternary(x, weight, bias):
        return reason
    if weight.tensor_impl.packed_dim != 1 or weight.tensor_impl.scale.shape[1] != 1:
        return f"it takes one scale a row, and packed rows; the blocks are {weight.block_size}"
    return None


@register(AffineQuantizedTensor, "ternary_rows", precedence=11, when=why_not_rows, op=ternary_linear)
def _(x, weight, bias):
    impl = weight.tensor_impl
    return ternary_linear(x, impl.plus, impl.minus, impl.scale, bias)


@register(AffineQuantizedTensor, "ternary_blocks", precedence=10, when=why_not_ternary)
def _(x, weight, bias):
    impl = weight.tensor_impl
    return affine_linear(x, impl.codes(), impl.scale, None, -1, 1, bias)


# 5. Which kernel runs? One that is never chosen gives right results too, only slowly; so look.


def ternary(hp, granularity="row"):
    return AffineQuantizedTensor.from_hp(hp, TernaryLayout(), "symmetric", -1, 1, granularity)


def watch():
    torch.manual_seed(0)
    hp, x, bias = torch.randn(32, 64), torch.randn(4, 64), torch.randn(32)
    rows, groups = ternary(hp), ternary(hp, 16)
    stored = sum(t.nbytes for t in (rows.tensor_impl.plus, rows.tensor_impl.minus))
    print(f"{hp.numel()} weights in {stored} bytes, which is {8 * stored / hp.numel():g} bits each")
    print("tried in this order:", ", ".join(kernel.name for kernel in kernels_for(AffineQuantizedTensor)))

    for name, weight in {"rows": rows, "groups": groups, "transposed": ternary(hp.t(), "row").t()}.items():
        with record_kernels() as ran:
            out = F.linear(x, weight, bias)
        torch.testing.assert_close(out, F.linear(x, weight.dequantize(), bias))
        print(f"a weight with scales of {name}: {', '.join(ran)}")

    # the same in a compiled program, where the choice is made once, when it is traced
    graphs = []
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graphs.append(graph) or graph)
    with torch.no_grad():
        torch.compile(F.linear, backend=backend, fullgraph=True)(x, rows, bias)
    print("in the compiled graph:", ", ".join(kernels_in(graphs[0])))
    assert kernels_in(graphs[0]) == ["ternary_rows"]

    torch.library.opcheck(ternary_linear, (x, *rows.tensor_impl.inner_tensors.values(), bias))

    # with one kernel only, what isn't for it is refused, and the error says why
    try:
        with override_kernels(AffineQuantizedTensor, ["ternary_rows"]):
            F.linear(x, groups)
    except QuantizedLinearNotImplementedError as error:
        print("refused:", error)


# 6. Does it hold? The kit tries all that people do with weights. It finds what the lines above don't: a product with `scale.t()` instead of
#    `scale.flatten()` is right but for an input of one dimension; one in the scale's dtype is right but for a float64 input.


def main():
    watch()
    report = check_subclass(
        Subject(
            AffineQuantizedTensor,
            name="ternary AffineQuantizedTensor",
            make=ternary,
            to_plain=AffineQuantizedTensor.dequantize,
            multiples_of=(1, 8),
            max_error=lambda hp, d: hp.abs().amax(-1, keepdim=True) * 0.5001 + torch.finfo(hp.dtype).tiny,
            claims=("inference", "training", "compile", "export", "serialization", "devices", "serving"),
        )
    )
    print(report)
    if not report.ok:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
