"""The Triton kernels for a GPU that isn't there: what they decline, and that they compile to code that rounds as derived."""

import contextlib
import importlib.util
import inspect
import os

import pytest
import torch
from torch._subclasses import FakeTensorMode

from reference_impls.kernels.packing import SHARDS

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton isn't installed, or interprets instead of compiling", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget

from reference_impls.kernels import triton_int8, triton_launch, triton_weight_only

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int8: "*i8", torch.uint8: "*u8"}
SHARED_MEMORY = (
    99 * 1024
)  # of a block, on the smallest GPU of capability 8.0 or more (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")


class Compiling:
    """In the place of a kernel: compiles it for the arguments of a launch, and keeps what came of it."""

    def __init__(self, kernel, capability):
        self.kernel, self.target = kernel, GPUTarget("cuda", capability, 32)

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, **kwargs):
        options = {name: kwargs.pop(name) for name in ("enable_fp_fusion", "num_stages") if name in kwargs}
        given = inspect.signature(self.kernel.fn).bind(*args, **kwargs).arguments
        constants = {p.name: given[p.name] for p in self.kernel.params if p.is_constexpr}
        signature = {name: "constexpr" if name in constants else kind(value) for name, value in given.items()}
        source = triton.compiler.ASTSource(self.kernel, signature, constants)
        self.compiled = triton.compile(source, target=self.target, options=options)


def kind(value):
    return POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "fp32" if isinstance(value, float) else "i32"


@pytest.fixture
def fake_cuda(monkeypatch, tmp_path):
    """Tensors "on" a GPU, without values."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_launch, "_device_is_able", lambda x: x.is_cuda)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: contextlib.nullcontext())
    with FakeTensorMode():
        yield


def compiled(monkeypatch, module, kernel, capability, launch):
    compiling = Compiling(getattr(module, kernel), capability)
    monkeypatch.setattr(module, kernel, compiling)
    assert launch() is not None
    code = compiling.compiled
    assert code.metadata.shared <= SHARED_MEMORY
    assert ".ftz" not in code.asm["ptx"]  # subnormals aren't flushed
    return code.asm


def empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 100])
def test_weight_only_compiles(monkeypatch, fake_cuda, capability, dtype, rows):
    """For the weight that needs most: three shards, packed along rows, and a floating-point zero point."""
    shards = [empty(72 * size // 8, 72, dtype=torch.uint8) for size in SHARDS[7]]
    x, parameter, bias = empty(rows, 72, dtype=dtype), empty(36, 12, dtype=torch.float32), empty(72, dtype=dtype)
    asm = compiled(
        monkeypatch, triton_weight_only, "_linear_tile", capability,
        lambda: triton_weight_only.uintx_weight_only_linear(x, shards, 7, 0, parameter, parameter, 0, 127, bias),
    )  # fmt: skip
    # only a product of float32, which no matrix unit computes exactly, is one of fused steps
    assert ("fma.rn.f32" in asm["ptx"]) == (dtype == torch.float32)
    assert ("mma" in asm["ptx"]) == (dtype != torch.float32)
    assert "tf32" not in asm["ptx"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_activation_compiles(monkeypatch, fake_cuda, dtype):
    x, qdata, scale = empty(100, 70, dtype=dtype), empty(67, 70, dtype=torch.int8), empty(67, 1, dtype=torch.float32)
    asm = compiled(
        monkeypatch, triton_int8, "_scaled_tile", 80,
        lambda: triton_int8.int8_dynamic_linear(x, qdata, scale, empty(67, dtype=dtype)),
    )  # fmt: skip
    assert ".s32.s8.s8.s32" in asm["ptx"]
    assert "fma.rn.f32" not in asm["ptx"]


# --- what is declined -------------------------------------------------------------------------------------------


X, CODES, SCALE, BIAS = torch.ones(2, 8), torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1), torch.ones(4)
PACKED = torch.ones(4, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("x", "codes", "scale", "bias"),
    [
        (X.double(), CODES, SCALE, None),
        (X, CODES, SCALE.double(), None),
        (X[:, :7], CODES, SCALE, None),
        (X[:0], CODES, SCALE, None),
        (X[:, :0], CODES[:, :0], SCALE, None),
        (X, CODES[:0], SCALE[:0], None),
        (X, CODES, SCALE, BIAS[:3]),
        (X, CODES, SCALE, BIAS.double()),
        (X, CODES, torch.ones(3, 1), None),
        (X, CODES[None], SCALE[None], None),
        (X.to("meta"), CODES, SCALE, None),
        (X.to(torch.int32), CODES, SCALE, None),
    ],
)
def test_declined_by_both(x, codes, scale, bias):
    assert triton_weight_only.int8_weight_only_linear(x, codes, scale, bias) is None
    assert triton_int8.int8_dynamic_linear(x, codes, scale, bias) is None


def test_declined_by_weight_only():
    assert triton_weight_only.int8_weight_only_linear(X, CODES, SCALE, BIAS.half()) is None
    assert triton_weight_only.affine_linear(X, CODES, SCALE, SCALE.double(), 0, 15) is None
    assert triton_weight_only.affine_linear(X, CODES, SCALE, torch.ones(4, 2), 0, 15) is None
    assert triton_weight_only.affine_linear(X, CODES.long(), SCALE, None, 0, 15) is None
    assert triton_weight_only.int4_weight_only_linear(X, CODES, 1, SCALE) is None  # signed bytes, and K is 16
    assert triton_weight_only.int4_weight_only_linear(X, PACKED.to(torch.int8), 1, SCALE) is None
    assert triton_weight_only.uintx_weight_only_linear(X, [PACKED], 9, 1, SCALE, None, 0, 511) is None
    assert triton_weight_only.uintx_weight_only_linear(X, [PACKED], 5, 1, SCALE, None, 0, 31) is None
    assert triton_weight_only.uintx_weight_only_linear(X, [PACKED, PACKED], 5, 1, SCALE, None, 0, 31) is None


def test_declined_by_int8_activation():
    assert triton_int8.int8_dynamic_linear(X, CODES.to(torch.int16), SCALE) is None
    assert triton_int8.int8_dynamic_linear(X, CODES, torch.ones(4, 2)) is None
    assert triton_int8.int8_static_linear(X, torch.ones(1).double(), CODES, SCALE) is None
    assert triton_int8.int8_static_linear(X, torch.ones(2), CODES, SCALE) is None
    many = (2**31 - 1) // (127 * 128) + 1  # 132105: a sum of as many products may not fit 32 bits
    assert triton_int8.int8_dynamic_linear(torch.ones(1, many), torch.ones(1, many, dtype=torch.int8), torch.ones(1, 1)) is None
