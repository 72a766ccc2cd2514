"""pytest's side: options, exit codes, collection, reports."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).parent.parent
TWO = "torch.testing._internal.two_tensor.TwoTensor"
ROW = "tests.zoo.correct.row_int8:RowInt8"
BROKEN = "tests.zoo.broken.slicing:SelectUsesFirstScale"


@pytest.fixture(autouse=True)
def _importable_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([f"--subclass={TWO[:-2]}"], "did you mean 'TwoTensor'?"),
        (["--subclass=torhc.Tensor"], "did you mean 'torch'?"),
        (["--subclass=nothing"], "write it as pkg.mod.Name"),
        ([f"--subclass={TWO}", "--subclass-checks=slicing/selct"], "did you mean 'slicing/select'?"),
        ([f"--subclass={TWO}", "--subclass-checks=!slicng/*"], "no check matches 'slicng/*'"),
        ([f"--subclass={TWO}", "--subclass-tier=quik"], "did you mean 'quick'?"),
        ([f"--subclass={TWO}", "--subclass-isolate=al"], "did you mean 'all'?"),
        ([f"--subclass={TWO}", "--subclass-claims=trainng"], "did you mean 'training'?"),
        ([f"--subclass={TWO}", "--subclass-report=r.jsn"], "the ending must be one of .badge.json"),
        ([f"--subclass={TWO}", "--subclass-seed=x"], "invalid int value"),
    ],
)
def test_a_typo_is_a_usage_error_with_the_nearest_name(pytester: pytest.Pytester, arguments: list[str], hint: str) -> None:
    result = pytester.runpytest_inprocess(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert hint in result.stderr.str() + result.stdout.str()


def test_without_a_path_only_the_conformance_run_is_collected(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_other(): pass")
    result = pytester.runpytest_inprocess(f"--subclass={TWO}", "--subclass-checks=slicing/select", "--collect-only", "-q")
    assert "test_other" not in result.stdout.str()
    result = pytester.runpytest_inprocess(f"--subclass={TWO}", "--subclass-checks=slicing/select", ".", "-v")
    result.stdout.fnmatch_lines(["*test_other PASSED*", "*slicing/select?w?3?-float32-32x48? PASSED*"])
    assert result.ret == 0


def test_a_session_without_subclass_is_untouched(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing_heavy_was_imported():
            assert "subclass_testkit.plugin" in sys.modules
            assert not {"torch", "hypothesis", "subclass_testkit.suite"} & set(sys.modules)
        """
    )
    result = pytester.runpytest_subprocess("--strict-markers", "--strict-config", "-q", "-p", "no:hypothesispytest")
    assert result.ret == 0
    assert "conformance" not in result.stdout.str()


def test_a_failure_exits_1_and_explains_itself(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess(f"--subclass={BROKEN}", "--subclass-checks=slicing/select")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "FAILED slicing/select ?case=w?3?, float32, 32x48? must",
            "*is wrong in * of 48 elements*",
            "*Rule *",
            "*Why *",
            "*Fix *",
            "*Reproduce*",
            "*import torch*",
            "*assert_close*",
            "*Explain * subclass-testkit explain slicing/select",
            "*Rerun *pytest --subclass=*",
            "*slicing *",
            "*FAIL: * distinct findings.*",
        ]
    )


def test_the_json_report_follows_its_schema_and_adds_up(pytester: pytest.Pytester) -> None:
    path = pytester.path / "out" / "r.json"
    pytester.runpytest_inprocess(
        f"--subclass={BROKEN}", f"--subclass={ROW}", "--subclass-checks=slicing/select", f"--subclass-report={path}"
    )
    data = json.loads(path.read_text())
    jsonschema.validate(data, json.loads((ROOT / "docs" / "report.schema.json").read_text()))
    assert [r["verdict"] for r in data["runs"]] == ["fail", "pass"]
    for run in data["runs"]:
        totals = dict(run["totals"])
        assert totals.pop("selected") == sum(totals.values()) == len(run["checks"]) > 0
    failed = next(c for c in data["runs"][0]["checks"] if c["outcome"] == "failed")
    assert failed["reproduction"].startswith("import torch")


@pytest.mark.parametrize("strict", [False, True])
def test_should_level_findings_fail_only_when_strict(pytester: pytest.Pytester, strict: bool) -> None:
    spec = "tests.zoo.broken.slicing:SliceDecaysToPlain"
    options = ["--subclass-strict"] if strict else []
    result = pytester.runpytest_inprocess(f"--subclass={spec}", "--subclass-checks=slicing/view-keeps-the-class", *options)
    assert result.ret == (1 if strict else 0)
    if not strict:
        assert "should: slicing/view-keeps-the-class" in result.stdout.str()


def test_a_demanded_claim_that_is_not_found_fails(pytester: pytest.Pytester) -> None:
    spec = "tests.zoo.correct.tensor_int8:TensorInt8"
    result = pytester.runpytest_inprocess(f"--subclass={spec}", "--subclass-checks=claims/*", "--subclass-claims=training")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*training (*) is declared, but not found:*"])


def test_settings_in_pyproject_hold_and_unknown_ones_are_errors(pytester: pytest.Pytester) -> None:
    pytester.makepyprojecttoml(f'[tool.subclass_testkit]\nsubclass = ["{TWO}"]\nchecks = ["slicing/select"]\n')
    result = pytester.runpytest_inprocess()
    assert result.ret == 0
    assert "conformance of " + TWO in result.stdout.str()
    pytester.makepyprojecttoml('[tool.subclass_testkit]\nteir = "quick"\n')
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "did you mean 'tier'?" in result.stderr.str()


def test_xdist_gives_the_same_report(pytester: pytest.Pytester) -> None:
    outcomes = []
    for name, options in (("a.json", ["-p", "no:xdist"]), ("b.json", ["-n", "2"])):
        result = pytester.runpytest_subprocess(
            f"--subclass={BROKEN}", "--subclass-checks=slicing/select", f"--subclass-report={name}", *options
        )
        assert result.ret == 1
        data = json.loads((pytester.path / name).read_text())
        outcomes.append([(c["id"], c["params"], c["outcome"], c["message"]) for c in data["runs"][0]["checks"]])
    assert outcomes[0] == outcomes[1]


def test_hypothesis_plugin_and_cacheprovider_are_not_needed(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(
        f"--subclass={TWO}",
        "--subclass-checks=slicing/random-index",
        "-p",
        "no:hypothesispytest",
        "-p",
        "no:cacheprovider",
        "--strict-markers",
        "--strict-config",
    )
    assert result.ret == 0


def test_last_failed_reruns_only_what_failed(pytester: pytest.Pytester) -> None:
    arguments = (f"--subclass={BROKEN}", "--subclass-checks=slicing/select")
    first = pytester.runpytest_inprocess(*arguments)
    failed = {k: v for k, v in first.parseoutcomes().items() if k in ("failed", "repeated")}
    assert failed["failed"] == 1
    assert failed["repeated"] > 10
    again = pytester.runpytest_inprocess(*arguments, "--lf")
    assert {k: v for k, v in again.parseoutcomes().items() if k in ("failed", "repeated")} == failed
    assert "passed" not in again.parseoutcomes()
