"""The `subclass-testkit` command: explain a check, list checks and subjects."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence

from subclass_testkit import __version__

EXIT_OK, EXIT_USAGE = 0, 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, or 4 for a usage error (as pytest's)."""
    parser = argparse.ArgumentParser(prog="subclass-testkit", description="Conformance tests for torch.Tensor subclasses.")
    parser.add_argument("--version", action="version", version=f"subclass-testkit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="what a check demands, why, and how to satisfy it")
    explain.add_argument("check", help="a check id (slicing/row-slice-carries-its-scales)")
    listing = commands.add_parser("list", help="all checks with level, tier and rule")
    listing.add_argument("glob", nargs="*", help="only checks whose id matches")
    listing.add_argument("--subjects", action="store_true", help="list the bundled subjects instead")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as end:
        return EXIT_USAGE if end.code else EXIT_OK
    try:
        if arguments.command == "explain":
            print(explanation(arguments.check))
        elif arguments.subjects:
            from subclass_testkit import adapters

            print("\n".join(adapters.bundled()))
        else:
            print(catalogue(arguments.glob))
    except ValueError as error:
        print(f"subclass-testkit: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


def explanation(check_id: str) -> str:
    """Everything that a check knows of itself.

    Raises:
        ValueError: no such check; names the nearest.
    """
    from subclass_testkit.check import CLAIMS, did_you_mean, registry

    checks = registry()
    if check_id not in checks:
        raise ValueError(f"there is no check {check_id!r}{did_you_mean(check_id, checks)}")
    info = checks[check_id]
    lines = [f"{info.id}   ({info.level}, tier {info.tier})", ""]
    for label, text in (("Rule", info.rule), ("Why", info.why), ("Fix", info.fix)):
        lines += textwrap.wrap(text, 100, initial_indent=f"{label:<9} ", subsequent_indent=" " * 10)
    for claim in info.needs:
        lines.append(f"{'Needs':<9} the claim {claim!r}: {CLAIMS[claim]}")
    for claim in info.requires:
        lines.append(f"{'Required':<9} by the claim {claim!r} where it is declared: a refusal then fails")
    for other in info.depends:
        lines.append(f"{'After':<9} {other}: blocked where that fails")
    if info.own_process:
        lines.append(f"{'Process':<9} runs in a process of its own")
    if info.upstream:
        lines.append(f"{'Upstream':<9} {info.upstream}")
    return "\n".join(lines)


def catalogue(globs: Sequence[str]) -> str:
    """A line a check."""
    from subclass_testkit.check import registry, select

    checks = registry()
    kept = select(checks, globs) if globs else list(checks)
    width = max((len(i) for i in kept), default=0)
    lines = [f"{i:<{width}}  {checks[i].level:<7} {checks[i].tier:<9} {checks[i].rule}" for i in kept]
    return "\n".join([*lines, f"{len(kept)} checks"])


if __name__ == "__main__":
    sys.exit(main())
