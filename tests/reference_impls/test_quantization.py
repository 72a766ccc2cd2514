"""The affine quantization primitives against hand-computed values and torch's own operators, bit for bit where they agree."""

import math

import pytest
import torch
from torch.ao.quantization.fx import _decomposed  # noqa: F401  (registers torch.ops.quantized_decomposed)

from reference_impls.kernels import quantization
from reference_impls.kernels.quantization_ops import (
    choose_qparams_affine,
    dequantize_affine,
    fake_quantize_affine,
    quantize_affine,
)

decomposed = torch.ops.quantized_decomposed

BLOCKS = {"row": (1, 8), "tensor": (6, 8), "group": (1, 4), "square": (2, 2)}


def source(seed=0, dtype=torch.float32, shape=(6, 8)):
    """Each row has a magnitude and an offset of its own; the first lies wholly above zero."""
    torch.manual_seed(seed)
    x = torch.randn(shape, dtype=dtype) * torch.arange(1, shape[0] + 1, dtype=dtype)[:, None] + 0.3
    x[0] = x[0].abs() + 1
    return x


def test_asymmetric_by_hand():
    x = torch.tensor([[-1.0, 0.0, 2.0, 0.24], [3.0, 6.0, 1.0, 2.0], [-8.0, -16.0, -4.0, -30.0]])
    scale, zero = quantization.choose_asymmetric(x, (1, 4), 0, 15)
    torch.testing.assert_close(scale, torch.tensor([[0.2], [0.4], [2.0]]))
    assert zero.tolist() == [[5], [0], [15]]
    codes = quantization.quantize(x, scale, zero, 0, 15, torch.uint8)
    assert codes.tolist() == [[0, 5, 15, 6], [8, 15, 2, 5], [11, 7, 13, 0]]
    values = quantization.dequantize(codes, scale, zero, torch.float32)
    torch.testing.assert_close(values, torch.tensor([[-1.0, 0.0, 2.0, 0.2], [3.2, 6.0, 0.8, 2.0], [-8.0, -16.0, -4.0, -30.0]]))


def test_float_zero_by_hand():
    x = torch.tensor([[10.0, 10.5, 13.0, 11.1]])
    scale, zero = quantization.choose_float_zero(x, (1, 4), 0, 15)
    torch.testing.assert_close(scale, torch.tensor([[0.2]]))
    torch.testing.assert_close(zero, torch.tensor([[11.6]]))  # 10 + 8 * 0.2
    codes = quantization.quantize(x, scale, zero, 0, 15, torch.uint8)
    assert codes[0, [0, 2]].tolist() == [0, 15]
    values = quantization.dequantize(codes, scale, zero, torch.float32, 0, 15)
    assert (values - x).abs().max() <= 0.1 + 1e-6


@pytest.mark.parametrize(
    ("mapping", "bits"),
    [("symmetric", n) for n in range(2, 9)] + [(m, n) for m in ("asymmetric", "float_zero") for n in range(1, 9)],
)
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_error_is_at_most_half_a_step(bits, mapping, block):
    x = source(dtype=torch.float64)
    qmin, qmax = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if mapping == "symmetric" else (0, 2**bits - 1)
    scale, zero = choose_qparams_affine(x, block, mapping, qmin, qmax)
    assert scale.shape == zero.shape == tuple(n // b for n, b in zip(x.shape, block, strict=True))
    values = dequantize_affine(quantize_affine(x, scale, zero, qmin, qmax, torch.int16), scale, zero, qmin, qmax, x.dtype)
    half_steps = (values - x).abs() / quantization.spread(scale, x.shape) * 2
    # Rounding the zero point may shift the range by half a code: what falls off its end is clipped by half a step at most.
    assert half_steps.max() <= (2 if mapping == "asymmetric" and bits == 1 else 1) + 1e-9


@pytest.mark.parametrize(("qmin", "qmax", "dtype"), [(0, 255, torch.uint8), (-128, 127, torch.int8)])
@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_torch_per_tensor(qmin, qmax, dtype, seed):
    x = source(seed)
    scale, zero = choose_qparams_affine(x, (6, 8), "asymmetric", qmin, qmax)
    expected_scale, expected_zero = decomposed.choose_qparams.tensor(x, qmin, qmax, 1e-30, dtype)
    assert (float(scale), int(zero)) == (expected_scale.item(), expected_zero.item())
    codes = quantize_affine(x, scale, zero, qmin, qmax, dtype)
    assert torch.equal(codes, decomposed.quantize_per_tensor(x, float(scale), int(zero), qmin, qmax, dtype))
    values = dequantize_affine(codes, scale, zero, qmin, qmax, torch.float32)
    assert torch.equal(values, decomposed.dequantize_per_tensor(codes, float(scale), int(zero), qmin, qmax, dtype))
    fake = torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero), qmin, qmax)
    assert torch.equal(fake_quantize_affine(x, scale, zero, qmin, qmax), fake)


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_torch_per_channel(seed):
    x = source(seed)
    scale, zero = choose_qparams_affine(x, (1, 8), "asymmetric", 0, 15)
    codes = quantize_affine(x, scale, zero, 0, 15, torch.uint8)
    flat = scale[:, 0], zero[:, 0].long()
    assert torch.equal(codes, decomposed.quantize_per_channel(x, *flat, 0, 0, 15, torch.uint8))
    values = dequantize_affine(codes, scale, zero, 0, 15, torch.float32)
    assert torch.equal(values, decomposed.dequantize_per_channel(codes, *flat, 0, 0, 15, torch.uint8))
    fake = torch.fake_quantize_per_channel_affine(x, scale[:, 0], zero[:, 0], 0, 0, 15)
    assert torch.equal(values, fake)


def test_dequantize_agrees_with_torch_per_group():
    scale, zero = choose_qparams_affine(source(), (1, 4), "asymmetric", 0, 15)
    codes = quantize_affine(source(), scale, zero, 0, 15, torch.uint8)
    expected = decomposed.dequantize_per_channel_group(codes, scale, zero, 0, 15, torch.uint8, 4, torch.float32)
    assert torch.equal(dequantize_affine(codes, scale, zero, 0, 15, torch.float32), expected)


def test_fake_quantize_gradient_agrees_with_torch():
    x = source().requires_grad_()
    scale, zero = torch.full((1, 1), 0.1), torch.full((1, 1), 7, dtype=torch.int32)
    grad = source(1)
    (ours,) = torch.autograd.grad(fake_quantize_affine(x, scale, zero, 0, 15), x, grad)
    (torchs,) = torch.autograd.grad(torch.fake_quantize_per_tensor_affine(x, 0.1, 7, 0, 15), x, grad)
    assert torch.equal(ours, torchs)
    assert 0 < (ours == 0).sum() < ours.numel()  # some are clipped, some aren't


def test_float_zero_agrees_with_the_formula_of_torchs_int4_kernel():
    """`aten::_weight_int4pack_mm` reads a code q as (q - 8) * scale + zero."""
    x = source()
    scale, zero = choose_qparams_affine(x, (1, 4), "float_zero", 0, 15)
    codes = quantize_affine(x, scale, zero, 0, 15, torch.int32)
    expected = (codes.reshape(6, 2, 4) - 8) * scale[..., None] + zero[..., None]
    assert torch.equal(dequantize_affine(codes, scale, zero, 0, 15, torch.float32), expected.reshape(6, 8))


@pytest.mark.parametrize("mapping", ["symmetric", "asymmetric", "float_zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_rows(mapping, dtype):
    big, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x = torch.tensor(
        [[0.0, 0.0], [5.0, 5.0], [-5.0, -5.0], [big, -big], [tiny / 8, 0.0], [torch.inf, 1.0], [-torch.inf, 1.0]], dtype=dtype
    )
    qmin, qmax = (-8, 7) if mapping == "symmetric" else (0, 15)
    scale, zero = choose_qparams_affine(x, (1, 2), mapping, qmin, qmax)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert zero.isfinite().all()
    values = dequantize_affine(quantize_affine(x, scale, zero, qmin, qmax, torch.int8), scale, zero, qmin, qmax, dtype)
    assert values.isfinite().all()
    torch.testing.assert_close(values[:3], x[:3])


def test_nan_reaches_its_own_block_only():
    x = source()
    x[2, 1] = math.nan
    for mapping in ("symmetric", "asymmetric", "float_zero"):
        scale, _ = choose_qparams_affine(x, (1, 4), mapping, 0, 15)
        assert scale.isnan().nonzero().tolist() == [[2, 0]]


def test_zero_is_exact_in_the_integer_domain():
    x = source()
    x[:, 3] = 0
    for bits in range(1, 9):
        scale, zero = choose_qparams_affine(x, (1, 4), "asymmetric", 0, 2**bits - 1)
        codes = quantize_affine(x, scale, zero, 0, 2**bits - 1, torch.uint8)
        assert (dequantize_affine(codes, scale, zero, 0, 2**bits - 1, torch.float32)[:, 3] == 0).all()


def _arguments():
    x = source(dtype=torch.float64)
    scale, zero = choose_qparams_affine(x, (1, 4), "asymmetric", 0, 15)
    float_scale, float_zero = choose_qparams_affine(x, (2, 2), "float_zero", 0, 15)
    codes = quantize_affine(x, scale, zero, 0, 15, torch.uint8)
    trained = float_scale.clone().requires_grad_(), float_zero.clone().requires_grad_()
    return {
        "choose symmetric": (choose_qparams_affine, (x, (1, 4), "symmetric", -8, 7)),
        "choose asymmetric": (choose_qparams_affine, (x, (6, 8), "asymmetric", 0, 15)),
        "choose float zero": (choose_qparams_affine, (x, (2, 2), "float_zero", 0, 15)),
        "quantize": (quantize_affine, (x, scale, zero, 0, 15, torch.uint8)),
        "quantize transposed": (quantize_affine, (x.t(), scale.t(), None, -8, 7, torch.int8)),
        "dequantize": (dequantize_affine, (codes, scale, zero, 0, 15, torch.bfloat16)),
        "dequantize, trained parameters": (dequantize_affine, (codes, *trained, 0, 15, torch.float64)),
        "dequantize, trained scale": (dequantize_affine, (codes, scale.clone().requires_grad_(), zero, 0, 15, torch.float64)),
        "dequantize, no zero point": (dequantize_affine, (codes, scale.clone().requires_grad_(), None, 0, 15, torch.float64)),
        "fake quantize": (fake_quantize_affine, (x.clone().requires_grad_(), scale, zero, 0, 15)),
        "fake quantize, float zero": (fake_quantize_affine, (x.clone().requires_grad_(), float_scale, float_zero, 0, 15)),
    }


@pytest.mark.parametrize("name", _arguments())
def test_opcheck(name):
    operator, arguments = _arguments()[name]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("name", [name for name in _arguments() if "trained" in name or "no zero" in name])
def test_dequantize_gradcheck(name):
    operator, (codes, scale, zero, *rest) = _arguments()[name]
    if zero is not None and zero.requires_grad:
        assert torch.autograd.gradcheck(lambda s, z: operator(codes, s, z, *rest), (scale, zero))
    else:
        assert torch.autograd.gradcheck(lambda s: operator(codes, s, zero, *rest), (scale,))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: choose_qparams_affine(x, (1, 3), "symmetric", -8, 7), ValueError, r"block_size \(1, 3\).*\(6, 8\)"),
        (lambda x: choose_qparams_affine(x, (8,), "symmetric", -8, 7), ValueError, "as many numbers"),
        (lambda x: choose_qparams_affine(x, (1, 8), "affine", 0, 15), ValueError, "'affine' is unknown.*asymmetric"),
        (lambda x: choose_qparams_affine(x.half(), (1, 8), "symmetric", -8, 7), TypeError, "float16.*float32"),
        (lambda x: quantize_affine(x, torch.ones(4, 1), None, -8, 7, torch.int8), ValueError, r"\(4, 1\).*\(6, 8\)"),
        (lambda x: fake_quantize_affine(x, torch.ones(6, 1), torch.ones(1, 1), 0, 15), ValueError, "same shape"),
    ],
)
def test_misuse_names_the_value_and_the_rule(call, error, text):
    with pytest.raises(error, match=text):
        call(source())
