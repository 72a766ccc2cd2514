"""Run one check instance in this process, and turn how it ended into a result."""

from __future__ import annotations

import contextlib
import time

import torch

from subclass_testkit import control, oracle
from subclass_testkit.calm import calm
from subclass_testkit.checks.base import Case, CheckGroup
from subclass_testkit.instances import Instance
from subclass_testkit.locate import SubjectCode, only_in
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Finding, NotClaimed, Outcome, Refused, Result


def execute(instance: Instance, case: Case) -> Result:
    """Run an instance in this process; where it fails, on the control too."""
    start = time.perf_counter()
    result = judged(instance, case)
    if asks_control(result):
        result = weighed(instance, case, result, control_result(instance, case))
    result.seconds = time.perf_counter() - start
    return result


def asks_control(result: Result) -> bool:
    """Whether the control decides if a result is the subject's fault."""
    return result.outcome is Outcome.FAILED or (result.outcome is Outcome.REFUSED and bool(result.notes))


def weighed(instance: Instance, case: Case, result: Result, limit: Result | None) -> Result:
    """The result; or, where the control's is the same, torch's limit."""
    if limit is None or limit.kind != result.kind or not control.same_text(limit.message, result.message):
        return result
    name = control.pick(case.subject).title
    text = f"{result.message.rstrip('.')}. The control {name} does the same on torch {torch.__version__}. {instance.check.upstream}"
    return instance.result(Outcome.TORCH_LIMIT, message=text.strip())


def judged(instance: Instance, case: Case) -> Result:
    """Run the check's body and turn how it ended into a result."""
    group = object.__new__(instance.mixin)
    group.case = case
    try:
        with calm():
            torch.manual_seed(case.seed)
            instance.method(group)
    except CheckFailed as failure:
        return _failed(instance, failure.finding, _line(failure.__cause__, case))
    except Refused as refusal:
        return _refused(instance, refusal, case)
    except CheckSkipped as reason:
        return instance.result(Outcome.SKIPPED, message=str(reason))
    except NotClaimed as reason:
        return instance.result(Outcome.NOT_CLAIMED, message=str(reason))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _stray(instance, error, case)
    return instance.result(Outcome.PASSED)


def locate(instance: Instance, case: Case) -> str:
    """Which of the subject's functions the check runs beyond those that any use of a tensor runs."""
    group = object.__new__(instance.mixin)
    group.case = case
    return only_in(SubjectCode(case.subject.cls), lambda: judged(instance, case), lambda: _usual(group))


def _usual(group: CheckGroup) -> None:
    """What nearly every check does: make a tensor, read its values, look at its inner tensors."""
    with calm(), contextlib.suppress(Exception):
        script = group.script()
        oracle.Snapshot.of(script["w"])
        script.read(script["w"].detach(), "w")


def _line(error: BaseException | None, case: Case) -> str:
    """The line of the subject's that raised."""
    return SubjectCode(case.subject.cls).line_of(oracle.root_cause(error)) if error is not None else ""


def _failed(instance: Instance, finding: Finding, where: str = "") -> Result:
    return instance.result(
        Outcome.FAILED,
        message=finding.message,
        kind=finding.kind,
        diagnosis=finding.likely,
        where=where,
        reproduction=finding.reproduction,
    )


def _refused(instance: Instance, refusal: Refused, case: Case) -> Result:
    required = [c for c in instance.check.requires if c in case.subject.declared]
    if required:
        finding = Finding(
            refusal.kind, f"{refusal}; the declared claim {required[0]!r} requires it.", reproduction=refusal.reproduction
        )
        return _failed(instance, finding)
    notes = []
    if refusal.odd:
        kind = refusal.kind.removeprefix("raised:")
        notes.append(f"refused by {kind}: a refusal should be a NotImplementedError that names the operation")
    return instance.result(
        Outcome.REFUSED, message=str(refusal), kind=refusal.kind, notes=notes, reproduction=refusal.reproduction
    )


def _stray(instance: Instance, error: BaseException, case: Case) -> Result:
    """An exception that no script caught: judged as the subject's."""
    message = f"the check ended in {oracle.describe(error)}"
    kind = f"raised:{type(oracle.root_cause(error)).__name__}"
    verdict = oracle.judge_exception(error, case.subject.refusals)
    if verdict == "accident":
        return _failed(instance, Finding(kind, message), _line(error, case))
    return _refused(instance, Refused(message, kind=kind, odd=verdict == "odd"), case)


def control_result(instance: Instance, case: Case) -> Result | None:
    """The same instance on the control, or None where the control doesn't have that dtype or shape."""
    twin = control.case_for(case.subject, instance.dtype, instance.shape, case.seed)
    return judged(instance, twin) if twin is not None else None
