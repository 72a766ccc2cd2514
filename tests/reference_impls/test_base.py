"""WrapperTensor: the protocol follows from the lists, tables follow the MRO, arguments follow the schema."""

import gc
import weakref

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from reference_impls import Int8Tensor, schema
from reference_impls.base import WrapperTensor
from reference_impls.values import ValueTensor

aten = torch.ops.aten


class Shifted(ValueTensor):
    """data + shift, with an optional mask: the smallest class that uses every kind of part."""

    inner_names = ("data_",)
    optional_inner_names = ("mask",)
    attribute_names = ("shift",)

    @staticmethod
    def __new__(cls, data_, mask=None, shift=0, outer_size=None, outer_stride=None):
        return torch.Tensor._make_wrapper_subclass(cls, data_.shape, strides=data_.stride(), dtype=data_.dtype)

    def __init__(self, data_, mask=None, shift=0, outer_size=None, outer_stride=None):
        self.data_, self.mask, self.shift = data_, mask, shift

    def values_copy(self):
        values = self.data_ + self.shift
        return values if self.mask is None else values * self.mask

    def write_values(self, values):
        self.data_.copy_(values - self.shift)

    def check_writable(self, operation):
        if self.mask is not None:
            raise NotImplementedError(f"{operation}: masked")


@pytest.mark.parametrize("mask", [None, torch.tensor([0.0, 1.0])])
def test_protocol_follows_from_the_lists(mask):
    s = Shifted(torch.tensor([1.0, 2.0]), mask, shift=3)
    names, context = s.__tensor_flatten__()
    assert names == (["data_"] if mask is None else ["data_", "mask"])
    assert context == {"shift": 3}
    assert is_traceable_wrapper_subclass(s)
    rebuilt = Shifted.__tensor_unflatten__({n: getattr(s, n) for n in names}, context, s.shape, s.stride())
    expected = [4.0, 5.0] if mask is None else [0.0, 5.0]
    for t in (rebuilt, s.clone(), s.detach()):
        assert type(t) is Shifted
        assert t.tolist() == expected
    assert "shift=3" in repr(s)


def test_detach_shares_and_clone_doesnt():
    s = Shifted(torch.ones(2))
    s.detach().add_(1)
    s.clone().add_(10)
    assert s.tolist() == [2, 2]


def tables():
    class Parent(Shifted):
        pass

    class Other(Shifted):
        pass

    class Child(Parent, Other):
        pass

    return Parent, Other, Child


def test_a_parent_registered_later_reaches_its_child():
    parent, _, child = tables()
    parent.implements(aten.neg.default)(lambda func, self: torch.tensor([10.0]))
    assert torch.neg(child(torch.ones(1))).tolist() == [10.0]


def test_a_child_doesnt_touch_its_parent():
    parent, _, child = tables()
    child.implements(aten.neg.default)(lambda func, self: torch.tensor([20.0]))
    assert torch.neg(child(torch.ones(1))).tolist() == [20.0]
    assert torch.neg(parent(torch.ones(1))).tolist() == [-1]


def test_two_parents_in_pythons_order():
    parent, other, child = tables()
    other.implements([aten.neg.default, aten.abs.default])(lambda func, self: torch.tensor([30.0]))
    parent.implements(aten.neg.default)(lambda func, self: torch.tensor([10.0]))
    assert torch.neg(child(torch.ones(1))).tolist() == [10.0]
    assert torch.abs(child(torch.ones(1))).tolist() == [30.0]


def test_functions_are_looked_up_the_same_way():
    parent, _, child = tables()
    parent.implements_torch_function(torch.nn.functional.relu)(lambda input, inplace=False: inplace)
    assert torch.nn.functional.relu(child(torch.ones(1)), inplace=True) is True


def test_arguments_come_complete_and_in_order():
    seen = []
    parent, _, _ = tables()
    parent.implements(aten.addmm.default)(lambda func, *arguments: seen.append(arguments[3:]) or torch.ones(1))
    s, m = parent(torch.ones(2, 2)), torch.ones(2, 2)
    torch.addmm(s, m, m)
    torch.addmm(s, m, m, alpha=2)
    torch.addmm(input=s, mat2=m, mat1=m, alpha=5, beta=4)
    assert seen == [(1, 1), (1, 2), (4, 5)]


def test_schema_knows_what_is_written():
    w, p = torch.ones(2), torch.zeros(2)
    lists = ([w], [p], 1)
    assert schema.written(aten._foreach_add_.List, lists) == [w]
    assert schema.written(aten.add.out, schema.bind(aten.add.out, (w, w), {"out": p})) == [p]
    assert schema.returns_alias(aten.view.default)
    assert not schema.returns_alias(aten.add_.Tensor)
    assert schema.changes_metadata(aten.resize_.default)


def test_unknown_operator_says_how_to_add_it():
    class Bare(WrapperTensor):
        inner_names = ("inner",)

        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

        def __init__(self, inner):
            self.inner = inner

    with pytest.raises(NotImplementedError, match=r"Bare does not implement aten.mul.Tensor.*@Bare.implements\("):
        Bare(torch.ones(2)) * 2


def test_lists_are_checked_before_anything_changes():
    good, bad = Shifted(torch.ones(2)), Shifted(torch.ones(2), torch.ones(2))
    with pytest.raises(NotImplementedError, match="masked"):
        torch._foreach_add_([good, bad], [torch.ones(2)] * 2)
    assert good.tolist() == [1, 1]
    plain = torch.ones(2)
    torch._foreach_add_([good, plain], [torch.ones(2), torch.full((2,), 5.0)])
    assert (good.tolist(), plain.tolist()) == ([2, 2], [6, 6])
    assert (good._version, plain._version) == (1, 1)


@pytest.mark.parametrize("order", [lambda a, b: a + b, lambda a, b: b + a])
@pytest.mark.parametrize(
    "function", [torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl], ids=["default", "disabled"]
)
def test_foreign_subclasses_get_their_turn(order, function):
    calls = []

    class Foreign(TwoTensor):
        __torch_function__ = function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            calls.append(func)
            return torch.zeros(1)

    foreign = Foreign(torch.ones(2, 4), torch.ones(2, 4))
    order(Int8Tensor.from_hp(torch.ones(2, 4)), foreign)
    assert calls == [aten.add.Tensor]


@pytest.mark.parametrize("order", [lambda a, b: a + b, lambda a, b: b + a])
def test_foreign_functions_get_their_turn(order):
    class Foreign(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "foreign"

    assert order(Int8Tensor.from_hp(torch.ones(2, 4)), torch.ones(2, 4).as_subclass(Foreign)) == "foreign"


def test_freed_without_the_cycle_collector():
    gc.collect()
    gc.disable()
    try:
        w = Int8Tensor.from_hp(torch.ones(2, 4))
        alive = weakref.ref(w.qdata)
        torch.nn.functional.linear(torch.ones(1, 4, requires_grad=True), w[1:]).sum().backward()
        del w
        assert alive() is None
    finally:
        gc.enable()


def test_stable_hash_tells_contexts_apart():
    w = Int8Tensor.from_hp(torch.ones(2, 4))
    same, other = Int8Tensor.from_hp(torch.zeros(2, 4)), Int8Tensor.from_hp(torch.ones(2, 4), 2)
    assert w._stable_hash_for_caching() == same._stable_hash_for_caching()
    assert w._stable_hash_for_caching() != other._stable_hash_for_caching()


def test_a_view_has_no_address_either():
    w = Int8Tensor.from_hp(torch.ones(4, 4))
    assert w[2:].storage_offset() == 8
    assert (w.data_ptr(), w[2:].data_ptr()) == (0, 0)
