"""Inheriting: a TestCase that mixes in groups of checks gets one method per check instance of its subject."""

from __future__ import annotations

import functools
import inspect
import unittest
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from parameterized import parameterized

if TYPE_CHECKING:
    from subclass_testkit.instances import Instance
    from subclass_testkit.outcome import Result
    from subclass_testkit.suite import Run


def expand_test_case(cls: type) -> None:
    """Called for every subclass of `CheckGroup`: where it is a TestCase with a ``subject``, its methods are made.

    The mixins' own methods are hidden (they need a case), and for each instance a method ``test_<group>_<check>__<axes>`` is added. It
    runs the same engine as ``--subclass``; so the outcomes are the same.
    """
    if not issubclass(cls, unittest.TestCase):
        return
    mixins = _mixins(cls)
    for mixin in mixins:
        for name, value in vars(mixin).items():
            if hasattr(value, "__check__") and name not in vars(cls):
                setattr(cls, name, None)  # unittest and pytest take only callables
    subject = getattr(cls, "subject", None)
    if subject is None or isinstance(inspect.getattr_static(cls, "subject"), property):
        return

    from subclass_testkit import known_files
    from subclass_testkit.instances import Options, validated
    from subclass_testkit.resolve import resolve
    from subclass_testkit.suite import Run

    options = validated(cast(Any, cls).__dict__.get("options") or getattr(cls, "options", None) or Options())
    test_case = cast(Any, cls)
    known = known_files.load(getattr(cls, "known_failures", ()), cls.__qualname__)
    run = Run(resolve(subject), options, tuple(mixins), known=known)
    test_case.conformance = run
    for label, name in method_names(run).items():
        setattr(cls, name, _method(run, run.instances[label], name))
    _close_with_class(cls, run)


def _mixins(cls: type) -> list[Any]:
    """The mixins that a class inherits, in the kit's order, those of the user after them."""
    from subclass_testkit.checks import MIXINS
    from subclass_testkit.checks.base import CheckGroup

    own = [k for k in cls.__mro__ if issubclass(k, CheckGroup) and not issubclass(k, unittest.TestCase) and k.group]
    return [m for m in MIXINS if m in own] + [m for m in own if m not in MIXINS]


def method_names(run: Run) -> dict[str, str]:
    """Label of each instance -> name of its method; all different."""
    names: dict[str, str] = {}
    taken: dict[str, int] = {}
    for label, instance in run.instances.items():
        name = _method_name(instance)
        taken[name] = taken.get(name, 0) + 1
        names[label] = name if taken[name] == 1 else f"{name}__{taken[name]}"
    return names


def _method_name(instance: Instance) -> str:
    """``test_slicing_row_slice__w_8_16___float32_32x48``: plain ASCII, and tells the whole case."""
    params = "__".join(parameterized.to_safe_name(_spell(value)) for value in instance.params.values())
    name = f"test_{instance.check.group}_{instance.check.function.removeprefix('test_')}"
    return f"{name}__{params}" if params else name


def _spell(value: str) -> str:
    """Keep apart what to_safe_name would merge."""
    for sign, word in (("-", "minus"), (":", "to"), ("...", "dots"), ("*", "times"), ("+", "plus"), ("/", "by")):
        value = value.replace(sign, word)
    return value


def _method(run: Run, instance: Instance, name: str) -> Callable[[unittest.TestCase], None]:
    def method(self: unittest.TestCase) -> None:
        report(self, run, run.run(instance.label))

    method.__name__ = name
    method.__qualname__ = f"{type(run).__name__}.{name}"
    method.__doc__ = None
    method.__conformance__ = (run, instance.label)  # type: ignore[attr-defined]  # the pytest plugin reads it
    return method


def report(test: unittest.TestCase, run: Run, result: Result) -> None:
    """Tell unittest how a check ended: a failure fails, everything that is not a pass is a skip with its reason."""
    from subclass_testkit.outcome import Outcome
    from subclass_testkit.report.terminal import failure_text

    if result.fails_run(run.options.strict):
        raise test.failureException("\n" + failure_text(run, result))
    if result.outcome is Outcome.FAILED:
        test.skipTest(f"{result.level}: {result.message}")
    if result.outcome is not Outcome.PASSED:
        test.skipTest(f"{result.outcome.value}: {result.known or result.message}")


def _close_with_class(cls: type, run: Run) -> None:
    original = cast(Any, cls).tearDownClass.__func__

    @functools.wraps(original)
    def tearDownClass(klass: Any) -> None:  # unittest's name
        try:
            original(klass)
        finally:
            run.close()
        if problems := run.problems(run.finished()):
            raise AssertionError("\n".join(["the known failures are not as declared:", *problems]))

    cast(Any, cls).tearDownClass = classmethod(tearDownClass)
