"""A subject that kills, hangs or exhausts the interpreter is reported, and the rest of the run is intact."""

from __future__ import annotations

import os
import signal
import time

import pytest

from subclass_testkit import check_subclass
from subclass_testkit.isolation import Ahead, Worker, WorkerDied
from subclass_testkit.outcome import Outcome


def _serve(request: object) -> object:
    if request == "exit":
        os._exit(3)
    if request == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if request == "hang":
        time.sleep(60)
    return request


@pytest.mark.parametrize(
    ("request_", "kind", "text"),
    [
        ("exit", "killed:exit", "exit code 3"),
        ("segfault", "killed:SIGSEGV", "SIGSEGV"),
        ("hang", "hang", "no end within 0.5 s"),
    ],
)
def test_a_worker_that_dies_says_how(request_: str, kind: str, text: str) -> None:
    worker = Worker(_serve)
    assert worker.ask("hello", 5) == "hello"
    with pytest.raises(WorkerDied, match=text) as death:
        worker.ask(request_, 0.5)
    assert death.value.kind == kind
    assert [frame.function for frame in death.value.stack][:1] == ([] if request_ == "exit" else ["_serve"])


def test_a_crash_is_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Its stack goes into the report; Python's own dump of it would bury the report."""
    with pytest.raises(WorkerDied):
        Worker(_serve).ask("segfault", 5)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("isolate", ["hazardous", "all"])
@pytest.mark.parametrize(
    ("spec", "check", "kind", "sound"),
    [
        ("ExitsInSlice", "slicing/view-under-no-grad", "killed:exit", "slicing/select"),
        ("HangsInTranspose", "slicing/view-leaves-its-input-alone", "hang", "slicing/select"),
        ("SegfaultsInTo", "devices/*", "killed:SIGSEGV", "slicing/select"),
        ("RecursesInClone", "copies/*", "raised:RecursionError", "slicing/select"),
    ],
)
def test_killers_are_named_and_the_run_goes_on(
    spec: str, check: str, kind: str, sound: str, isolate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subclass_testkit.suite._PATIENCE", ((2, 60.0), (0, 15.0)))
    report = check_subclass(f"tests.zoo.broken.killers:{spec}", checks=[check, sound], tier="quick", isolate=isolate)
    assert len(report.results) == len(report.run.instances)
    found = {r.kind: r for r in report.failures}
    assert kind in found, found.keys()
    if kind != "killed:exit":  # os._exit leaves no trace
        assert "tests/zoo/broken/killers.py:" in found[kind].where, found[kind].where
    assert {r.outcome for r in report.results if r.id == sound} == {Outcome.PASSED}


def _slow_square(request: int) -> int:
    if request == 3:
        time.sleep(0.2)
    if request == 13:
        os._exit(1)
    return request * request


def test_a_child_that_works_ahead_meets_its_parent() -> None:
    ahead = Ahead(_slow_square, list(range(10)))
    time.sleep(0.1)
    assert ahead.take(0, 0) is None  # not reached: the child comes from the other end
    assert ahead.take(3, 5) == 9  # being worked on: waited for, and then the child ends
    assert [ahead.take(n, 0) for n in range(4, 10)] == [16, 25, 36, 49, 64, 81]
    assert ahead.take(2, 0) is None


def test_a_child_that_dies_ahead_loses_only_what_it_had_not_answered() -> None:
    ahead = Ahead(_slow_square, list(range(11, 20)))
    time.sleep(0.2)
    assert [ahead.take(n, 1) for n in (11, 12, 13, 14, 19)] == [None, None, None, 196, 361]


@pytest.mark.parametrize("spec", ["tests.zoo.broken.slicing:SelectUsesFirstScale", "tests.zoo.broken.killers:ExitsInSlice"])
def test_working_ahead_changes_no_result(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = ("slicing/select", "slicing/narrow", "slicing/view-under-no-grad", "slicing/pieces")
    outcomes = []
    for worth in (1, 10**9):
        monkeypatch.setattr("subclass_testkit.suite._WORTH_A_PROCESS", worth)
        report = check_subclass(spec, checks=checks)
        outcomes.append([(r.label, r.outcome, r.kind) for r in report.results])
    assert outcomes[0] == outcomes[1]
