"""Which implementation a linear operator runs: the plain one, or one in Triton where that is there and takes the arguments."""

import subprocess
import sys
import types

import pytest
import torch

from reference_impls.kernels import custom_op as made
from reference_impls.kernels.int8_linear import int8_weight_only_linear

OPERATORS = ["int8_weight_only", "int8_dynamic", "int8_static", "int4_weight_only", "uintx_weight_only", "affine"]


def linear(x, bias=None):
    return x + 1


@pytest.fixture
def fast(monkeypatch):
    """A module that takes all but float64, and says so by its results."""
    module = types.ModuleType("reference_impls.kernels.fast_for_this_test")
    module.linear = lambda x, bias=None: None if x.dtype == torch.float64 else x + (2 if bias is None else 3)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def test_the_fast_implementation_runs_where_it_takes_the_arguments(fast):
    run = made.triton_or_plain(fast, linear)
    assert run(torch.zeros(1)) == 2
    assert run(torch.zeros(1), bias=torch.zeros(1)) == 3
    assert run(torch.zeros(1, dtype=torch.float64)) == 1


def test_the_plain_implementation_runs_where_the_fast_one_cant_be_imported():
    assert made.triton_or_plain("reference_impls.kernels.not_there", linear)(torch.zeros(1)) == 1


def run(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


KEYS = f"""
import torch, reference_impls
has = torch._C._dispatch_has_kernel_for_dispatch_key
for name in {OPERATORS}:
    print(has(f"reference_impls::{{name}}_linear", "CUDA"))
"""


def test_without_triton_nothing_is_registered_for_cuda():
    """The import doesn't fail either, and the operators run."""
    hidden = "import sys; sys.modules['triton'] = None" + KEYS
    assert run(hidden + "print(reference_impls.Int8Tensor.from_hp(torch.eye(2)) @ torch.eye(2))")[:6] == ["False"] * 6


def test_with_triton_every_operator_has_an_implementation_that_isnt_imported_before_it_runs():
    pytest.importorskip("triton", reason="Triton isn't installed")
    loaded = (
        "import sys; print([m for m in sys.modules if m == 'triton' or '.triton_' in m and m.startswith('reference_impls')])"
    )
    assert run(KEYS + loaded) == ["True"] * 6 + ["[]"]


def test_cpu_runs_the_plain_implementation(monkeypatch):
    monkeypatch.setattr(made, "_found", lambda *_: pytest.fail("CPU asked for a Triton implementation"))
    out = int8_weight_only_linear(torch.ones(1, 2), torch.tensor([[3, 4]], dtype=torch.int8), torch.full((1, 1), 0.5))
    assert out.tolist() == [[3.5]]
