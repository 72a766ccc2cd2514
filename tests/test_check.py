"""Checks as data: ids, registration, selection."""

from __future__ import annotations

import pytest
from torch.testing._internal.two_tensor import TwoTensor

from subclass_testkit import Subject, check_subclass
from subclass_testkit.check import check, check_id, group_checks, over, registry, select
from subclass_testkit.checks import MIXINS
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.outcome import Outcome


def test_ids_are_unique_and_derived_from_group_and_method() -> None:
    checks = registry()
    assert check_id("slicing", "test_row_slice") == "slicing/row-slice"
    for key, info in checks.items():
        assert key == info.id == check_id(info.group, info.function)
    assert [m.group for m in MIXINS] == list(dict.fromkeys(m.group for m in MIXINS))


def test_every_check_explains_itself() -> None:
    for info in registry().values():
        for text in (info.rule, info.why, info.fix):
            assert len(text) > 12, info.id
        assert info.rule.endswith("."), f"{info.id}: the rule is a sentence"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"needs": ["trainig"]}, "unknown claim 'trainig'; did you mean 'training'"),
        ({"level": "maybe"}, "'maybe' is none of must, should, preview"),
        ({"axes": "every"}, "'every' is none of"),
        ({"why": " "}, "needs a why"),
    ],
)
def test_a_wrong_registration_fails_at_import(arguments: dict, text: str) -> None:
    def test_x(self) -> None:
        """A rule."""

    with pytest.raises(ValueError, match=text):
        check(**{"why": "because", "fix": "so", **arguments})(test_x)


def test_a_check_without_docstring_is_refused() -> None:
    def test_x(self) -> None:
        pass

    with pytest.raises(ValueError, match="needs a docstring"):
        check(why="because", fix="so")(test_x)


def test_over_makes_an_instance_a_case_in_order() -> None:
    class Some(CheckGroup):
        group = "some"

        @over("a[1]", ("b", 2))
        @check(why="because", fix="so that")
        def test_it(self, text: str, number: int = 1) -> None:
            """A rule."""

    found = group_checks(Some)
    assert [(c.id, argument) for c, _, argument in found] == [("some/it", "a[1]"), ("some/it", "b")]


def test_selection_keeps_and_leaves_out() -> None:
    ids = ["a/x", "a/y", "b/x"]
    assert select(ids, ["a/*"]) == ["a/x", "a/y"]
    assert select(ids, ["!a/y"]) == ["a/x", "b/x"]
    assert select(ids, ["a/*", "b/x", "!*/y"]) == ["a/x", "b/x"]
    with pytest.raises(ValueError, match="no check matches 'c/x'"):
        select(ids, ["c/x"])


def test_what_is_no_parameter_is_not_judged_as_one() -> None:
    """An activation or an optimizer's state: no module holds it, but its in-place operations must be right all the same."""
    subject = Subject(
        TwoTensor, make="TwoTensor(hp, hp.clone())", to_plain="t.a", parameter=False,
        imports="from torch.testing._internal.two_tensor import TwoTensor",
    )  # fmt: skip
    report = check_subclass(
        subject, checks=["modules/state-dict*", "devices/module-move", "optimizers/sgd-works", "equivalence/in-place"]
    )
    outcomes = {r.id: {x.outcome for x in report.results if x.id == r.id} for r in report.results}
    assert outcomes.pop("equivalence/in-place") == {Outcome.PASSED}
    assert set(map(frozenset, outcomes.values())) == {frozenset({Outcome.NOT_CLAIMED})}
