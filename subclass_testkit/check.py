"""What a check is: its id, level, claims and explanation; and the registry of all of them."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from parameterized import parameterized

from subclass_testkit.outcome import Level

Tier = Literal["quick", "standard", "full"]
Axes = Literal["all", "each", "dtype", "variant", "one", "experts"]

CLAIMS: dict[str, str] = {
    "wrapper": "a wrapper subclass: the values live in inner tensors, reachable by __tensor_flatten__",
    "quantized": "values are stored in fewer bits than the outer dtype has, so that writes round",
    "inference": "F.linear(x, w) works",
    "training": "a Parameter of it gets a gradient, and an optimizer step changes it",
    "compile": "torch.compile of a linear works",
    "export": "torch.export of a linear works",
    "serialization": "torch.save and torch.load work",
    "devices": ".to(device) works",
    "serving": "narrow + copy_ loads a shard into it, as inference servers do",
    "optimizer_state": "it serves as state of an optimizer: copy_ from plain values, and arithmetic",
    "tensor_parallel": "it can be sharded with DTensor",
    "fsdp2": "it has the two all-gather hooks of fully_shard",
}

FIRST_RULES = "2026.12"  # the rule set that checks without another `since` belong to

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Check:
    """One rule.

    Attributes:
        id: ``group/slug``, derived from the mixin's ``group`` and the method's name.
        level: ``must`` fails a run, ``should`` only with ``--subclass-strict``, ``preview`` never.
        needs: claims without which the check doesn't apply.
        requires: claims which, when *declared*, turn a refusal of the operation into a failure.
        depends: ids of checks whose failure makes this one meaningless (it becomes ``blocked``).
        rule, why, fix: what must hold, what breaks for users when it doesn't, and how to fix it.
        tier: the smallest tier that runs it.
        own_process: it can kill the interpreter or changes global state that can't be restored.
        axes: which of the subject's axes it runs over (see ``suite.expand``).
        timeout: seconds after which it counts as hanging.
        upstream: known issues of torch itself that show when the control fails as well.
        since: the rule set (``YYYY.MM``) that it came with; ``--subclass-rules`` leaves out what is newer.
        of_parameters: it is about parameters of modules, which not every tensor is for (``Subject(parameter=False)``).
    """

    id: str
    group: str
    level: Level
    needs: tuple[str, ...]
    requires: tuple[str, ...]
    depends: tuple[str, ...]
    rule: str
    why: str
    fix: str
    tier: Tier
    own_process: bool
    axes: Axes
    timeout: float
    upstream: str
    of_parameters: bool
    function: str
    since: str = FIRST_RULES


def check_id(group: str, function: str) -> str:
    """The one place where an id is made: ``slicing``, ``test_row_slice`` -> ``slicing/row-slice``."""
    return f"{group}/{function.removeprefix('test_').replace('_', '-')}"


def check(
    *,
    why: str,
    fix: str,
    level: Level = "must",
    needs: Iterable[str] = (),
    requires: Iterable[str] = (),
    depends: Iterable[str] = (),
    tier: Tier = "quick",
    own_process: bool = False,
    axes: Axes = "each",
    timeout: float = 30.0,
    upstream: str = "",
    of_parameters: bool = False,
    since: str = FIRST_RULES,
) -> Callable[[_F], _F]:
    """Mark a mixin's method as a check. The method's docstring is the rule.

    Raises:
        ValueError: a claim, level, tier or axes value is unknown, or a sentence is missing; at import, naming the method.
    """

    def mark(function: _F) -> _F:
        where = function.__qualname__
        rule = " ".join((inspect.getdoc(function) or "").split())
        for name, text in (("docstring", rule), ("why", why), ("fix", fix)):
            if not text.strip():
                raise ValueError(f"{where}: a check needs a {name}")
        for claim in (*needs, *requires):
            if claim not in CLAIMS:
                raise ValueError(f"{where}: unknown claim {claim!r}{did_you_mean(claim, CLAIMS)}")
        for value, allowed in ((level, Level), (tier, Tier), (axes, Axes)):
            if value not in get_args(allowed):
                raise ValueError(f"{where}: {value!r} is none of {', '.join(get_args(allowed))}")
        if not re.fullmatch(r"\d{4}\.(0[1-9]|1[0-2])", since):
            raise ValueError(f"{where}: since is a year and month, as in {FIRST_RULES!r}, got {since!r}")
        function.__check__ = {  # type: ignore[attr-defined]  # functions carry attributes; parameterized keeps them
            "level": level,
            "needs": tuple(needs),
            "requires": tuple(requires),
            "depends": tuple(depends),
            "rule": rule,
            "why": why,
            "fix": fix,
            "tier": tier,
            "own_process": own_process,
            "axes": axes,
            "timeout": timeout,
            "upstream": upstream,
            "of_parameters": of_parameters,
            "function": function.__name__,
            "since": since,
        }
        function.__check_cases__ = {}  # type: ignore[attr-defined]  # method name -> case, filled by `over`
        return function

    return mark


def over(*cases: Any) -> Callable[[Callable[..., Any]], None]:
    """Run a check over its own axis: ``parameterized.expand`` with one instance per case (a value, or a tuple of arguments).

    The first argument of a case names it; it is a string, or has a readable ``str()``.
    """
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]

    def name_case(function: Callable[..., Any], number: str, param: Any) -> str:
        name = parameterized.to_safe_name(f"{function.__name__}_{number}_{param.args[0]}")
        cast(Any, function).__check_cases__[name] = str(param.args[0])
        return str(name)

    return cast(Callable[[Callable[..., Any]], None], parameterized.expand(rows, name_func=name_case))


def group_checks(mixin: type) -> list[tuple[Check, Callable[..., Any], str]]:
    """The checks that ``mixin`` itself defines, in order of definition: (check, method, the case's name or '')."""
    found = []
    for function in vars(mixin).values():
        data = getattr(function, "__check__", None)
        if data is None:
            continue
        group = cast(Any, mixin).group
        of_parameters = data["of_parameters"] or cast(Any, mixin).of_parameters
        info = Check(id=check_id(group, data["function"]), group=group, **{**data, "of_parameters": of_parameters})
        found.append((info, function, function.__check_cases__.get(function.__name__, "")))
    return found


@functools.cache
def registry() -> dict[str, Check]:
    """All checks of the kit by id, in a fixed order.

    Raises:
        ValueError: two checks share an id, or a dependency names none.
    """
    from subclass_testkit.checks import MIXINS

    checks: dict[str, Check] = {}
    owner: dict[str, type] = {}
    for mixin in MIXINS:
        for info, _, _ in group_checks(mixin):
            if owner.setdefault(info.id, mixin) is not mixin:
                raise ValueError(f"{info.id} is defined twice: in {owner[info.id].__name__} and {mixin.__name__}")
            if info.id in checks and checks[info.id] != info:
                raise ValueError(f"{info.id} is defined twice in {mixin.__name__}")
            checks[info.id] = info
    for info in checks.values():
        for other in info.depends:
            if other not in checks:
                raise ValueError(f"{info.id} depends on {other!r}, which is no check{did_you_mean(other, checks)}")
    return checks


def select(ids: Iterable[str], globs: Iterable[str]) -> list[str]:
    """The ids that the globs keep: with any positive glob only what matches one; ``!glob`` leaves out.

    Raises:
        ValueError: a glob matches no id; the message names the nearest one.
    """
    ids = list(ids)
    positive: list[str] = []
    negative: list[str] = []
    for glob in globs:
        bare = glob.removeprefix("!")
        if not fnmatch.filter(ids, bare):
            raise ValueError(f"checks: no check matches {bare!r}{did_you_mean(bare, ids)}")
        (negative if glob.startswith("!") else positive).append(bare)
    kept = [i for i in ids if not positive or any(fnmatch.fnmatchcase(i, g) for g in positive)]
    return [i for i in kept if not any(fnmatch.fnmatchcase(i, g) for g in negative)]


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """``; did you mean 'x'?`` or, when nothing is near, the list of what is valid (if short)."""
    names = [str(v) for v in valid]
    bare = _letters(word)
    near = [n for n in names if bare and bare in _letters(n)] or difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {min(near, key=len)!r}?"
    return f"; valid are: {', '.join(sorted(names))}" if len(names) <= 20 else ""


def _letters(word: str) -> str:
    return "".join(c for c in word.lower() if c.isalnum() or c == "/")
