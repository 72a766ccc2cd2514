"""torchao's quantized weights, trainable weights and optimizer states. Tried with torchao 0.18.0, torch 2.13.0 (CPU).

Not on a CPU: the Int4Tensor family (mslk, CUDA or XPU), IntxOpaqueTensor (Arm), Float8Tensor with dynamic 128x128
blocks (triton), NVFP4Tensor with dynamic activations (``torch._scaled_mm`` for float4).

* ``Int8MixedPrecisionTrainingLinearWeight``: its ``F.linear`` is registered in the table of the aten operations, which
  its own ``__torch_dispatch__`` never reads, so that the linear runs in full precision and equals the dense one.
* ``BitNetTrainingLinearWeight`` keeps its values as they are; its linear rounds the weight to -1, 0, 1 times their mean
  magnitude, and the activation to int8. Its backward without a bias argument (``F.linear(x, w)``) ends in IndexError; ``nn.Linear(bias=False)`` works.
* ``activation_bits`` of float formats: the most bits of an integer format, one step of which (the row's maximum over
  ``2**(bits - 1) - 1``) covers the largest error. float8 e4m3 errs by up to 1/28 of the row's maximum: 5 bits. MX scales
  are rounded down to a power of two, and what exceeds the range is clipped: by 1/8 for mxfp8 (4 bits), 1/4 for mxfp4 (3 bits).
* MX and NVFP4 take contiguous float32 and bfloat16 only; MX linears need dynamic activations and refuse without.
* Optimizer states take contiguous sources only (``view``); NF4 up to two dimensions.
* A row of zeros becomes NaN in Float8Tensor (per row), and a block of zeros in a float16 OptimStateFp8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from subclass_testkit.adapters._recipe import Recipe
from subclass_testkit.adapters._recipe import subjects as _subjects

if TYPE_CHECKING:
    from subclass_testkit.subject import Subject

# AssertionErrors and ValueErrors by which torchao says that something isn't supported; its NotImplementedErrors need no pattern
_REFUSALS = r"\bnot (yet )?supported\b|^unsupported\b|\btranspose unsupported\b|^unimplemented\b|^Only support |^Only dim in .* supported"

_A = "hp.float().abs()"
_EPS = "torch.finfo(d.dtype).eps"
_EXACT = "torch.zeros_like(hp)"
_ROW = f"{_A}.amax(-1, keepdim=True)"
_TENSOR = f"{_A}.amax()"
_BLOCK32 = (
    f"{_A}.unflatten(-2, (-1, 32)).unflatten(-1, (-1, 32)).amax((-3, -1)).repeat_interleave(32, -2).repeat_interleave(32, -1)"
)
# the scales' own lower limits
_FLOOR = "torch.finfo(d.dtype).tiny + 1e-7"


def _flat(size: int) -> str:
    """The largest magnitude of each run of ``size`` elements, in the shape of ``hp``."""
    return f"{_A}.reshape(-1, {size}).amax(1).repeat_interleave({size}).reshape(hp.shape)"


def _int_error(amax: str, steps: int = 127) -> str:
    # half a step; in the short dtypes the division and the scale round as well
    return f"{amax} * (0.5 / {steps} + {_EPS}) + {_FLOOR}"


def _float8_error(amax: str, bits: int = 4, largest: int = 2**15) -> str:
    # the relative rounding of normal numbers, and the absolute one of subnormal numbers
    return f"{_A} * (2**-{bits} + 2 * {_EPS}) + {amax} / {largest} + {_FLOOR}"


_INT8 = "Int8Tensor.from_hp(hp, granularity={})"
_INT8_DYNAMIC = "Int8Tensor.from_hp(hp, granularity=PerRow(), act_quant_kwargs=QuantizeTensorToInt8Kwargs({}))"
_INT8_DYNAMIC_IMPORTS = (
    "from torchao.quantization import Int8Tensor, MappingType, PerRow\n"
    "from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs"
)
_MX_DYNAMIC = "MXTensor.to_mx(hp, torch.{0}, act_quant_kwargs=QuantizeTensorToMXKwargs(elem_dtype=torch.{0}))"


RECIPES: tuple[Recipe, ...] = (
    # --- quantized weights for inference
    Recipe(
        paths=(
            "torchao.quantization.Int8Tensor",
            "torchao.quantization.quant_api.Int8Tensor",
            "torchao.quantization.quantize_.workflows.Int8Tensor",
            "torchao.quantization.quantize_.workflows.int8.int8_tensor.Int8Tensor",
        ),
        make=_INT8.format("PerRow()"),
        to_plain="t.dequantize()",
        imports="from torchao.quantization import Int8Tensor, PerRow",
        ndim=(2, 3),
        refusals=_REFUSALS,
        max_error=_int_error(_ROW),
        variants={
            "tensor": {
                "make": _INT8.format("PerTensor()"),
                "imports": "from torchao.quantization import Int8Tensor, PerTensor",
                "max_error": _int_error(_TENSOR),
            },
            "group32": {
                "make": _INT8.format("PerGroup(32)"),
                "imports": "from torchao.quantization import Int8Tensor, PerGroup",
                "multiples_of": (1, 32),
                "max_error": _int_error(_flat(32)),
            },
            "block32x32": {
                "make": _INT8.format("PerBlock([32, 32])"),
                "imports": "from torchao.quantization import Int8Tensor, PerBlock",
                "multiples_of": (32, 32),
                "max_error": _int_error(_BLOCK32),
            },
            "asymmetric": {
                "make": _INT8.format("PerRow(), mapping_type=MappingType.ASYMMETRIC"),
                "imports": "from torchao.quantization import Int8Tensor, MappingType, PerRow",
                # a step is 1/255 of the range (which includes zero); the zero point rounds by another half
                "max_error": f"(hp.float().amax(-1, keepdim=True).clamp(min=0) - hp.float().amin(-1, keepdim=True).clamp(max=0)) * (1 / 255 + {_EPS}) + {_FLOOR}",
            },
            "dynamic": {
                "make": _INT8_DYNAMIC.format("granularity=PerRow()"),
                "imports": _INT8_DYNAMIC_IMPORTS.replace(", MappingType", ""),
                "activation_bits": 8,
            },
            "dynamic-asymmetric": {
                "make": _INT8_DYNAMIC.format("granularity=PerRow(), mapping_type=MappingType.ASYMMETRIC"),
                "imports": _INT8_DYNAMIC_IMPORTS,
                "activation_bits": 8,
            },
        },
    ),
    Recipe(
        paths=(
            "torchao.quantization.IntxUnpackedToInt8Tensor",
            "torchao.quantization.quant_api.IntxUnpackedToInt8Tensor",
            "torchao.quantization.quantize_.workflows.IntxUnpackedToInt8Tensor",
            "torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor.IntxUnpackedToInt8Tensor",
        ),
        make="IntxUnpackedToInt8Tensor.from_hp(hp, (1, 32), torch.int4)",
        to_plain="t.dequantize()",
        imports="from torchao.quantization import IntxUnpackedToInt8Tensor",
        multiples_of=(1, 32),
        refusals=_REFUSALS,
        max_error=_int_error(_flat(32), 7),
        variants={
            "int8-row": {
                "make": "IntxUnpackedToInt8Tensor.from_hp(hp, (1, hp.shape[-1]), torch.int8)",
                "multiples_of": 1,
                "max_error": _int_error(_ROW),
            },
            "int2-group32": {
                "make": "IntxUnpackedToInt8Tensor.from_hp(hp, (1, 32), torch.int2)",
                "max_error": _int_error(_flat(32), 1),
            },
            "int4-asymmetric": {
                "make": "IntxUnpackedToInt8Tensor.from_hp(hp, (1, 32), torch.int4, mapping_type=MappingType.ASYMMETRIC)",
                "imports": "from torchao.quantization import IntxUnpackedToInt8Tensor, MappingType",
                "max_error": _int_error(_flat(32), 7) + f" + {_flat(32)} / 15",
            },
            "dynamic": {
                "make": "IntxUnpackedToInt8Tensor.from_hp("
                'hp, (1, 32), torch.int4, activation_quantization="int8_asym_per_token")',
                "activation_bits": 8,
            },
        },
    ),
    Recipe(
        paths=(
            "torchao.quantization.Float8Tensor",
            "torchao.quantization.quant_api.Float8Tensor",
            "torchao.quantization.quantize_.workflows.Float8Tensor",
            "torchao.quantization.quantize_.workflows.float8.float8_tensor.Float8Tensor",
        ),
        make="Float8Tensor.from_hp(hp, granularity=PerRow())",
        to_plain="t.dequantize()",
        imports="from torchao.quantization import Float8Tensor, PerRow",
        ndim=(2, 3),
        refusals=_REFUSALS,
        max_error=_float8_error(_ROW),
        variants={
            "tensor": {
                "make": "Float8Tensor.from_hp(hp, granularity=PerTensor())",
                "imports": "from torchao.quantization import Float8Tensor, PerTensor",
                "max_error": _float8_error(_TENSOR),
            },
            "block32x32": {
                "make": "Float8Tensor.from_hp(hp, granularity=PerBlock([32, 32]))",
                "imports": "from torchao.quantization import Float8Tensor, PerBlock",
                "multiples_of": (32, 32),
                "max_error": _float8_error(_BLOCK32),
            },
            "e5m2": {
                "make": "Float8Tensor.from_hp(hp, torch.float8_e5m2, granularity=PerRow())",
                "max_error": _float8_error(_ROW, bits=3),
            },
            "dynamic": {
                "make": "Float8Tensor.from_hp(hp, granularity=PerRow(), mm_config=Float8MMConfig(),"
                " act_quant_kwargs=QuantizeTensorToFloat8Kwargs(granularity=PerRow()))",
                "imports": (
                    "from torchao.quantization import Float8MMConfig, Float8Tensor, PerRow\n"
                    "from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs"
                ),
                "activation_bits": 5,
            },
        },
    ),
    Recipe(
        paths=(
            "torchao.quantization.NF4Tensor",
            "torchao.quantization.quantize_.workflows.NF4Tensor",
            "torchao.quantization.quantize_.workflows.nf4.nf4_tensor.NF4Tensor",
        ),
        make="to_nf4(hp, block_size=32, scaler_block_size=2)",
        to_plain="t.get_original_weight()",
        imports="from torchao.quantization import NF4Tensor, to_nf4",
        multiples_of=(1, 64),
        refusals=_REFUSALS,
        # half of the widest gap; the blocks' maxima are themselves rounded to int8
        max_error=f"{_flat(32)} * (0.152 + 2 * {_EPS}) + {_TENSOR} / 100",
        # the library's own block sizes: 64 elements, 256 blocks
        variants={
            "block64": {
                "make": "to_nf4(hp)",
                "multiples_of": (128, 128),
                "max_error": f"{_flat(64)} * (0.152 + 2 * {_EPS}) + {_TENSOR} / 100",
            }
        },
    ),
    Recipe(
        paths=(
            "torchao.prototype.mx_formats.nvfp4_tensor.NVFP4Tensor",
            "torchao.prototype.mx_formats.inference_workflow.NVFP4Tensor",
        ),
        make="NVFP4Tensor.to_nvfp4(hp)",
        to_plain="t.dequantize()",
        imports="from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor",
        ndim=(2, 3),
        multiples_of=(1, 16),
        dtypes="float32 bfloat16",
        refusals=_REFUSALS,
        # half of the widest gap (4 to 6) under a scale which is rounded to float8, and kept between 2**-6 and 448
        max_error=f"({_flat(16)} / 6).clamp(min=2**-6) * 1.08 + ({_A} - 6 * 448).clamp(min=0) + {_A} * {_EPS}",
        variants={
            "two-level": {
                "make": "NVFP4Tensor.to_nvfp4(hp, per_tensor_scale=per_tensor_amax_to_scale(hp.abs().amax()))",
                "imports": "from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale",
                "max_error": f"{_flat(16)} / 6 * 1.08 + {_TENSOR} * 2**-12 + {_A} * {_EPS}",
            },
            "swizzled": {"make": "NVFP4Tensor.to_nvfp4(hp, is_swizzled_scales=True)", "ndim": (2,)},
        },
    ),
    Recipe(
        paths=("torchao.prototype.mx_formats.mx_tensor.MXTensor", "torchao.prototype.mx_formats.inference_workflow.MXTensor"),
        make=_MX_DYNAMIC.format("float8_e4m3fn"),
        to_plain="t.dequantize()",
        imports="from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs",
        ndim=(2, 3),
        multiples_of=(1, 32),
        dtypes="float32 bfloat16",
        activation_bits=4,
        refusals=_REFUSALS,
        max_error=f"{_A} / 8 + {_flat(32)} * 2**-16 + 1e-30",
        variants={
            "weight-only": {
                "make": "MXTensor.to_mx(hp, torch.float8_e4m3fn)",
                "imports": "from torchao.prototype.mx_formats.mx_tensor import MXTensor",
                "activation_bits": None,
            },
            "float4": {
                "make": _MX_DYNAMIC.format("float4_e2m1fn_x2"),
                "activation_bits": 3,
                "max_error": f"{_flat(32)} / 4 + 1e-30",
            },
        },
    ),
    # --- trainable weights
    Recipe(
        paths=(
            "torchao.prototype.quantized_training.Int8QuantizedTrainingLinearWeight",
            "torchao.prototype.quantized_training.int8.Int8QuantizedTrainingLinearWeight",
        ),
        make="Int8QuantizedTrainingLinearWeight.from_float(hp)",
        to_plain="t.dequantize()",
        imports="from torchao.prototype.quantized_training import Int8QuantizedTrainingLinearWeight",
        claims=frozenset({"training"}),
        stochastic=True,  # in-place writes; from_float rounds to nearest
        refusals=_REFUSALS,
        max_error=_int_error(_ROW),
    ),
    Recipe(
        paths=(
            "torchao.prototype.quantized_training.Int8MixedPrecisionTrainingLinearWeight",
            "torchao.prototype.quantized_training.int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight",
        ),
        make="Int8MixedPrecisionTrainingLinearWeight(hp.clone(), Int8MixedPrecisionTrainingConfig())",
        to_plain="t._data",
        imports=(
            "from torchao.prototype.quantized_training import ("
            "Int8MixedPrecisionTrainingConfig, Int8MixedPrecisionTrainingLinearWeight)"
        ),
        claims=frozenset({"training"}),
        refusals=_REFUSALS,
        max_error=_EXACT,
    ),
    Recipe(
        paths=(
            "torchao.prototype.quantized_training.BitNetTrainingLinearWeight",
            "torchao.prototype.quantized_training.bitnet.BitNetTrainingLinearWeight",
        ),
        make="BitNetTrainingLinearWeight(hp.clone())",
        to_plain="t._data",
        imports="from torchao.prototype.quantized_training import BitNetTrainingLinearWeight",
        claims=frozenset({"training"}),
        activation_bits=8,
        weight_bits=2,
        refusals=_REFUSALS,
        max_error=_EXACT,
    ),
    Recipe(
        paths=(
            "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor",
            "torchao.float8.float8_linear.WeightWithDynamicFloat8CastTensor",
        ),
        make="WeightWithDynamicFloat8CastTensor(hp.clone(), LinearMMConfig(), torch.float8_e4m3fn)",
        to_plain="t._tensor",
        imports=(
            "from torchao.float8.float8_training_tensor import LinearMMConfig\n"
            "from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor"
        ),
        claims=frozenset({"training"}),
        refusals=_REFUSALS,
        max_error=_EXACT,
    ),
    # --- optimizer states. Blocks run over the flattened tensor: 256 (4-bit: 128) elements, in rows of whole blocks
    Recipe(
        paths=("torchao.optim.subclass_8bit.OptimState8bit", "torchao.optim.adam.OptimState8bit"),
        make="OptimState8bit.zeros(hp.shape, dtype=hp.dtype, device=hp.device).copy_(hp)",
        to_plain="t.dequantize(t.dtype)",
        imports="from torchao.optim.subclass_8bit import OptimState8bit",
        multiples_of=(16, 16),
        claims=frozenset({"optimizer_state"}),
        parameter=False,
        refusals=_REFUSALS,
        max_error=f"{_flat(256)} * (0.0071 + {_EPS}) + {_FLOOR}",
    ),
    Recipe(
        paths=("torchao.optim.subclass_4bit.OptimState4bit", "torchao.optim.adam.OptimState4bit"),
        make="OptimState4bit.zeros(hp.shape, dtype=hp.dtype, device=hp.device).copy_(hp)",
        to_plain="t.dequantize(t.dtype)",
        imports="from torchao.optim.subclass_4bit import OptimState4bit",
        multiples_of=(16, 16),
        claims=frozenset({"optimizer_state"}),
        parameter=False,
        refusals=_REFUSALS,
        max_error=f"{_flat(128)} * (0.1126 + {_EPS}) + {_FLOOR}",
    ),
    Recipe(
        paths=("torchao.optim.subclass_fp8.OptimStateFp8", "torchao.optim.adam.OptimStateFp8"),
        make="OptimStateFp8.zeros(hp.shape, dtype=hp.dtype, device=hp.device).copy_(hp)",
        to_plain="t.dequantize(t.dtype)",
        imports="from torchao.optim.subclass_fp8 import OptimStateFp8",
        multiples_of=(16, 16),
        claims=frozenset({"optimizer_state"}),
        parameter=False,
        refusals=_REFUSALS,
        max_error=_float8_error(_flat(256)),
    ),
)


def subjects() -> dict[str, Subject]:
    """The ready subjects, by every path by which a class is known."""
    return _subjects(RECIPES)
