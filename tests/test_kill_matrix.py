"""Each broken subclass dies by its intended check; the correct ones, and the controls, die by none."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import warnings

import pytest
import torch

from subclass_testkit import check_subclass, oracle
from subclass_testkit.instances import Options
from subclass_testkit.outcome import Outcome
from subclass_testkit.suite import Run
from tests.zoo.kill_matrix import INTENDED, subject_of
from tests.zoo.registry import Entry, load_zoo

CORRECT, BROKEN = load_zoo()
CHECKS: dict[str, str] = json.loads(INTENDED.read_text())


def test_every_broken_subclass_has_an_intended_check() -> None:
    assert {entry.name for entry in BROKEN} == set(CHECKS)


MORTAL = [entry for entry in BROKEN if entry.group != "isolation"]  # test_isolation.py is about the others


@pytest.mark.parametrize("entry", MORTAL, ids=lambda entry: entry.name)
def test_a_broken_subclass_dies_by_its_intended_check(entry) -> None:
    """And the script that the failure prints fails on the class, and runs through on its correct parent."""
    check = CHECKS[entry.name]
    failed = [r for r in Run(subject_of(entry), Options(checks=(check,))).all() if r.outcome is Outcome.FAILED]
    assert failed, f"{entry.name} ({entry.defect}) survives {check}"
    script = failed[0].reproduction
    assert runs(script), f"the script of {failed[0].label} passes on {entry.name}:\n{script}"
    if "variants" in entry.subject_kwargs:
        return  # made by a method of the class's own
    error = runs(on_parent(script, entry))
    assert not error or error.startswith("refused"), (failed[0].label, error, on_parent(script, entry))


def on_parent(script: str, entry: Entry) -> str:
    """The script with the correct class that the broken one is derived from."""
    here, parent = entry.cls, entry.parent
    script = script.replace(f"from {here.__module__} import", f"from {parent.__module__} import")
    return re.sub(rf"\b{here.__name__}\b", parent.__name__, script)


def runs(script: str) -> str:
    """How a script ends, in a process of its own: empty if it runs through, else its error."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            torch._dynamo.reset()
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(script, "<reproduction>", "exec"), {"__name__": "reproduction"})
        except SystemExit as end:
            os.write(write, f"exit {end.code}".encode() if end.code else b"")
        except BaseException as error:
            # what the parent refuses, the broken class does wrong
            accident = isinstance(error, AssertionError) or oracle.judge_exception(error) == "accident"
            os.write(write, f"{'' if accident else 'refused: '}{type(error).__name__}: {error}".encode()[:2000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        error = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return error or (f"status {status}" if status else "")


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
