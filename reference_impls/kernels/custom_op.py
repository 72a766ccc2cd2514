"""How the linear operators of this directory are made: a plain torch implementation, and for CUDA one in Triton beside it.

The Triton implementation is looked for when an operator first runs on CUDA. Until then, and where Triton isn't installed,
nothing is imported.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.library import CustomOpDef

Plain = Callable[..., torch.Tensor]
# takes the same arguments, and gives None for those that don't fit it
Attempt = Callable[..., torch.Tensor | None]


def custom_op(name: str, *, triton: str) -> Callable[[Plain], CustomOpDef]:
    """Make the decorated function the plain implementation, for every device, of the custom operator `name`.

    Args:
        name: "namespace::operator".
        triton: a module of this directory, in which a function of the same name as the decorated one is the implementation
            for CUDA. It returns None for arguments that don't fit it: then the plain one runs.
    """

    def decorate(plain: Plain) -> CustomOpDef:
        op = torch.library.custom_op(name, plain, mutates_args=())
        if _triton_is_installed():
            op.register_kernel("cuda", triton_or_plain(f"{__package__}.{triton}", plain))
        return op

    return decorate


def triton_or_plain(module: str, plain: Plain) -> Plain:
    """Run the function of the same name in `module` where it is there and the arguments fit it, and `plain` elsewhere."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        attempt = _found(module, plain.__name__)
        out = None if attempt is None else attempt(*args, **kwargs)
        return plain(*args, **kwargs) if out is None else out

    return run


@functools.cache
def _triton_is_installed() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # a stand-in for the module, without a spec
        return False


@functools.cache
def _found(module: str, function: str) -> Attempt | None:
    try:
        return getattr(importlib.import_module(module), function)
    except ImportError:  # installed, but not for this platform or this Python
        return None
