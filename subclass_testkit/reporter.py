"""What pytest reports of check instances: their outcomes, across xdist's processes, the summary at the end, and the files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from subclass_testkit import report
from subclass_testkit.collection import CheckItem

if TYPE_CHECKING:
    from collections.abc import Generator

    from subclass_testkit.collection import Session
    from subclass_testkit.finished import Finished
    from subclass_testkit.outcome import Result
    from subclass_testkit.suite import Run

_PROPERTY = "subclass_testkit_result"
_STATUS = {
    "refused": ("refused", "r"),
    "blocked": ("blocked", "b"),
    "not claimed": ("not claimed", "n"),
    "torch limit": ("torch limit", "t"),
    "known": ("known", "k"),
    "skipped": ("skipped", "s"),
    "failed": ("advice", "a"),
}


class Reporter:
    """Carries results in reports (so that they cross xdist's processes), and shows them at the end."""

    def __init__(self, config: pytest.Config, settings: dict[str, Any]) -> None:
        self.config = config
        self.paths = [Path(p) for p in settings["report"] or ()]
        self.results: dict[str, list[Result]] = {}
        self.inherited: dict[str, Run] = {}
        self.shown: set[tuple[str, str, str]] = set()
        self.causes: dict[tuple[str, str, str], Result] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        found = _result_of(item) if call.when == "call" else None
        if found:
            item.user_properties += properties(found[1])  # junit.xml takes them from the item, at its teardown
        report = yield
        if found:
            run, result = found
            # An attribute of its own: xdist carries it between processes, and junit.xml gets short properties only.
            setattr(report, _PROPERTY, {"run": _key(run, item), **result.to_json()})
            if isinstance(item, CheckItem) and call.excinfo is None:
                _set_outcome(report, run, result)
            elif not isinstance(item, CheckItem):
                self.inherited.setdefault(_key(run, item), run)
                if result.fails_run(run.options.strict):
                    from subclass_testkit.report.terminal import failure_text

                    report.longrepr = failure_text(run, result)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from_run = _property(report)
        if from_run is None:
            return
        from subclass_testkit.outcome import Result

        data = {k: v for k, v in from_run.items() if k not in ("run", "repeated")}
        result = Result.from_json(data)
        self.results.setdefault(from_run["run"], []).append(result)
        finding = (from_run["run"], result.id, result.kind)
        if report.failed and finding in self.shown:
            # The same finding at another point of the axes: counted, but its text stands above already.
            from_run["repeated"] = True
            report.longrepr = f"FAILED {result.label} {result.level}: as above.\n  {result.message}"
        elif report.failed:
            first = self.causes.setdefault((from_run["run"], *result.cause), result)
            run = self._runs().get(from_run["run"])
            if first is not result and run is not None:
                from subclass_testkit.report.terminal import short_text

                report.longrepr = short_text(run, result, first)
        if report.failed:
            self.shown.add(finding)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        data = _property(report) if report.when == "call" else None
        if data is not None and data.get("repeated"):
            return "repeated", "F", "FAILED"
        if data is None or not report.skipped:
            return None
        category, letter = _STATUS[data["outcome"]]
        return category, letter, category.upper()

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from subclass_testkit.report.terminal import closing

        for key, end in (self._finished() if self.results else {}).items():
            terminalreporter.section(f"conformance of {key}", sep="=", bold=True)
            *lines, verdict = closing(end)
            for line in lines:
                terminalreporter.write_line(line, yellow=line.startswith("should: "), red=line.startswith("gate: "))
            terminalreporter.write_line(f"{key}: {verdict}", red=end.failed, green=not end.failed, bold=True)
        session = self._session()
        for problem in session.problems if session else ():
            terminalreporter.write_line(f"gate: {problem}", red=True)
        if self.paths and not self.results and not session:
            terminalreporter.write_line("no conformance check ran: no report was written", yellow=True)

    def _finished(self) -> dict[str, Finished]:
        """Every run with its results, in the fixed order of its instances whatever the order in which they came."""
        from subclass_testkit import expect
        from subclass_testkit.finished import Finished

        session = self._session()
        finished = {}
        for key, run in self._runs().items():
            place = {label: i for i, label in enumerate(run.instances)}
            results = sorted(self.results.get(key, []), key=lambda r: place.get(r.label, len(place)))
            problems = run.problems(results)
            if session and session.lockfile is not None and run in session.runs:
                problems += expect.drops(session.lockfile, key, run.options.tier, results)
            finished[key] = Finished(run, results, problems)
        return finished

    def _session(self) -> Session | None:
        return self.config.pluginmanager.get_plugin("subclass_testkit_session")

    def _runs(self) -> dict[str, Run]:
        session = self._session()
        return {**{run.spec: run for run in (session.runs if session else ())}, **self.inherited}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        plugin = self._session()
        if hasattr(self.config, "workerinput") or self.config.option.collectonly or not self._runs():
            return
        finished = self._finished()
        problems = plugin.problems if plugin else []
        if exitstatus == pytest.ExitCode.OK and (problems or any(end.problems for end in finished.values())):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.paths and finished:
            interrupted = bool(session.shouldstop or session.shouldfail) or exitstatus == pytest.ExitCode.INTERRUPTED
            data = report.json.report(finished.values(), interrupted=interrupted, problems=problems)
            for path in self.paths:
                report.write(path, data)


def _result_of(item: pytest.Item) -> tuple[Run, Result] | None:
    """The result that an item stands for, from `--subclass` or from an inherited mixin."""
    if isinstance(item, CheckItem):
        return (item.run, item.check_result) if item.check_result else None
    conformance = getattr(getattr(item, "obj", None), "__conformance__", None)
    if conformance is None:
        return None
    run, label = conformance
    return (run, run.results[label]) if label in run.results else None


def _key(run: Run, item: pytest.Item) -> str:
    return run.spec if isinstance(item, CheckItem) else item.nodeid.rpartition("::")[0]


def _set_outcome(report: pytest.TestReport, run: Run, result: Result) -> None:
    from subclass_testkit.outcome import Outcome
    from subclass_testkit.report.terminal import failure_text

    if result.fails_run(run.options.strict):
        report.outcome = "failed"
        report.longrepr = failure_text(run, result)
    elif result.outcome is not Outcome.PASSED:
        report.outcome = "skipped"
        report.longrepr = (run.spec, None, f"{result.outcome.value}: {result.known or result.message}")  # type: ignore[assignment]
    report.duration = result.seconds or report.duration


def properties(result: Result) -> list[tuple[str, object]]:
    """What junit.xml says of a check instance: short values only."""
    values = {
        "check": result.id,
        "level": result.level,
        "outcome": result.outcome.value,
        **result.params,
        "known": result.known,
    }
    return [(name, value) for name, value in values.items() if value]


def _property(report: Any) -> dict[str, Any] | None:
    return getattr(report, _PROPERTY, None)
