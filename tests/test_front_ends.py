"""The three ways in give the same outcomes, and totals add up."""

from __future__ import annotations

import json
import subprocess
import sys
import unittest
from pathlib import Path

import pytest

from subclass_testkit import Options, SlicingTests, Subject, SubjectError, check_subclass
from subclass_testkit.checks import MIXINS, ConformanceTests
from subclass_testkit.testcase import method_names
from tests.zoo.broken.slicing import SelectUsesFirstScale
from tests.zoo.correct.row_int8 import RowInt8

SPEC = "tests.zoo.broken.slicing:SelectUsesFirstScale"
GLOBS = ("slicing/select", "slicing/narrow", "slicing/expert-view")


def _inherited() -> dict[str, str]:
    """Outcomes by label of the same checks as methods of a TestCase, run by unittest."""

    class Inherited(ConformanceTests, unittest.TestCase):
        subject = SelectUsesFirstScale
        options = Options(checks=GLOBS)

    suite = unittest.defaultTestLoader.loadTestsFromTestCase(Inherited)
    result = unittest.TestResult()
    suite.run(result)
    run = Inherited.conformance
    names = {name: label for label, name in method_names(run).items()}
    assert result.testsRun == len(names)
    failed = {names[test._testMethodName] for test, _ in result.failures}
    skipped = {names[test._testMethodName]: reason for test, reason in result.skipped}
    assert not result.errors
    outcomes = {}
    for label in names.values():
        reason = skipped.get(label, "")
        outcomes[label] = "failed" if label in failed or reason.startswith("should: ") else reason.split(":")[0] or "passed"
    return outcomes


def test_the_three_front_ends_agree(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_subclass(SPEC, checks=GLOBS)
    by_call = {r.label: r.outcome.value for r in report.results}
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    globs = [f"--subclass-checks={g}" for g in GLOBS]
    path = pytester.path / "report.json"
    pytester.runpytest_inprocess(f"--subclass={SPEC}", *globs, f"--subclass-report={path}")
    data = json.loads(path.read_text())
    checks = data["runs"][0]["checks"]
    by_plugin = {f"{c['id']}[{'-'.join(c['params'].values())}]": c["outcome"] for c in checks}
    assert set(by_call.values()) >= {"passed", "failed"}
    assert by_plugin == by_call
    assert _inherited() == by_call


def test_totals_add_up_and_every_instance_ends_once() -> None:
    report = check_subclass(RowInt8, checks=["slicing/*"], tier="quick")
    totals = report.totals
    assert totals["selected"] == len(report.run.instances) == len(report.results)
    assert totals["selected"] == sum(n for name, n in totals.items() if name != "selected")
    assert report.ok


def test_an_empty_run_is_not_green() -> None:
    report = check_subclass(RowInt8, checks=["compilation/*"], tier="quick")
    assert not report.results
    assert not report.ok
    assert report.to_json()["runs"][0]["verdict"] == "fail"


def test_mixins_collect_nothing_by_themselves(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("from subclass_testkit import SlicingTests, ConformanceTests\n")
    pytester.runpytest_inprocess().assert_outcomes()


def test_an_inherited_class_is_selectable_by_name(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    pytester.makepyfile(
        """
        import unittest
        from subclass_testkit import SlicingTests, Subject
        from tests.zoo.correct.row_int8 import RowInt8

        class TestRow(SlicingTests, unittest.TestCase):
            subject = Subject(RowInt8, make=RowInt8.from_hp)
        """
    )
    result = pytester.runpytest_inprocess("-k", "test_slicing_select and 48x48", "-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*TestRow::test_slicing_select__w_3___float32__48x48 PASSED*"])


def test_two_subjects_in_one_class_hierarchy_do_not_share_methods() -> None:
    class Base(SlicingTests, unittest.TestCase):
        options = Options(checks=("slicing/select",))

    class One(Base):
        subject = Subject(RowInt8, make=RowInt8.from_hp)

    class Two(Base):
        subject = Subject(SelectUsesFirstScale, make=SelectUsesFirstScale.from_hp)

    outcomes = []
    for cls in (One, Two):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(cls).run(result)
        outcomes.append(bool(result.failures))
    assert outcomes == [False, True]
    assert unittest.defaultTestLoader.getTestCaseNames(Base) == []


def test_method_names_are_unique_ascii_identifiers() -> None:
    class Inherited(ConformanceTests, unittest.TestCase):
        subject = RowInt8

    names = list(method_names(Inherited.conformance).values())
    assert len(names) == len(set(names))
    assert all(n.isascii() and n.isidentifier() for n in names)


def test_conformance_tests_is_all_mixins() -> None:
    assert set(ConformanceTests.__bases__) == set(MIXINS)


def test_a_subject_that_cannot_be_built_says_what_was_tried() -> None:
    import torch

    class NoWayIn(torch.Tensor):
        @staticmethod
        def __new__(cls, a, b, c):
            raise TypeError("never")

    with pytest.raises(SubjectError, match=r"Tried:(?s:.)*NoWayIn\(hp\)(?s:.)*Subject\(NoWayIn, make="):
        check_subclass(NoWayIn)


def test_importing_the_package_and_plugin_is_free_of_torch() -> None:
    code = "import sys, subclass_testkit, subclass_testkit.plugin; print('torch' in sys.modules, 'hypothesis' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]
