"""The `subclass-testkit` command: its arguments and exit codes; what it does stands in `commands/`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from subclass_testkit import __version__

# As pytest's: all is well; a regression or a missing part; a usage error.
EXIT_OK, EXIT_BAD, EXIT_USAGE = 0, 1, 4
_EPILOG = "exit codes: 0 all is well, 1 a regression (compare) or a missing part (doctor), 4 a usage error"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 1 for a bad finding, or 4 for a usage error (as pytest's)."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as end:
        return EXIT_USAGE if end.code else EXIT_OK
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except (ValueError, TypeError) as error:
        print(f"subclass-testkit: {error}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="subclass-testkit", description="Conformance tests for torch.Tensor subclasses.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"subclass-testkit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(run=run)
        return command

    explain = add("explain", _explain, "what a check demands, why, and how to satisfy it")
    explain.add_argument("check", help="a check id (slicing/row-slice-carries-its-scales)")
    listing = add("list", _list, "all checks with level, tier and rule")
    listing.add_argument("glob", nargs="*", help="only checks whose id matches")
    listing.add_argument("--subjects", action="store_true", help="list the bundled subjects instead")
    comparing = add("compare", _compare, "what changed between two JSON reports; exit code 1 on a regression")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    reporting = add("report", _report, "write a JSON report in other formats")
    reporting.add_argument("report", type=Path)
    reporting.add_argument("--to", type=Path, action="append", required=True, help="the ending chooses (repeatable)")
    _add_gate(add)
    starting = add("init", _init, "write a test file and a GitHub workflow for a class")
    starting.add_argument("subclass", help="pkg.mod.Name or pkg.mod:Name")
    starting.add_argument("--print", action="store_true", help="print the files instead of writing them")
    add("doctor", _doctor, "what this environment can check, and what it lacks")
    completing = add("completion", _completion, "print a script that completes this command in a shell")
    completing.add_argument("shell", help="bash, zsh or fish")
    return parser


def _add_gate(add: Callable[..., argparse.ArgumentParser]) -> None:
    accepting = add("accept", _accept, "declare the failures of a JSON report as known")
    accepting.add_argument("report", type=Path)
    accepting.add_argument("--reason", help="why they are accepted (asked for if not given)")
    for name, text in (("issue", "where it is tracked"), ("expires", "a date or 'torch 2.15'"), ("when", "'torch < 2.14'")):
        accepting.add_argument(f"--{name}", default="", help=text)
    accepting.add_argument("--checks", action="append", default=[], metavar="GLOB", help="only these checks (repeatable)")
    pruning = add("prune", _prune, "remove the known failures that a JSON report shows gone, and narrow those that half pass")
    pruning.add_argument("report", type=Path)
    for command in (accepting, pruning):
        command.add_argument("--file", type=Path, help="default: what pyproject.toml names, itself, or known_failures.toml")
    locking = add("lock", _lock, "write the counts of a JSON report, for --subclass-expect")
    locking.add_argument("report", type=Path)
    locking.add_argument("--to", type=Path, default=Path("conformance.lock"), help="default: conformance.lock")
    annotating = add("annotate", _annotate, "print GitHub annotations for a JSON report, one a check")
    annotating.add_argument("report", type=Path)


def _explain(arguments: argparse.Namespace) -> int:
    from subclass_testkit.commands.catalogue import explanation

    print(explanation(arguments.check))
    return EXIT_OK


def _list(arguments: argparse.Namespace) -> int:
    from subclass_testkit import adapters
    from subclass_testkit.commands.catalogue import catalogue

    print("\n".join(adapters.bundled()) if arguments.subjects else catalogue(arguments.glob))
    return EXIT_OK


def _compare(arguments: argparse.Namespace) -> int:
    from subclass_testkit.commands.compare import compare
    from subclass_testkit.report import json

    found = compare(json.read(arguments.before), json.read(arguments.after))
    print(found)
    return EXIT_BAD if found.regressed else EXIT_OK


def _report(arguments: argparse.Namespace) -> int:
    from subclass_testkit import report

    for path in arguments.to:
        report.format_of(path)  # all endings, before anything is written
    data = report.json.read(arguments.report)
    for path in arguments.to:
        report.write(path, data)
    return EXIT_OK


def _accept(arguments: argparse.Namespace) -> int:
    from subclass_testkit.commands import accept
    from subclass_testkit.report import json

    data = json.read(arguments.report)
    path = arguments.file or accept.default_file(Path.cwd())
    reason = arguments.reason
    if reason is None and sys.stdin.isatty():
        reason = input("Why are these failures accepted? ")
    if not (reason or "").strip():
        raise ValueError("accept: --reason is missing: say why these failures are accepted, as in --reason='see #12'")
    common = {"reason": reason, "issue": arguments.issue, "expires": arguments.expires, "when": arguments.when}
    entries = accept.accept(data, path, common, arguments.checks)
    if not entries:
        print("no failure to accept: nothing was written")
    else:
        print(
            f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'} written to {path}:", accept.listed(entries), sep="\n"
        )
    return EXIT_OK


def _prune(arguments: argparse.Namespace) -> int:
    from subclass_testkit.commands import accept
    from subclass_testkit.report import json

    path = arguments.file or accept.default_file(Path.cwd())
    told = accept.prune(json.read(arguments.report), path)
    print("\n".join(told) if told else f"{path}: nothing to remove")
    return EXIT_OK


def _lock(arguments: argparse.Namespace) -> int:
    from subclass_testkit import expect
    from subclass_testkit.report import json

    expect.write(arguments.to, expect.lock(json.read(arguments.report)))
    print(f"{arguments.to} written; use it with pytest --subclass-expect={arguments.to}")
    return EXIT_OK


def _annotate(arguments: argparse.Namespace) -> int:
    from subclass_testkit.report import github, json

    print(github.render(json.read(arguments.report)), end="")
    return EXIT_OK


def _init(arguments: argparse.Namespace) -> int:
    from subclass_testkit.commands import init

    texts = init.files(arguments.subclass, Path.cwd())
    if arguments.print:
        print("\n".join(f"# {path}\n{text}" for path, text in texts.items()))
        return EXIT_OK
    init.write(texts)
    print("\n".join(f"{path} written" for path in texts))
    return EXIT_OK


def _doctor(_: argparse.Namespace) -> int:
    from subclass_testkit.commands import doctor

    answers = doctor.examine()
    print(doctor.render(answers))
    return EXIT_BAD if any(a.needed and not a.there for a in answers) else EXIT_OK


def _completion(arguments: argparse.Namespace) -> int:
    from subclass_testkit.commands.completion import script

    print(script(_parser(), arguments.shell), end="")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
