"""SARIF 2.1.0: findings at the line of the subject's code, for code scanning.

The format: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subclass_testkit.report import model
from subclass_testkit.report.model import Finding, RunView

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"fail": "error", "should": "warning", "known": "note"}


def render(report: Mapping[str, Any], root: Path | None = None) -> str:
    """One SARIF run, one result a finding. ``root`` is the folder that paths are counted from; default: the current one."""
    root = root or Path.cwd()
    ids = list(report["rules"])
    results = [_result(view, finding, ids, root) for view in model.runs(report) for finding in view.findings()]
    run = {
        "tool": {
            "driver": {
                "name": report["tool"]["name"],
                "semanticVersion": report["tool"]["version"],
                "informationUri": "https://pypi.org/project/subclass-testkit/",
                "rules": [_rule(i, report["rules"][i]) for i in ids],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": not report["interrupted"],
                "endTimeUtc": report["created"].replace("+00:00", "Z"),
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": text}}
                    for text in (*report["problems"], *(p for run in report["runs"] for p in run["problems"]))
                ],
            }
        ],
        "results": results,
    }
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=1, ensure_ascii=False) + "\n"


def _rule(check_id: str, rule: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": check_id,
        "shortDescription": {"text": rule["rule"]},
        "fullDescription": {"text": f"{rule['rule']} {_sentence(rule['why'])}"},
        "help": {"text": f"{_sentence(rule['fix'])} More: subclass-testkit explain {check_id}"},
        "defaultConfiguration": {"level": "error" if rule["level"] == "must" else "warning"},
        "properties": {"tags": [check_id.partition("/")[0], rule["level"]]},
    }


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _result(view: RunView, finding: Finding, ids: list[str], root: Path) -> dict[str, Any]:
    first = finding.first
    also = f" ({len(finding.results)} instances)" if len(finding.results) > 1 else ""
    likely = f" Likely {first.diagnosis}" if first.diagnosis else ""
    identity = f"{view.spec} {first.id} {first.kind}"
    result: dict[str, Any] = {
        "ruleId": first.id,
        "level": _LEVELS[finding.status],
        "message": {"text": f"{view.short}: {first.message}{likely}{also}"},
        "partialFingerprints": {"finding/v1": hashlib.sha256(identity.encode()).hexdigest()[:32]},
        "properties": {"subject": view.spec, "params": first.params, "instances": len(finding.results)},
    }
    if first.id in ids:
        result["ruleIndex"] = ids.index(first.id)
    place = model.place(first.where) or model.place(view.data["source"])
    if place:
        result["locations"] = [_location(*place, root)]
    if finding.status == "known":
        result["suppressions"] = [{"kind": "external", "justification": first.known}]
    return result


def _location(file: str, line: int, root: Path) -> dict[str, Any]:
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": relative(file, root), "uriBaseId": "%SRCROOT%"},
            "region": {"startLine": line},
        }
    }


def relative(file: str, root: Path) -> str:
    """A file that is counted from its package (``mypkg/tensor.py``), counted from the repository's root (``src/mypkg/tensor.py``)."""
    for folder in (root, root / "src", root / "python", *sorted(p for p in root.glob("*/") if p.is_dir())):
        if (folder / file).is_file():
            return (folder / file).relative_to(root).as_posix()
    return Path(file).as_posix().lstrip("/")
