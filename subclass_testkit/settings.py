"""The settings of a pytest session: the command line's over those of ``[tool.subclass_testkit]``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subclass_testkit.known_failures import KnownFailure

# The command line's name of each is --subclass-NAME.
TYPES: dict[str, type] = {
    "subclass": list,
    "claims": list,
    "checks": list,
    "tier": str,
    "strict": bool,
    "isolate": str,
    "seed": int,
    "report": list,
    "expect": str,
    "rules": str,
    "known_failures_file": str,
}
_FILE_ONLY: dict[str, type] = {"known_failures": list, "extends": list}


def read(pyproject: Path, option: Callable[[str], Any]) -> dict[str, Any]:
    """Each setting's value, or None; ``known`` holds the known failures.

    Args:
        pyproject: the file, which need not exist.
        option: the command line's value of a setting by name, None where it isn't given.

    Raises:
        ValueError, TypeError: a setting is unknown or malformed; names it, and the nearest valid name.
    """
    table = _table(pyproject)
    values = {name: table.get(name) for name in TYPES}
    for name in TYPES:
        given = option(name)
        if given is not None:
            values[name] = [c.strip() for c in given.split(",") if c.strip()] if name == "claims" else given
    if values["subclass"]:
        values["known"] = _known(table, pyproject, option("known_failures_file"))
    return values


def _known(table: dict[str, Any], pyproject: Path, given: str | None) -> list[KnownFailure]:
    """The file of the command line alone; else those of pyproject.toml and of the file that it names."""
    if not (given or table.keys() & {"known_failures", "extends", "known_failures_file"}):
        return []
    from subclass_testkit import known_files

    if given:
        return known_files.read(Path(given))
    entries = known_files.parse(table, str(pyproject.name), pyproject.parent)
    if "known_failures_file" in table:
        entries += known_files.read(pyproject.parent / table["known_failures_file"])
    return entries


def _table(path: Path) -> dict[str, Any]:
    if not path.is_file() or "subclass_testkit" not in path.read_text(encoding="utf-8"):
        return {}
    from subclass_testkit import known_files
    from subclass_testkit.check import did_you_mean

    table = known_files.table_of(path)
    where = f"[tool.subclass_testkit] in {path}"
    valid = {**TYPES, **_FILE_ONLY}
    for name, value in table.items():
        if name not in valid:
            raise ValueError(f"{where}: unknown setting {name!r}{did_you_mean(name, valid)}")
        if type(value) is not valid[name]:
            raise TypeError(f"{where}: {name} takes a {valid[name].__name__}, got {value!r}")
    return table
