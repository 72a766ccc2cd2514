"""The same seed gives the same outcomes, in the same order: again, over two processes, and whatever order the items run in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BROKEN = "tests.zoo.broken.slicing:SteppedSliceIgnoresStep"
ROOT = Path(__file__).parent.parent
CHECKS = ("slicing/*", "sequences/random-operations", "copies/copy-*")


@pytest.fixture
def outcomes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(*options: str, conftest: str = "") -> list[tuple[str, str, str, str, str]]:
        report = pytester.path / f"report{len(list(pytester.path.iterdir()))}.json"
        if conftest:
            pytester.makeconftest(conftest)
        checks = [f"--subclass-checks={glob}" for glob in CHECKS]
        done = pytester.runpytest_subprocess(
            f"--subclass={BROKEN}", *checks, f"--subclass-report={report}", "-q", "-p", "no:cacheprovider", *options
        )
        assert done.ret == 1, done.stdout.str()
        checks_run = json.loads(report.read_text())["runs"][0]["checks"]
        return [(c["id"], str(c["params"]), c["outcome"], c["message"], c["reproduction"]) for c in checks_run]

    return run


def test_three_runs_are_alike(outcomes) -> None:
    first = outcomes()
    assert len(first) > 1000
    assert len({o[2] for o in first}) > 1
    assert outcomes() == first
    assert outcomes("-n", "2") == first


def test_the_order_of_items_does_not_matter(outcomes) -> None:
    first = outcomes()
    shuffle = "import random\ndef pytest_collection_modifyitems(items):\n    random.Random(3).shuffle(items)\n"
    assert sorted(outcomes(conftest=shuffle)) == sorted(first)


def test_another_seed_gives_other_data(outcomes) -> None:
    first, other = outcomes(), outcomes("--subclass-seed=5")
    assert [o[:2] for o in first] == [o[:2] for o in other]
    assert [o[4] for o in first if o[2] == "failed"] != [o[4] for o in other if o[2] == "failed"]
