"""Subject x checks x axes -> instances in a fixed order -> results."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from subclass_testkit import claims, control, oracle
from subclass_testkit.check import Check, group_checks, registry, select
from subclass_testkit.checks.base import Case, CheckGroup
from subclass_testkit.claims import Claim
from subclass_testkit.isolation import Worker, WorkerDied, can_fork
from subclass_testkit.outcome import CheckFailed, CheckSkipped, Finding, NotClaimed, Outcome, Refused, Result, instance_label
from subclass_testkit.subject import Subject

Isolate = Literal["hazardous", "all", "none"]
TIERS = ("quick", "standard", "full")
ISOLATE = ("hazardous", "all", "none")
_PROBE_TIMEOUT = 60.0
_HANGS_BEFORE_HURRY = 2
_HURRY = 5.0


@dataclass(frozen=True)
class Options:
    """How a run is made. ``claims`` are demanded in addition to what the subject declares; ``checks`` are globs of ids."""

    claims: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    tier: str = "standard"
    strict: bool = False
    isolate: str = "hazardous"
    seed: int = 0


@dataclass(frozen=True)
class Instance:
    """A check at one point of its own axis and the subject's. ``method`` is the mixin's (with its case bound)."""

    check: Check
    mixin: type[CheckGroup]
    method: Callable[..., Any]
    argument: str
    variant: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None

    @property
    def params(self) -> dict[str, str]:
        params = {"case": self.argument} if self.argument else {}
        if self.variant != "default":
            params["variant"] = self.variant
        params["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.shape is not None:
            params["shape"] = "x".join(map(str, self.shape))
        return params

    @property
    def label(self) -> str:
        return instance_label(self.check.id, self.params)


@dataclass
class Run:
    """All instances of one subject, and their results as they come."""

    subject: Subject
    options: Options = field(default_factory=Options)
    mixins: tuple[type[CheckGroup], ...] | None = None
    spec: str = ""
    results: dict[str, Result] = field(default_factory=dict, repr=False)
    facts: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.options.claims:
            declared = tuple(dict.fromkeys((*(self.subject.claims or ()), *self.options.claims)))
            self.subject = replace(self.subject, claims=declared)
        self.instances: dict[str, Instance] = {i.label: i for i in self._expand()}
        self._known: dict[str, Instance] = {**{i.label: i for i in self._dependency_instances()}, **self.instances}
        self._claims: dict[str, Claim] | None = None
        self._worker: Worker | None = None
        self._hangs = 0
        self._subjects: dict[str, Subject] = {}
        self.isolate = self.options.isolate
        self.isolation_note = ""
        reason = can_fork()
        if reason and self.isolate != "none":
            self.isolate, self.isolation_note = "none", f"checks run in this process: {reason}"

    # --- expansion

    def _expand(self) -> Iterator[Instance]:
        from subclass_testkit.checks import MIXINS

        tiers = TIERS[: TIERS.index(self.options.tier) + 1]
        mixins = self.mixins or MIXINS
        ids = [info.id for mixin in mixins for info, _, _ in group_checks(mixin)]
        kept = set(select(dict.fromkeys(ids), self.options.checks)) if self.options.checks else set(ids)
        for mixin in mixins:
            for info, method, argument in group_checks(mixin):
                if info.id in kept and info.tier in tiers:
                    yield from self._points(info, mixin, method, argument)

    def _points(self, info: Check, mixin: type[CheckGroup], method: Callable[..., Any], argument: str) -> Iterator[Instance]:
        for variant, dtype, shape in axis_points(self.subject, info.axes):
            yield Instance(info, mixin, method, argument, variant, dtype, shape)

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
                claim, bits = self._ask(("probe", name, variant), _PROBE_TIMEOUT)
            except WorkerDied as death:
                claim, bits = Claim(name, name in self.subject.declared, True, f"probing it {death}"), {}
            self.facts.setdefault("activation_bits", {}).update(bits)
            answer = answer or claim
        assert answer is not None
        return answer

    def run(self, label: str) -> Result:
        """The result of an instance; it runs once."""
        if label not in self.results:
            self.results[label] = self._run(self._known[label])
        return self.results[label]

    def _run(self, instance: Instance) -> Result:
        claims = self.claims  # probed before the first check, which then knows what the probes measured
        missing = [c for c in instance.check.needs if not claims[c].found]
        if missing:
            reasons = "; ".join(f"{c}: {self.claims[c].reason}" for c in missing)
            return result_of(instance, Outcome.NOT_CLAIMED, message=reasons)
        if instance.shape is None:
            return result_of(instance, Outcome.SKIPPED, message="no 3-D shape is legal for this subject")
        for dependency in self._dependencies(instance):
            if self.run(dependency.label).outcome is Outcome.FAILED:
                return result_of(instance, Outcome.BLOCKED, message=f"{dependency.label} failed")
        own = instance.check.own_process or self.isolate == "all"
        if self.isolate == "none":
            if instance.check.own_process:
                return result_of(instance, Outcome.SKIPPED, message=self.isolation_note or "needs a process of its own (--subclass-isolate=none)")
            return execute(self, instance)
        start = time.perf_counter()
        timeout = instance.check.timeout if self._hangs < _HANGS_BEFORE_HURRY else min(_HURRY, instance.check.timeout)
        request = ("run", instance.label)
        try:
            return self._ask_alone(request, timeout) if own else self._ask(request, timeout)  # type: ignore[no-any-return]
        except WorkerDied as death:
            self._hangs += death.kind == "hang"
            return self._death(instance, death, time.perf_counter() - start)

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
                return result_of(instance, Outcome.TORCH_LIMIT, message=text, seconds=seconds)
        return result_of(instance, Outcome.FAILED, message=message + ".", kind=death.kind, seconds=seconds)

    def _dependencies(self, instance: Instance) -> Iterator[Instance]:
        """The instances that this one depends on, at the same variant and dtype where they run over these."""
        for other in instance.check.depends:
            points = [p for p in self._known.values() if p.check.id == other]
            same = [p for p in points if p.variant == instance.variant and p.dtype == instance.dtype]
            yield from same or points[:1]

    def _dependency_instances(self) -> Iterator[Instance]:
        """The instances of all checks that a selected one depends on, selected themselves or not."""
        wanted = {other for i in self.instances.values() for other in i.check.depends}
        while more := {other for w in wanted for other in registry()[w].depends} - wanted:
            wanted |= more
        for mixin in _all_mixins():
            for info, method, argument in group_checks(mixin):
                if info.id in wanted:
                    yield from self._points(info, mixin, method, argument)

    def finished(self) -> list[Result]:
        """The results of selected instances that have run, in the fixed order."""
        return [self.results[label] for label in self.instances if label in self.results]

    def all(self) -> Iterator[Result]:
        """Run every selected instance, in order."""
        for label in self.instances:
            yield self.run(label)
        self.close()

    # --- processes

    def _ask(self, request: Any, timeout: float) -> Any:
        if self.isolate == "none":
            return self._serve(request)
        if self._worker is None:
            self._worker = Worker(self._serve)
        try:
            return self._worker.ask(request, timeout)
        except WorkerDied:
            self._worker = None
            raise

    def _ask_alone(self, request: Any, timeout: float) -> Any:
        worker = Worker(self._serve)
        answer = worker.ask(request, timeout)
        worker.close(kill=True)
        return answer

    def _tell_worker(self) -> None:
        """Let the child that is running know what the probes found; one forked later knows it from this process."""
        if self._worker is not None:
            self._worker.ask(("facts", self.facts), _PROBE_TIMEOUT)

    def close(self) -> None:
        """End the worker process."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _serve(self, request: Any) -> Any:
        kind = request[0]
        if kind == "probe":
            case = self.case("default" if len(request) < 3 else request[2])
            return claims.probe(case, request[1]), self.facts.get("activation_bits", {})
        if kind == "facts":
            self.facts.update(request[1])
            return None
        instance = self._known[request[1]]
        return execute(self, instance) if kind == "run" else control_result(instance, self)

    def case(self, variant: str = "default", dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Case:
        """The subject at a point of its axes."""
        if variant not in self._subjects:
            self._subjects[variant] = self.subject.at(variant)
        at = self._subjects[variant]
        assert at.shapes is not None
        return Case(at, variant, dtype or at.dtypes[0], shape or at.shapes[0], self.options.seed, self.facts)


def axis_points(subject: Subject, axes: str) -> Iterator[tuple[str, torch.dtype, tuple[int, ...] | None]]:
    """The points of the subject's axes that a check runs at.

    ``all``: variants x dtypes x shapes. ``each``: the default point, and from it each other dtype, shape and variant. ``dtype``,
    ``variant``: that axis alone. ``one``: the default point. ``experts``: the 3-D shapes, each dtype.
    """
    assert subject.shapes is not None
    first, dtype = subject.shapes[0], subject.dtypes[0]
    shapes = [s for s in subject.shapes if len(s) == len(first)]
    if axes == "experts":
        deep = [s for s in subject.shapes if len(s) == 3]
        yield from (("default", d, s) for s in deep for d in subject.dtypes)
        if not deep:
            yield "default", dtype, None
        return
    points: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    for variant in subject.variant_names() if axes in ("all", "each", "variant") else ("default",):
        at = subject.at(variant)
        own_shapes = shapes if at.shapes == subject.shapes else [s for s in (at.shapes or ()) if len(s) == len(first)]
        for d in at.dtypes if axes in ("all", "each", "dtype") else (at.dtypes[0],):
            for s in own_shapes if axes in ("all", "each") else (own_shapes[0],):
                changed = (variant != "default") + (d != at.dtypes[0]) + (s != own_shapes[0])
                if axes == "all" or changed <= 1:
                    points.append((variant, d, s))
    yield from points


def _all_mixins() -> tuple[type[CheckGroup], ...]:
    from subclass_testkit.checks import MIXINS

    return MIXINS


# --- one instance


def result_of(instance: Instance, outcome: Outcome, **fields: Any) -> Result:
    return Result(instance.check.id, instance.check.level, instance.params, outcome, **fields)


def execute(run: Run, instance: Instance) -> Result:
    """Run an instance in this process."""
    case = run.case(instance.variant, instance.dtype, instance.shape)
    start = time.perf_counter()
    result = judged(instance, case)
    if result.outcome is Outcome.FAILED or (result.outcome is Outcome.REFUSED and result.notes):
        limit = control_result(instance, run)
        if limit is not None and limit.kind == result.kind and control.same_text(limit.message, result.message):
            name = control.pick(run.subject).title
            text = f"{result.message} The control {name} does the same on torch {torch.__version__}. {instance.check.upstream}"
            result = result_of(instance, Outcome.TORCH_LIMIT, message=text.strip())
    result.seconds = time.perf_counter() - start
    return result


def judged(instance: Instance, case: Case) -> Result:
    """Run the check's body and turn how it ended into a result."""
    group = object.__new__(instance.mixin)
    group.case = case
    try:
        with _calm():
            torch.manual_seed(case.seed)
            instance.method(group)
    except CheckFailed as failure:
        return _failed(instance, failure.finding)
    except Refused as refusal:
        return _refused(instance, refusal, case)
    except CheckSkipped as reason:
        return result_of(instance, Outcome.SKIPPED, message=str(reason))
    except NotClaimed as reason:
        return result_of(instance, Outcome.NOT_CLAIMED, message=str(reason))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _stray(instance, error, case)
    return result_of(instance, Outcome.PASSED)


class _calm(warnings.catch_warnings):  # noqa: N801  # reads as a context manager
    """No warnings, and torch's global state restored afterwards, whatever the subject did to it."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
        self._rng = torch.get_rng_state()
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()

    def __exit__(self, *details: Any) -> None:
        torch.set_rng_state(self._rng)
        torch.set_default_dtype(self._dtype)
        torch.set_grad_enabled(self._grad)
        super().__exit__(*details)


def _failed(instance: Instance, finding: Finding) -> Result:
    return result_of(
        instance,
        Outcome.FAILED,
        message=finding.message,
        kind=finding.kind,
        diagnosis=finding.likely,
        reproduction=finding.reproduction,
    )


def _refused(instance: Instance, refusal: Refused, case: Case) -> Result:
    required = [c for c in instance.check.requires if c in case.subject.declared]
    if required:
        finding = Finding(refusal.kind, f"{refusal}; the declared claim {required[0]!r} requires it.", reproduction=refusal.reproduction)
        return _failed(instance, finding)
    notes = []
    if refusal.odd:
        kind = refusal.kind.removeprefix("raised:")
        notes.append(f"refused by {kind}: a refusal should be a NotImplementedError that names the operation")
    return result_of(instance, Outcome.REFUSED, message=str(refusal), kind=refusal.kind, notes=notes, reproduction=refusal.reproduction)


def _stray(instance: Instance, error: BaseException, case: Case) -> Result:
    """An exception that no script caught: judged as the subject's."""
    message = f"the check ended in {oracle.describe(error)}"
    kind = f"raised:{type(oracle.root_cause(error)).__name__}"
    verdict = oracle.judge_exception(error, case.subject.refusals)
    if verdict == "accident":
        return _failed(instance, Finding(kind, message))
    return _refused(instance, Refused(message, kind=kind, odd=verdict == "odd"), case)


def control_result(instance: Instance, run: Run) -> Result | None:
    """The same instance on the control, or None where the control doesn't have that dtype or shape."""
    case = control.case_for(run.subject, instance.dtype, instance.shape, run.options.seed)
    return judged(instance, case) if case is not None else None


# --- the call for notebooks


@dataclass
class Report:
    """The outcome of :func:`check_subclass`. ``str(report)`` is the terminal summary."""

    run: Run
    results: list[Result]

    @property
    def ok(self) -> bool:
        """Whether nothing failed (at level must; with ``strict`` at all)."""
        return not any(r.fails_run(self.run.options.strict) for r in self.results)

    @property
    def failures(self) -> list[Result]:
        return [r for r in self.results if r.outcome is Outcome.FAILED]

    @property
    def totals(self) -> dict[str, int]:
        return totals(self.results)

    def to_json(self) -> dict[str, Any]:
        """The report as design and schema say (one run)."""
        from subclass_testkit.report.json import report

        return report([(self.run, self.results)])

    def __str__(self) -> str:
        from subclass_testkit.report.terminal import render

        return render(self.run, self.results)


def totals(results: Iterable[Result]) -> dict[str, int]:
    """How many results ended in each outcome; ``selected`` is their sum."""
    results = list(results)
    counts = {"selected": len(results)}
    counts.update({o.value: sum(r.outcome is o for r in results) for o in Outcome})
    return counts


def check_subclass(
    subject: object,
    *,
    claims: Iterable[str] = (),
    checks: Iterable[str] = (),
    tier: str = "standard",
    strict: bool = False,
    isolate: str = "hazardous",
    seed: int = 0,
) -> Report:
    """Run the suite on a tensor subclass, without pytest.

    Args:
        subject: a tensor class, a :class:`Subject`, or the name of one (``"mypkg.MyTensor"``).
        claims: claims that must be found, besides those that the subject declares.
        checks: globs of check ids; ``!glob`` leaves out.
        tier: ``quick``, ``standard`` or ``full``.
        strict: should-level findings fail too.
        isolate: ``hazardous`` (checks run in a child process, dangerous ones in one each), ``all`` (one each) or ``none`` (in this process).
        seed: shifts all data.

    Raises:
        SubjectError: the class can't be found or built; ValueError: an unknown option value.
    """
    from subclass_testkit.resolve import resolve

    options = validated(Options(tuple(claims), tuple(checks), tier, strict, isolate, seed))
    run = Run(resolve(subject), options, spec=subject if isinstance(subject, str) else "")
    return Report(run, list(run.all()))


def validated(options: Options) -> Options:
    """The options, if all values are known.

    Raises:
        ValueError: names the value, the option and the nearest valid value.
    """
    from subclass_testkit.check import CLAIMS, did_you_mean

    for name, value, allowed in (("tier", options.tier, TIERS), ("isolate", options.isolate, ISOLATE)):
        if value not in allowed:
            raise ValueError(f"{name}: {value!r} is none of {', '.join(allowed)}{did_you_mean(value, allowed)}")
    for claim in options.claims:
        if claim not in CLAIMS:
            raise ValueError(f"claims: unknown claim {claim!r}{did_you_mean(claim, CLAIMS)}")
    if options.checks:
        select(registry(), options.checks)
    return options
