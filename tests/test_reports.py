"""Report formats: each says what the run said, in the form that its readers demand."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from subclass_testkit import report as reports
from subclass_testkit.cli import main
from subclass_testkit.outcome import Outcome, Result
from subclass_testkit.report import github, model
from tests.browser import CHROMIUM, Browser

pytestmark = pytest.mark.usefixtures("_claims_are_probed_once")

ROOT = Path(__file__).parent.parent
HOSTILE = "</script><script>document.title='owned'</script> `|` *bold* <img src=x onerror=alert(1)> & \"quotes\" 'single'"
SPEC = "pkg.mod.MyTensor"


def results() -> list[Result]:
    """Every outcome, every severity."""
    at = {"dtype": "float32", "shape": "32x48"}
    script = "import torch\nassert 1 < 2 & True, '</pre>'"
    return [
        Result("slicing/select", "must", {"case": "w[1]", **at}, Outcome.PASSED, 0.25),
        Result("slicing/select", "must", {"case": "w[3]", **at}, Outcome.FAILED, 0.5, f"w[3] is wrong {HOSTILE}", "value",
               "rows of another scale", "pkg/mod.py:12, in _select: scale = scale[0]", script),
        Result("slicing/select", "must", {"case": "w[-1]", **at}, Outcome.FAILED, 0.5, "w[-1] is wrong", "value"),
        Result("slicing/narrow", "must", {"case": "w[2:4]", **at}, Outcome.FAILED, 0.5, "raised IndexError: x", "raised:IndexError"),
        Result("slicing/pieces", "should", {"case": "w.chunk(2)", **at}, Outcome.FAILED, 0.1, "loses the class", "class"),
        Result("equivalence/unary", "must", {"case": "-w", **at}, Outcome.KNOWN, 0.1, "is wrong", "value", known="no kernel (#7)"),
        Result("equivalence/unary", "must", {"case": "w.abs()", **at}, Outcome.FAILED, 0.1, "passes, but is declared", "known:passed",
               gate="passes, but is declared"),
        Result("equivalence/binary", "must", {"case": "w + w", **at}, Outcome.REFUSED, 0.1, "raised NotImplementedError"),
        Result("copies/save-and-load", "must", at, Outcome.BLOCKED, 0.0, "x failed"),
        Result("copies/deepcopy", "must", at, Outcome.NOT_CLAIMED, 0.0, "no"),
        Result("devices/module-move", "must", at, Outcome.TORCH_LIMIT, 0.0, "the control too"),
        Result("devices/dtype-move", "must", at, Outcome.SKIPPED, 0.0, "no CUDA"),
    ]  # fmt: skip


def rule(level: str = "must") -> dict[str, Any]:
    texts = {"rule": "A slice is a slice.", "why": "servers slice", "fix": "slice the scales", "upstream": ""}
    return {"level": level, "tier": "quick", "since": "2026.12", "needs": [], **texts}


def run_data(spec: str = SPEC, found: list[Result] | None = None, **more: Any) -> dict[str, Any]:
    from subclass_testkit.outcome import totals

    found = results() if found is None else found
    bad = any(r.fails_run() for r in found)
    data = {
        "subject": spec, "spec": spec, "source": "pkg/mod.py:3", "inferred": ["make: MyTensor(hp)"],
        "claims": [{"name": "training", "declared": True, "found": False, "reason": f"no gradient {HOSTILE}"}],
        "tier": "quick", "strict": False, "totals": totals(found), "deselected": 0, "verdict": "fail" if bad else "pass",
        "problems": [], "known_failures": [], "checks": [r.to_json() for r in found],
    }  # fmt: skip
    return {**data, **more}


def data(*runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    runs_ = list(runs) or [run_data()]
    ids = {c["id"]: rule(c["level"]) for run in runs_ for c in run["checks"]}
    head = {
        "schema_version": 1, "tool": {"name": "subclass-testkit", "version": "1.2.3"}, "torch": "2.13.0",
        "platform": {"python": "3.12.1", "system": "Linux", "machine": "x86_64"}, "created": "2026-12-01T10:00:00+00:00",
        "seed": 0, "rule_set": "", "interrupted": False, "problems": [], "rules": ids, "runs": runs_,
    }  # fmt: skip
    return {**head, **more}


def text(ending: str, report: dict[str, Any] | None = None) -> str:
    return reports.render(Path("r" + ending), report or data())


def good() -> dict[str, Any]:
    return data(run_data(found=[r for r in results() if r.outcome is Outcome.PASSED]))


def test_the_data_of_these_tests_follows_the_schema() -> None:
    schema = json.loads((ROOT / "docs" / "report.schema.json").read_text())
    for report in (data(), good(), json.loads(text(".json"))):
        jsonschema.validate(report, schema)


@pytest.mark.parametrize("ending", list(reports.FORMATS))
def test_every_ending_writes_the_whole_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "deep" / f"r{ending}"
    reports.write(path, data())
    assert path.read_text(encoding="utf-8")
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_unknown_ending_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"r\.pdf: the ending must be one of .*\.html"):
        reports.format_of(Path("r.pdf"))


# --- the model


def test_findings_come_most_severe_first() -> None:
    found = model.runs(data())[0].findings()
    told = [(f.results[0].id, f.status, len(f.results)) for f in found]
    assert told == [
        ("equivalence/unary", "fail", 1),  # the list of known failures is wrong
        ("slicing/select", "fail", 2),  # silently wrong
        ("slicing/narrow", "fail", 1),  # raises
        ("slicing/pieces", "should", 1),
        ("equivalence/unary", "known", 1),
    ]


def test_cells() -> None:
    cells = model.runs(data())[0].groups()
    assert {name: (c.status, c.failing) for name, c in cells.items()} == {
        "slicing": ("fail", 2),
        "equivalence": ("fail", 1),
        "copies": ("none", 0),
        "devices": ("none", 0),
    }
    strict = model.RunView({**run_data(), "strict": True})
    assert strict.groups()["slicing"].failing == 3


@pytest.mark.parametrize(
    ("where", "place"),
    [
        ("pkg/mod.py:12, in _select: scale = scale[0]", ("pkg/mod.py", 12)),
        ("pkg/mod.py:120 _slice, :88 _rebuild", ("pkg/mod.py", 120)),
        ("pkg/mod.py:3", ("pkg/mod.py", 3)),
        ("", None),
        ("somewhere", None),
    ],
)
def test_places(where: str, place: tuple[str, int] | None) -> None:
    assert model.place(where) == place


# --- Markdown, badge, JUnit, annotations


def test_markdown_is_short_and_severe_first() -> None:
    lines = text(".md", data(problems=["pyproject.toml, known failure 1 expired"])).splitlines()
    assert lines[0] == "## Conformance: failed"
    assert "| ❌ | `pkg.mod.MyTensor` | 12 | 1 | 5 | 1 | 1 | 1 | 1 | 1 | 1 |" in lines
    assert "- **Gate** pyproject.toml, known failure 1 expired" in lines
    findings = [line for line in lines if line.startswith("- **") and "Gate" not in line]
    assert [re.search(r"`([a-z-]+/[a-z-]+)", line)[1] for line in findings] == [
        "equivalence/unary", "slicing/select", "slicing/narrow", "slicing/pieces"
    ]  # fmt: skip
    assert "`pkg/mod.py:12`" in findings[1]
    assert "(2 instances)" in findings[1]
    assert "<img" not in "".join(lines)
    many = [Result(f"slicing/c{i}", "must", {}, Outcome.FAILED, 0.0, "x" * 900, "value") for i in range(60)]
    summary = text(".md", data(run_data(found=many)))
    assert len(summary) < 4000
    assert "and 50 more findings" in summary


def test_markdown_of_a_good_run() -> None:
    assert text(".md", good()).startswith("## Conformance: passed")
    assert "**Interrupted:**" in text(".md", data(interrupted=True))


@pytest.mark.parametrize(
    ("report", "message", "colour"),
    [
        (data(), "3 failing", "red"),
        (good(), "1 passed", "brightgreen"),
        (
            data(run_data(found=[r for r in results() if r.outcome in (Outcome.PASSED, Outcome.KNOWN)])),
            "1 passed, 1 known",
            "yellow",
        ),
        ({**good(), "interrupted": True}, "incomplete", "lightgrey"),
        ({**good(), "problems": ["x"]}, "failing", "red"),
        (data() | {"runs": []}, "failing", "red"),
    ],
)
def test_badge(report: dict[str, Any], message: str, colour: str) -> None:
    expected = {"schemaVersion": 1, "label": "conformance", "message": message, "color": colour}
    assert json.loads(text(".badge.json", report)) == expected


def test_annotations_are_one_line_a_check() -> None:
    lines = github.render(data(problems=["50% gone"]), ROOT).splitlines()
    assert lines[0] == "::error title=conformance::50%25 gone"
    assert lines[2].startswith("::error file=pkg/mod.py,line=12,title=MyTensor slicing/select::w[3] is wrong")
    assert [line.split("title=")[1].split("::")[0] for line in lines[1:]] == [
        f"MyTensor {i}" for i in ("equivalence/unary", "slicing/select", "slicing/narrow", "slicing/pieces")
    ]
    assert lines[-1].startswith("::warning ")


# --- SARIF


def sarif(report: dict[str, Any] | None = None) -> dict[str, Any]:
    return json.loads(text(".sarif", report))


def test_sarif_follows_the_official_schema() -> None:
    schema = json.loads((ROOT / "tests" / "data" / "sarif-2.1.0-rtm.5.schema.json").read_text())
    for report in (data(), good(), data(problems=["x"], interrupted=True), data() | {"runs": []}):
        jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker()).validate(sarif(report))


def test_sarif_says_what_where_and_how_bad() -> None:
    run = sarif()["runs"][0]
    told = [(r["ruleId"], r["level"], r["locations"][0]["physicalLocation"]["region"]["startLine"]) for r in run["results"]]
    assert told == [
        ("equivalence/unary", "error", 3),
        ("slicing/select", "error", 12),
        ("slicing/narrow", "error", 3),  # where the line isn't known, the class
        ("slicing/pieces", "warning", 3),
        ("equivalence/unary", "note", 3),
    ]
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert all(ids[r["ruleIndex"]] == r["ruleId"] for r in run["results"])
    assert run["results"][-1]["suppressions"] == [{"kind": "external", "justification": "no kernel (#7)"}]
    prints = [r["partialFingerprints"]["finding/v1"] for r in run["results"]]
    assert len(set(prints)) == len(prints)
    assert prints == [r["partialFingerprints"]["finding/v1"] for r in sarif(data(torch="9.9"))["runs"][0]["results"]]


def test_sarif_paths_are_counted_from_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src" / "pkg").mkdir(parents=True)
    (tmp_path / "src" / "pkg" / "mod.py").touch()
    monkeypatch.chdir(tmp_path)
    places = {r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in sarif()["runs"][0]["results"]}
    assert places == {"src/pkg/mod.py"}


# --- SVG and HTML


def test_svg_has_a_cell_for_each_group_of_each_subject() -> None:
    picture = ET.fromstring(text(".svg", data(run_data("a.One"), run_data("b.Two<&>", found=results()[:1]))))
    tips = [t.text for t in picture.iter("{http://www.w3.org/2000/svg}title")][1:]
    assert len(tips) == 8
    assert "One, slicing: fails" in tips
    assert "Two<&>, slicing: passes" in tips
    assert "Two<&>, copies: nothing was judged" in tips
    assert picture.get("aria-label") == "Conformance: 1 of 2 subjects pass"


def test_html_escapes_everything_and_loads_nothing() -> None:
    page = text(".html")
    assert "<script>document.title" not in page
    assert "<img" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert "Content-Security-Policy" in page
    assert page.count("<main") == 1
    assert len(set(re.findall(r' id="([^"]+)"', page))) == len(re.findall(r' id="([^"]+)"', page))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("html") / "r.html"
    entry = {
        "source": "pyproject.toml, known failure 1", "subclass": "*", "check": "equivalence/unary", "reason": "no kernel", "when": "",
        "issue": "#7", "expires": "2027-01-31", "match": "", "params": {"case": ["-w"]}, "in_force": True, "expired": False,
    }  # fmt: skip
    reports.write(
        path,
        data(run_data(known_failures=[entry]), run_data("other.Tensor", found=results()[:1]), problems=["the list is stale"]),
    )
    return path


@pytest.mark.skipif(not CHROMIUM, reason="no chromium")
def test_html_in_a_browser(page: Path) -> None:
    with Browser(1280, 900) as browser:
        browser.open(page)
        visible = "[...document.querySelectorAll('.check:not([hidden])')].length"
        assert browser.run("document.title").startswith("Conformance failed")
        assert browser.run(visible) == 10
        assert browser.run("document.querySelector('#shown').textContent") == "10 of 10 checks"
        # a cell of the matrix leads to its group, and opens it
        browser.run("document.querySelector('a[href=\"#s0-slicing\"]').click()")
        assert browser.run("new Promise(r => setTimeout(() => r(document.getElementById('s0-slicing').open), 50))")
        # filters
        change = "dispatchEvent(new Event('input', {bubbles: true}))"
        browser.run(f"var s = document.querySelector('#search'); s.value = 'rows of another'; s.{change}")
        assert browser.run(visible) == 1
        browser.run(f"s.value = ''; s.{change}; var g = document.querySelector('#group'); g.value = 'copies'; g.{change}")
        assert browser.run(visible) == 2
        browser.run(f"g.value = ''; g.{change}; var j = document.querySelector('#subject'); j.value = 's1'; j.{change}")
        assert browser.run(visible) == 1
        assert browser.run("document.querySelector('#s0').hidden")
        browser.run(f"j.value = ''; j.{change}; document.querySelector('[value=fail]').click()")
        assert browser.run(visible) == 7
        # the script can be copied
        browser.run("document.querySelector('.copy').click()")
        assert (
            browser.run("new Promise(r => setTimeout(() => r(document.querySelector('.copy').textContent), 100))") == "Copied"
        )
        assert not browser.requests
        assert not browser.messages


@pytest.mark.skipif(not CHROMIUM, reason="no chromium")
def test_html_by_keyboard(page: Path) -> None:
    with Browser(1280, 900) as browser:
        browser.open(page)
        browser.key("Tab")
        assert browser.run("document.activeElement.className") == "skip"
        browser.key("/")
        assert browser.run("document.activeElement.id") == "search"
        browser.key("Escape")
        browser.run("document.querySelector('#s0-slicing > summary').focus()")
        browser.key("Enter")
        assert browser.run("document.querySelector('#s0-slicing').open")


@pytest.mark.skipif(not CHROMIUM, reason="no chromium")
def test_html_on_a_phone_and_in_the_dark(page: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with Browser(390, 844) as browser:
        browser.open(page)
        browser.run("document.querySelector('#expand').click()")
        assert browser.run("document.documentElement.scrollWidth") == 390
        assert browser.run(background) == "rgb(255, 255, 255)"
        browser.run("document.querySelector('#theme').click()")
        assert browser.run(background) == "rgb(13, 17, 23)"
    with Browser(390, 844, dark=True) as browser:
        browser.open(page)
        assert browser.run(background) == "rgb(13, 17, 23)"


# --- through pytest and the command


def test_pytest_writes_all_formats_and_junit_properties(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    names = [f"r{ending}" for ending in reports.FORMATS if ending != ".sarif.json"]
    spec = "tests.zoo.broken.slicing:SelectUsesFirstScale"
    arguments = [f"--subclass-report={name}" for name in names]
    pytester.runpytest_inprocess(f"--subclass={spec}", "--subclass-checks=slicing/select", "--junitxml=j.xml", *arguments)
    assert all((pytester.path / name).stat().st_size for name in names)
    report = json.loads((pytester.path / "r.json").read_text())
    jsonschema.validate(report, json.loads((ROOT / "docs" / "report.schema.json").read_text()))
    assert report["rules"]["slicing/select"]["since"] == "2026.12"
    assert report["runs"][0]["source"] == "tests/zoo/broken/slicing.py:53"
    case = next(c for c in ET.parse(pytester.path / "j.xml").iter("testcase") if c.find("failure") is not None)
    properties = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert properties["check"] == "slicing/select"
    assert properties["outcome"] == "failed"
    assert properties["level"] == "must"
    assert properties["dtype"] == "float32"


def test_inherited_mixins_are_reported_too(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    pytester.makepyfile(
        """
        import unittest
        from subclass_testkit import Options, SlicingTests
        from tests.zoo.broken.slicing import SelectUsesFirstScale

        class TestBroken(SlicingTests, unittest.TestCase):
            subject = SelectUsesFirstScale
            options = Options(checks=("slicing/select",))

        def test_other():
            pass
        """
    )
    assert pytester.runpytest_inprocess("--subclass-report=r.json").ret == 1
    (run,) = json.loads((pytester.path / "r.json").read_text())["runs"]
    assert (run["spec"], run["verdict"]) == ("tests.zoo.broken.slicing.SelectUsesFirstScale", "fail")
    nothing = pytester.runpytest_inprocess("--subclass-report=n.json", "-k", "test_other")
    assert "no conformance check ran: no report was written" in nothing.stdout.str()
    assert not (pytester.path / "n.json").exists()


def test_a_run_that_was_stopped_says_so(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    arguments = ["--subclass=tests.zoo.broken.slicing:SelectUsesFirstScale", "--subclass-checks=slicing/select"]
    pytester.runpytest_inprocess(*arguments, "--subclass-report=r.json", "-x")
    report = json.loads((pytester.path / "r.json").read_text())
    assert report["interrupted"]
    assert report["runs"][0]["deselected"] > 0
    assert main(["accept", "r.json", "--reason=r"]) == 4


def test_the_command_writes_other_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "r.json"
    reports.write(source, data())
    targets = [tmp_path / "r.html", tmp_path / "r.svg"]
    assert main(["report", str(source), *(f"--to={t}" for t in targets)]) == 0
    assert all(t.is_file() for t in targets)
    assert main(["report", str(source), f"--to={tmp_path / 'ok.md'}", "--to=r.pdf"]) == 4
    assert not (tmp_path / "ok.md").exists()
    assert "the ending must be one of" in capsys.readouterr().err
    for text_, message in (("{}", "no report of schema version 1"), ("{", "no JSON report")):
        (tmp_path / "bad.json").write_text(text_)
        assert main(["report", str(tmp_path / "bad.json"), "--to=r.html"]) == 4
        assert message in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none.json"), "--to=r.html"]) == 4
    assert "there is no report" in capsys.readouterr().err
