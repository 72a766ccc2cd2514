"""Int8 mixed precision: the rescaled product, and a model that learns with it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reference_impls import Int8MixedPrecisionTensor
from reference_impls.kernels.int8_matmul import Int8RescaledMatmul, int8_rescaled_matmul
from reference_impls.linear import record_kernels
from tests.reference_impls.test_trainable import Task


def operands(m, k, n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator) * torch.linspace(0.1, 10, m)[:, None]
    b = torch.randn(k, n, generator=generator) * torch.linspace(10, 0.1, n)
    return a.to(dtype), b.to(dtype)


def rounded(x, dim):
    """In float32 and with the reciprocal, so that ties (which bfloat16 has many of) are the kernel's ties."""
    step = x.float().abs().amax(dim, keepdim=True) / 127
    return (x.float() * (1 / step)).round().double() * step.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k", "n"), [(5, 16, 3), (1, 7, 9), (32, 1, 48), (64, 64, 64), (1, 1, 1)])
def test_the_product_is_that_of_the_rounded_operands(m, k, n, dtype):
    a, b = operands(m, k, n, dtype)
    want = rounded(a, 1) @ rounded(b, 0)
    torch.testing.assert_close(int8_rescaled_matmul(a, b).double(), want, rtol=4 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("layout", ["rows", "columns", "every other"])
def test_the_product_does_not_depend_on_strides(layout):
    a, b = operands(1, 6, 4)
    strided = {"rows": a, "columns": a.t().contiguous().t(), "every other": a.repeat_interleave(2, 1)[:, ::2]}[layout]
    assert torch.equal(int8_rescaled_matmul(strided, b), int8_rescaled_matmul(a, b))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_empty_operands(shape):
    a, b = torch.ones(shape[0], shape[1]), torch.ones(shape[1], shape[2])
    assert torch.equal(int8_rescaled_matmul(a, b), a @ b)


@pytest.mark.parametrize("lead", [(5,), (2, 3), ()])
def test_opcheck(lead):
    a, b = torch.randn(*lead, 8).requires_grad_(), torch.randn(8, 3).requires_grad_()
    torch.library.opcheck(int8_rescaled_matmul, (a, b))


def test_the_gradients_are_rounded_products():
    a, b = operands(6, 16, 4)
    g = torch.randn(6, 4)
    got = torch.autograd.grad(Int8RescaledMatmul.apply(a.requires_grad_(), b.requires_grad_()), (a, b), g)
    wanted = rounded(g, 1) @ rounded(b.detach().mT, 0), rounded(a.detach().mT, 1) @ rounded(g, 0)
    for grad, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-4)


def test_linear_runs_the_kernel_and_values_are_kept():
    hp, x = torch.randn(6, 16), torch.randn(5, 16)
    weight = Int8MixedPrecisionTensor.from_hp(hp)
    with record_kernels() as ran:
        out = F.linear(x, weight)
    assert ran == ["int8_mixed_precision"]
    assert torch.equal(weight.dequantize(), hp)
    assert torch.equal(out, int8_rescaled_matmul(x, hp.t()))
    assert not torch.equal(out, F.linear(x, hp))


def test_the_backward_of_a_linear_multiplies_int8_too():
    hp, x, g = torch.randn(6, 16), torch.randn(5, 16).requires_grad_(), torch.randn(5, 6)
    p = nn.Parameter(Int8MixedPrecisionTensor.from_hp(hp))
    of_x, of_p = torch.autograd.grad(F.linear(x, p), (x, p), g)
    assert torch.equal(of_x, int8_rescaled_matmul(g, hp))
    assert torch.equal(of_p, int8_rescaled_matmul(g.t(), x.detach()))


def test_a_three_layer_model_learns_as_well_as_its_float_twin():
    task = Task()
    twin, rounded_products = task.trained(torch.clone), task.trained(Int8MixedPrecisionTensor.from_hp)
    assert twin < task.trained(torch.clone, steps=0) / 5
    assert rounded_products <= 1.05 * twin, (rounded_products, twin)
