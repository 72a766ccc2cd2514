"""Mutate the reference implementations one place at a time, and see whether the kit notices.

    python scripts/mutate_reference.py run --sample 300 --jobs 2      # appends to results.jsonl; rerun to go on
    python scripts/mutate_reference.py report                         # writes docs/mutation.md

A mutant drops a statement, a keyword or a table entry, swaps two arguments, or changes a constant, an operator, a comparison or a
condition. It is caught if any check fails on a class that uses the file. Statements that raise, and
the conditions that guard nothing but them, are left alone: what they refuse is tested by tests/reference_impls.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "reference_impls"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
TIMEOUT = 240

# The classes whose runs execute a file; those of the first lines that match are tried in turn. Not here: what no class executes
# (quantize.py, quantization_ops.py), and what runs in several processes only (collectives.py).
SUBJECTS = (
    ("per_channel.py", ("PerChannelSymmetricWeight",)),
    ("trainable.py", ("TrainableInt8Tensor",)),
    ("int8_activation.py", ("Int8ActivationTensor",)),
    ("kernels/int8_linear.py", ("Int8ActivationTensor", "Int8Tensor")),
    ("uintx.py", ("UintxTensor",)),
    ("int4.py", ("Int4Tensor", "UInt4Tensor")),
    ("packed_tensor.py", ("UintxTensor", "Int4Tensor")),
    ("kernels/packed_linear.py", ("UintxTensor", "Int4Tensor")),
    ("kernels/packing.py", ("UintxTensor", "Int4Tensor")),
    ("kernels/quantization.py", ("UintxTensor", "Int8Tensor")),
    ("linear.py", ("Int8ActivationTensor",)),
    ("block_tensor.py", ("Int8Tensor", "UintxTensor")),
    ("block_views.py", ("Int8Tensor", "UintxTensor")),
    ("int8.py", ("Int8Tensor",)),
    ("base.py", ("Int8Tensor", "UintxTensor")),
    ("schema.py", ("Int8Tensor",)),
    ("values.py", ("Int8Tensor",)),
    ("operators.py", ("Int8Tensor",)),
    ("linear_arguments.py", ("Int8Tensor",)),
    ("block_strided.py", ("Int8Tensor", "UintxTensor")),
    ("kernels/linear_gradients.py", ("Int8Tensor",)),
    ("mixed_precision.py", ("Int8MixedPrecisionTensor",)),
    ("kernels/int8_matmul.py", ("Int8MixedPrecisionTensor",)),
    ("affine.py", ("AffineQuantizedTensor",)),
    ("layouts/plain.py", ("AffineQuantizedTensor",)),
    ("layouts/uintx.py", ("AffineQuantizedTensor",)),
    ("layouts/int4.py", ("AffineQuantizedTensor",)),
    ("kernels/int4_words.py", ("AffineQuantizedTensor",)),
    ("kernels/affine_linear.py", ("AffineQuantizedTensor",)),
)

_COMPARE = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_BINARY = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.MatMult: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
_NAMES = {
    "amax": "amin",
    "amin": "amax",
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "floor": "ceil",
    "round": "floor",
}


# --- making mutants ---------------------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """What a node may become: (kind, new node; None: dropped)."""
    if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign)) and not _is_docstring(node):
        yield "drop", ast.Pass()
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARE:
        yield "compare", _with(node, ops=[_COMPARE[type(node.ops[0])](), *node.ops[1:]])
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY and not isinstance(node.left, ast.Constant):
        yield "operator", _with(node, op=_BINARY[type(node.op)]())
    if isinstance(node, ast.BoolOp):
        yield "and/or", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield "sign", node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool, float):
        new = (not node.value) if isinstance(node.value, bool) else {0: 1, 1: 0}.get(node.value, node.value + 1)
        yield "constant", ast.Constant(new)
    if isinstance(node, (ast.If, ast.IfExp)):
        yield "negate", _with(node, test=ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Call):
        if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            yield "swap", _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
        for i in (i for i, k in enumerate(node.keywords) if k.arg != "strict"):  # it only guards
            yield "keyword", _with(node, keywords=node.keywords[:i] + node.keywords[i + 1 :])
    if isinstance(node, ast.Attribute) and node.attr in _NAMES:
        yield "name", _with(node, attr=_NAMES[node.attr])
    if isinstance(node, ast.Dict):
        for i in range(len(node.keys)):
            yield "entry", _with(node, keys=node.keys[:i] + node.keys[i + 1 :], values=node.values[:i] + node.values[i + 1 :])


def _with(node: Any, **fields: Any) -> Any:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _only_raises(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) or (
        isinstance(node, ast.If) and not node.orelse and all(isinstance(s, ast.Raise) for s in node.body)
    )


class Place:
    """A field of a parent node (or an item of a list in it) that holds a node."""

    def __init__(self, parent: ast.AST, field: str, index: int | None, function: str) -> None:
        self.parent, self.field, self.index, self.function = parent, field, index, function

    def set(self, node: Any) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def places(node: ast.AST, function: str = "") -> Iterator[tuple[Place, ast.AST]]:
    """Every node that may be mutated, with its place and the function it belongs to (empty: module level)."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list") or field == "type_params":
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _only_raises(child) or isinstance(child, (ast.Import, ast.ImportFrom)):
                continue
            inside = child.name if isinstance(child, ast.FunctionDef) and not function else function
            yield Place(node, field, index, inside), child
            yield from places(child, inside)


def mutants(path: Path) -> Iterator[dict[str, Any]]:
    """All mutants of a file: key, function, line, what was changed, and the source."""
    tree = ast.parse(path.read_text())
    seen: Counter[str] = Counter()
    for place, node in list(places(tree)):
        for kind, new in changes(node):
            before, after = ast.unparse(node), ast.unparse(new) if new is not None else ""
            key = f"{path.relative_to(PACKAGE)}:{place.function or 'module'}:{kind}: {before} -> {after}".replace("\n", " ")[
                :300
            ]
            seen[key] += 1
            key += f" #{seen[key]}" if seen[key] > 1 else ""
            place.set(new)
            try:
                source = ast.unparse(ast.fix_missing_locations(tree))
            finally:
                place.set(node)
            yield {
                "key": key,
                "file": str(path.relative_to(PACKAGE)),
                "function": place.function,
                "line": node.lineno,
                "places": [f"{path.relative_to(PACKAGE)}:{n}" for n in range(node.lineno, node.end_lineno + 1)],
                "source": source,
            }


# --- running the kit on one ---------------------------------------------------------------------------------------


def judge(mutant: dict[str, Any], subject: str, order: dict[str, int], usual: Baseline) -> dict[str, Any]:
    """The first check that fails on the subject's class of the mutated package; runs in a process of its own.

    Only the instances that execute what was mutated are run. What runs when the module is imported has an effect on all of them.
    """
    folder = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(PACKAGE, folder / "reference_impls", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "reference_impls" / mutant["file"]).write_text(mutant["source"])
        sys.path.insert(0, str(folder))
        from subclass_testkit.instances import Options
        from subclass_testkit.outcome import Outcome
        from subclass_testkit.resolve import resolve
        from subclass_testkit.suite import Run

        try:
            run = Run(resolve(f"reference_impls.{subject}"), Options())
        except Exception as error:
            return {"killed": f"not built: {type(error).__name__}"}
        labels = sorted(run.instances, key=lambda label: -order.get(run.instances[label].check.id, 0))
        if mutant["function"]:
            labels = [label for label in labels if usual.reach.get(label, set()) & set(mutant["places"])]
        refused = 0
        for label in labels:
            result = run.run(label)
            refused += result.outcome is Outcome.REFUSED
            if result.outcome is Outcome.FAILED:
                run.close()
                return {"killed": result.id, "message": result.message[:200]}
        run.close()
        more = refused - len(usual.refused & set(labels))
        return {"killed": None, "instances": len(labels), **({"refuses": more} if more > 0 else {})}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def in_a_process(function: Any, *arguments: Any, timeout: float) -> Any:
    """Fork, call, and read back what it returned; what hangs or dies is killed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(read)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            answer = function(*arguments)
        except BaseException as error:  # whatever a mutant raises is an answer
            answer = {"killed": f"raised {type(error).__name__}"}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    deadline, data = time.monotonic() + timeout, b""
    os.set_blocking(read, False)
    while time.monotonic() < deadline:
        try:
            chunk = os.read(read, 65536)
            if not chunk:
                break
            data += chunk
        except BlockingIOError:
            time.sleep(0.02)
    os.close(read)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return json.loads(data) if data else {"killed": "hang" if time.monotonic() >= deadline else "died"}


class Baseline(NamedTuple):
    """A run of a class without a mutation.

    Attributes:
        refused: the labels of the instances that are refused.
        reach: label -> the lines of the package (``int8.py:12``) that the instance executes.
    """

    refused: set[str]
    reach: dict[str, set[str]]


def baseline(subject: str, folder: Path) -> Baseline:
    """What a class does without a mutation; kept in a file beside the results."""
    path = folder / f"{subject}.json"
    if not path.exists():
        found = in_a_process(trace, subject, str(path), timeout=10 * TIMEOUT)
        if found["killed"]:
            raise SystemExit(f"reference_impls.{subject} fails {found['killed']} without a mutation: {found.get('message')}")
    data = json.loads(path.read_text())
    return Baseline(set(data["refused"]), {label: set(lines) for label, lines in data["reach"].items()})


def trace(subject: str, path: str) -> dict[str, Any]:
    """Run a class, and write down which lines of the package each instance executes (in the kit's worker processes, too)."""
    from subclass_testkit.instances import Options
    from subclass_testkit.outcome import Outcome
    from subclass_testkit.resolve import resolve
    from subclass_testkit.suite import Run

    log = Path(path + ".log")
    log.unlink(missing_ok=True)
    serve = Run._serve

    def traced(self: Any, request: Any) -> Any:
        lines: set[str] = set()

        def local(frame: Any, event: str, argument: Any) -> Any:
            lines.add(f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_lineno}")
            return local

        def calls(frame: Any, event: str, argument: Any) -> Any:
            return local(frame, event, argument) if frame.f_code.co_filename.startswith(f"{PACKAGE}/") else None

        sys.settrace(calls)
        try:
            return serve(self, request)
        finally:
            sys.settrace(None)
            if request[0] == "run":
                with log.open("a") as out:
                    out.write(json.dumps([request[1], sorted(lines)]) + "\n")

    Run._serve = traced  # type: ignore[method-assign]
    run = Run(resolve(f"reference_impls.{subject}"), Options())
    refused = []
    for label in run.instances:
        result = run.run(label)
        refused += [label] if result.outcome is Outcome.REFUSED else []
        if result.outcome is Outcome.FAILED:
            return {"killed": result.id, "message": result.message[:200]}
    run.close()
    reach = dict(json.loads(line) for line in log.read_text().splitlines())
    Path(path).write_text(json.dumps({"refused": refused, "reach": reach}))
    return {"killed": None}


def run_all(arguments: argparse.Namespace) -> None:
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
    sys.path.insert(0, str(ROOT))  # for the kit; the mutated copy goes before it
    from subclass_testkit.isolation import warm_up

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())
    warm_up()
    results = Path(arguments.results)
    done = {json.loads(line)["key"]: json.loads(line) for line in results.read_text().splitlines()} if results.exists() else {}
    subjects_of = dict(SUBJECTS)
    chosen = [
        m
        for path in sorted(PACKAGE.rglob(arguments.file))
        if str(path.relative_to(PACKAGE)) in subjects_of
        for m in mutants(path)
    ]
    random.Random(arguments.seed).shuffle(chosen)
    chosen = [m for m in chosen[: arguments.sample or None] if m["key"] not in done]
    print(f"{len(chosen)} mutants to go, {len(done)} done", flush=True)
    order: Counter[str] = Counter(d["killed"] for d in done.values() if d.get("killed"))
    folder = Path(arguments.results + ".baseline")
    folder.mkdir(exist_ok=True)
    subjects = sorted({s for m in chosen for s in subjects_of[m["file"]]})
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(arguments.jobs, fork) as pool:
        usual = dict(zip(subjects, pool.map(functools.partial(baseline, folder=folder), subjects), strict=True))
    shares = [chosen[job :: arguments.jobs] for job in range(arguments.jobs)]
    workers = [fork.Process(target=work_through, args=(share, usual, order, results)) for share in shares]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def work_through(mutants: list[dict[str, Any]], usual: dict[str, Baseline], order: Counter[str], results: Path) -> None:
    """Judge mutants one after the other, and append what comes of each to the results."""
    subjects_of = dict(SUBJECTS)
    for number, mutant in enumerate(mutants, 1):
        start = time.monotonic()
        verdict: dict[str, Any] = {"killed": None}
        for subject in subjects_of[mutant["file"]]:
            verdict = {"subject": subject, **in_a_process(judge, mutant, subject, dict(order), usual[subject], timeout=TIMEOUT)}
            if verdict["killed"]:
                order[verdict["killed"]] += 1
                break
            if "refuses" in verdict:
                break
        row = {k: mutant[k] for k in ("key", "file", "function", "line")} | verdict
        row["seconds"] = round(time.monotonic() - start, 1)
        with results.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(
            f"{number}/{len(mutants)} {row['seconds']:5.1f} s {row['killed'] or 'SURVIVED':<45} {mutant['key'][:110]}",
            flush=True,
        )


# --- the report ---------------------------------------------------------------------------------------------------


def report(arguments: argparse.Namespace) -> None:
    rows = [json.loads(line) for line in Path(arguments.results).read_text().splitlines()]
    reasons = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    files = sorted({r["file"] for r in rows})
    lines = [
        "# Mutants of the reference implementations",
        "",
        "Written by `scripts/mutate_reference.py`: each mutant changes one place of `reference_impls/`; it is caught if a check of the kit "
        "fails on a class that uses the file. Unit tests don't count. A sample with a fixed seed.",
        "",
        "",
        "A mutant that makes the class refuse more than before, and wrong nowhere, isn't caught by design: a refusal is fine unless a "
        "claim requires the operation. Those are counted apart, and so are those in lines that no check of the classes that were run "
        "executes.",
        "",
        "| file | mutants | not executed | caught | refuses more | survived | of these equivalent | caught of the rest |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in [*files, "total"]:
        mine = [r for r in rows if name in (r["file"], "total")]
        unreached = sum(r.get("instances") == 0 for r in mine)
        refuses = sum("refuses" in r for r in mine)
        survived = [r for r in mine if not r["killed"] and "refuses" not in r and r.get("instances") != 0]
        same = [r for r in survived if r["key"] in reasons]
        caught = sum(bool(r["killed"]) for r in mine)
        share = f"{100 * caught / max(caught + len(survived) - len(same), 1):.0f}%"
        lines.append(f"| {name} | {len(mine)} | {unreached} | {caught} | {refuses} | {len(survived)} | {len(same)} | {share} |")
    killers = Counter(r["killed"] for r in rows if r["killed"])
    lines += ["", "## What survived", ""]
    for row in (r for r in rows if not r["killed"]):
        more = f"refuses {row['refuses']} instances more" if "refuses" in row else "**not caught**"
        more = "not executed" if row.get("instances") == 0 else more
        why = reasons.get(row["key"]) or more
        lines.append(f"- `{row['key']}` (line {row['line']}): {why}")
    lines += ["", "## What caught most", "", *(f"- {name}: {count}" for name, count in killers.most_common(15))]
    (ROOT / "docs" / "mutation.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[6 : 8 + len(files)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--sample", type=int, default=0, help="how many of all mutants, with a fixed seed (0: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", default="*.py", help="glob of file names")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    parser.add_argument("--results", default=str(ROOT / "build" / "mutants.jsonl"))
    arguments = parser.parse_args()
    Path(arguments.results).parent.mkdir(parents=True, exist_ok=True)
    if arguments.command == "report":
        report(arguments)
        return
    run_all(arguments)


if __name__ == "__main__":
    main()
