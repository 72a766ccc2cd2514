"""Known failures: every key of an entry has an effect, in each of the ways in; and both ways of not holding fail the run."""

from __future__ import annotations

import datetime
import functools
import unittest
from pathlib import Path
from typing import Any

import pytest

from subclass_testkit import KnownFailure, Options, SlicingTests, check_subclass, known_failure
from subclass_testkit.conditions import Condition, Expiry
from subclass_testkit.outcome import Outcome, Result
from tests.zoo.broken.slicing import SelectUsesFirstScale
from tests.zoo.correct.row_int8 import RowInt8

pytestmark = pytest.mark.usefixtures("_claims_are_probed_once")

ROOT = Path(__file__).parent.parent
BROKEN = "tests.zoo.broken.slicing:SelectUsesFirstScale"
ROW = "tests.zoo.correct.row_int8:RowInt8"
GLOB = "slicing/select"


@pytest.fixture(autouse=True)
def _importable_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def report(*entries: Any, spec: str = BROKEN, **options: Any):
    return check_subclass(spec, checks=[GLOB], tier="quick", known_failures=entries, **options)


@functools.cache
def failing_cases() -> list[str]:
    return sorted({r.params["case"] for r in report().failures})


def entry(**keys: Any) -> dict[str, Any]:
    return {"check": GLOB, "reason": "no row kernel yet", "params": {"case": failing_cases()}, **keys}


def test_a_declared_failure_is_known_and_counted() -> None:
    before = report()
    after = report(entry(issue="#12"))
    assert before.totals["failed"] == after.totals["known"] > 0
    assert after.totals["failed"] == 0
    assert after.totals["selected"] == before.totals["selected"]
    assert (before.ok, after.ok) == (False, True)
    assert {r.known for r in after.results if r.outcome is Outcome.KNOWN} == {"no row kernel yet (#12)"}
    assert "known failures: 1 entry" in str(after)


def test_passing_though_declared_fails_the_run() -> None:
    result = report({"check": GLOB, "reason": "all of it"})
    stale = [r for r in result.results if r.gate]
    assert not result.ok
    assert {r.params["case"] for r in stale}.isdisjoint(failing_cases())
    assert stale
    assert all(r.fails_run() and "remove the entry" in r.message for r in stale)
    assert not report({"check": GLOB, "reason": "fixed long ago"}, spec=ROW).ok


def test_match_tells_the_declared_failure_from_another() -> None:
    assert report(entry(match="is wrong in")).ok
    other = report(entry(match="IndexError"))
    assert not other.ok
    assert "fails differently" in other.failures[0].gate
    assert "doesn't contain 'IndexError'" in " ".join(str(other).split())


def test_params_choose_instances_and_a_star_stands_for_any_text() -> None:
    known = report(entry(params={"case": "w[3]", "shape": "32x*"}))
    told = [r.params for r in known.results if r.outcome is Outcome.KNOWN]
    assert told
    assert all(p["case"] == "w[3]" and p["shape"].startswith("32x") for p in told)


def test_brackets_in_a_case_are_no_glob() -> None:
    known = report(entry(params={"case": "w[*"}))
    told = {r.params["case"] for r in known.results if r.outcome is Outcome.KNOWN}
    assert told == {c for c in failing_cases() if c.startswith("w[")}


def test_when_puts_an_entry_in_force_only_where_it_holds() -> None:
    assert report(entry(when="torch >= 2.0")).ok
    out = report(entry(when="torch < 2.0"))
    assert not out.ok
    assert out.totals["known"] == 0
    assert "1 not in force here (torch < 2.0)" in str(out)
    assert report(entry(when="torch < 2.0"), spec=ROW).ok  # an entry that is not in force is not stale


def test_expired_fails_and_soon_is_announced() -> None:
    today = datetime.date.today()
    over = report(entry(expires=today - datetime.timedelta(days=1)))
    assert not over.ok
    assert over.totals["known"] == 0
    assert "expired" in over.problems[0]
    soon = report(entry(expires=today + datetime.timedelta(days=3)))
    assert soon.ok
    assert "expires in 3 days" in str(soon)
    assert not report(entry(expires="torch 2.0")).ok
    assert report(entry(expires="torch 99.1")).ok


def test_about_nothing_fails() -> None:
    nothing = report(entry(), {"check": GLOB, "reason": "r", "params": {"dtype": "float8"}})
    assert not nothing.ok
    assert "matches nothing" in nothing.problems[0]
    assert "dtype 'float8'" in nothing.problems[0]


def test_covering_only_refusals_fails() -> None:
    from tests.zoo.correct.packed_int4 import PackedInt4

    refused = [
        r for r in check_subclass(PackedInt4, checks=["slicing/*"], tier="quick").results if r.outcome is Outcome.REFUSED
    ]
    one = refused[0]
    declared = KnownFailure(one.id, reason="r", params=one.params)
    result = check_subclass(PackedInt4, checks=[one.id], tier="quick", known_failures=[declared])
    assert result.problems == [f"the known failure of {one.id!r} covers nothing that fails (refused): remove it (r)."]
    assert not result.ok


def test_an_odd_refusal_that_a_strict_run_fails_on_can_be_declared() -> None:
    from subclass_testkit.known_failures import Expectations
    from subclass_testkit.suite import Run

    run = Run(report().run.subject, Options(checks=(GLOB,)))
    instances = list(run.instances.values())
    odd = instances[0].result(Outcome.REFUSED, notes=["refused by ValueError: ..."])
    declared = Expectations([KnownFailure(GLOB, reason="r", params=odd.params)], [BROKEN], instances, instances)
    judged = declared.judge(odd)
    assert (odd.fails_run(strict=True), judged.fails_run(strict=True)) == (True, False)
    assert (judged.outcome, judged.known) == (Outcome.REFUSED, "r")
    assert declared.problems([judged]) == []


def test_subclass_chooses_the_subject() -> None:
    assert report(entry(subclass=BROKEN.replace(":", "."))).ok
    assert report(entry(subclass="tests.zoo.*")).ok
    assert not report(entry(subclass="mypkg.*")).ok


def test_known_failures_still_block_what_depends_on_them() -> None:
    failed = Result("a/b", "must", {}, Outcome.FAILED, kind="value")
    known = Result("a/b", "must", {}, Outcome.KNOWN, kind="value")
    stale = Result("a/b", "must", {}, Outcome.FAILED, kind="known:passed", gate="x")
    assert (failed.broken, known.broken, stale.broken) == (True, True, False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"reason": " "}, "reason is missing"),
        ({"chek": "x"}, "unknown key 'chek'; did you mean 'check'?"),
        ({"check": "slicing/selct"}, "there is no check 'slicing/selct'; did you mean 'slicing/select'?"),
        ({"params": {"dtyp": "float32"}}, "params has no 'dtyp'; did you mean 'dtype'?"),
        ({"params": {"dtype": 3}}, "params.dtype takes a text or a list of texts, got 3"),
        ({"params": ["float32"]}, "params takes a table"),
        ({"when": "torch 2.14"}, "'torch 2.14' is no condition"),
        ({"when": "torch < banana"}, "is no condition"),
        ({"expires": "next year"}, "'next year' is neither a date nor a version"),
        ({"expires": 2027}, "expires takes a date or a text, got 2027"),
        ({"match": 3}, "match takes a text, got 3"),
        ({"subclass": ""}, "'*' stands for all"),
    ],
)
def test_a_malformed_entry_names_value_rule_and_fix(keys: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        report({"check": GLOB, "reason": "r", **keys})
    assert message in str(error.value)
    assert "known_failures[0]" in str(error.value)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("torch > 1", True),
        ("torch < 1", False),
        ("torch > 1 and python < 3", False),
        ("torch > 1 and python > 3", True),
        ("no-such-package > 0", False),
    ],
)
def test_conditions(text: str, holds: bool) -> None:
    assert Condition(text).holds() is holds


def test_versions_of_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    from packaging.version import Version

    for installed, before, over in (("2.13.0+cpu", True, False), ("2.14.0.dev20261101", False, True), ("2.14.1", False, True)):
        monkeypatch.setattr("subclass_testkit.conditions.version_of", lambda _, v=installed: Version(v))
        assert Condition("torch < 2.14").holds() is before
        assert Expiry("torch 2.14").past() is over
    day = Expiry("2027-01-31")
    assert not day.past(datetime.date(2027, 1, 31))
    assert day.past(datetime.date(2027, 2, 1))


# --- inherited


def run_case(cls: type[unittest.TestCase]) -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(cls).run(result)
    return result


def test_a_class_attribute_and_a_decorator_declare_too() -> None:
    class Base(SlicingTests, unittest.TestCase):
        options = Options(checks=(GLOB,))

    class Plain(Base):
        subject = SelectUsesFirstScale

    class Attribute(Base):
        subject = SelectUsesFirstScale
        known_failures = [entry()]

    @known_failure(GLOB, reason="no row kernel yet", params={"case": failing_cases()})
    class Decorated(Base):
        subject = SelectUsesFirstScale

    assert run_case(Plain).failures
    for cls in (Attribute, Decorated):
        result = run_case(cls)
        assert result.wasSuccessful()
        assert any(reason == "known: no row kernel yet" for _, reason in result.skipped)


def test_an_inherited_stale_or_expired_entry_fails() -> None:
    @known_failure(GLOB, reason="r")
    class Stale(SlicingTests, unittest.TestCase):
        subject = RowInt8
        options = Options(checks=(GLOB,))

    assert "passes, but" in run_case(Stale).failures[0][1]

    class Expired(SlicingTests, unittest.TestCase):
        subject = SelectUsesFirstScale
        options = Options(checks=(GLOB,))
        known_failures = [entry(expires="2020-01-01")]

    assert "expired (2020-01-01)" in run_case(Expired).errors[0][1]


# --- pytest and files


def toml(cases: list[str], *, table: str = "tool.subclass_testkit.known_failures", more: str = "") -> str:
    return (
        f'[[{table}]]\nsubclass = "{BROKEN}"\ncheck = "{GLOB}"\nreason = "no row kernel yet"\nissue = "#12"\n'
        f"params = {{ case = {cases!r} }}\n{more}\n"
    )


def run(pytester: pytest.Pytester, *arguments: str, spec: str = BROKEN) -> pytest.RunResult:
    return pytester.runpytest_inprocess(f"--subclass={spec}", f"--subclass-checks={GLOB}", *arguments)


def test_pyproject_declares_them(pytester: pytest.Pytester) -> None:
    pytester.makepyprojecttoml(toml(failing_cases()))
    result = run(pytester)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*known failures: 1 entry*", "*PASS.*"])
    assert result.parseoutcomes()["known"] > 0


def test_pyproject_expiry_and_stale_entries_fail_the_gate(pytester: pytest.Pytester) -> None:
    pytester.makepyprojecttoml(toml(failing_cases(), more="expires = 2020-01-01"))
    result = run(pytester)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["gate: pyproject.toml, known failure 1 expired*"])
    pytester.makepyprojecttoml(toml(["w[3]"]).replace(BROKEN, ROW))
    result = run(pytester, spec=ROW)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*passes, but pyproject.toml, known failure 1 declares it to fail*"])


def test_a_problem_of_the_list_alone_fails_the_session(pytester: pytest.Pytester) -> None:
    pytester.makepyprojecttoml(toml(["w[77]"]).replace(BROKEN, ROW))
    result = run(pytester, spec=ROW)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["gate: pyproject.toml, known failure 1 matches nothing*", "*FAIL: 1 problem of the gate.*"])


def test_a_misspelt_class_of_an_imported_module_is_found(pytester: pytest.Pytester) -> None:
    pytester.makepyprojecttoml(toml(["w[3]"]).replace("SelectUsesFirstScale", "SelectUsesFirstScales"))
    result = run(pytester, "-k", "nothing_at_all or 48x48", spec=ROW)
    assert (
        "tests.zoo.broken.slicing has no 'SelectUsesFirstScales'; did you mean 'SelectUsesFirstScale'?" in result.stdout.str()
    )
    assert result.ret == 1


def test_a_file_of_its_own_by_setting_and_by_option(pytester: pytest.Pytester) -> None:
    (pytester.path / "known.toml").write_text(toml(failing_cases(), table="known_failures"))
    (pytester.path / "other.toml").write_text("")
    pytester.makepyprojecttoml('[tool.subclass_testkit]\nknown_failures_file = "known.toml"\n')
    assert run(pytester).ret == 0
    assert run(pytester, "--subclass-known-failures=other.toml").ret == 1  # the command line comes first
    pytester.makepyprojecttoml("")
    assert run(pytester).ret == 1
    assert run(pytester, "--subclass-known-failures=known.toml").ret == 0


def test_extends_takes_over_a_file_or_a_packages_list(pytester: pytest.Pytester) -> None:
    pytester.mkpydir("upstream")
    (pytester.path / "upstream" / "known.toml").write_text(toml(failing_cases(), table="known_failures"))
    for other in ("upstream/known.toml", "upstream:known.toml"):
        pytester.makepyprojecttoml(f'[tool.subclass_testkit]\nextends = ["{other}"]\n')
        pytester.syspathinsert()
        assert run(pytester).ret == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[tool.subclass_testkit.known_failures]]\ncheck = "a/b"\nreason = "r"', "known failure 1: subclass is missing"),
        ('[[tool.subclass_testkit.known_failures]]\nsubclass = "a.b"\nreason = "r"', "known failure 1: check is missing"),
        (
            '[[tool.subclass_testkit.known_failures]]\nsubclass = "*"\ncheck = "slicing/selct"\nreason = "r"',
            "did you mean 'slicing/select'?",
        ),
        ("[tool.subclass_testkit]\nknown_failures = 3", "known_failures takes a list, got 3"),
        ('[tool.subclass_testkit]\nknown_failure_file = "x"', "did you mean 'known_failures_file'?"),
        ('[tool.subclass_testkit]\nknown_failures_file = "x.toml"', "there is no such file"),
        ('[tool.subclass_testkit]\nextends = ["x.toml"]', "extends 'x.toml', but there is no file"),
        ('[tool.subclass_testkit]\nextends = ["nopkg:x.toml"]', "there is no package 'nopkg'"),
        ('[tool.subclass_testkit]\nextends = ["pyproject.toml"]', "leads back to itself"),
    ],
)
def test_a_malformed_file_is_a_usage_error(pytester: pytest.Pytester, text: str, message: str) -> None:
    pytester.makepyprojecttoml(text)
    result = run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str() + result.stdout.str()


def test_xdist_judges_the_list_once(pytester: pytest.Pytester) -> None:
    pytester.makepyprojecttoml(toml(failing_cases()))
    result = pytester.runpytest_subprocess(f"--subclass={BROKEN}", f"--subclass-checks={GLOB}", "-n", "2")
    assert result.ret == 0
    assert "known failures: 1 entry" in result.stdout.str()


def test_a_part_of_a_run_does_not_judge_what_it_left_out(pytester: pytest.Pytester) -> None:
    pytester.makepyprojecttoml(toml(failing_cases()))
    assert run(pytester, "-k", "dtype_or_48x48 or 32x48").ret == 0
