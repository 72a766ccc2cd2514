"""The catalogue: one file per mixin. MIXINS is their fixed order; ConformanceTests is all of them in one."""

from __future__ import annotations

from subclass_testkit.checks.base import CheckGroup
from subclass_testkit.checks.claimed import ClaimTests
from subclass_testkit.checks.compilation import CompilationTests
from subclass_testkit.checks.copies import CopyTests
from subclass_testkit.checks.devices import DeviceTests
from subclass_testkit.checks.equivalence import EquivalenceTests
from subclass_testkit.checks.export import ExportTests
from subclass_testkit.checks.gradients import GradientFlowTests
from subclass_testkit.checks.kernels import KernelTests
from subclass_testkit.checks.modules import ModuleTests
from subclass_testkit.checks.optimizers import OptimizerTests
from subclass_testkit.checks.protocol import ProtocolTests
from subclass_testkit.checks.sequences import SequenceTests
from subclass_testkit.checks.slicing import SlicingTests

MIXINS: tuple[type[CheckGroup], ...] = (
    ClaimTests,
    ProtocolTests,
    SlicingTests,
    EquivalenceTests,
    GradientFlowTests,
    OptimizerTests,
    CompilationTests,
    ExportTests,
    DeviceTests,
    CopyTests,
    ModuleTests,
    KernelTests,
    SequenceTests,
)


class ConformanceTests(  # type: ignore[misc]  # groups may use equal names: a check runs on its own mixin
    ClaimTests,
    ProtocolTests,
    SlicingTests,
    EquivalenceTests,
    GradientFlowTests,
    OptimizerTests,
    CompilationTests,
    ExportTests,
    DeviceTests,
    CopyTests,
    ModuleTests,
    KernelTests,
    SequenceTests,
):
    """All checks: inherit it beside unittest.TestCase and set ``subject``."""


__all__ = [
    "MIXINS",
    "CheckGroup",
    "ClaimTests",
    "CompilationTests",
    "ConformanceTests",
    "CopyTests",
    "DeviceTests",
    "EquivalenceTests",
    "ExportTests",
    "GradientFlowTests",
    "KernelTests",
    "ModuleTests",
    "OptimizerTests",
    "ProtocolTests",
    "SequenceTests",
    "SlicingTests",
]
