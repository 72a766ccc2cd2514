"""Layouts of `AffineQuantizedTensor`, a file each: the layout, its impl, and the registration of its kernels."""

from reference_impls.layouts.int4 import Int4Layout
from reference_impls.layouts.plain import PlainLayout
from reference_impls.layouts.uintx import UintxLayout

__all__ = ["Int4Layout", "PlainLayout", "UintxLayout"]
