"""Fixtures of the kit's own tests."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True, scope="session")
def _one_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One fresh compile cache a session: an old one may hold results of another version of a class."""
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
