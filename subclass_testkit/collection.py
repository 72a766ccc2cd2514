"""What `--subclass` collects: a session's runs, and an item for each check instance."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from subclass_testkit import expect

if TYPE_CHECKING:
    from subclass_testkit.instances import Options
    from subclass_testkit.outcome import Result
    from subclass_testkit.suite import Run


class Session:
    """A pytest session that was asked for conformance runs."""

    def __init__(self, config: pytest.Config, settings: dict[str, Any]) -> None:
        self.config = config
        self.settings = settings
        self.runs: list[Run] = []
        self.labels: dict[str, list[str]] = {}  # of subjects that have not been reached, where working ahead is worth it
        self.problems: list[str] = []  # of the session as a whole
        self.lockfile: dict[str, Any] | None = None
        if settings["expect"]:
            self.lockfile = expect.read(Path(settings["expect"]))
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args = []  # no path was given: only the conformance run is collected

    def pytest_sessionstart(self) -> None:
        from subclass_testkit.known_failures import misnamed
        from subclass_testkit.resolve import resolve
        from subclass_testkit.subject import SubjectError
        from subclass_testkit.suite import Run

        try:
            options = self._options()
            known = self.settings["known"]
            specs = dict.fromkeys(self.settings["subclass"])
            self.runs = [Run(resolve(spec), options, spec=spec, known=known) for spec in specs]
            self.problems += misnamed(known)
            if self.lockfile is not None:
                self.problems += expect.untested(self.lockfile, specs)
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
            rules=given["rules"] or "",
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
            collected = collector.ihook.pytest_make_collect_report(collector=collector)
            collector.ihook.pytest_collectreport(report=collected)  # so that the terminal counts the items
            items.extend(collected.result)

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
