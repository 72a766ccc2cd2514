"""Which linear kernel runs: order, conditions, inheritance, override, direct calls, observation, and the kernels themselves."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd

from reference_impls import Int4Tensor, Int8ActivationTensor, Int8Tensor, UInt4Tensor, UintxTensor
from reference_impls.kernels.int8_linear import int8_dynamic_linear, int8_static_linear, int8_weight_only_linear
from reference_impls.kernels.packed_linear import int4_weight_only_linear, uintx_weight_only_linear
from reference_impls.linear import (
    QuantizedLinearNotImplementedError,
    kernels_for,
    kernels_in,
    override_kernels,
    record_kernels,
    register_linear_kernel,
    run_kernel,
    set_kernels,
)


def hp(rows=32, columns=48):
    torch.manual_seed(0)
    return torch.randn(rows, columns) * torch.linspace(0.5, 3, rows)[:, None]


X = torch.linspace(-2, 3, 5 * 48).sin().reshape(5, 48)
BIAS = torch.linspace(20, 60, 32)


@pytest.fixture
def family():
    """Parent, other parent, and a child of both, with no kernels of their own."""

    class Left(Int8Tensor):
        pass

    class Right(Int8Tensor):
        pass

    class Child(Left, Right):
        pass

    return Left, Right, Child


def names(cls):
    return [kernel.name for kernel in kernels_for(cls)]


def constant(value):
    return lambda x, weight, bias: x.new_full((*x.shape[:-1], weight.shape[0]), float(value))


# --- order and inheritance --------------------------------------------------------------------------------------


def test_static_before_dynamic_before_weight_only():
    assert names(Int8ActivationTensor) == ["int8_static", "int8_dynamic", "int8_weight_only"]
    assert names(Int8Tensor) == ["int8_weight_only"]


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (Int8Tensor.from_hp(hp()), "int8_weight_only"),
        (Int8ActivationTensor.from_hp(hp()), "int8_dynamic"),
        (Int8ActivationTensor.from_hp(hp(), activation_scale=0.05), "int8_static"),
        (Int8ActivationTensor.from_hp(hp(48, 32)).t(), "int8_weight_only"),  # its scales are by columns
        (UintxTensor.from_hp(hp(), 3), "uintx_weight_only"),
        (UInt4Tensor.from_hp(hp(), 16), "uintx_weight_only"),
        (Int4Tensor.from_hp(hp(), 16), "int4_weight_only"),
    ],
)
def test_the_kernel_that_runs(weight, expected):
    with record_kernels() as ran:
        out = F.linear(X, weight, bias=BIAS)
    assert ran == [expected]
    exact = F.linear(X.double(), weight.dequantize().double(), BIAS.double())
    # a rounded activation is off by half a step of its row, 1.0 / 127 / 2, in each of 48 products of up to about 9
    near = 1e-4 if "weight_only" in expected else 48 * 9 * (0.05 if expected == "int8_static" else 1 / 127) / 2
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=near)


def test_a_later_registration_on_a_parent_reaches_its_children(family):
    left, right, child = family
    assert names(child) == ["int8_weight_only"]
    register_linear_kernel(left, "of_left", precedence=5)(constant(1))
    assert names(child) == ["of_left", "int8_weight_only"]
    assert names(right) == ["int8_weight_only"]
    register_linear_kernel(right, "of_right", precedence=7)(constant(2))
    assert names(child) == ["of_right", "of_left", "int8_weight_only"]  # by precedence, wherever they come from


def test_a_child_replaces_its_parents_kernel_for_itself_only(family):
    left, _, child = family
    register_linear_kernel(left, "mine", precedence=5)(constant(1))
    register_linear_kernel(child, "mine", precedence=5)(constant(2))
    assert (F.linear(X, child.from_hp(hp())) == 2).all()
    assert (F.linear(X, left.from_hp(hp())) == 1).all()


def test_equal_precedences_of_two_parents_follow_the_mro(family):
    left, right, child = family
    register_linear_kernel(right, "of_right", precedence=5)(constant(2))
    register_linear_kernel(left, "of_left", precedence=5)(constant(1))
    assert names(child)[:2] == ["of_left", "of_right"]
    register_linear_kernel(child, "of_child", precedence=5)(constant(3))
    assert names(child)[:3] == ["of_child", "of_left", "of_right"]


def test_ambiguous_registrations_are_errors(family):
    left, _, child = family
    register_linear_kernel(left, "one", precedence=5)(constant(1))
    with pytest.raises(ValueError, match="'two' and 'one' of Left both have precedence 5"):
        register_linear_kernel(left, "two", precedence=5)
    with pytest.raises(ValueError, match="Left already has a linear kernel 'one'"):
        register_linear_kernel(left, "one", precedence=6)
    register_linear_kernel(child, "two", precedence=5)(constant(2))  # another class may


# --- conditions, override, direct calls -------------------------------------------------------------------------


def test_a_kernel_that_declines_is_passed_over(family):
    left, *_ = family
    register_linear_kernel(left, "wide", precedence=5, when=lambda x, w, b: None if x.dim() > 2 else "x is narrow")(constant(1))
    weight = left.from_hp(hp())
    with record_kernels() as ran:
        F.linear(X, weight)
        assert (F.linear(X[None], weight) == 1).all()
    assert ran == ["int8_weight_only", "wide"]


def test_when_none_applies_the_error_says_why(family):
    left, *_ = family
    register_linear_kernel(left, "gpu_only", precedence=5, when=lambda x, w, b: f"x is on {x.device}, not on a GPU")(
        constant(1)
    )
    with override_kernels(left, ["gpu_only"]), pytest.raises(QuantizedLinearNotImplementedError) as error:
        F.linear(X, left.from_hp(hp()))
    for part in (
        "Left",
        "float32 (5, 48) on cpu",
        "(32, 48)",
        "gpu_only: x is on cpu, not on a GPU",
        "@register_linear_kernel(Left",
    ):
        assert part in str(error.value)
    assert isinstance(error.value, NotImplementedError)


def test_override_replaces_the_whole_list_of_one_class():
    weight = Int8ActivationTensor.from_hp(hp())
    with override_kernels(Int8ActivationTensor, ["int8_weight_only"]), record_kernels() as ran:
        assert names(Int8ActivationTensor) == ["int8_weight_only"]
        F.linear(X, weight)
    assert ran == ["int8_weight_only"]
    assert names(Int8ActivationTensor) == ["int8_static", "int8_dynamic", "int8_weight_only"]
    assert names(Int8Tensor) == ["int8_weight_only"]


def test_override_ends_with_its_block_also_by_an_error():
    with pytest.raises(RuntimeError, match="mine"), override_kernels(Int8ActivationTensor, []):
        raise RuntimeError("mine")
    assert len(names(Int8ActivationTensor)) == 3


def test_a_permanent_override_and_its_end(family):
    left, _, child = family
    register_linear_kernel(left, "one", precedence=5)(constant(1))
    set_kernels(left, ["int8_weight_only", "one"])
    assert names(left) == ["int8_weight_only", "one"]
    assert names(child) == ["int8_weight_only", "one"]
    register_linear_kernel(child, "own", precedence=0)(constant(2))
    assert names(child) == ["own", "int8_weight_only", "one"]
    set_kernels(left, None)
    assert names(left) == ["one", "int8_weight_only"]


def test_a_kernel_is_called_by_name_without_its_condition():
    weight = Int8ActivationTensor.from_hp(hp())
    with record_kernels() as ran:
        out = run_kernel("int8_weight_only", X, weight, BIAS)
    assert ran == ["int8_weight_only"]
    torch.testing.assert_close(out, F.linear(X, weight.dequantize(), BIAS))
    with pytest.raises(ValueError, match="no linear kernel 'int9'; it has int8_dynamic, int8_static, int8_weight_only"):
        run_kernel("int9", X, weight)


# --- observation ------------------------------------------------------------------------------------------------


def test_records_nest_and_keep_to_their_thread():
    weight = Int8Tensor.from_hp(hp())
    other = []

    def elsewhere():
        with record_kernels() as ran:
            F.linear(X, weight)
        other.extend(ran)

    with record_kernels() as outer:
        F.linear(X, weight)
        with record_kernels() as inner:
            F.linear(X, weight)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert (len(outer), len(inner), len(other)) == (2, 1, 1)
    F.linear(X, weight)
    assert len(outer) == 2


@pytest.mark.parametrize("weight", [Int8ActivationTensor.from_hp(hp()), UintxTensor.from_hp(hp(), 5)])
def test_a_compiled_graph_shows_its_kernel(weight):
    graphs = []

    def keep(module, inputs):
        graphs.append(module)
        return module

    backend = aot_autograd(fw_compiler=keep)
    with torch.no_grad():
        compiled = torch.compile(lambda x, w: F.linear(x, w) + 1, backend=backend, fullgraph=True)(X, weight)
    torch.testing.assert_close(compiled, F.linear(X, weight) + 1)
    expected = names(type(weight))[1 if isinstance(weight, Int8ActivationTensor) else 0]
    assert kernels_in(graphs[0]) == [expected]
    assert kernels_in(graphs[0].code) == [expected]


def test_an_exported_program_shows_its_kernel():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(Int4Tensor.from_hp(hp(), 16), False)

        def forward(self, x):
            return F.linear(x, self.weight)

    program = torch.export.export(Model(), (X,)).run_decompositions({})
    assert kernels_in(program) == ["int4_weight_only"]


# --- the kernels' operators -------------------------------------------------------------------------------------


def _operator_arguments():
    weight, activation = Int8Tensor.from_hp(hp()), X.clone().requires_grad_()
    uintx, int4 = UintxTensor.from_hp(hp(), 7, 16), Int4Tensor.from_hp(hp(), 16)
    shards = list(uintx.blocks.codes)
    transposed = UintxTensor.from_hp(hp(48, 32), 3).t()
    bias, scale = BIAS.clone().requires_grad_(), weight.scale.clone().requires_grad_()
    return {
        "weight only": (int8_weight_only_linear, (activation, weight.qdata, scale, bias)),
        "dynamic": (int8_dynamic_linear, (activation, weight.qdata, scale, bias)),
        "dynamic, 3-D, half": (int8_dynamic_linear, (X.half()[None], weight.qdata, weight.scale, None)),
        "dynamic, empty": (int8_dynamic_linear, (X[:0], weight.qdata, weight.scale, None)),
        "static": (int8_static_linear, (activation, torch.tensor(0.01), weight.qdata, scale, bias)),
        "uintx": (
            uintx_weight_only_linear,
            (activation, shards, 7, 1, uintx.scale.clone().requires_grad_(), uintx.zero_point, 0, 127, bias),
        ),
        "uintx, packed rows": (
            uintx_weight_only_linear,
            (X, list(transposed.blocks.codes), 3, 0, transposed.scale, transposed.zero_point, 0, 7, None),
        ),
        "int4": (int4_weight_only_linear, (activation, int4.qdata, 1, int4.scale.clone().requires_grad_(), bias)),
    }


@pytest.mark.parametrize("name", _operator_arguments())
def test_opcheck(name):
    operator, arguments = _operator_arguments()[name]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("name", ["weight only", "uintx", "int4"])
def test_gradients_are_those_of_the_dense_linear(name):
    operator, arguments = _operator_arguments()[name]
    out = operator(*arguments)
    grad = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    x, scale, bias = torch.autograd.grad(out, leaves, grad)
    weight = {
        "weight only": Int8Tensor.from_hp(hp()),
        "uintx": UintxTensor.from_hp(hp(), 7, 16),
        "int4": Int4Tensor.from_hp(hp(), 16),
    }
    dense = weight[name].dequantize()
    torch.testing.assert_close(x, grad @ dense)
    torch.testing.assert_close(bias, grad.sum(0))
    # each scale times its gradient is the sum over its block of weight times weight gradient
    products = dense * (grad.t() @ X)
    blocks = products.unflatten(1, (scale.shape[1], -1)).sum(-1)
    torch.testing.assert_close(scale * leaves[1], blocks, rtol=1e-3, atol=1e-3)


def test_dynamic_rounds_each_row_by_its_own_step():
    weight = Int8Tensor.from_hp(hp())
    x = X * torch.tensor([1e-3, 1.0, 10.0, 1e3, 1.0])[:, None]
    steps = x.abs().amax(1, keepdim=True) / 127
    rounded = (x / steps).round() * steps
    out = int8_dynamic_linear(x, weight.qdata, weight.scale, None)
    torch.testing.assert_close(out, F.linear(rounded, weight.dequantize()), rtol=1e-4, atol=1e-4)


def test_static_saturates_and_has_no_gradient_there():
    weight = Int8Tensor.from_hp(hp())
    x = X.clone().requires_grad_()
    step = torch.tensor(0.5 / 127)
    out = int8_static_linear(x, step, weight.qdata, weight.scale, None)
    rounded = (X / step).round().clamp(-127, 127) * step
    torch.testing.assert_close(out, F.linear(rounded, weight.dequantize()), rtol=1e-4, atol=1e-4)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad == 0, (X / step).round().abs() > 127)


def test_integer_sums_are_exact_where_float32_would_round():
    """1025 products of 127 * 127 and one of 1 * 1 add up to more than 2**24."""
    columns = 1026
    codes = torch.full((1, columns), 127, dtype=torch.int8)
    codes[0, -1] = 1
    x = torch.full((1, columns), 127.0)
    x[0, -1] = 1.0
    out = int8_dynamic_linear(x.double(), codes, torch.ones(1, 1, dtype=torch.float64), None)
    assert out.item() == 1025 * 127 * 127 + 1
