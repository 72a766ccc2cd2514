"""Each broken subclass dies by its intended check; the correct ones, and the controls, die by none."""

from __future__ import annotations

import json

import pytest

from subclass_testkit import check_subclass
from subclass_testkit.instances import Options
from subclass_testkit.outcome import Outcome
from subclass_testkit.suite import Run
from tests.zoo.kill_matrix import INTENDED, killers, subject_of
from tests.zoo.registry import load_zoo

CORRECT, BROKEN = load_zoo()
CHECKS: dict[str, str] = json.loads(INTENDED.read_text())


def test_every_broken_subclass_has_an_intended_check() -> None:
    assert {entry.name for entry in BROKEN} == set(CHECKS)


MORTAL = [entry for entry in BROKEN if entry.group != "isolation"]  # test_isolation.py is about the others


@pytest.mark.parametrize("entry", MORTAL, ids=lambda entry: entry.name)
def test_a_broken_subclass_dies_by_its_intended_check(entry) -> None:
    check = CHECKS[entry.name]
    found = killers(entry, Options(checks=(check,)))
    assert check in found["fails"], f"{entry.name} ({entry.defect}) survives {check}"


@pytest.mark.parametrize("entry", CORRECT, ids=lambda entry: entry.name)
def test_a_correct_subclass_gets_no_failure(entry) -> None:
    run = Run(subject_of(entry))
    failed = [r for r in run.all() if r.outcome is Outcome.FAILED]
    assert {r.id for r in failed if r.level == "should"} == set(entry.advice)
    assert not [(r.label, r.message) for r in failed if r.level == "must"]


@pytest.mark.parametrize(
    "spec",
    [
        "torch.Tensor",
        "torch.testing._internal.two_tensor.TwoTensor",
        "torch.testing._internal.subclasses.WrapperSubclass",
        "torch.testing._internal.custom_tensor.ConstantExtraMetadataTensor",
        "reference_impls.Int8Tensor",
    ],
)
def test_a_control_gets_no_failure(spec: str) -> None:
    report = check_subclass(spec)
    assert not [(r.label, r.message) for r in report.failures]
    assert report.totals["selected"] >= 600
