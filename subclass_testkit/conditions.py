"""What a known failure may depend on: versions (``torch < 2.14``) and dates."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

_CONDITION = re.compile(r"\s*([A-Za-z][\w.-]*)\s*((?:[<>=!~]).*)")
_RELEASE = re.compile(r"\s*([A-Za-z][\w.-]*)\s+v?(\d[\w.+!-]*)\s*")


class Condition:
    """``torch < 2.14``, ``python >= 3.12``, ``torchao == 0.18.*``; several joined by ``and``.

    Raises:
        ValueError: the text is no such condition; says what is expected.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._terms: list[tuple[str, SpecifierSet]] = []
        for term in re.split(r"\s+and\s+", text):
            match = _CONDITION.fullmatch(term)
            try:
                if match is None:
                    raise InvalidSpecifier(term)
                self._terms.append((match[1], SpecifierSet(match[2])))
            except InvalidSpecifier:
                raise ValueError(
                    f"{term!r} is no condition: write a package, a comparison and a version, as in 'torch < 2.14'"
                ) from None

    def holds(self) -> bool:
        """Whether it is true here; a package that isn't installed fulfils no condition."""
        return all(
            (installed := version_of(package)) is not None and allowed.contains(_public(installed), prereleases=True)
            for package, allowed in self._terms
        )


class Expiry:
    """``2027-01-31`` (the last day on which it holds) or ``torch 2.15`` (the first version on which it doesn't).

    Raises:
        ValueError: the value is neither; says what is expected.
    """

    def __init__(self, value: str | datetime.date) -> None:
        self.text = str(value)
        self._day: datetime.date | None = None
        self._package, self._version = "", Version("0")
        try:
            self._day = datetime.date.fromisoformat(self.text)
        except ValueError:
            match = _RELEASE.fullmatch(self.text)
            try:
                if match is None:
                    raise InvalidVersion(self.text)
                self._package, self._version = match[1], Version(match[2])
            except InvalidVersion:
                raise ValueError(f"{self.text!r} is neither a date nor a version: write 2027-01-31, or 'torch 2.15'") from None

    def past(self, today: datetime.date | None = None) -> bool:
        """Whether it is over. A nightly build of a version counts as that version."""
        if self._day is not None:
            return (today or datetime.date.today()) > self._day
        installed = version_of(self._package)
        return installed is not None and Version(installed.base_version) >= self._version

    def days_left(self, today: datetime.date | None = None) -> int | None:
        """The days until it is over; None where it is a version."""
        return None if self._day is None else (self._day - (today or datetime.date.today())).days


def version_of(package: str) -> Version | None:
    """The installed version of a package, or of ``python``; None where there is none."""
    try:
        return Version(platform.python_version() if package.lower() == "python" else importlib.metadata.version(package))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None


def _public(version: Version) -> Version:
    """Without the local part (``2.13.0+cpu``), which no condition means."""
    return Version(version.public)
