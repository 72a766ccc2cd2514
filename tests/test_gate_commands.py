"""The command line: lists from reports, lockfiles, comparisons, scaffolds; and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest
import yaml

from subclass_testkit import Options, check_subclass, expect, known_files
from subclass_testkit import report as reports
from subclass_testkit.check import check
from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.cli import main
from subclass_testkit.commands.accept import cover
from subclass_testkit.commands.compare import compare
from subclass_testkit.outcome import Outcome, Result
from tests.test_reports import SPEC, data, run_data
from tests.zoo.correct.row_int8 import RowInt8

pytestmark = pytest.mark.usefixtures("_claims_are_probed_once")

ROOT = Path(__file__).parent.parent
BROKEN = "tests.zoo.broken.slicing:SelectUsesFirstScale"
ROW = "tests.zoo.correct.row_int8:RowInt8"


@pytest.fixture(autouse=True)
def _importable_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(path: Path, report: dict[str, Any]) -> str:
    reports.write(path, report)
    return str(path)


# --- accept and prune


def at(**params: str) -> dict[str, str]:
    return params


@pytest.mark.parametrize(
    ("failing", "passing", "covered"),
    [
        ([at(case="a", dtype="x")], [], [{}]),
        ([at(case="a"), at(case="b")], [at(case="c")], [{"case": ["a", "b"]}]),
        (
            [at(case="a", dtype="x"), at(case="b", dtype="x")],
            [at(case="a", dtype="y"), at(case="b", dtype="y")],
            [{"dtype": ["x"]}],
        ),
        (
            [at(case="a", dtype="x")],
            [at(case="a", dtype="y"), at(case="b", dtype="x")],
            [{"case": ["a"], "dtype": ["x"]}],
        ),
        (
            [at(case="a", dtype="x"), at(case="b", dtype="y")],
            [at(case="a", dtype="y"), at(case="b", dtype="x")],
            [{"case": ["a"], "dtype": ["x"]}, {"case": ["b"], "dtype": ["y"]}],
        ),
        (
            [at(dtype="x", shape="1"), at(dtype="y", shape="2")],
            [at(dtype="x", shape="2"), at(dtype="y", shape="1")],
            [{"dtype": ["x"], "shape": ["1"]}, {"dtype": ["y"], "shape": ["2"]}],
        ),
    ],
)
def test_params_cover_what_fails_and_nothing_that_passes(failing: list, passing: list, covered: list) -> None:
    assert cover(failing, passing) == covered


def test_accept_then_fix_then_prune(pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    """The life of a known failure, as a maintainer sees it."""
    pyproject = pytester.makepyprojecttoml('# mine\n[project]\nname = "x"\n\n[tool.other]\nkey = [1]\n')

    def gate(spec: str = BROKEN, *arguments: str) -> int:
        options = [
            "--subclass-checks=slicing/select",
            "--subclass-checks=slicing/narrow",
            "--subclass-report=r.json",
            *arguments,
        ]
        return int(pytester.runpytest_inprocess(f"--subclass={spec}", *options).ret)

    assert gate() == 1
    assert main(["accept", "r.json", "--reason=no kernel yet", "--issue=#7", "--expires=2099-01-01"]) == 0
    text = pyproject.read_text()
    assert text.startswith("# mine\n")
    assert text.count("[[tool.subclass_testkit.known_failures]]") == 1
    (entry,) = known_files.read(pyproject)
    assert (entry.check, entry.reason, entry.issue, entry.expires) == ("slicing/select", "no kernel yet", "#7", "2099-01-01")
    assert gate() == 0
    assert main(["accept", "r.json", "--reason=again"]) == 0
    assert pyproject.read_text() == text  # nothing is left to accept
    assert main(["prune", "r.json"]) == 0
    assert pyproject.read_text() == text  # nothing is stale
    pyproject.write_text(text.replace(BROKEN, ROW))  # the class is fixed
    assert gate(ROW) == 1
    assert main(["prune", "r.json"]) == 0
    assert "removed (slicing/select: no kernel yet)" in capsys.readouterr().out
    assert gate(ROW) == 0
    assert pyproject.read_text() == '# mine\n[project]\nname = "x"\n\n[tool.other]\nkey = [1]\n\n'


def test_prune_narrows_an_entry_that_half_passes(folder: Path) -> None:
    known = folder / "known_failures.toml"
    known.write_text(f'# ours\n[[known_failures]]\nsubclass = "{BROKEN}"\ncheck = "slicing/select"\nreason = "r"\n')
    run = check_subclass(BROKEN, checks=["slicing/select"], tier="quick", known_failures="known_failures.toml")
    assert not run.ok
    assert main(["prune", save(folder / "r.json", run.to_json())]) == 0
    assert known.read_text().startswith("# ours\n")
    again = check_subclass(BROKEN, checks=["slicing/select"], tier="quick", known_failures=known)
    assert again.ok
    assert again.totals["known"] == run.totals["known"]


def test_accept_keeps_a_crash_from_hiding_a_wrong_value(folder: Path) -> None:
    assert main(["accept", save(folder / "r.json", data()), "--reason=r"]) == 0
    entries = {e.check: e for e in known_files.read(folder / "known_failures.toml")}
    assert entries["slicing/narrow"].match == "raised:IndexError"
    assert entries["slicing/select"].match == ""
    assert "equivalence/unary" not in entries  # it is stale: for prune, not for accept
    crash = Result("slicing/narrow", "must", {}, Outcome.FAILED, 0.0, "IndexError", "raised:IndexError")
    wrong = Result("slicing/narrow", "must", {}, Outcome.FAILED, 0.0, "is wrong", "value")
    assert (entries["slicing/narrow"].describes(crash), entries["slicing/narrow"].describes(wrong)) == (True, False)


def test_accept_takes_only_the_checks_that_are_named(folder: Path) -> None:
    report = save(folder / "r.json", data())
    assert main(["accept", report, "--reason=r", "--checks=slicing/n*"]) == 0
    assert [e.check for e in known_files.read(folder / "known_failures.toml")] == ["slicing/narrow"]


def test_accept_writes_where_the_project_keeps_its_list(folder: Path) -> None:
    report = save(folder / "r.json", data())
    (folder / "pyproject.toml").write_text('[tool.subclass_testkit]\nknown_failures_file = "ci/known.toml"\n')
    (folder / "ci").mkdir()
    assert main(["accept", report, "--reason=r"]) == 0
    assert (folder / "ci" / "known.toml").is_file()
    assert main(["accept", report, "--reason=r", "--file=mine.toml"]) == 0
    assert (folder / "mine.toml").is_file()


@pytest.mark.parametrize(
    ("report", "arguments", "message"),
    [
        (data(interrupted=True), ["--reason=r"], "interrupted run"),
        (data(run_data(deselected=3)), ["--reason=r"], "3 instances were left out"),
        (data(), [], "--reason is missing"),
        (data(), ["--reason= "], "--reason is missing"),
        (data(), ["--reason=r", "--expires=soon"], "'soon' is neither a date nor a version"),
        (data(), ["--reason=r", "--when=torch 3"], "is no condition"),
        (data(), ["--reason=r", "--checks=slicing/narow"], "did you mean 'slicing/narrow'?"),
    ],
)
def test_accept_refuses(
    folder: Path, capsys: pytest.CaptureFixture[str], report: dict[str, Any], arguments: list[str], message: str
) -> None:
    assert main(["accept", save(folder / "r.json", report), *arguments]) == 4
    assert message in capsys.readouterr().err
    assert not (folder / "known_failures.toml").exists()


def test_prune_refuses_an_interrupted_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", save(folder / "r.json", data(interrupted=True))]) == 4
    assert "may still fail" in capsys.readouterr().err


def test_inline_lists_are_left_to_the_hand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[tool.subclass_testkit]\nknown_failures = [{ subclass = "a.b", check = "slicing/select", reason = "r" }]\n'
    (folder / "pyproject.toml").write_text(text)
    assert main(["accept", save(folder / "r.json", data()), "--reason=r"]) == 4
    assert "edit them by hand" in capsys.readouterr().err
    assert (folder / "pyproject.toml").read_text() == text


def test_texts_survive_being_written(folder: Path) -> None:
    odd = "w[\"a\\b\"] = 'x' é \t # \x7f [[known_failures]]\nnext"
    path = folder / "k.toml"
    known_files.append(path, [{"subclass": "a.b", "check": "c/d", "params": {"case": [odd]}, "reason": odd}])
    many = [f"w[{i}] and more text" for i in range(9)]
    known_files.append(path, [{"subclass": "a.b", "check": "e/f", "params": {"case": many}, "reason": "second"}])
    assert max(map(len, path.read_text().splitlines())) < 100
    first, second = known_files.read(path)
    assert (first.params, first.reason, second.reason) == ({"case": [odd]}, odd, "second")
    assert second.params == {"case": many}
    known_files.remove(path, [1])
    assert [e.reason for e in known_files.read(path)] == ["second"]


# --- counts


def test_the_lockfile_keeps_counts_from_dropping(pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str, spec: str = ROW) -> pytest.RunResult:
        return pytester.runpytest_inprocess(f"--subclass={spec}", "--subclass-checks=slicing/s*", *arguments)

    run("--subclass-report=r.json")
    assert main(["lock", "r.json"]) == 0
    assert "--subclass-expect=conformance.lock" in capsys.readouterr().out
    assert run("--subclass-expect=conformance.lock").ret == 0
    fewer = run("--subclass-expect=conformance.lock", "--subclass-checks=!slicing/select")
    assert fewer.ret == 1
    fewer.stdout.fnmatch_lines(["gate: slicing has * check instances, the lockfile says *"])
    assert run("--subclass-expect=conformance.lock", "-k", "32x48").ret == 1
    assert run("--subclass-expect=none.lock").ret == pytest.ExitCode.USAGE_ERROR
    other = run("--subclass-expect=conformance.lock", spec=BROKEN)
    assert f"gate: the lockfile has no counts of {BROKEN}" in other.stdout.str()
    assert f"gate: {ROW} stands in the lockfile, and was not tested." in other.stdout.str()
    pytester.makepyprojecttoml('[tool.subclass_testkit]\nexpect = "conformance.lock"\n')
    assert run("-k", "32x48").ret == 1


def test_checks_that_are_no_longer_judged_are_a_drop() -> None:
    found = [Result("slicing/select", "must", {"case": str(i)}, Outcome.PASSED) for i in range(3)]
    lock = {"lock_version": 1, "subjects": {SPEC: {"tier": "quick", "groups": expect.counts(found)}}}
    assert expect.drops(lock, SPEC, "quick", found) == []
    found[0].outcome = Outcome.NOT_CLAIMED
    assert expect.drops(lock, SPEC, "quick", found) == [
        "slicing has 2 instances that passed, failed or are known, the lockfile says 3."
    ]
    assert "The lockfile is of the tier quick, this run of full." in expect.drops(lock, SPEC, "full", [])[0]


def test_a_lock_of_a_part_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lock", save(folder / "r.json", data(run_data(deselected=1)))]) == 4
    assert "counts would be too low" in capsys.readouterr().err
    (folder / "l").write_text("[]")
    with pytest.raises(ValueError, match="no lockfile of version 1"):
        expect.read(folder / "l")


def test_every_run_prints_sums_that_add_up(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess(f"--subclass={BROKEN}", "--subclass-checks=slicing/s*")
    (line,) = [line for line in result.stdout.lines if line.startswith("selected ")]
    selected, parts = line.removeprefix("selected ").split(" = ")
    counts = [int(part.rpartition(" ")[2]) for part in parts.split(" + ")]
    assert len(counts) == 8
    assert sum(counts) == int(selected) > 0


# --- compare


def one(outcome: Outcome, level: str = "must", kind: str = "", **more: Any) -> Result:
    return Result("slicing/select", level, {"case": "w[3]"}, outcome, 0.0, outcome.value, kind, **more)


FAILED, PASSED = one(Outcome.FAILED, kind="value"), one(Outcome.PASSED)


@pytest.mark.parametrize(
    ("before", "after", "kind", "regressed"),
    [
        (PASSED, FAILED, "fails now", True),
        (None, FAILED, "fails now", True),
        (one(Outcome.KNOWN), FAILED, "fails now", True),
        (PASSED, None, "no longer checked", True),
        (PASSED, one(Outcome.REFUSED), "no longer passes", True),
        (PASSED, one(Outcome.NOT_CLAIMED), "no longer passes", True),
        (PASSED, one(Outcome.KNOWN), "no longer passes", True),
        (PASSED, one(Outcome.SKIPPED), "other outcome", False),
        (FAILED, PASSED, "no failure any more", False),
        (FAILED, one(Outcome.FAILED, kind="shape"), "fails differently", False),
        (None, PASSED, "newly checked", False),
        (FAILED, FAILED, "", False),
        (FAILED, None, "", False),
        (PASSED, PASSED, "", False),
        (PASSED, one(Outcome.FAILED, "should"), "no longer passes", True),
        (one(Outcome.REFUSED), one(Outcome.FAILED, "should"), "other outcome", False),
    ],
)
def test_compare(before: Result | None, after: Result | None, kind: str, regressed: bool) -> None:
    a, b = (data(run_data(found=[r] if r else [])) for r in (before, after))
    found = compare(a, b)
    assert [k for k, texts in found.changes.items() if texts] == ([kind] if kind else [])
    assert found.regressed is regressed


def test_compare_prints_and_exits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = save(folder / "a.json", data(run_data(found=[PASSED])))
    bad = save(folder / "b.json", data(run_data(found=[FAILED], tier="full"), torch="2.14.0", interrupted=True))
    assert main(["compare", good, bad]) == 1
    out = capsys.readouterr().out
    assert f"fails now (1):\n  {SPEC} slicing/select[w[3]]: passed -> failed: failed" in out
    assert "torch 2.13.0 -> 2.14.0" in out
    assert "tier quick -> full" in out
    assert "interrupted" in out
    assert main(["compare", good, good]) == 0
    assert capsys.readouterr().out == "No regression.\n"
    assert main(["compare", good, "none.json"]) == 4


# --- rule sets


class LaterTests(CheckGroup):
    group = "later"

    @check(why="w", fix="f", since="2027.03", level="preview", axes="one")
    def test_newer_rule(self) -> None:
        """A rule of a later rule set."""

    @check(why="w", fix="f", axes="one")
    def test_older_rule(self) -> None:
        """A rule of the first rule set."""


def test_rules_freeze_the_set() -> None:
    def ids(options: Options) -> list[str]:
        class Inherited(LaterTests, unittest.TestCase):
            subject = RowInt8

        Inherited.options = options

        class Again(Inherited):
            pass

        return [i.check.id for i in Again.conformance.instances.values()]

    assert ids(Options()) == ["later/newer-rule", "later/older-rule"]
    assert ids(Options(rules="2026.12")) == ["later/older-rule"]


def test_the_rules_option(pytester: pytest.Pytester) -> None:
    arguments = (f"--subclass={ROW}", "--subclass-checks=slicing/select", "--subclass-report=r.json")
    assert pytester.runpytest_inprocess(*arguments, "--subclass-rules=2026.12").ret == 0
    assert json.loads((pytester.path / "r.json").read_text())["rule_set"] == "2026.12"
    result = pytester.runpytest_inprocess(*arguments, "--subclass-rules=2026.11")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--subclass-rules: there is no rule set '2026.11'; did you mean '2026.12'?" in result.stderr.str()


def test_since_is_a_month() -> None:
    with pytest.raises(ValueError, match="since is a year and month"):
        check(why="w", fix="f", since="2027.13")(LaterTests.test_older_rule)


# --- init, doctor, catalogue


def test_init_writes_files_that_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", ROW]) == 0
    test = folder / "tests" / "test_row_int8_conformance.py"
    workflow = folder / ".github" / "workflows" / "conformance.yml"
    assert str(test) in capsys.readouterr().out
    (job,) = yaml.safe_load(workflow.read_text())["jobs"].values()
    command = next(s["run"] for s in job["steps"] if "pytest" in s.get("run", ""))
    assert command.startswith(f"pytest --subclass={ROW} --subclass-claims=inference,training")
    assert "\n" not in command.strip()
    assert "training" in test.read_text()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    arguments = ["-q", "-p", "no:cacheprovider", "-k", "test_slicing_select__w_3", str(test)]
    run = subprocess.run([sys.executable, "-m", "pytest", *arguments], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert main(["init", ROW]) == 4
    assert "is there already" in capsys.readouterr().err
    assert main(["init", ROW, "--print"]) == 0
    assert "class TestRowInt8(ConformanceTests, unittest.TestCase)" in capsys.readouterr().out
    assert main(["init", "nopkg.Name"]) == 4


def test_doctor_tells_what_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from subclass_testkit.commands import doctor

    assert main(["doctor"]) == 0
    assert "The kit can run here." in capsys.readouterr().out
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name in ("hypothesis", "safetensors") else "1")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "The kit can't run: hypothesis." in out
    assert "pip install safetensors: checks of safetensors files" in out


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 4), (["--version"], 0), (["lst"], 4), (["list"], 0), (["list", "slicng/*"], 4)]
)
def test_exit_codes(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code


def test_annotate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["annotate", save(folder / "r.json", data())]) == 0
    assert capsys.readouterr().out.startswith("::error file=pkg/mod.py,line=3,title=MyTensor equivalence/unary::")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["exp"], {"explain"}),
        (["accept", "--rea"], {"--reason"}),
        (["explain", "slicing/sel"], {"slicing/select"}),
        (["report", "mine.j"], {"mine.json"}),
        (["completion", "z"], {"zsh"}),
    ],
)
def test_bash_completes(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: set[str]) -> None:
    (folder / "mine.json").touch()
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    script += (
        f'COMP_WORDS=(subclass-testkit {" ".join(words)}); COMP_CWORD={len(words)}; _subclass_testkit; echo "${{COMPREPLY[@]}}"'
    )
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert set(answer.stdout.split()) == expected


def test_other_shells_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert main(["completion", "fish"]) == 0
    assert "-l reason" in capsys.readouterr().out
    assert main(["completion", "fsh"]) == 4
    assert "did you mean 'fish'?" in capsys.readouterr().err
