"""A failure names the place in the subject's own code: the line that raised, or the functions that the operation ran."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from subclass_testkit import check_subclass
from subclass_testkit.api import Report
from subclass_testkit.locate import SubjectCode
from subclass_testkit.outcome import Outcome

_MODULE = """
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

def rows_of(w, start, end):
    return Scaled(w.q[start:end], w.scale[: end - start])

def forgetful(w, src):
    return w.copy(src.q)

class Scaled(torch.Tensor):
    @staticmethod
    def __new__(cls, q, scale):
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, strides=q.stride(), dtype=scale.dtype, storage_offset=q.storage_offset())

    def __init__(self, q, scale):
        self.q, self.scale = q, scale

    @classmethod
    def from_hp(cls, hp):
        scale = hp.detach().abs().amax(-1, keepdim=True).clamp(1e-6) / 127
        return cls((hp.detach() / scale).round().to(torch.int8), scale)

    def dequantize(self):
        return self.q.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self):
        return ["q", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, ctx, size, stride):
        return Scaled(inner["q"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, {}, Scaled(args[0].q, args[0].scale))
        if func is torch.ops.aten.slice.Tensor and args[1] == 0 and len(args) == 4:
            end = min(args[3], args[0].shape[0])
            return return_and_correct_aliasing(func, args, {}, rows_of(args[0], args[2], end))
        if func is torch.ops.aten.copy_.default:
            return forgetful(args[0], args[1])
        raise NotImplementedError(str(func))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("located")
    (folder / "located_subject.py").write_text(_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return check_subclass(
            "located_subject:Scaled", checks=["slicing/row-slice*", "copies/copy-from-plain", "equivalence/in-place"]
        )


def test_a_wrong_value_names_the_functions_that_made_it(report: Report) -> None:
    wrong = [r for r in report.failures if r.id == "slicing/row-slice-carries-its-scales" and r.kind == "value"]
    line = _MODULE.splitlines().index("def rows_of(w, start, end):") + 1
    assert wrong[0].where == f"located_subject.py:{line} rows_of"
    assert not any(r.where for r in wrong[1:]), "the first of a finding is enough"


def test_an_error_names_its_line(report: Report) -> None:
    raised = [r for r in report.failures if r.id == "copies/copy-from-plain"]
    line = _MODULE.splitlines().index("    return w.copy(src.q)") + 1
    assert {r.where for r in raised} == {f"located_subject.py:{line}, in forgetful: return w.copy(src.q)"}


def test_findings_of_one_cause_are_shown_once(report: Report) -> None:
    text = str(report)
    causes = {r.cause for r in report.failures}
    findings = {(r.id, r.kind) for r in report.failures}
    assert len(causes) < len(findings)
    assert f"{len(findings)} distinct findings, {len(causes)} distinct causes" in text
    assert text.count("  Reproduce") == len(causes)
    assert text.count("the same cause as of") == len(findings) - len(causes)


def test_code_of_torch_and_of_the_kit_is_not_the_subjects() -> None:
    code = SubjectCode(TwoTensor)
    assert not code.owns(torch.__file__)
    assert not code.owns(str(Path(check_subclass.__code__.co_filename)))
    assert check_subclass(TwoTensor, checks=["slicing/row-slice*"]).results[0].outcome is Outcome.PASSED
