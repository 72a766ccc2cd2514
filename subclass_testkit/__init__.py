"""Conformance tests for torch.Tensor subclasses: the public names, imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Subject": "subject",
    "SubjectError": "subject",
    "check_subclass": "api",
    "Options": "instances",
    "Report": "api",
    "KnownFailure": "known_failures",
    "known_failure": "known_failures",
    "CLAIMS": "check",
    "ConformanceTests": "checks",
    "ClaimTests": "checks",
    "ProtocolTests": "checks",
    "SlicingTests": "checks",
    "EquivalenceTests": "checks",
    "GradientFlowTests": "checks",
    "OptimizerTests": "checks",
    "CompilationTests": "checks",
    "ExportTests": "checks",
    "DeviceTests": "checks",
    "CopyTests": "checks",
    "ModuleTests": "checks",
    "KernelTests": "checks",
    "SequenceTests": "checks",
}

if TYPE_CHECKING:
    from subclass_testkit.api import Report as Report
    from subclass_testkit.api import check_subclass as check_subclass
    from subclass_testkit.check import CLAIMS as CLAIMS
    from subclass_testkit.checks import *  # noqa: F403
    from subclass_testkit.instances import Options as Options
    from subclass_testkit.known_failures import KnownFailure as KnownFailure
    from subclass_testkit.known_failures import known_failure as known_failure
    from subclass_testkit.subject import Subject as Subject
    from subclass_testkit.subject import SubjectError as SubjectError

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    # The pytest plugin lives in this package and is loaded in every session: torch must not be imported with it.
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
