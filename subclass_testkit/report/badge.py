"""The badge: an endpoint of shields.io (https://shields.io/badges/endpoint-badge)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from subclass_testkit.report import model


def render(report: Mapping[str, Any]) -> str:
    """``conformance | 4303 passed``, or how many checks fail."""
    views = model.runs(report)
    failing = sum(v.whole.failing for v in views)
    passed = sum(v.whole.counts["passed"] for v in views)
    known = sum(v.whole.counts["known"] for v in views)
    if model.failed(report):
        message, colour = f"{failing} failing" if failing else "failing", "red"
    elif report["interrupted"]:
        message, colour = "incomplete", "lightgrey"
    else:
        message, colour = f"{passed} passed" + (f", {known} known" if known else ""), "yellow" if known else "brightgreen"
    return json.dumps({"schemaVersion": 1, "label": "conformance", "message": message, "color": colour}) + "\n"
