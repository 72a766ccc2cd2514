"""Symmetric int8 quantization against hand-computed values, numpy and torch's own operators."""

import numpy as np
import pytest
import torch
from torch.ao.quantization.fx import _decomposed  # noqa: F401  (registers torch.ops.quantized_decomposed)

from reference_impls.kernels import quantization
from reference_impls.kernels.int8_linear import int8_weight_only_linear


def choose_scale(x, block):
    return quantization.choose_symmetric(x, block, -127, 127)


def quantize(x, scale):
    return quantization.quantize(x, scale, None, -127, 127, torch.int8)


def dequantize(codes, scale, dtype):
    return quantization.dequantize(codes, scale, None, dtype)


BLOCKS = {"row": (1, 8), "tensor": (6, 8), "group": (1, 4), "square": (2, 2)}


def ramp(dtype=torch.float32):
    """(6, 8): every row and every group has a magnitude of its own, signs alternate."""
    values = torch.arange(1, 49, dtype=torch.float64).reshape(6, 8) ** 1.5
    return (values * torch.tensor([1.0, -1.0] * 4)).to(dtype)


def test_by_hand():
    x = torch.tensor([[1.27, -0.634, 0.0, 0.005], [0.0, 254.0, -3.1, 2.9]])
    scale = choose_scale(x, (1, 4))
    assert scale.shape == (2, 1)
    torch.testing.assert_close(scale, torch.tensor([[0.01], [2.0]]))
    codes = quantize(x, scale)
    assert codes.tolist() == [[127, -63, 0, 0], [0, 127, -2, 1]]
    torch.testing.assert_close(
        dequantize(codes, scale, torch.float32),
        torch.tensor([[1.27, -0.63, 0.0, 0.0], [0.0, 254.0, -4.0, 2.0]]),
    )


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_scale_is_a_127th_of_the_largest_magnitude(block):
    x = ramp().numpy()
    blocks = x.reshape(6 // block[0], block[0], 8 // block[1], block[1])
    expected = np.abs(blocks).max(axis=(1, 3)) / np.float32(127)
    np.testing.assert_allclose(choose_scale(ramp(), block).numpy(), expected, rtol=2e-7)


def test_quantize_agrees_with_torch_per_channel():
    x, scale = ramp(), torch.rand(6) + 0.5
    zeros = torch.zeros(6, dtype=torch.int64)
    ops = torch.ops.quantized_decomposed
    codes = ops.quantize_per_channel(x, scale, zeros, 0, -127, 127, torch.int8)
    assert torch.equal(quantize(x, scale[:, None]), codes)
    values = ops.dequantize_per_channel(codes, scale, zeros, 0, -127, 127, torch.int8)
    assert torch.equal(dequantize(codes, scale[:, None], torch.float32), values)
    fake = torch.fake_quantize_per_channel_affine(x, scale, zeros.int(), 0, -127, 127)
    assert torch.equal(values, fake)


def test_quantize_agrees_with_torch_per_tensor_and_group():
    x, scale = ramp(), 0.75
    ops = torch.ops.quantized_decomposed
    codes = ops.quantize_per_tensor(x, scale, 0, -127, 127, torch.int8)
    assert torch.equal(quantize(x, torch.full((1, 1), scale)), codes)
    scales, zeros = torch.rand(6, 2) + 0.5, torch.zeros(6, 2)
    codes = ops.quantize_per_channel_group(x, scales, zeros, -127, 127, torch.int8, 4)
    assert torch.equal(quantize(x, scales), codes)
    values = ops.dequantize_per_channel_group(codes, scales, zeros, -127, 127, torch.int8, 4, torch.float32)
    assert torch.equal(dequantize(codes, scales, torch.float32), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantizing_again_gives_the_same_scale(dtype):
    torch.manual_seed(0)
    exponents = torch.randint(-30, 30, (50000, 1)).to(dtype)
    x = torch.randn(50000, 4, dtype=dtype) * 2.0**exponents
    scale = choose_scale(x, (1, 4))
    values = dequantize(quantize(x, scale), scale, dtype)
    assert torch.equal(choose_scale(values, (1, 4)), scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_rows_stay_finite(dtype):
    info = torch.finfo(dtype)
    rows = [[0.0, 0.0], [5.0, 5.0], [info.max, 1.0], [info.smallest_normal / 1000, 0.0], [-torch.inf, 1.0]]
    x = torch.tensor(rows, dtype=dtype)
    scale = choose_scale(x, (1, 2))
    values = dequantize(quantize(x, scale), scale, dtype)
    assert (scale > 0).all()
    assert values.isfinite().all()
    assert values[0].tolist() == [0, 0]
    torch.testing.assert_close(values[1], x[1])
    torch.testing.assert_close(values[2, 0], x[2, 0])
    assert values[3].abs().max() < info.smallest_normal
    torch.testing.assert_close(values[4, 0], -torch.tensor(info.max, dtype=dtype))


def test_nan_spreads_over_its_own_block_only():
    x = ramp()
    x[1, 2] = torch.nan
    scale = choose_scale(x, (1, 4))
    nans = dequantize(quantize(x, scale), scale, torch.float32).isnan()
    assert nans.nonzero().tolist() == [[1, c] for c in range(4)]


def test_strides_follow_the_codes():
    x = ramp().t()
    scale = choose_scale(x, (4, 1))
    codes = quantize(x, scale)
    assert codes.stride() == x.stride()
    assert dequantize(codes, scale, torch.float32).stride() == x.stride()


def test_float16_doesnt_overflow():
    codes, scale = torch.full((1, 8), 127, dtype=torch.int8), torch.full((1, 1), 1.0)
    x = torch.full((1, 8), 60.0, dtype=torch.float16)  # sum of x * q = 60960 is the largest that fits
    assert int8_weight_only_linear(x, codes, scale / 127).item() == pytest.approx(480, rel=2e-3)
    x = torch.full((1, 8), 6000.0, dtype=torch.float16)  # x * q overflows, x * q * scale doesn't
    assert int8_weight_only_linear(x, codes, scale / 127).item() == pytest.approx(48000, rel=2e-3)


@pytest.mark.parametrize("shape", [(3, 8), (8,), (2, 3, 8), (0, 8)])
@pytest.mark.parametrize("block", [(1, 8), (1, 4), (6, 8)])
def test_linear_opcheck(shape, block):
    scale = choose_scale(ramp(), block)
    codes = quantize(ramp(), scale)
    arguments = (torch.randn(shape, requires_grad=True), codes, scale.requires_grad_(), torch.randn(6, requires_grad=True))
    torch.library.opcheck(int8_weight_only_linear, arguments)


@pytest.mark.parametrize("block", [(1, 8), (2, 4), (6, 8)])
def test_linear_gradients(block):
    scale = choose_scale(ramp(torch.float64), block)
    codes = quantize(ramp(torch.float64), scale.detach())
    x, bias = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (x, scale, bias)]
    assert torch.autograd.gradcheck(lambda x, s, b: int8_weight_only_linear(x, codes, s, b), inputs)
