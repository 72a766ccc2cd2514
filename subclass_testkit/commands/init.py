"""`init`: a test file and a workflow for a class."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subclass_testkit.subject import Subject
    from subclass_testkit.suite import Run

_TEST = '''"""Conformance of {name}. Run: pytest {path}"""

import unittest

from subclass_testkit import ConformanceTests{more}
{imports}


class Test{name}(ConformanceTests, unittest.TestCase):
    subject = {subject}
    # known_failures = "known_failures.toml"  # `subclass-testkit accept report.json --reason=...` writes it
'''

_WORKFLOW = """name: conformance
on:
  push:
    branches: [main]
  pull_request:

permissions:
  contents: read

jobs:
  conformance:
    runs-on: ubuntu-latest
    timeout-minutes: 30
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
          cache: pip
      - run: pip install . subclass-testkit
      - run: >
          pytest --subclass={spec}{claims}
          --subclass-report=conformance.json --subclass-report=conformance.md --subclass-report=conformance.html
      - if: always()
        run: cat conformance.md >> "$GITHUB_STEP_SUMMARY"
      - if: always()
        uses: actions/upload-artifact@v4
        with:
          name: conformance
          path: conformance.*
"""


def files(spec: str, folder: Path) -> dict[Path, str]:
    """The files for a class, by path; nothing is written.

    Raises:
        SubjectError: the class can't be found or built; says what was tried and what fixes it.
    """
    from subclass_testkit.instances import Options
    from subclass_testkit.resolve import resolve
    from subclass_testkit.suite import Run

    subject = resolve(spec)
    run = Run(subject, Options(tier="quick"), spec=spec)
    try:
        claims = [name for name in _supported(run) if name not in ("wrapper", "quantized")]
    finally:
        run.close()
    name = subject.cls.__name__
    slug = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    path = folder / "tests" / f"test_{slug}_conformance.py"
    demanded = f" --subclass-claims={','.join(claims)}" if claims else ""
    workflow = folder / ".github" / "workflows" / "conformance.yml"
    return {
        path: _test_file(spec, subject, claims, path.relative_to(folder)),
        workflow: _WORKFLOW.format(spec=spec, claims=demanded),
    }


def _supported(run: Run) -> list[str]:
    """The claims that are found, and that only a declaration keeps from being lost unnoticed."""
    return [c.name for c in run.claims.values() if c.found and not c.reason.startswith("probing it")]


def _test_file(spec: str, subject: Subject, claims: list[str], path: Path) -> str:
    module, _, attribute = spec.replace(":", ".").rpartition(".")
    imports = f"from {module} import {attribute}"
    is_class = attribute == subject.cls.__name__
    text = f"Subject({attribute}, claims={claims!r})".replace("'", '"') if is_class else attribute
    return _TEST.format(
        name=subject.cls.__name__, path=path, more=", Subject" if is_class else "", imports=imports, subject=text
    )


def write(texts: dict[Path, str]) -> None:
    """Write the files.

    Raises:
        ValueError: one is there already; then none is written.
    """
    for path in texts:
        if path.exists():
            raise ValueError(
                f"{path} is there already: move it away, or take from `subclass-testkit init --print` what you need"
            )
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
