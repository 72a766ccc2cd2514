"""Declared failures: what an entry says, and how the results of a run are judged by the entries."""

from __future__ import annotations

import datetime
import fnmatch
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from subclass_testkit.check import did_you_mean
from subclass_testkit.conditions import Condition, Expiry
from subclass_testkit.outcome import STALE, Outcome, Result

if TYPE_CHECKING:
    from subclass_testkit.instances import Instance

AXES = ("case", "variant", "dtype", "shape")
_SOON = 14  # days before its expiry from which on an entry is announced
_T = TypeVar("_T", bound=type)


@dataclass(frozen=True)
class KnownFailure:
    """A failure that is declared.

    Args:
        check: the check's id, or a glob of ids.
        reason: why it is accepted. Mandatory: the next reader must be able to decide whether it still holds.
        subclass: the subject, as ``--subclass`` or a report names it, or a glob.
        params: axis -> value or values (``{"case": ["w[3]", "w[-1]"], "dtype": "bfloat16"}``); ``*`` stands for any text.
            Default: all instances of the check.
        when: a condition (``torch < 2.14``) outside which the entry is ignored.
        issue: where it is tracked.
        expires: the last day (``2027-01-31``), or the first version (``torch 2.15``) on which it no longer holds.
        match: text that the failure contains; another failure is not the declared one.
        source: where the entry stands, for messages.

    Raises:
        ValueError: a value is missing or malformed; TypeError: it has the wrong type. The text names the entry, the value and the fix.
    """

    check: str
    reason: str = field(kw_only=True, default="")
    subclass: str = field(kw_only=True, default="*")
    params: Mapping[str, str | Sequence[str]] = field(kw_only=True, default_factory=dict)
    when: str = field(kw_only=True, default="")
    issue: str = field(kw_only=True, default="")
    expires: str | datetime.date = field(kw_only=True, default="")
    match: str = field(kw_only=True, default="")
    source: str = field(kw_only=True, default="", compare=False)

    def __post_init__(self) -> None:
        if not self.source:
            object.__setattr__(self, "source", f"the known failure of {self.check!r}")
        for name in ("check", "reason", "subclass", "when", "issue", "match"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{self.source}: {name} takes a text, got {getattr(self, name)!r}")
        if not self.check.strip() or not self.subclass.strip():
            raise ValueError(f"{self.source}: check and subclass can't be empty; '*' stands for all")
        if not self.reason.strip():
            raise ValueError(f"{self.source}: reason is missing: say why this failure is accepted, as in reason = 'see #12'")
        self._check_params()
        if not isinstance(self.expires, str | datetime.date) or isinstance(self.expires, datetime.datetime):
            raise TypeError(f"{self.source}: expires takes a date or a text, got {self.expires!r}")
        try:
            _ = self.condition, self.expiry
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from None

    def _check_params(self) -> None:
        if not isinstance(self.params, Mapping):
            raise TypeError(
                f"{self.source}: params takes a table, as in params = {{ dtype = 'bfloat16' }}, got {self.params!r}"
            )
        for axis, values in self.params.items():
            if axis not in AXES:
                raise ValueError(f"{self.source}: params has no {axis!r}{did_you_mean(axis, AXES)}")
            if not isinstance(values, str | list | tuple) or not all(isinstance(v, str) for v in values):
                raise TypeError(f"{self.source}: params.{axis} takes a text or a list of texts, got {values!r}")

    @property
    def condition(self) -> Condition | None:
        return Condition(self.when) if self.when else None

    @property
    def expiry(self) -> Expiry | None:
        return Expiry(self.expires) if self.expires else None

    @property
    def active(self) -> bool:
        """Whether its condition holds here."""
        return self.condition is None or self.condition.holds()

    @property
    def expired(self) -> bool:
        return self.expiry is not None and self.expiry.past()

    @property
    def told(self) -> str:
        """The reason, and where it is tracked."""
        return f"{self.reason} ({self.issue})" if self.issue else self.reason

    def names(self, subjects: Iterable[str]) -> bool:
        """Whether it is about a subject that goes by these names."""
        glob = self.subclass.replace(":", ".")
        return any(fnmatch.fnmatchcase(name.replace(":", "."), glob) for name in subjects)

    def covers(self, result: Result | Instance, values: Mapping[str, frozenset[str]]) -> bool:
        """Whether it is about this instance. ``values`` are those that an axis has: one of them means itself, whatever signs it has."""
        check_id = result.id if isinstance(result, Result) else result.check.id
        return fnmatch.fnmatchcase(check_id, self.check) and all(
            any(_fits(result.params.get(axis, ""), p, values.get(axis, frozenset())) for p in _several(patterns))
            for axis, patterns in self.params.items()
        )

    def describes(self, result: Result) -> bool:
        """Whether a failure is the declared one."""
        return not self.match or any(
            self.match in text for text in (result.message, result.diagnosis, result.where, result.kind)
        )

    @classmethod
    def parse(cls, data: Mapping[str, Any], source: str) -> KnownFailure:
        """An entry from a table of a file, or from a dict.

        Raises:
            ValueError, TypeError: as the class; and for an unknown key.
        """
        if not isinstance(data, Mapping):
            raise TypeError(f"{source}: a known failure is a table, got {data!r}")
        valid = [f.name for f in fields(cls) if f.name != "source"]
        for key in data:
            if key not in valid:
                raise ValueError(f"{source}: unknown key {key!r}{did_you_mean(key, valid)}")
        if "check" not in data:
            raise ValueError(f"{source}: check is missing: name an id or a glob (subclass-testkit list shows all)")
        return cls(**data, source=source)


def _several(patterns: str | Sequence[str]) -> Sequence[str]:
    return (patterns,) if isinstance(patterns, str) else patterns


def _fits(value: str, pattern: str, valid: frozenset[str]) -> bool:
    """Brackets are part of a case's name (``w[3]``); only ``*`` is special, and not where it is part of a name (``w * 2``)."""
    if value == pattern or pattern in valid:
        return value == pattern
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), value, re.DOTALL) is not None


def known_failure(check: str, **entry: Any) -> Any:
    """Declare a failure of a TestCase's subject: a class decorator. Takes what :class:`KnownFailure` takes.

    ``@known_failure("slicing/select", reason="no kernel yet", issue="https://...")``
    """
    declared = KnownFailure(check, **entry)

    def decorate(cls: _T) -> _T:
        cls.known_failures = [*declarations(getattr(cls, "known_failures", ()), cls.__qualname__), declared]  # type: ignore[attr-defined]
        if "conformance" in vars(cls):
            vars(cls)["conformance"].declare(cls.known_failures)  # type: ignore[attr-defined]
        return cls

    return decorate


def declarations(given: Iterable[KnownFailure | Mapping[str, Any]], owner: str) -> list[KnownFailure]:
    """Entries from Python code: objects, or dicts with the same names."""
    return [
        e if isinstance(e, KnownFailure) else KnownFailure.parse(e, f"known_failures[{i}] of {owner}")
        for i, e in enumerate(given)
    ]


def check_ids(entries: Iterable[KnownFailure], ids: Iterable[str]) -> None:
    """See that each entry names a check that exists.

    Raises:
        ValueError: one doesn't; names the entry and the nearest id.
    """
    ids = list(ids)
    for entry in entries:
        if not fnmatch.filter(ids, entry.check):
            raise ValueError(
                f"{entry.source}: there is no check {entry.check!r}{did_you_mean(entry.check, ids)} "
                "(a check that was renamed or removed: correct or remove the entry)"
            )


class Expectations:
    """The entries that are about one run, and what they make of its results.

    Args:
        entries: all entries, also those about other subjects.
        subjects: the names that the run's subject goes by.
        instances: those of the run.
        everything: those that a run of any tier would have.
    """

    def __init__(
        self,
        entries: Iterable[KnownFailure],
        subjects: Iterable[str],
        instances: Iterable[Instance],
        everything: Iterable[Instance],
    ) -> None:
        named = [e for e in entries if e.names(subjects)]
        self.entries = [e for e in named if e.active]
        self.idle = [e for e in named if not e.active]
        wide = _by_check(everything if self.entries else ())
        values = {axis: frozenset(i.params.get(axis, "") for same in wide.values() for i in same) for axis in AXES}
        self._nowhere = [e for e in self.entries if not _covered(e, wide, values)]
        own = _by_check(instances if self.entries else ())
        self._labels = [(e, _covered(e, own, values)) for e in self.entries]
        self._covering: dict[str, list[KnownFailure]] = {}
        for entry, labels in self._labels:
            for label in labels:
                self._covering.setdefault(label, []).append(entry)

    def judge(self, result: Result) -> Result:
        """A failure as declared is `known`; a pass that is declared to fail, and another failure than the declared one, fail the run."""
        covering = self._covering.get(result.label, [])
        if not covering:
            return result
        holding = [e for e in covering if not e.expired]
        if result.outcome is Outcome.PASSED and not result.notes:
            entry = covering[0]
            text = f"passes, but {entry.source} declares it to fail ({entry.told}): remove the entry, or narrow it with params."
            return replace(result, outcome=Outcome.FAILED, kind=STALE, message=text, gate=text)
        if result.outcome is not Outcome.FAILED and not result.notes:
            return result
        for entry in holding:
            if entry.describes(result):
                if result.outcome is Outcome.FAILED:
                    return replace(result, outcome=Outcome.KNOWN, known=entry.told)
                return replace(result, known=entry.told, notes=[])  # a refusal by an odd error, which strict runs don't accept
        if result.outcome is not Outcome.FAILED:
            return result
        entry = covering[0]
        if holding:
            text = f"fails differently than {entry.source} declares: the failure doesn't contain {holding[0].match!r}."
        else:
            text = (
                f"{entry.source} declared it until {entry.expires}: fix it, or set a new date for a good reason ({entry.told})."
            )
        return replace(result, gate=text)

    def problems(self, results: Iterable[Result]) -> list[str]:
        """What is wrong with the entries themselves: expired, about nothing, or about nothing that fails."""
        texts = [
            f"{e.source} expired ({e.expires}): fix the failure, or set a new date ({e.told})."
            for e in self.entries
            if e.expired
        ]
        for entry in self._nowhere:
            values = ", ".join(f"{k} {v!r}" for k, v in entry.params.items())
            texts.append(
                f"{entry.source} matches nothing: {entry.check!r} has no instance with {values or 'this subject'}; remove it."
            )
        outcomes = {r.label: r for r in results}
        for entry, covered in self._labels:
            ran = [outcomes[label] for label in covered if label in outcomes]
            if ran and len(ran) == len(covered) and all(_harmless(r) for r in ran):
                seen = ", ".join(sorted({r.outcome.value for r in ran}))
                texts.append(f"{entry.source} covers nothing that fails ({seen}): remove it ({entry.told}).")
        return texts

    def summary(self, results: Iterable[Result]) -> list[str]:
        """A line on what the entries did, and one on each that expires soon."""
        known = [r for r in results if r.outcome is Outcome.KNOWN]
        if not self.entries and not self.idle:
            return []
        lines = [f"known failures: {_count(self.entries, 'entry', 'entries')}, {_count(known, 'instance', 'instances')}"]
        if self.idle:
            lines[0] += f"; {len(self.idle)} not in force here ({', '.join(sorted({e.when for e in self.idle}))})"
        for entry in self.entries:
            left = entry.expiry.days_left() if entry.expiry else None
            if left is not None and 0 <= left <= _SOON:
                lines.append(f"{entry.source} expires in {_count(range(left), 'day', 'days')} ({entry.expires}): {entry.told}")
        return lines


def _count(things: Sequence[object], one: str, many: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else many}"


def _by_check(instances: Iterable[Instance]) -> dict[str, list[Instance]]:
    checks: dict[str, list[Instance]] = {}
    for instance in instances:
        checks.setdefault(instance.check.id, []).append(instance)
    return checks


def _covered(entry: KnownFailure, checks: Mapping[str, Sequence[Instance]], values: Mapping[str, frozenset[str]]) -> list[str]:
    """The labels of the instances that an entry is about."""
    return [i.label for name in fnmatch.filter(checks, entry.check) for i in checks[name] if entry.covers(i, values)]


def _harmless(result: Result) -> bool:
    return result.outcome in (Outcome.REFUSED, Outcome.TORCH_LIMIT) and not result.notes and not result.known


def misnamed(entries: Iterable[KnownFailure]) -> list[str]:
    """Entries whose class isn't in its module, where that is imported: nothing else can tell a misspelt name from a subject not tested now."""
    texts = []
    for entry in entries:
        name = entry.subclass.replace(":", ".")
        module, _, attribute = name.rpartition(".")
        loaded = sys.modules.get(module)
        if loaded is not None and not set("*?[") & set(name) and not hasattr(loaded, attribute):
            near = did_you_mean(attribute, [n for n in dir(loaded) if isinstance(getattr(loaded, n, None), type)])
            texts.append(f"{entry.source} matches nothing: {module} has no {attribute!r}{near}")
    return texts
