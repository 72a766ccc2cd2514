"""torch's global state, the same for every check, whatever the session or the subject did to it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """Grad mode on, default dtype float32, no warnings; and all as it was before at the end, the random generator too."""
    generator, dtype, grad = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(generator)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
