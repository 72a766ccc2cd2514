"""Every tutorial is a script that runs, and ends by passing the kit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

TUTORIALS = sorted((Path(__file__).parent.parent / "docs" / "tutorials").glob("*.py"))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial(path: Path, tmp_path: Path) -> None:
    if path.stem == "shard_it" and (sys.platform != "linux" or not torch.distributed.is_available()):
        pytest.skip("needs gloo and fork")
    run = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert ": PASS" in run.stdout.splitlines()[-1]
