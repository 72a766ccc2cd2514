"""Fixtures of the kit's own tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# pytester forgets the modules that an in-process run imports, but torch can't be imported twice: import it all before.
import subclass_testkit.api
import subclass_testkit.report.json  # noqa: F401
from subclass_testkit.calm import calm
from subclass_testkit.isolation import warm_up
from tests.zoo.registry import load_zoo

torch.set_num_threads(1)  # small tensors, and as many test processes as cores: more threads only wait for each other
warm_up()
load_zoo()

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def _global_state_is_kept() -> Iterator[None]:
    """Some classes of the zoo change grad mode or default dtype: that is their defect, and must not reach the next test."""
    with calm():
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One fresh compile cache a session: an old one may hold results of another version of a class."""
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture
def _claims_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that run the same subject again and again, about something else than its claims."""
    from subclass_testkit.claims import Claim
    from subclass_testkit.suite import Run

    def probe(run: Run, name: str) -> Claim:
        key = (run.subject.cls, run.subject.declared, name)
        if key not in _PROBED:
            _PROBED[key] = original(run, name)
        return _PROBED[key]

    original = Run._probe
    monkeypatch.setattr(Run, "_probe", probe)


_PROBED: dict[object, object] = {}
