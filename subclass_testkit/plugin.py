"""pytest's side: options, collection of `--subclass` runs, and reporting. Nothing heavy is imported before a run needs it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from subclass_testkit.instances import Options
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
_SETTINGS = {
    "subclass": list,
    "claims": list,
    "checks": list,
    "tier": str,
    "strict": bool,
    "isolate": str,
    "seed": int,
    "report": list,
}
_REPORTS = (".json",)


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
        help="write a report; the ending chooses the format: .json (repeatable)",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings = _settings(config)
    if settings["subclass"]:
        config.pluginmanager.register(Session(config, settings), "subclass_testkit_session")
    config.pluginmanager.register(Reporter(config), "subclass_testkit_reporter")


def _settings(config: pytest.Config) -> dict[str, Any]:
    """The command line's values over those of ``[tool.subclass_testkit]`` in pyproject.toml."""
    values = _from_pyproject(config.rootpath / "pyproject.toml")
    for name in _SETTINGS:
        option = "subclass" if name == "subclass" else f"subclass_{name}"
        given = config.getoption(option)
        if given is not None:
            values[name] = [c.strip() for c in given.split(",") if c.strip()] if name == "claims" else given
    return {name: values.get(name) for name in _SETTINGS}


def _from_pyproject(path: Path) -> dict[str, Any]:
    if not path.is_file() or "subclass_testkit" not in (text := path.read_text(encoding="utf-8")):
        return {}
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef, import-not-found, unused-ignore]
    table = tomllib.loads(text).get("tool", {}).get("subclass_testkit", {})
    for name, value in table.items():
        if name not in _SETTINGS:
            near = difflib.get_close_matches(name, _SETTINGS, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; valid are: {', '.join(_SETTINGS)}"
            raise pytest.UsageError(f"[tool.subclass_testkit] in {path}: unknown setting {name!r}{hint}")
        if not isinstance(value, _SETTINGS[name]):
            raise pytest.UsageError(
                f"[tool.subclass_testkit] in {path}: {name} takes a {_SETTINGS[name].__name__}, got {value!r}"
            )
    return dict(table)


class Session:
    """A pytest session that was asked for conformance runs."""

    def __init__(self, config: pytest.Config, settings: dict[str, Any]) -> None:
        self.config = config
        self.settings = settings
        self.runs: list[Run] = []
        self.labels: dict[str, list[str]] = {}  # of subjects that have not been reached, where working ahead is worth it
        self.reports = [Path(p) for p in settings["report"] or ()]
        for path in self.reports:
            if path.suffix not in _REPORTS:
                raise pytest.UsageError(f"--subclass-report={path}: the ending must be one of {', '.join(_REPORTS)}")
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args = []  # no path was given: only the conformance run is collected

    def pytest_sessionstart(self) -> None:
        from subclass_testkit.resolve import resolve
        from subclass_testkit.subject import SubjectError
        from subclass_testkit.suite import Run

        try:
            options = self._options()
            self.runs = [Run(resolve(spec), options, spec=spec) for spec in dict.fromkeys(self.settings["subclass"])]
            if not hasattr(self.config, "workerinput") and not self.config.option.collectonly:
                for run in self.runs:
                    _ = run.claims
        except (SubjectError, ValueError, TypeError) as error:
            raise pytest.UsageError(str(error)) from error

    def _options(self) -> Options:
        from subclass_testkit.instances import Options, validated

        given = self.settings
        isolate = given["isolate"] or ("none" if self.config.getoption("usepdb", False) else "hazardous")
        options = Options(
            claims=tuple(given["claims"] or ()),
            checks=tuple(given["checks"] or ()),
            tier=given["tier"] or "standard",
            strict=bool(given["strict"]),
            isolate=isolate,
            seed=given["seed"] or 0,
        )
        try:
            return validated(options)
        except ValueError as error:
            raise pytest.UsageError(f"--subclass-{error}") from error  # "tier: ..." -> "--subclass-tier: ..."

    def pytest_report_header(self) -> list[str]:
        from subclass_testkit.report.terminal import header

        if self.config.option.collectonly:
            return [f"subject: {run.subject.title}" for run in self.runs]
        return [line for run in self.runs for line in header(run)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        for run in self.runs:
            collector = SubjectCollector.from_parent(session, name=run.spec, run=run)
            report = collector.ihook.pytest_make_collect_report(collector=collector)
            collector.ihook.pytest_collectreport(report=report)  # so that the terminal counts the items
            items.extend(report.result)

    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if (
            session.config.option.collectonly
            or hasattr(self.config, "workerinput")
            or self.config.getoption("numprocesses", None)
        ):
            return  # xdist uses the processors already
        for item in session.items:
            if isinstance(item, CheckItem):
                self.labels.setdefault(item.run.spec, []).append(item.name)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """The second process of a subject starts when its first check is reached."""
        if isinstance(item, CheckItem) and (labels := self.labels.pop(item.run.spec, None)):
            item.run.work_ahead(labels)

    def pytest_sessionfinish(self) -> None:
        for run in self.runs:
            run.close()


class SubjectCollector(pytest.Collector):
    """The conformance run of one subject."""

    def __init__(self, *, run: Run, **kwargs: Any) -> None:
        kwargs.setdefault("nodeid", run.spec)
        super().__init__(**kwargs)
        self.run = run

    def collect(self) -> Iterable[pytest.Item]:
        for label in self.run.instances:
            yield CheckItem.from_parent(self, name=label, run=self.run)


class CheckItem(pytest.Item):
    """One check instance."""

    def __init__(self, *, run: Run, **kwargs: Any) -> None:
        # As text: pytest then parses it as it parses the ids that its cache has stored, so that --lf finds the item again.
        super().__init__(**kwargs, nodeid=f"{kwargs['parent'].nodeid}::{kwargs['name']}")
        self.run = run
        self.check_result: Result | None = None

    def runtest(self) -> None:
        self.check_result = self.run.run(self.name)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.run.spec}::{self.name}"


class Reporter:
    """Carries results in reports (so that they cross xdist's processes), and shows them at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.results: dict[str, list[Result]] = {}
        self.inherited: dict[str, Run] = {}
        self.shown: set[tuple[str, str, str]] = set()
        self.causes: dict[tuple[str, str, str], Result] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call" and (found := _result_of(item)):
            run, result = found
            # An attribute of its own: xdist carries it between processes, and junit.xml gets the three short properties only.
            setattr(report, _PROPERTY, {"run": _key(run, item), **result.to_json()})
            report.user_properties += [("check", result.id), ("level", result.level), ("outcome", result.outcome.value)]
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
        if not self.results:
            return
        from subclass_testkit.report.terminal import notes, table, verdict

        for key, (run, results) in self._finished().items():
            terminalreporter.section(f"conformance of {key}", sep="=", bold=True)
            for line in table(results):
                terminalreporter.write_line(line)
            terminalreporter.write_line("")
            for line in notes(results):
                terminalreporter.write_line(line)
            strict = run.options.strict
            bad = not results or any(r.fails_run(strict) for r in results)
            for line in _advice(results, strict):
                terminalreporter.write_line(line, yellow=True)
            terminalreporter.write_line(f"{key}: {verdict(results, strict)}", red=bad, green=not bad, bold=True)

    def _finished(self) -> dict[str, tuple[Run, list[Result]]]:
        """Every run with its results, in the fixed order of its instances whatever the order in which they came."""
        finished = {}
        for key, run in self._runs().items():
            results = self.results.get(key, [])
            place = {label: i for i, label in enumerate(run.instances)}
            finished[key] = (run, sorted(results, key=lambda r: place.get(r.label, len(place))))
        return finished

    def _runs(self) -> dict[str, Run]:
        session = self.config.pluginmanager.get_plugin("subclass_testkit_session")
        return {**{run.spec: run for run in (session.runs if session else ())}, **self.inherited}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        plugin = self.config.pluginmanager.get_plugin("subclass_testkit_session")
        if plugin is None or not plugin.reports or hasattr(self.config, "workerinput"):
            return
        from subclass_testkit.report import json

        finished = self._finished()
        runs = [finished[run.spec] for run in plugin.runs]
        interrupted = bool(session.shouldstop or session.shouldfail) or exitstatus == pytest.ExitCode.INTERRUPTED
        for path in plugin.reports:
            json.write(path, json.report(runs, interrupted=interrupted))


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
        report.longrepr = (run.spec, None, f"{result.outcome.value}: {result.message}")  # type: ignore[assignment]
    report.duration = result.seconds or report.duration


def _property(report: Any) -> dict[str, Any] | None:
    return getattr(report, _PROPERTY, None)


def _advice(results: list[Result], strict: bool) -> Iterator[str]:
    """Should-level findings: a line each, since they don't stand among the failures."""
    from subclass_testkit.outcome import Outcome
    from subclass_testkit.report.terminal import group_failures

    for group in group_failures(r for r in results if r.outcome is Outcome.FAILED and not r.fails_run(strict)):
        more = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
        yield " ".join(f"should: {group[0].label}: {group[0].message}{more}".split())
