"""pytest's side: its options. Nothing heavy is imported before a run needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("subclass-testkit", "conformance of torch.Tensor subclasses")
    add = group.addoption
    add(
        "--subclass",
        action="append",
        metavar="SPEC",
        help="tensor class, Subject or function to test: pkg.mod.Name or pkg.mod:Name (repeatable)",
    )
    add("--subclass-claims", metavar="LIST", help="comma-separated claims that must hold: training,compile,...")
    add(
        "--subclass-checks",
        action="append",
        metavar="GLOB",
        help="run only the checks whose id matches; !GLOB leaves out (repeatable)",
    )
    add("--subclass-tier", metavar="TIER", help="quick (eager only), standard (default) or full")
    add("--subclass-strict", action="store_true", default=None, help="should-level findings fail too")
    add("--subclass-isolate", metavar="MODE", help="hazardous (default), all (a process per check) or none")
    add("--subclass-seed", type=int, metavar="N", help="another seed: other data (default 0)")
    add(
        "--subclass-report",
        action="append",
        metavar="PATH",
        help="write a report; the ending chooses: .json .md .html .sarif .svg .badge.json (repeatable)",
    )
    add("--subclass-known-failures", metavar="PATH", help="the known failures of this file, instead of those in pyproject.toml")
    add("--subclass-expect", metavar="LOCKFILE", help="fail where a group has fewer checks than in this file")
    add("--subclass-rules", metavar="YYYY.MM", help="only the checks that this rule set had, or an earlier one")


def pytest_configure(config: pytest.Config) -> None:
    from subclass_testkit import report, settings
    from subclass_testkit.collection import Session
    from subclass_testkit.reporter import Reporter

    try:
        values = settings.read(config.rootpath / "pyproject.toml", lambda name: _option(config, name))
    except (ValueError, TypeError) as error:
        raise pytest.UsageError(str(error)) from error
    try:
        for path in values["report"] or ():
            report.format_of(Path(path))
        if values["subclass"]:
            config.pluginmanager.register(Session(config, values), "subclass_testkit_session")
    except ValueError as error:
        raise pytest.UsageError(f"--subclass-{error}") from error  # "report=r.pdf: ..." -> "--subclass-report=r.pdf: ..."
    config.pluginmanager.register(Reporter(config, values), "subclass_testkit_reporter")


def _option(config: pytest.Config, name: str) -> Any:
    """The command line's value of a setting."""
    spelled = {"subclass": "subclass", "known_failures_file": "subclass_known_failures"}
    return config.getoption(spelled.get(name, f"subclass_{name}"))
