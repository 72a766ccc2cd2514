"""Bundled adapters, and what the kit has to find in the libraries they are for, unaided."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from subclass_testkit import adapters, check_subclass
from subclass_testkit.outcome import Outcome, Result
from subclass_testkit.resolve import resolve

ROOT = Path(__file__).parent.parent


def test_listing_imports_no_library() -> None:
    code = "import sys; from subclass_testkit import adapters; adapters.bundled(); print([m for m in ('torch', 'torchao', 'optimum', 'bitsandbytes') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("path", [p for p in adapters.bundled() if p.startswith(("torch.", "reference_impls."))])
def test_a_bundled_subject_of_torch_can_be_built(path: str) -> None:
    subject = resolve(path)
    assert subject.shapes


@pytest.mark.parametrize(
    ("path", "package"),
    [(p, p.split(".")[0]) for p in adapters.bundled() if not p.startswith(("torch.", "reference_impls.", "monai."))],
)
def test_a_bundled_subject_of_a_library_can_be_built(path: str, package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed (extra: adapters)")
    assert resolve(path).shapes


@pytest.fixture(scope="module")
def int8() -> list[Result]:
    """The failures of a run on torchao's Int8Tensor without configuration."""
    pytest.importorskip("torchao", reason="torchao is not installed (extra: adapters)")
    report = check_subclass("torchao.quantization.Int8Tensor", tier="quick")
    return [r for r in report.results if r.outcome is Outcome.FAILED]


def _reproduce(result: Result, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run the printed script on its own: it imports torch and torchao only."""
    script = tmp_path / "repro.py"
    script.write_text(result.reproduction)
    assert "subclass_testkit" not in result.reproduction
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)


@pytest.mark.parametrize(
    ("operation", "variant", "kind", "error"),
    [
        ("bias=", None, "value", "AssertionError"),
        (".half()", None, "dtype", "AssertionError"),
        ("F.linear(", "asymmetric", "value", "AssertionError"),
        ("copy_", None, "raised:AttributeError", "AttributeError"),
        ("w[3]", "tensor", "raised:IndexError", "IndexError"),
    ],
)
def test_known_faults_of_torchao_int8tensor_are_found(
    int8: list[Result], tmp_path: Path, operation: str, variant: str | None, kind: str, error: str
) -> None:
    found = [
        r
        for r in int8
        if operation in r.reproduction and r.kind == kind and (variant is None or r.params.get("variant") == variant)
    ]
    assert found, f"no failure of kind {kind} with {operation}"
    done = _reproduce(found[0], tmp_path)
    assert done.returncode == 1
    assert error in done.stderr.strip().splitlines()[-1] or error in done.stderr
