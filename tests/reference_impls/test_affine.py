"""`AffineQuantizedTensor`: every mapping, granularity and layout against values computed by torch's own operators, and its kernels."""

import io

import pytest
import torch
import torch.nn.functional as F

from reference_impls import AffineQuantizedTensor, Int4Layout, Int4Tensor, PlainLayout, UintxLayout, UintxTensor
from reference_impls.kernels.affine_linear import affine_linear
from reference_impls.kernels.int4_words import int4_words_linear
from reference_impls.kernels.packed_linear import uintx_weight_only_linear
from reference_impls.linear import record_kernels

HP = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 3, 6)[:, None] + 0.4
X = torch.linspace(-1, 1, 96).sin().reshape(3, 32)


def made(layout, *arguments):
    return AffineQuantizedTensor.from_hp(HP, layout, *arguments)


FORMATS = {
    "uint8 rows": (PlainLayout(), "asymmetric", 0, 255),
    "int8 tensor": (PlainLayout(), "symmetric", -128, 127, "tensor"),
    "blocks of 2x8": (PlainLayout(), "asymmetric", 0, 15, (2, 8)),
    "int8 with zero point": (PlainLayout(), "asymmetric", -128, 127, 8),
    "float zero": (UintxLayout(4), "float_zero", 0, 15, 8),
    "int3": (UintxLayout(3), "symmetric", -4, 3, 16),
    "uint7": (UintxLayout(7), "asymmetric", 0, 127, 8),
    "int4 words": (Int4Layout(), "symmetric", -8, 7, 16),
    "int4 words with zero point": (Int4Layout(), "asymmetric", -8, 7, (2, 8)),
    "uint4 words": (Int4Layout(), "asymmetric", 0, 15, 8),
    "float zero words": (Int4Layout(), "float_zero", 0, 15, 8),
}
KERNELS = {
    PlainLayout: ("affine_plain", affine_linear, lambda impl: (impl.qdata,)),
    UintxLayout: ("uintx_weight_only", uintx_weight_only_linear, lambda i: (list(i.blocks.codes), i.bits, i.packed_dim)),
    Int4Layout: ("int4_words", int4_words_linear, lambda impl: (impl.words, impl.packed_dim)),
}


@pytest.mark.parametrize(("layout", "last"), [(PlainLayout(), 31), (UintxLayout(5), 31), (Int4Layout(), 15)])
def test_rows_are_what_torch_fakes(layout, last):
    w = made(layout, "asymmetric", 0, last)
    scale, zero = w.tensor_impl.scale[:, 0], w.tensor_impl.zero_point[:, 0]
    assert torch.equal(w.dequantize(), torch.fake_quantize_per_channel_affine(HP, scale, zero, 0, 0, last))
    rows = torch.cat([HP, torch.zeros(6, 1)], 1)
    torch.testing.assert_close(scale, (rows.amax(1) - rows.amin(1)) / last)


def test_it_is_what_the_plain_class_is():
    w, plain = made(UintxLayout(3), "asymmetric", 0, 7, 16), UintxTensor.from_hp(HP, 3, 16)
    assert torch.equal(w.dequantize(), plain.dequantize())
    assert torch.equal(w.tensor_impl.shard2, plain.shard2)
    assert torch.equal(made(Int4Layout(), "symmetric", -7, 7, 16).dequantize(), Int4Tensor.from_hp(HP, 16).dequantize())


@pytest.mark.parametrize("arguments", FORMATS.values(), ids=FORMATS)
def test_views_writes_and_files(arguments):
    w = made(*arguments)
    d = w.dequantize()
    assert torch.equal(w.t()[8:16].dequantize(), d.t()[8:16])
    with torch.no_grad():
        w[2:4].copy_(HP[2:4] * 10) if w.block_size[0] in (1, 2) else w.copy_(HP * 10)
        expected = made(*arguments)
        expected.copy_(HP * 10)
    assert torch.equal(w[2:4].dequantize(), expected[2:4].dequantize())
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    loaded = torch.load(file)  # weights_only
    assert torch.equal(loaded.dequantize(), w.dequantize())
    assert (loaded._layout, loaded.mapping) == (arguments[0], arguments[1])
    assert loaded.preserve_zero == (arguments[1] != "float_zero")


@pytest.mark.parametrize("arguments", FORMATS.values(), ids=FORMATS)
def test_zeroing_is_exact(arguments):
    w = made(*arguments)
    with torch.no_grad():
        w.zero_()
    assert (w.dequantize() == 0).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "arguments", [*FORMATS.values(), (PlainLayout(), "float_zero", -3, 3, 8)], ids=[*FORMATS, "half a code"]
)
def test_padding_with_whole_blocks_keeps_the_class(arguments, transposed):
    w = made(*arguments)
    rows, columns = w.block_size
    for pad in ([0, 0, rows, 0], [0, 0, 0, 2 * rows], [columns, columns, rows, rows]):
        if transposed:
            pad = pad[2:] + pad[:2]
        padded, expected = (F.pad(v.t() if transposed else v, pad) for v in (w, w.dequantize()))
        assert type(padded) is AffineQuantizedTensor
        assert torch.equal(padded.dequantize(), expected)


@pytest.mark.parametrize("arguments", FORMATS.values(), ids=FORMATS)
def test_padding_with_anything_else_gives_values(arguments):
    w = made(*arguments).to(torch.float16)
    for pad, value in (([0, 0, 0, 4], 2.0), ([-1, 0], 0.0), ([1, 0], 0.1)):
        padded = F.pad(w, pad, value=value)
        assert (type(padded), padded.dtype) == (torch.Tensor, torch.float16)
        assert torch.equal(padded, F.pad(w.dequantize(), pad, value=value))


@pytest.mark.parametrize("arguments", FORMATS.values(), ids=FORMATS)
def test_the_kernel_of_the_layout_runs(arguments):
    w = made(*arguments)
    with record_kernels() as ran:
        out = F.linear(X, w)
    assert ran == [KERNELS[type(arguments[0])][0]]
    torch.testing.assert_close(out, F.linear(X, w.dequantize()))


@pytest.mark.parametrize("arguments", FORMATS.values(), ids=FORMATS)
def test_opcheck(arguments):
    _, operator, codes = KERNELS[type(arguments[0])]
    for impl, x in ((made(*arguments).tensor_impl, X), (made(*arguments).tensor_impl.t(), X[:, :6])):
        bias = torch.linspace(0, 1, impl.shape[0]).requires_grad_()
        rest = (impl.scale, impl.zero_point, impl.quant_min, impl.quant_max, bias)
        torch.library.opcheck(operator, (x.clone().requires_grad_(), *codes(impl), *rest))


@pytest.mark.parametrize("arguments", FORMATS.values(), ids=FORMATS)
def test_no_gradient_of_a_parameter_is_lost(arguments):
    impl, bias = made(*arguments).tensor_impl, torch.linspace(0, 1, 6, dtype=torch.float64).requires_grad_()
    x, scale = X.double().requires_grad_(), impl.scale.double().requires_grad_()
    zero = impl.zero_point.double().requires_grad_() if arguments[1] == "float_zero" else impl.zero_point
    _, operator, codes = KERNELS[type(arguments[0])]

    def linear(x, scale, bias, *zero_point):
        return operator(x, *codes(impl), scale, *(zero_point or (zero,)), impl.quant_min, impl.quant_max, bias)

    assert torch.autograd.gradcheck(linear, (x, scale, bias, *([zero] if arguments[1] == "float_zero" else [])))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((PlainLayout(), "affine"), "mapping 'affine' is unknown"),
        ((PlainLayout(), "asymmetric", 0, 999), "0..999 fit neither"),
        ((UintxLayout(3), "asymmetric", 0, 15), "don't fit into 3 bits"),
        ((UintxLayout(9), "asymmetric", 0, 15), "9 bits can't be packed"),
        ((Int4Layout(), "asymmetric", 0, 16), r"0\.\.16 are neither"),
        ((Int4Layout(), "asymmetric", -9, 6), r"-9\.\.6 are neither"),
        ((Int4Layout(), "asymmetric", -1, 8), r"-1\.\.8 are neither"),
        ((Int4Layout(), "asymmetric", 0, 15, 4), "a group of 4 elements cuts a word"),
        ((PlainLayout(), "asymmetric", 0, 15, (4, 8)), r"\(4, 8\) doesn't divide the shape \(6, 32\)"),
        ((PlainLayout(), "asymmetric", 0, 15, 5), "group size 5 doesn't divide"),
    ],
)
def test_misuse_is_said(arguments, text):
    with pytest.raises(ValueError, match=text):
        made(*arguments)
