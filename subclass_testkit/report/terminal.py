"""The terminal: the claims header, the table of groups and outcomes, and failures that explain themselves."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from subclass_testkit.outcome import STALE, Outcome, Result, totals

if TYPE_CHECKING:
    from subclass_testkit.finished import Finished
    from subclass_testkit.suite import Run

_WIDTH = 110
_COLUMNS = (
    Outcome.PASSED,
    Outcome.FAILED,
    Outcome.KNOWN,
    Outcome.REFUSED,
    Outcome.BLOCKED,
    Outcome.NOT_CLAIMED,
    Outcome.TORCH_LIMIT,
    Outcome.SKIPPED,
)


def header(run: Run) -> list[str]:
    """What is tested: the subject, what was inferred of it, and each claim with its reason."""
    lines = [f"subject: {run.subject.title}" + (f"  (seed {run.options.seed})" if run.options.seed else "")]
    lines += [f"  {line}" for line in run.subject.inferred]
    if run.subject.variants:
        lines.append(f"  variants: default, {', '.join(run.subject.variants)}")
    if run.isolation_note:
        lines.append(f"  {run.isolation_note}")
    lines.append("claims:")
    for claim in run.claims.values():
        text = f"  {claim.name:<16} {claim.status:<20} {' '.join(claim.reason.split())}"
        lines.append(text if len(text) <= 2 * _WIDTH else text[: 2 * _WIDTH] + "...")
    return lines


def table(results: Sequence[Result]) -> list[str]:
    """Groups x outcomes, with totals; a row for each group that has results."""
    columns = [o for o in _COLUMNS if o in (Outcome.PASSED, Outcome.FAILED) or any(r.outcome is o for r in results)]
    advice = any(r.outcome is Outcome.FAILED and r.level != "must" for r in results)
    names = [*(o.value for o in columns)]
    if advice:
        names.insert(names.index("failed") + 1, "(should)")
    widths = [max(8, len(n) + 2) for n in [*names, "total"]]
    lines = [f"{'group':<14}" + "".join(f"{n:>{w}}" for n, w in zip([*names, "total"], widths, strict=True))]
    groups = list(dict.fromkeys(r.id.split("/")[0] for r in results))
    rows = [(g, [r for r in results if r.id.split("/")[0] == g]) for g in groups]
    lines.append("-" * len(lines[0]))
    for name, members in [*rows, ("total", list(results))]:
        if name == "total":
            lines.append("-" * len(lines[0]))
        counts = []
        for outcome in columns:
            same = [r for r in members if r.outcome is outcome]
            if outcome is Outcome.FAILED:
                must = sum(r.level == "must" for r in same)
                counts.append(must)
                if advice:
                    counts.append(len(same) - must)
            else:
                counts.append(len(same))
        cells = [*(str(c) if c else "." for c in counts), str(len(members))]
        lines.append(f"{name:<14}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    return lines


def sums(results: Sequence[Result]) -> str:
    """``selected 12 = passed 10 + failed 1 + known 1 + refused 0 + ...``: every instance in exactly one outcome."""
    selected, *outcomes = totals(results).items()
    return f"selected {selected[1]} = " + " + ".join(f"{name} {count}" for name, count in outcomes)


def closing(end: Finished) -> list[str]:
    """The end of a run: the table, what is worth reading, what fails the gate, and the verdict."""
    results, strict = end.results, end.run.options.strict
    lines = [*table(results), "", sums(results), *end.run.expectations.summary(results), "", *notes(results)]
    for group in group_failures(r for r in results if r.outcome is Outcome.FAILED and not r.fails_run(strict)):
        more = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
        lines.append(" ".join(f"should: {group[0].label}: {group[0].message}{more}".split()))
    return [*lines, *(f"gate: {problem}" for problem in end.problems), verdict(end)]


def verdict(end: Finished) -> str:
    """One sentence: whether the run failed, and by how many distinct findings."""
    results = end.results
    failing = [r for r in results if r.fails_run(end.run.options.strict)]
    if not results:
        return "FAIL: no check was selected, so nothing is proved."
    if not failing and end.problems:
        return f"FAIL: {len(end.problems)} {'problem' if len(end.problems) == 1 else 'problems'} of the gate."
    if not failing:
        advice = sum(r.outcome is Outcome.FAILED for r in results)
        return "PASS" + (f", with {advice} should-level findings" if advice else "") + "."
    stale = sum(bool(r.gate) for r in failing)
    if stale == len(failing):
        return f"FAIL: {stale} instances are not as the known failures declare."
    checks = len({r.id for r in failing})
    findings, causes = len(group_failures(failing)), len({r.cause for r in failing})
    fewer = f", {causes} distinct causes" if causes < findings else ""
    return f"FAIL: {len(failing)} failures of {checks} checks, {findings} distinct findings{fewer}."


def group_failures(failures: Iterable[Result]) -> list[list[Result]]:
    """Failures of the same check and kind belong together: the first is shown whole, the others are named."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in failures:
        groups.setdefault((result.id, result.kind), []).append(result)
    return list(groups.values())


def failure_text(run: Run, result: Result, others: Sequence[Result] = ()) -> str:
    """One finding, as design says: what was seen, the rule, why it matters, the likely cause, and how to reproduce it."""
    from subclass_testkit.check import registry

    if result.kind == STALE:
        entry = [f"FAILED {result.label} {result.level}", *_wrap("", result.message), f"  Rerun     {rerun(run, result)}"]
        return "\n".join(entry)
    info = registry().get(result.id)
    params = ", ".join(f"{k}={v}" if k in ("case", "variant") else v for k, v in result.params.items())
    lines = [f"FAILED {result.id} [{params}] {result.level}", *_wrap("", result.message)]
    if info is not None:
        lines += [*_wrap("Rule", info.rule), *_wrap("Why", info.why)]
    if result.gate:
        lines += _wrap("Known", result.gate)
    if result.where:
        lines += _wrap("Code", result.where)
    if result.diagnosis:
        lines += _wrap("Likely", result.diagnosis)
    if info is not None:
        lines += _wrap("Fix", info.fix)
    if others:
        lines += _wrap(
            "Also", ", ".join(_brief(r) for r in others[:12]) + (f" and {len(others) - 12} more" if len(others) > 12 else "")
        )
    if result.reproduction:
        lines += ["  Reproduce", *textwrap.indent(result.reproduction, "    | ", lambda _: True).splitlines()]
    lines += [f"  Explain   subclass-testkit explain {result.id}", f"  Rerun     {rerun(run, result)}"]
    return "\n".join(lines)


def short_text(run: Run, result: Result, first: Result) -> str:
    """A finding whose cause another one has shown already: the same line of the subject's raises."""
    return "\n".join(
        [
            f"FAILED {result.label} {result.level}",
            *_wrap("", result.message),
            *_wrap("Code", result.where),
            *_wrap("Likely", f"the same cause as of {first.label}, above."),
            f"  Rerun     {rerun(run, result)}",
        ]
    )


def rerun(run: Run, result: Result) -> str:
    """The command that runs this check again."""
    spec = run.spec or run.subject.title
    return f"pytest --subclass={spec} '--subclass-checks={result.id}'"


def _brief(result: Result) -> str:
    return "[" + ", ".join(result.params.values()) + "]"


def _wrap(label: str, text: str) -> list[str]:
    start = f"  {label:<9} " if label else "  "
    return textwrap.wrap(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start]


def render(end: Finished) -> str:
    """The whole report as text: header, findings, table, verdict."""
    run, results = end.run, end.results
    lines = [*header(run), ""]
    failures = [r for r in results if r.outcome is Outcome.FAILED]
    shown: dict[tuple[str, str], Result] = {}
    for group in group_failures(failures):
        first = shown.setdefault(group[0].cause, group[0])
        text = failure_text(run, group[0], group[1:]) if first is group[0] else short_text(run, group[0], first)
        lines += [text, ""]
    *ending, last = closing(end)
    return "\n".join([*lines, *ending, f"{run.subject.title}: {last}"])


def notes(results: Sequence[Result]) -> list[str]:
    """What isn't pass or failure but worth reading: torch's limits, and refusals by an unusual error."""
    lines = []
    limits = {r.message for r in results if r.outcome is Outcome.TORCH_LIMIT}
    if limits:
        lines.append(
            f"{sum(r.outcome is Outcome.TORCH_LIMIT for r in results)} instances hit limits of torch itself, e.g.: {min(limits)}"
        )
    odd = [r for r in results if r.notes]
    if odd:
        kinds = sorted({n.split(":")[0].removeprefix("refused by ") for r in odd for n in r.notes})
        lines.append(
            f"{len(odd)} refusals raise {', '.join(kinds)}, where NotImplementedError would be understood by callers; e.g. {odd[0].label}: {odd[0].message}"
        )
    return [" ".join(line.split()) for line in lines] + ([""] if lines else [])
