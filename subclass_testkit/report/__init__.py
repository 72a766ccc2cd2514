"""Writers that turn a report into what people and programs read. Each gets the report as JSON has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from subclass_testkit.report import json


def _json(data: dict[str, Any]) -> str:
    return json.render(data)


# The first ending that fits chooses.
FORMATS: dict[str, Callable[[dict[str, Any]], str]] = {
    ".json": _json,
}


def format_of(path: Path) -> Callable[[dict[str, Any]], str]:
    """The writer that a file's ending chooses.

    Raises:
        ValueError: there is none; names the endings.
    """
    for ending, render in FORMATS.items():
        if path.name.endswith(ending):
            return render
    raise ValueError(f"report={path}: the ending must be one of {', '.join(FORMATS)}")


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a report, as a whole or not at all."""
    text = format_of(path)(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
