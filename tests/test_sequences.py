"""The state machine of `sequences`: it finds what single operations don't show, always the same, and prints a script."""

from __future__ import annotations

import subprocess
import sys

import pytest

from subclass_testkit.checks import _sequence_ops as ops
from subclass_testkit.instances import Options
from subclass_testkit.outcome import Outcome
from subclass_testkit.resolve import resolve
from subclass_testkit.suite import Run
from tests.zoo.correct.row_int8 import RowInt8
from tests.zoo.kill_matrix import subject_of
from tests.zoo.registry import load_zoo

CHECK = "sequences/random-operations"


class StaleAfterTwoViews(RowInt8):
    """A view of a view forgets that it is one: its writes go into a copy. Every single view is right."""

    @classmethod
    def op_slice(cls, func, w, *args):
        out = super().op_slice(func, w, *args)
        if w.storage_offset() and args[1]:
            return out.map_inner(lambda t: t.clone())
        return out


def run(subject: object, seed: int = 0):
    found = Run(resolve(subject), Options(checks=(CHECK,), seed=seed))
    results = list(found.all())
    assert len(results) == len(found.instances)
    return next((r for r in results if r.outcome is Outcome.FAILED), results[0])


def test_a_correct_class_passes() -> None:
    assert run(RowInt8).outcome is Outcome.PASSED


def test_what_only_a_sequence_shows_is_found_and_shrunk() -> None:
    result = run(StaleAfterTwoViews)
    assert result.outcome is Outcome.FAILED
    steps = [line for line in result.reproduction.splitlines() if line.startswith(("v", "with"))]
    assert 3 <= len(steps) <= 5, result.reproduction  # two views, and a write into both twins


def test_the_script_fails_on_the_class_and_passes_on_its_parent(tmp_path) -> None:
    text = run(StaleAfterTwoViews).reproduction
    for name, code in (("StaleAfterTwoViews", 1), ("RowInt8", 0)):
        source = text.replace("StaleAfterTwoViews", name)
        if name == "RowInt8":
            source = source.replace("tests.test_sequences", "tests.zoo.correct.row_int8")
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stderr
        assert code == 0 or "AssertionError" in done.stderr


ZOO = (
    "SelectUsesFirstScale", "LastUnevenChunkWrong", "SliceCopies", "NegativeDimSlicesRows", "KeywordBiasDropped", "AddmmIgnoresAlphaBeta",
    "StepIsNoOp", "CloneSharesScale", "CopyIsNoOp",
)  # fmt: skip


@pytest.mark.parametrize("entry", [e for e in load_zoo()[1] if e.name in ZOO], ids=lambda entry: entry.name)
def test_faults_of_single_operations_are_found_as_well(entry) -> None:
    """Alone and with its standard budget, it finds four of five of the zoo's faults in slicing, equivalence and optimizers."""
    assert run(subject_of(entry)).outcome is Outcome.FAILED


def test_without_a_seed_the_sequences_are_always_the_same() -> None:
    first, second = run(StaleAfterTwoViews), run(StaleAfterTwoViews)
    assert (first.message, first.reproduction) == (second.message, second.reproduction)


def test_a_seed_explores_and_what_failed_is_tried_first(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(StaleAfterTwoViews, seed=7)
    assert result.outcome is Outcome.FAILED
    assert list((tmp_path / ".hypothesis" / "examples").iterdir())
    again = run(StaleAfterTwoViews, seed=7)
    assert again.reproduction == result.reproduction


def test_two_subjects_in_one_process() -> None:
    assert run(StaleAfterTwoViews).outcome is Outcome.FAILED
    assert run(RowInt8).outcome is Outcome.PASSED


def test_a_class_that_refuses_everything_passes() -> None:
    from tests.zoo.correct.refuses_everything import RefusesEverything

    assert run(RefusesEverything).outcome is Outcome.PASSED


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (4,), (2, 3, 4)])
def test_every_view_is_legal(shape) -> None:
    import torch
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(max_examples=100, database=None)
    @given(st.sampled_from(ops.views(torch.Size(shape))).flatmap(lambda text: ops.filled(text, torch.Size(shape))))
    def legal(text: str) -> None:
        t = torch.zeros(shape)
        view = eval(text.format("t"), {"t": t})
        assert view.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()

    legal()
