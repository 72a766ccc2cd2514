"""The GitHub action and the examples: valid YAML, and shell that does what it says, run as a runner would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


def step(name: str) -> dict[str, Any]:
    return next(s for s in ACTION["runs"]["steps"] if s["name"] == name)


def run(name: str, folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run a step's shell with the inputs' values, the others at their defaults."""
    values = {key: given.get("default", "") for key, given in ACTION["inputs"].items()}
    values.update({key.replace("_", "-"): value for key, value in inputs.items()})
    environment = dict(os.environ)
    for variable, expression in step(name)["env"].items():
        environment[variable] = values[re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", expression)[1]]
    (folder / "bin").mkdir(exist_ok=True)
    for tool, module in (("python", ""), ("subclass-testkit", "-m subclass_testkit.cli ")):
        (folder / "bin" / tool).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        (folder / "bin" / tool).chmod(0o755)
    environment |= {
        "PATH": f"{folder / 'bin'}{os.pathsep}{environment['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step(name)["run"]]  # as a runner's shell: bash
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_action_runs_the_gate_and_tells_of_it(tmp_path: Path) -> None:
    gate = run(
        "Conformance",
        tmp_path,
        subclass="tests.zoo.broken.slicing:SelectUsesFirstScale\ntests.zoo.correct.row_int8:RowInt8\n",
        tier="quick",
        rules="2026.12",
        pytest_args="--subclass-checks=slicing/select -q",
    )
    assert gate.returncode == 1, gate.stdout + gate.stderr
    outputs = dict(line.split("=", 1) for line in (tmp_path / "output").read_text().splitlines())
    report = json.loads((tmp_path / outputs["json"]).read_text())
    assert [r["verdict"] for r in report["runs"]] == ["fail", "pass"]
    assert report["rule_set"] == "2026.12"
    assert (tmp_path / outputs["sarif"]).is_file()
    told = run("Summary", tmp_path)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("::error file=")
    assert told.stdout.count("\n") == 1
    assert (tmp_path / "summary").read_text().startswith("## Conformance: failed")
    assert run("Summary", tmp_path, annotations="false").stdout == ""


def test_the_summary_of_a_run_that_never_started_is_no_error(tmp_path: Path) -> None:
    assert run("Summary", tmp_path).returncode == 0


def test_inputs_reach_the_shell_as_variables_only() -> None:
    for each in ACTION["runs"]["steps"]:
        assert "${{" not in each.get("run", "")  # an expression in a script would be code that an input writes
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text()))
    assert used == set(ACTION["inputs"])


@pytest.mark.parametrize("path", ["docs/examples/conformance.yml", "docs/examples/pre-commit-config.yaml"])
def test_examples_are_yaml(path: str) -> None:
    assert yaml.safe_load((ROOT / path).read_text())


def test_the_example_gives_the_action_inputs_that_exist() -> None:
    workflow = yaml.safe_load((ROOT / "docs" / "examples" / "conformance.yml").read_text())
    steps = workflow["jobs"]["conformance"]["steps"]
    mine = next(s for s in steps if "subclass_testkit" in s.get("uses", ""))
    assert set(mine["with"]) <= set(ACTION["inputs"])
    assert "steps.conformance.outputs.sarif" in str(steps)
    assert "sarif" in ACTION["outputs"]


def test_the_pre_commit_example_runs_what_exists() -> None:
    hook = yaml.safe_load((ROOT / "docs" / "examples" / "pre-commit-config.yaml").read_text())["repos"][0]["hooks"][0]
    assert hook["entry"].startswith("python -m pytest --subclass=")
    assert not hook["pass_filenames"]


def test_the_documentation_names_options_and_commands_that_exist() -> None:
    from subclass_testkit import cli, plugin

    source = Path(plugin.__file__).read_text() + Path(cli.__file__).read_text()
    texts = [ROOT / "README.md", *(ROOT / "docs" / f"{n}.md" for n in ("ci", "known-failures", "reports"))]
    for text in texts:
        for option in re.findall(r"--subclass[a-z-]*", text.read_text()):
            assert f'"{option}"' in source, (text.name, option)
        for command in re.findall(r"subclass-testkit ([a-z]+)", text.read_text()):
            assert f'"{command}"' in source, (text.name, command)
