"""Reference tensor subclasses: complete, tested, and meant to be read and copied."""

from reference_impls import collectives  # noqa: F401  (it registers operators)
from reference_impls.affine import AffineQuantizedTensor
from reference_impls.int4 import Int4Tensor, UInt4Tensor
from reference_impls.int8 import Int8Tensor
from reference_impls.int8_activation import Int8ActivationTensor
from reference_impls.layouts import Int4Layout, PlainLayout, UintxLayout
from reference_impls.mixed_precision import Int8MixedPrecisionTensor
from reference_impls.per_channel import PerChannelSymmetricWeight
from reference_impls.quantize import (
    Int4WeightOnly,
    Int8DynamicActivation,
    Int8MixedPrecision,
    Int8WeightOnly,
    TrainableInt8,
    UintxWeightOnly,
    quantize_,
    size_in_bytes,
)
from reference_impls.trainable import TrainableInt8Tensor
from reference_impls.uintx import UintxTensor

__all__ = [
    "AffineQuantizedTensor",
    "Int4Layout",
    "Int4Tensor",
    "Int4WeightOnly",
    "Int8ActivationTensor",
    "Int8DynamicActivation",
    "Int8MixedPrecision",
    "Int8MixedPrecisionTensor",
    "Int8Tensor",
    "Int8WeightOnly",
    "PerChannelSymmetricWeight",
    "PlainLayout",
    "TrainableInt8",
    "TrainableInt8Tensor",
    "UInt4Tensor",
    "UintxLayout",
    "UintxTensor",
    "UintxWeightOnly",
    "quantize_",
    "size_in_bytes",
]
