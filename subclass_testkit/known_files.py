"""Files of known failures: read with what they extend, and edited so that comments and order stay."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from subclass_testkit.check import did_you_mean
from subclass_testkit.known_failures import KnownFailure, declarations

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef, import-not-found, unused-ignore]

_TABLE = "tool.subclass_testkit"
_KEYS = ("known_failures", "extends")
_LINE = 90  # a longer list stands on several lines


def load(known: str | Path | Iterable[KnownFailure | Mapping[str, Any]], owner: str) -> list[KnownFailure]:
    """Entries from the path of a file, or from Python code.

    Raises:
        ValueError, TypeError: an entry or the file is malformed.
    """
    return read(Path(known)) if isinstance(known, str | Path) else declarations(known, owner)


def read(path: Path, seen: tuple[str, ...] = ()) -> list[KnownFailure]:
    """The entries of a file, and of the files that it extends.

    Args:
        path: a pyproject.toml (``[[tool.subclass_testkit.known_failures]]``), or a file of known failures alone (``[[known_failures]]``).
        seen: the files that lead here.

    Raises:
        ValueError: there is no such file, it is no TOML, it extends itself, or an entry is malformed.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file of known failures")
    return parse(table_of(path), str(path), path.parent, (*seen, str(path.resolve())))


def table_of(path: Path) -> dict[str, Any]:
    """What a file says of this package: its ``[tool.subclass_testkit]``, or in a file of its own all of it."""
    data = _toml(path.read_text(encoding="utf-8"), str(path))
    if "tool" in data or path.name == "pyproject.toml":
        return dict(data.get("tool", {}).get("subclass_testkit", {}))
    for key in data:
        if key not in _KEYS:
            raise ValueError(f"{path}: unknown key {key!r}{did_you_mean(key, _KEYS)}")
    return data


def parse(table: Mapping[str, Any], name: str, folder: Path, seen: tuple[str, ...] = ()) -> list[KnownFailure]:
    """The entries of a table, first its own, then those that it extends.

    Raises:
        ValueError, TypeError: as `read`.
    """
    given = table.get("known_failures", [])
    if not isinstance(given, list):
        raise TypeError(f"{name}: known_failures is a list of tables, written [[known_failures]]; got {given!r}")
    entries = []
    for number, data in enumerate(given, 1):
        source = f"{name}, known failure {number}"
        if isinstance(data, Mapping) and "subclass" not in data:
            raise ValueError(f"{source}: subclass is missing: name the subject as --subclass does, or a glob")
        entries.append(KnownFailure.parse(data, source))
    extends = table.get("extends", [])
    for other in [extends] if isinstance(extends, str) else extends:
        entries += _extended(str(other), name, folder, seen)
    return entries


def _extended(other: str, name: str, folder: Path, seen: tuple[str, ...]) -> list[KnownFailure]:
    """``path/to/file.toml``, or ``package:file.toml`` for one that a package brings along."""
    package, colon, resource = other.partition(":")
    try:
        path = Path(str(importlib.resources.files(package).joinpath(resource))) if colon else folder / other
    except (ModuleNotFoundError, ValueError) as error:
        raise ValueError(
            f"{name}: extends {other!r}, but there is no package {package!r}: install it, or remove the line"
        ) from error
    if str(path.resolve()) in seen:
        raise ValueError(f"{name}: extends {other!r}, which leads back to itself")
    if not path.is_file():
        raise ValueError(f"{name}: extends {other!r}, but there is no file {path}")
    return read(path, seen)


def _toml(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name} is no TOML: {error}") from None


# --- writing


def append(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Add entries at the end of a file; it is made where it doesn't exist.

    Raises:
        ValueError: the file says known_failures in another way than as tables, and must be edited by hand.
    """
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    header = _header(path)
    text = "\n".join([before.rstrip() + "\n" if before.strip() else "", *(f"[[{header}]]\n{_entry(e)}" for e in entries)])
    _replace(path, text.lstrip("\n"), [*_raw(path), *entries])


def remove(path: Path, numbers: Iterable[int]) -> None:
    """Remove entries by their number (from 1).

    Raises:
        ValueError: the file says known_failures in another way than as tables, and must be edited by hand.
    """
    gone = set(numbers)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept, number, inside = [], 0, False
    for line in lines:
        if line.startswith("["):
            inside = bool(re.match(rf"\[\[\s*{re.escape(_header(path))}\s*\]\]", line))
            number += inside
        if not (inside and number in gone):
            kept.append(line)
        elif line.lstrip().startswith("#") and not line.startswith(" "):
            kept.append(line)  # a remark between entries is about what follows
    _replace(path, "".join(kept), [e for i, e in enumerate(_raw(path), 1) if i not in gone])


def _header(path: Path) -> str:
    return f"{_TABLE}.known_failures" if _is_pyproject(path) else "known_failures"


def _is_pyproject(path: Path) -> bool:
    return path.name == "pyproject.toml" or (path.is_file() and "tool" in _toml(path.read_text(encoding="utf-8"), str(path)))


def _raw(path: Path) -> list[Mapping[str, Any]]:
    return list(table_of(path).get("known_failures", [])) if path.is_file() else []


def _entry(entry: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in entry.items() if value)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # a JSON string is a TOML string but for DEL
    if isinstance(value, Sequence):
        items = [_value(v) for v in value]
        line = ", ".join(items)
        return f"[{line}]" if len(line) <= _LINE else "[\n" + "".join(f"    {item},\n" for item in items) + "]"
    return str(value)  # a date


def _replace(path: Path, text: str, expected: Sequence[Mapping[str, Any]]) -> None:
    """Write the text if it says what it shall; never half of it."""
    try:
        data = _toml(text, str(path))
    except ValueError:
        data = {}
    table = data.get("tool", {}).get("subclass_testkit", {}) if _is_pyproject(path) else data
    if table.get("known_failures", []) != [{k: v for k, v in e.items() if v} for e in expected]:
        raise ValueError(f"{path}: its known failures are not written as [[{_header(path)}]] tables; edit them by hand")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
