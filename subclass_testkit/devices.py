"""The devices that checks move tensors to: a simulated accelerator (metadata only), and the real one where there is one."""

from __future__ import annotations

import torch
from torch.utils import backend_registration

from subclass_testkit.outcome import CheckSkipped

SIMULATED = "sim"
# What a standalone script needs for the same.
SETUP = "torch.utils.backend_registration._setup_privateuseone_for_python_backend('sim')"


def simulate() -> None:
    """Make device ``sim`` exist in this process, for fake tensors.

    It is PrivateUse1 under another name and without kernels: FakeTensorMode computes the metadata of every operation on it, and
    raises where devices are mixed, as on a real accelerator. The renaming is global and can't be undone: call it in a child process.

    Raises:
        CheckSkipped: something else has renamed PrivateUse1 already, or this torch can't.
    """
    name = torch._C._get_privateuse1_backend_name()
    if name == SIMULATED:
        return
    if name != "privateuseone":
        raise CheckSkipped(f"no simulated accelerator: PrivateUse1 is already in use as {name!r}")
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        raise CheckSkipped(f"no simulated accelerator: torch {torch.__version__} has no python backends for PrivateUse1")
    setup(SIMULATED)


def accelerator() -> str:
    """The type of the real accelerator (``cuda``, ``xpu``, ``mps``, ...).

    Raises:
        CheckSkipped: this machine has none, or this torch was built without it.
    """
    if not torch.accelerator.is_available():
        raise CheckSkipped("needs an accelerator; this machine (or this build of torch) has none")
    current = torch.accelerator.current_accelerator()
    if current is None or current.type == SIMULATED:
        raise CheckSkipped("needs an accelerator; this machine (or this build of torch) has none")
    return current.type
