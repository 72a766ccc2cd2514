"""A subject that kills, hangs or exhausts the interpreter is reported, and the rest of the run is intact."""

from __future__ import annotations

import os
import signal
import time

import pytest

from subclass_testkit import check_subclass
from subclass_testkit.isolation import Worker, WorkerDied
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
    [("exit", "killed:exit", "exit code 3"), ("segfault", "killed:SIGSEGV", "SIGSEGV"), ("hang", "hang", "no end within 0.5 s")],
)
def test_a_worker_that_dies_says_how(request_: str, kind: str, text: str) -> None:
    worker = Worker(_serve)
    assert worker.ask("hello", 5) == "hello"
    with pytest.raises(WorkerDied, match=text) as death:
        worker.ask(request_, 0.5)
    assert death.value.kind == kind


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
    kinds = {r.kind for r in report.failures}
    assert kind in kinds, kinds
    assert {r.outcome for r in report.results if r.id == sound} == {Outcome.PASSED}
