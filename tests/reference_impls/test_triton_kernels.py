"""The Triton implementations of the linears against the plain ones, on a GPU or in Triton's interpreter; and that they compile."""

import ctypes
import functools
import importlib.util
import math
import mmap
import os
import re
import subprocess
import sys

import pytest
import torch

from reference_impls.kernels import affine_linear, int8_linear, packed_linear
from reference_impls.kernels.linear_gradients import Codes
from reference_impls.kernels.packing import pack, unpack
from reference_impls.kernels.quantization import choose_asymmetric, choose_float_zero, choose_symmetric, quantize

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton isn't installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BEYOND = 2**18  # bytes: more than the rows of a tile reach beyond a tensor here


@pytest.fixture
def device():
    if INTERPRETED:
        why_not = why_the_interpreter_doesnt_run()
        return pytest.skip(why_not) if why_not else "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no GPU; test_in_tritons_interpreter runs this without one")
    return "cuda"


@functools.cache
def why_the_interpreter_doesnt_run():
    """What a kernel of one loop raises, or None. That of Triton 3.5 does with numpy 2.4."""
    import triton
    import triton.language as tl

    @triton.jit
    def copy(out, x, n):
        for i in range(0, n):
            tl.store(out + i, tl.load(x + i))

    try:
        out = torch.zeros(2)
        copy[(1,)](out, torch.ones(2), 2)
        return None if (out == 1).all() else f"it copied ones as {out.tolist()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(autouse=True)
def _seeded_and_guarded(monkeypatch):
    """In the interpreter, where tensors are on the CPU, what a launch makes is guarded as its inputs are."""
    torch.manual_seed(0)
    original = torch.Tensor.new_empty

    def new_empty(self, size, **options):
        return original(self, size, **options) if options else guarded_empty(size, self.dtype)

    if INTERPRETED:
        monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
        triton_int8 = importlib.import_module("reference_impls.kernels.triton_int8")
        for name in ("row_codes", "row_scale"):
            plain = getattr(triton_int8, name)
            monkeypatch.setattr(triton_int8, name, lambda *args, plain=plain: placed(plain(*args), "cpu"))


def guarded_empty(size, dtype):
    """A tensor at whose end there is memory that can't be touched: a load or a store beyond it ends the process."""
    used = math.prod(size) * dtype.itemsize
    readable = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, readable + BEYOND)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + readable
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(BEYOND), 0) == 0
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(size), offset=readable - used).view(size)


def placed(tensor, device):
    """The same values on `device`; on the CPU guarded, unless it is a view."""
    if device == "cpu" and tensor.is_contiguous():
        return guarded_empty(tensor.shape, tensor.dtype).copy_(tensor)
    return tensor.to(device)


def activation(shape, dtype):
    """One row of zeros, and one with an outlier."""
    x = torch.randn(shape).reshape(-1, shape[-1])
    x[len(x) // 2] = 0
    x[-1, 0] = 300
    return x.reshape(shape).to(dtype)


def weight(n, k):
    """Rows and columns of different sizes, a row of zeros, and an outlier."""
    w = torch.randn(n, k) * torch.linspace(0.5, 3, n)[:, None] * torch.linspace(1, 2, k)
    w[n // 2] = 0
    w[-1, -1] = 50
    return w


def bias_of(n, dtype):
    return torch.linspace(5, 9, n).to(dtype)


def run(module, op, device, *args):
    """The results of the Triton and of the plain implementation, on the CPU."""
    args = [
        placed(a, device) if isinstance(a, torch.Tensor) else [placed(t, device) for t in a] if isinstance(a, list) else a
        for a in args
    ]
    fast = getattr(importlib.import_module(f"reference_impls.kernels.{module}"), op._name)(*args)
    assert fast is not None, "it declined"
    with op.set_kernel_enabled("cuda", enabled=False):
        plain = op(*args)
    if device == "cuda":
        assert torch.equal(op(*args), fast)  # it is what the operator runs
    return fast.cpu(), plain.cpu()


def assert_within_bound(fast, plain, x, values, bias):
    """The bound that `triton_weight_only.py` derives."""
    x, values = x.double(), values.double()
    eps, k = torch.finfo(fast.dtype).eps, values.shape[1]
    magnitude, total = x.abs() @ values.abs().T, x @ values.T
    if bias is not None:
        magnitude = magnitude + bias.double().abs()
    bound = (
        2 * (k + 2) * 2**-23 * magnitude + eps * (plain.double().abs() + total.abs() / 2) + torch.finfo(fast.dtype).tiny * eps
    )
    if INTERPRETED and fast.dtype == torch.bfloat16:  # it truncates to bfloat16, weights and results, instead of rounding
        bound = bound + eps * (magnitude + plain.double().abs() / 2)
    assert fast.shape == plain.shape
    assert fast.dtype == plain.dtype
    off = (fast.double() - plain.double()).abs()
    assert (off <= bound).all(), f"off by {(off / bound).max():.3g} times the bound, at {(off / bound).argmax()}"


# (leading dimensions of x, N, K): one tile and several, whole and not
SIZES = [((1,), 1, 1), ((5,), 67, 35), ((2, 3), 64, 64), ((70,), 65, 130), ((), 3, 40)]
PACKED_SIZES = [((5,), 67, 72), ((2, 3), 64, 64), ((70,), 65, 136), ((), 3, 40)]
ZEROS = {
    "none": lambda w, block, low, high: (choose_symmetric(w, block, -high, high), None),
    "integer": choose_asymmetric,
    "float": choose_float_zero,
}


class TestAgainstPlain:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("lead", "n", "k"), SIZES)
    @pytest.mark.parametrize("block", ["tensor", "row", "group", "rows"])
    def test_int8_weight_only(self, device, dtype, lead, n, k, block):
        group = next(g for g in (10, 8, 7, 5, 1) if k % g == 0)
        rows = next(r for r in (5, 4, 3, 1) if n % r == 0)
        w, block = weight(n, k), {"tensor": (n, k), "row": (1, k), "group": (1, group), "rows": (rows, group)}[block]
        scale = choose_symmetric(w, block, -127, 127)
        x, codes, bias = (
            activation((*lead, k), dtype),
            quantize(w, scale, None, -127, 127, torch.int8),
            bias_of(n, dtype),
        )
        for b in (None, bias):
            fast, plain = run("triton_weight_only", int8_linear.int8_weight_only_linear, device, x, codes, scale, b)
            assert_within_bound(fast, plain, x, Codes(codes, scale).values(dtype), b)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("lead", "n", "k"), SIZES)
    @pytest.mark.parametrize("static", [False, True])
    def test_int8_activation(self, device, dtype, lead, n, k, static):
        w = weight(n, k)
        scale = choose_symmetric(w, (1, k), -127, 127)
        x, codes, bias = (
            activation((*lead, k), dtype),
            quantize(w, scale, None, -127, 127, torch.int8),
            bias_of(n, dtype),
        )
        op = int8_linear.int8_static_linear if static else int8_linear.int8_dynamic_linear
        for b in (None, bias, bias.float()):
            given = [torch.tensor(0.02)] if static else []
            fast, plain = run("triton_int8", op, device, x, *given, codes, scale, b)
            if INTERPRETED and dtype == torch.bfloat16:  # it truncates instead of rounding
                torch.testing.assert_close(fast, plain, rtol=torch.finfo(dtype).eps, atol=0)
            else:
                assert torch.equal(fast, plain)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("lead", "n", "k"), PACKED_SIZES)
    @pytest.mark.parametrize("packed_dim", [0, 1])
    def test_int4(self, device, dtype, lead, n, k, packed_dim):
        n, k = (k, n) if packed_dim == 0 else (n, k)
        w, group = weight(n, k), next(g for g in (34, 24, 13, 8, 1) if k % g == 0)
        scale = choose_symmetric(w, (1, group), -7, 7)
        (qdata,) = pack((quantize(w, scale, None, -8, 7, torch.int8) & 15).to(torch.uint8), 4, packed_dim)
        x, bias = activation((*lead, k), dtype), bias_of(n, dtype)
        fast, plain = run(
            "triton_weight_only", packed_linear.int4_weight_only_linear, device, x, qdata, packed_dim, scale, bias
        )
        values = Codes(packed_linear.signed(unpack([qdata], 4, packed_dim)), scale).values(dtype)
        assert_within_bound(fast, plain, x, values, bias)

    @pytest.mark.parametrize("bits", range(1, 8))
    @pytest.mark.parametrize("packed_dim", [0, 1])
    @pytest.mark.parametrize("zero", ZEROS)
    def test_uintx(self, device, bits, packed_dim, zero):
        for dtype, (lead, n, k) in zip([*DTYPES, torch.float32], PACKED_SIZES, strict=True):
            n, k = (k, n) if packed_dim == 0 else (n, k)
            low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if dtype == torch.float16 else (0, 2**bits - 1)
            w, group = weight(n, k), next(g for g in (34, 24, 13, 8, 1) if k % g == 0)
            scale, zero_point = ZEROS[zero](w, (1, group), low, max(high, 1))
            codes = quantize(w, scale, zero_point, low, high, torch.int32)
            shards = pack((codes - low).to(torch.uint8), bits, packed_dim)
            x, bias = activation((*lead, k), dtype), bias_of(n, dtype)
            fast, plain = run(
                "triton_weight_only", packed_linear.uintx_weight_only_linear, device,
                x, shards, bits, packed_dim, scale, zero_point, low, high, bias,
            )  # fmt: skip
            assert_within_bound(fast, plain, x, Codes(codes, scale, zero_point, low, high).values(dtype), bias)

    @pytest.mark.parametrize("code_dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
    @pytest.mark.parametrize("zero", ZEROS)
    def test_affine(self, device, code_dtype, zero):
        w, (low, high) = weight(67, 36), (0, 100)
        scale, zero_point = ZEROS[zero](w, (1, 12), low, high)
        codes = quantize(w, scale, zero_point, low, high, code_dtype)
        x = activation((5, 36), torch.float32)
        fast, plain = run(
            "triton_weight_only", affine_linear.affine_linear, device, x, codes, scale, zero_point, low, high, None
        )
        assert_within_bound(fast, plain, x, Codes(codes, scale, zero_point, low, high).values(x.dtype), None)

    def test_views(self, device):
        """Transposed and sliced codes, scales and activations."""
        w = weight(40, 70)[:, 5:]
        scale = choose_symmetric(weight(65, 40).mT, (1, 13), -127, 127)
        codes = quantize(w.contiguous(), scale, None, -127, 127, torch.int8)
        turned = scale.mT.contiguous().mT
        x = activation((65, 70), torch.float32).mT[:, :65]
        fast, plain = run(
            "triton_weight_only",
            int8_linear.int8_weight_only_linear,
            device,
            x,
            codes.mT.contiguous().mT,
            turned,
            None,
        )
        assert_within_bound(fast, plain, x, Codes(codes, scale).values(x.dtype), None)

    def test_what_isnt_finite_stays_so(self, device):
        x = torch.zeros(3, 40)
        x[0, 3], x[1, 5] = float("nan"), float("inf")
        codes, scale = torch.ones(2, 40, dtype=torch.int8), torch.ones(2, 1)
        fast, plain = run("triton_weight_only", int8_linear.int8_weight_only_linear, device, x, codes, scale, None)
        torch.testing.assert_close(fast, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_tritons_interpreter():
    """All of the above, on CPU. The interpreter is chosen when Triton is imported: so in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::TestAgainstPlain"],
        env={**environment, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    skipped = re.search(r"SKIPPED \[\d+\] \S+ (.*)", done.stdout)
    if skipped:
        pytest.skip(f"Triton's interpreter doesn't run here: {skipped[1]}")
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100
