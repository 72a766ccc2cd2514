"""Reference tensor subclasses: complete, tested, and meant to be read and copied."""

from reference_impls import collectives  # noqa: F401  (it registers operators)
from reference_impls.int8 import Int8Tensor

__all__ = ["Int8Tensor"]
