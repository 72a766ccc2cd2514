"""The judge: what is a refusal, what is equal, what was changed."""

from __future__ import annotations

import math

import pytest
import torch

from subclass_testkit import oracle
from subclass_testkit.oracle import Snapshot, compare, judge_exception


def _raised(source: str) -> BaseException:
    try:
        exec(source, {"torch": torch})
    except BaseException as error:
        return error
    raise AssertionError(f"{source} raised nothing")


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        ("raise NotImplementedError('no t()')", "refused"),
        (
            "try:\n    raise NotImplementedError('x')\nexcept Exception as e:\n    raise RuntimeError('wrapped') from e",
            "refused",
        ),
        ("raise TypeError('no implementation found for torch.add')", "refused"),
        ("raise TypeError('Multiple dispatch failed for aten.add')", "refused"),
        ("raise RuntimeError('While copying: NotImplementedError(...)')", "refused"),
        ("raise ValueError('block of 32 is cut')", "odd"),
        ("raise RuntimeError('no')", "odd"),
        ("assert False, 'unsupported'", "odd"),
        ("raise TypeError('MyTensor takes no bool')", "odd"),
        ("torch.zeros(2).view(3)", "odd"),
        ("assert False", "accident"),
        ("raise RuntimeError()", "accident"),
        ("raise TypeError(\"f() got an unexpected keyword argument 'bias'\")", "accident"),
        ("len(3)", "accident"),
        ("(lambda a: a)()", "accident"),
        ("None.qdata", "accident"),
        ("[][1]", "accident"),
        ("{}['x']", "accident"),
        ("1 / 0", "accident"),
        ("undefined_name", "accident"),
        ("f = lambda: f()\nf()", "accident"),
        ("raise SystemExit(1)", "accident"),
    ],
)
def test_an_exception_is_judged_by_how_it_came(source: str, verdict: str) -> None:
    assert judge_exception(_raised(source)) == verdict


def test_a_subjects_own_pattern_makes_a_refusal_of_any_type() -> None:
    error = _raised("raise KeyError('float8 is not supported')")
    assert judge_exception(error) == "accident"
    assert judge_exception(error, r"is not supported") == "odd"


@pytest.mark.parametrize(
    ("got", "want", "kind"),
    [
        (torch.ones(2), torch.ones(3), "shape"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype"),
        (torch.ones(2), torch.ones(2, device="meta"), "device"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), "value"),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), "value"),
        (1.0, torch.ones(()), "type"),
        ((torch.ones(1),), (torch.ones(1), torch.ones(1)), "length"),
        (True, False, "value"),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), None),
        ([torch.ones(1)], (torch.ones(1),), None),
    ],
)
def test_compare_names_the_first_difference(got: object, want: object, kind: str | None) -> None:
    found = compare(got, want, None, "op")
    assert (found.kind if found else None) == kind


def test_a_value_finding_says_where_and_how_much() -> None:
    want = torch.arange(12.0).reshape(3, 4)
    got = want.clone()
    got[1, 2] += 0.5
    got[2, 3] -= 4
    found = compare(got, want, None, "op")
    assert found is not None
    assert (
        found.message
        == "op is wrong in 2 of 12 elements; largest difference 4 at [2, 3]; first at [1, 2]: got 6.5, expected 6."
    )


def test_the_multilinear_bound_admits_rounding_and_no_more() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 512), torch.randn(16, 512)
    exact = x.double() @ w.double().t()
    bound = oracle.multilinear_bound(x.abs() @ w.abs().t(), torch.float32, 512, None)
    assert ((x @ w.t()).double() - exact).abs().le(bound).all()
    shifted = (x.roll(1, 1) @ w.t()).double()
    assert (shifted - exact).abs().gt(bound).all()
    half = oracle.multilinear_bound(x.abs() @ w.abs().t(), torch.bfloat16, 512, None)
    rounded = (x.bfloat16().float() @ w.bfloat16().float().t()).bfloat16().double()
    assert (rounded - exact).abs().le(half).all()


def test_a_snapshot_notices_values_context_and_shape() -> None:
    from tests.zoo.correct.lossless import Lossless

    hp = torch.arange(12.0).reshape(3, 4)
    w = Lossless.from_hp(hp)
    before = Snapshot.of(w)
    assert before.changes(w) == ""
    name = next(iter(oracle.inner_tensors(w)))
    oracle.inner_tensors(w)[name][1, 1] += 1
    assert f"the values of its inner tensor {name!r} changed" in before.changes(w)
    plain = torch.zeros(3)
    before = Snapshot.of(plain)
    plain.resize_(2)
    assert "its shape changed" in before.changes(plain)


def test_same_bits_tells_signed_zeros_and_nans_apart() -> None:
    assert oracle.same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not oracle.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert oracle.same_bits(torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3).to(torch.float8_e4m3fn))


def test_inner_tensors_recurses_and_takes_only_tensors() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    nested = TwoTensor(TwoTensor(torch.ones(2), torch.zeros(2)), torch.ones(2))
    assert sorted(oracle.inner_tensors(nested)) == ["a.a", "a.b", "b"]
    assert oracle.inner_tensors(torch.ones(1)) == {}
