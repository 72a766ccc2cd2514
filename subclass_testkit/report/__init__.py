"""Writers that turn a report into what people and programs read. Each gets the report as JSON has it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from subclass_testkit.report import json as json

# The first ending that fits chooses; writers are imported when they are needed.
FORMATS: dict[str, str] = {
    ".badge.json": "badge",
    ".sarif.json": "sarif",
    ".json": "json",
    ".md": "markdown",
    ".html": "html",
    ".sarif": "sarif",
    ".svg": "svg",
}


def format_of(path: Path) -> str:
    """The writer that a file's ending chooses.

    Raises:
        ValueError: there is none; names the endings.
    """
    for ending, writer in FORMATS.items():
        if path.name.endswith(ending):
            return writer
    raise ValueError(f"report={path}: the ending must be one of {', '.join(FORMATS)}")


def render(path: Path, data: dict[str, Any]) -> str:
    """The text of a report file."""
    module = importlib.import_module(f"{__name__}.{format_of(path)}")
    return cast(Callable[[dict[str, Any]], str], module.render)(data)


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a report, as a whole or not at all."""
    text = render(path, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
