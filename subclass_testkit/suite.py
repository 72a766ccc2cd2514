"""A run: all check instances of one subject and their results, with the processes they run in."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from subclass_testkit import claims, control
from subclass_testkit.check import group_checks
from subclass_testkit.checks import MIXINS
from subclass_testkit.checks.base import Case, CheckGroup
from subclass_testkit.claims import Claim
from subclass_testkit.execution import asks_control, control_result, execute, judged, locate, weighed
from subclass_testkit.instances import Instance, Options, dependencies, expand
from subclass_testkit.isolation import Ahead, Worker, WorkerDied, can_fork, cores, warm_up
from subclass_testkit.known_failures import Expectations, KnownFailure, check_ids
from subclass_testkit.locate import SubjectCode
from subclass_testkit.outcome import Outcome, Result
from subclass_testkit.subject import Subject

_PROBE_TIMEOUT = 60.0
_WORTH_A_PROCESS = 200
# A check that takes longer isn't run again to see which functions it calls, in seconds.
_LONG = 2.0
# Once a subject has hung a few times, it is given less time: (hangs so far, divisor of a check's timeout).
_PATIENCE = ((10, 30.0), (2, 6.0), (0, 1.0))


@dataclass
class Run:
    """All instances of one subject, and their results as they come."""

    subject: Subject
    options: Options = field(default_factory=Options)
    mixins: tuple[type[CheckGroup], ...] | None = None
    spec: str = ""
    results: dict[str, Result] = field(default_factory=dict, repr=False)
    facts: dict[str, Any] = field(default_factory=dict, repr=False)
    known: Sequence[KnownFailure] = ()

    def __post_init__(self) -> None:
        if self.options.claims:
            declared = tuple(dict.fromkeys((*(self.subject.claims or ()), *self.options.claims)))
            self.subject = replace(self.subject, claims=declared)
        mixins = self.mixins or MIXINS
        self.instances: dict[str, Instance] = {i.label: i for i in expand(self.subject, self.options, mixins)}
        others = dependencies(self.subject, self.options, list(self.instances.values()), MIXINS)
        self._known: dict[str, Instance] = {**{i.label: i for i in others}, **self.instances}
        self._expectations: Expectations | None = None
        check_ids(self.known, self._ids())
        self._claims: dict[str, Claim] | None = None
        self._worker: Worker | None = None
        self._ahead: Ahead | None = None
        self._hangs = 0
        self._located: set[tuple[str, str]] = set()
        self._subjects: dict[str, Subject] = {}
        self.isolate = self.options.isolate
        self.isolation_note = ""
        reason = can_fork()
        if reason and self.isolate != "none":
            self.isolate, self.isolation_note = "none", f"checks run in this process: {reason}"

    # --- known failures

    @property
    def expectations(self) -> Expectations:
        """The known failures that are about this subject."""
        if self._expectations is None:
            names = {self.spec or self.subject.title, self.subject.title}
            mixins = dict.fromkeys((*MIXINS, *(self.mixins or ())))
            everything = expand(self.subject, Options(tier="full"), tuple(mixins)) if self.known else ()
            self._expectations = Expectations(self.known, names, self._known.values(), everything)
        return self._expectations

    def declare(self, known: Sequence[KnownFailure]) -> None:
        """Take these known failures instead of those given before.

        Raises:
            ValueError: one names no check.
        """
        check_ids(known, self._ids())
        self.known, self._expectations = known, None

    def _ids(self) -> set[str]:
        return {info.id for mixin in (*MIXINS, *(self.mixins or ())) for info, _, _ in group_checks(mixin)}

    def problems(self, results: Sequence[Result]) -> list[str]:
        """What fails the run besides its results: known failures that are expired or cover nothing."""
        return self.expectations.problems(results)

    # --- running

    @property
    def claims(self) -> dict[str, Claim]:
        """Every claim, probed once."""
        if self._claims is None:
            self._claims = {}
            for name in claims.NAMES:
                self._claims[name] = self._probe(name)
            self.facts["found"] = tuple(n for n, c in self._claims.items() if c.found)
            self.facts["claims"] = {n: c.reason for n, c in self._claims.items()}
            self._tell_worker()
        return self._claims

    def _probe(self, name: str) -> Claim:
        answer: Claim | None = None
        for variant in self.subject.variant_names() if name == "inference" else ("default",):
            try:
                claim, rounding = self._ask(("probe", name, variant), _PROBE_TIMEOUT)
            except WorkerDied as death:
                claim, rounding = Claim(name, name in self.subject.declared, True, f"probing it {death}"), {}
            self.facts.setdefault("rounding", {}).update(rounding)
            answer = answer or claim
        assert answer is not None
        return answer

    def run(self, label: str) -> Result:
        """The result of an instance; it runs once."""
        if label not in self.results:
            instance = self._known[label]
            result = self.expectations.judge(self._run(instance))
            if result.outcome is Outcome.FAILED and result.broken and not result.where:
                result.where = self._locate(instance, result)
            self.results[label] = result
        return self.results[label]

    def _locate(self, instance: Instance, result: Result) -> str:
        """Where a wrong result comes from: found for the first instance of a finding, by running it once more."""
        finding = (result.id, result.kind)
        safe = instance.check.tier == "quick" and not instance.check.own_process and self.isolate == "hazardous"
        if not safe or finding in self._located or result.kind.startswith(("killed", "hang")) or result.seconds > _LONG:
            return ""
        self._located.add(finding)
        try:
            return str(self._ask(("locate", instance.label), instance.check.timeout))
        except WorkerDied:
            return ""

    def _run(self, instance: Instance) -> Result:
        unasked = self._unasked(instance)
        if unasked is not None:
            return unasked
        for dependency in self._dependencies(instance):
            if self.run(dependency.label).broken:
                return instance.result(Outcome.BLOCKED, message=f"{dependency.label} failed")
        own = instance.check.own_process or self.isolate == "all"
        if self.isolate == "none":
            if instance.check.own_process:
                return instance.result(
                    Outcome.SKIPPED, message=self.isolation_note or "needs a process of its own (--subclass-isolate=none)"
                )
            return execute(instance, self.case_of(instance))
        start = time.perf_counter()
        timeout = instance.check.timeout / next(divisor for hangs, divisor in _PATIENCE if self._hangs >= hangs)
        try:
            if own:
                return self._run_alone(instance, timeout)
            request = ("run", instance.label)
            result: Result | None = self._ahead.take(request, timeout) if self._ahead is not None else None
            return result if result is not None else self._ask(request, timeout)
        except WorkerDied as death:
            self._hangs += death.kind == "hang"
            return self._death(instance, death, time.perf_counter() - start)

    def _unasked(self, instance: Instance) -> Result | None:
        """The result of an instance that doesn't apply to this subject; None where it must run."""
        claims = self.claims  # probed before the first check, which then knows what the probes measured
        missing = [c for c in instance.check.needs if not claims[c].found]
        if missing:
            reasons = "; ".join(f"{c}: {claims[c].reason}" for c in missing)
            return instance.result(Outcome.NOT_CLAIMED, message=reasons)
        if instance.check.of_parameters and not self.subject.parameter:
            return instance.result(
                Outcome.NOT_CLAIMED, message="the subject says parameter=False: no module has it as a parameter"
            )
        if instance.shape is None:
            return instance.result(Outcome.SKIPPED, message="no 3-D shape is legal for this subject")
        return None

    def _run_alone(self, instance: Instance, timeout: float) -> Result:
        """Run an instance in a process of its own, and the control in another: what kills the control must not kill the verdict."""
        start = time.perf_counter()
        result: Result = self._ask_alone(("judge", instance.label), timeout)
        if asks_control(result):
            try:
                limit = self._ask_alone(("control", instance.label), timeout)
            except WorkerDied:
                limit = None
            result = weighed(instance, self.case_of(instance), result, limit)
        result.seconds = time.perf_counter() - start
        return result

    def _death(self, instance: Instance, death: WorkerDied, seconds: float) -> Result:
        """The result of an instance that killed its process: torch's limit if the control dies too."""
        message = f"the check {death}"
        if death.kind != "hang":
            try:
                outcome = self._ask_alone(("control", instance.label), instance.check.timeout)
                dies = outcome is not None and outcome.kind == death.kind
            except WorkerDied as second:
                dies = second.kind == death.kind
            if dies:
                name = control.pick(self.subject).title
                text = f"{message}; so does the control {name} on torch {torch.__version__}. {instance.check.upstream}".strip()
                return instance.result(Outcome.TORCH_LIMIT, message=text, seconds=seconds)
        where = SubjectCode(self.subject.cls).frame_of(death.stack)
        return instance.result(Outcome.FAILED, message=message + ".", kind=death.kind, where=where, seconds=seconds)

    def _dependencies(self, instance: Instance) -> Iterator[Instance]:
        """The instances that this one depends on, at the same variant and dtype where they run over these."""
        for other in instance.check.depends:
            points = [p for p in self._known.values() if p.check.id == other]
            same = [p for p in points if p.variant == instance.variant and p.dtype == instance.dtype]
            yield from same or points[:1]

    def finished(self) -> list[Result]:
        """The results of selected instances that have run, in the fixed order."""
        return [self.results[label] for label in self.instances if label in self.results]

    def all(self) -> Iterator[Result]:
        """Run every selected instance, in order."""
        try:
            self.work_ahead(list(self.instances))
            for label in self.instances:
                yield self.run(label)
        finally:
            self.close()

    # --- processes

    def _ask(self, request: Any, timeout: float) -> Any:
        if self.isolate == "none":
            return self._serve(request)
        if self._worker is None:
            warm_up()
            self._worker = Worker(self._serve)
        try:
            return self._worker.ask(request, timeout)
        except WorkerDied:
            self._worker = None
            raise

    def _ask_alone(self, request: Any, timeout: float) -> Any:
        warm_up()
        worker = Worker(self._serve)
        answer = worker.ask(request, timeout)
        worker.close(kill=True)
        return answer

    def work_ahead(self, labels: Sequence[str]) -> None:
        """Let a second process run these instances from the last to the first, if there is a processor for it.

        The results are the same; they are only there sooner.
        """
        if self.isolate != "hazardous" or cores() < 2 or len(labels) < _WORTH_A_PROCESS:
            return
        instances = (self.instances[label] for label in labels)
        useful = [i for i in instances if not i.check.own_process and self._unasked(i) is None]
        warm_up()
        self._ahead = Ahead(self._serve, [("run", i.label) for i in useful])

    def _tell_worker(self) -> None:
        """Let the child that is running know what the probes found; one forked later knows it from this process."""
        if self._worker is not None:
            self._worker.ask(("facts", self.facts), _PROBE_TIMEOUT)

    def close(self) -> None:
        """End the worker processes."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _serve(self, request: Any) -> Any:
        kind = request[0]
        if kind == "probe":
            case = self.case("default" if len(request) < 3 else request[2])
            return claims.probe(case, request[1]), self.facts.get("rounding", {})
        if kind == "facts":
            self.facts.update(request[1])
            return None
        instance = self._known[request[1]]
        case = self.case_of(instance)
        action = {"run": execute, "judge": judged, "control": control_result, "locate": locate}[kind]
        return action(instance, case)

    def case_of(self, instance: Instance) -> Case:
        return self.case(instance.variant, instance.dtype, instance.shape)

    def case(self, variant: str = "default", dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Case:
        """The subject at a point of its axes."""
        if not self._subjects:
            self._subjects.update({name: self.subject.at(name) for name in self.subject.variant_names()})
        at = self._subjects[variant]
        assert at.shapes is not None
        others = {name: other for name, other in self._subjects.items() if name != variant}
        return Case(at, variant, dtype or at.dtypes[0], shape or at.shapes[0], self.options.seed, self.facts, others)
