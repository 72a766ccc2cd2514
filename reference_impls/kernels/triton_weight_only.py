"""The weight-only linears in Triton: out = x @ dequantize(codes, scale, zero_point).T + bias, without the weight in memory.

Each program computes a tile of the output. It walks along K, unpacks a tile of codes, dequantizes it in float32, rounds
it to the dtype of `x` as the plain implementation does, and adds the product of the tiles to a sum in float32.

The weights are those of the plain implementation, bit for bit: every step that rounds is the same, and no product is fused
with a sum. So results differ by the order of the sum, and by when the bias is added. With K products of x and w, u = 2**-23
(a sum in float32, which matrix units may truncate) and eps that of x's dtype, by Higham 2002, "Accuracy and Stability of
Numerical Algorithms", eq. 3.5, either is within (K + 2) u (sum|x w| + |bias|) of the exact result before it is rounded to x's
dtype, and the plain one may be rounded before the bias too:

    |difference| <= 2 (K + 2) u (sum|x w| + |bias|) + eps (|out| + |sum x w| / 2)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from reference_impls.kernels.packing import SHARDS
from reference_impls.kernels.triton_launch import TILE_COLUMNS, grid, takes, tile_rows

TILE_SUMMED = 32
STAGES = 2  # with more, the tiles of float32 and three shards are beyond the shared memory of smaller GPUs
WHOLE = 8  # the size of a shard that isn't one: a code an entry, signed or not
CODES = (torch.int8, torch.uint8, torch.int16, torch.int32)
NO_ZERO, INTEGER_ZERO, FLOAT_ZERO = 0, 1, 2


@triton.jit
def _part(shard, n, k, K, mask, low, SIZE: tl.constexpr, ROWS_PACKED: tl.constexpr):
    """The bits of codes (n, k) that a shard holds, moved up by `low`; see `packing.py`."""
    if SIZE == 8:
        return tl.load(shard + n * K + k, mask=mask, other=0).to(tl.int32)
    EACH: tl.constexpr = 8 // SIZE
    if ROWS_PACKED:
        entry, place = (n // EACH) * K + k, (n % EACH).to(tl.int32)
    else:
        entry, place = n * (K // EACH) + k // EACH, k % EACH
    byte = tl.load(shard + entry, mask=mask, other=0).to(tl.int32)
    return ((byte >> (place * SIZE)) & ((1 << SIZE) - 1)) << low


@triton.jit
def _linear_tile(
    out, x, first, second, third, scale, zero_point, bias,
    M, N, K, scale_columns, block_rows, block_columns, offset,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, ROWS_PACKED: tl.constexpr, SIGN: tl.constexpr,
    ZERO_POINT: tl.constexpr, HAS_BIAS: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Every tensor is contiguous. FIRST, SECOND and THIRD are the sizes of the shards in bits, 0 for one that isn't there."""
    tiles = tl.cdiv(N, BLOCK_N)
    # 64 bits: M * N and N * K may be beyond 2**31
    m = ((tl.program_id(0) // tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = ((tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        k = columns[:, None]
        inside = (n < N) & (k < K)
        codes = _part(first, n, k, K, inside, 0, FIRST, ROWS_PACKED)
        if SECOND > 0:
            codes |= _part(second, n, k, K, inside, FIRST, SECOND, ROWS_PACKED)
        if THIRD > 0:
            codes |= _part(third, n, k, K, inside, FIRST + SECOND, THIRD, ROWS_PACKED)
        if SIGN > 0:  # two's complement of fewer than 32 bits, whose highest is worth SIGN
            codes = (codes ^ SIGN) - SIGN
        level = codes.to(tl.float32) + offset
        block = (n // block_rows) * scale_columns + k // block_columns
        if ZERO_POINT == 1:
            level -= tl.load(zero_point + block, mask=inside, other=0).to(tl.float32)
        weight = level * tl.load(scale + block, mask=inside, other=0.0)
        if ZERO_POINT == 2:
            weight += tl.load(zero_point + block, mask=inside, other=0.0).to(tl.float32)
        rows = tl.load(x + m * K + columns[None, :], mask=(m < M) & (columns[None, :] < K), other=0.0)
        total = tl.dot(rows.to(OPERAND), weight.to(rows.dtype).to(OPERAND), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + m * N + n, total.to(out.dtype.element_ty), mask=(m < M) & (n < N))


class Weight(NamedTuple):
    """A quantized weight (N, K) as its codes lie in memory.

    Args:
        shards: one to three tensors of codes, the low bits first; sizes: the bits of each, or (WHOLE,).
        sign: what the highest bit of a code is worth where codes are in two's complement, else 0.
        lowest: what is added to each code.
        middle: the code at a floating-point zero point.
    """

    shards: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]
    packed_dim: int
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None
    sign: int = 0
    lowest: int = 0
    middle: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        each = 8 // self.sizes[0]
        return tuple(size * each if dim == self.packed_dim else size for dim, size in enumerate(self.shards[0].shape))

    @property
    def zero(self) -> int:
        if self.zero_point is None:
            return NO_ZERO
        return FLOAT_ZERO if self.zero_point.is_floating_point() else INTEGER_ZERO

    def is_taken(self) -> bool:
        """Whether its parts fit together, and the plain implementation computes in the dtypes of the kernel."""
        return (
            len(self.shards) == len(self.sizes)
            and all(shard.shape == self._shape_of(size) for shard, size in zip(self.shards, self.sizes, strict=True))
            and all(shard.dtype in (CODES if self.sizes == (WHOLE,) else (torch.uint8,)) for shard in self.shards)
            and self.scale.dtype == torch.float32
            and self.scale.dim() == len(self.shape)
            and all(m and n % m == 0 for n, m in zip(self.shape, self.scale.shape, strict=True))
            and (self.zero_point is None or self.zero_point.shape == self.scale.shape)
            and (self.zero_point is None or self.zero_point.dtype != torch.float64)
        )

    def _shape_of(self, size: int) -> tuple[int, ...]:
        return tuple(n * size // 8 if dim == self.packed_dim else n for dim, n in enumerate(self.shape))


def _linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor | None:
    others = (*weight.shards, weight.scale, weight.zero_point)
    if not (takes(x, weight.shape, bias, others) and weight.is_taken() and (bias is None or bias.dtype == x.dtype)):
        return None
    (count, width), rows = weight.shape, x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty((rows.shape[0], count))
    # what a view of codes leaves out is copied: that is less than the whole weight in floating point
    shards = [shard.contiguous() for shard in weight.shards]
    first, second, third = (*shards, *[shards[0]] * (3 - len(shards)))
    sizes = (*weight.sizes, 0, 0)
    with torch.cuda.device_of(x):
        _linear_tile[grid(len(rows), count)](
            out, rows, first, second, third, weight.scale.contiguous(), _or(weight.zero_point, out), _or(bias, out),
            len(rows), count, width, weight.scale.shape[1], count // weight.scale.shape[0], width // weight.scale.shape[1],
            float(weight.lowest - (weight.middle if weight.zero == FLOAT_ZERO else 0)),
            FIRST=sizes[0], SECOND=sizes[1], THIRD=sizes[2], ROWS_PACKED=weight.packed_dim == 0, SIGN=weight.sign,
            ZERO_POINT=weight.zero, HAS_BIAS=bias is not None, OPERAND=_operand(x),
            BLOCK_M=tile_rows(len(rows)), BLOCK_N=TILE_COLUMNS, BLOCK_K=TILE_SUMMED,
            num_stages=STAGES,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out.reshape(*x.shape[:-1], count)


def _or(tensor: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    return unused if tensor is None else tensor.contiguous()


def _operand(x: torch.Tensor) -> tl.dtype:
    """In what dtype tiles are multiplied: float32 in the interpreter, whose product of bfloat16 is one of the bits as integers."""
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(x.dtype, tl.float32) if x.is_cuda else tl.float32


# --- the operators ----------------------------------------------------------------------------------------------
# each takes what its operator takes, and gives None where that doesn't fit


def int8_weight_only_linear(
    x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    return _linear(x, Weight((qdata,), (WHOLE,), 1, scale), bias)


def affine_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    quant_min: int,
    quant_max: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:
    return _linear(x, Weight((codes,), (WHOLE,), 1, scale, zero_point, middle=(quant_min + quant_max + 1) / 2), bias)


def int4_weight_only_linear(
    x: torch.Tensor, qdata: torch.Tensor, packed_dim: int, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    return _linear(x, Weight((qdata,), SHARDS[4], packed_dim, scale, sign=8), bias)


def uintx_weight_only_linear(
    x: torch.Tensor,
    shards: list[torch.Tensor],
    bits: int,
    packed_dim: int,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    quant_min: int,
    quant_max: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:
    if bits not in SHARDS:
        return None
    middle = (quant_min + quant_max + 1) / 2
    return _linear(x, Weight(tuple(shards), SHARDS[bits], packed_dim, scale, zero_point, 0, quant_min, middle), bias)
