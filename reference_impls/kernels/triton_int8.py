"""The linear with an int8 weight and an int8 activation in Triton: out = (xq @ qdata.T) * x_scale * scale.T + bias.

The activation is rounded by the plain implementation; the kernel multiplies integers, exact in int32, and rescales each tile
before it is stored. It rounds where the plain implementation does and fuses no product with a sum: the results are those of the
plain implementation on the same device, bit for bit. Unlike torch._int_mm it has no condition on the sizes.
"""

import torch
import triton
import triton.language as tl

from reference_impls.kernels.int8_linear import row_codes, row_scale
from reference_impls.kernels.triton_launch import DTYPES, TILE_COLUMNS, grid, takes, tile_rows

TILE_SUMMED = 64

# a sum of so many products of a code -127..127 and one -128..127 is less than 2**31
MOST_SUMMED = (2**31 - 1) // (127 * 128)


@triton.jit
def _scaled_tile(
    out, codes, qdata, x_scale, scale, bias,
    M, N, K,
    PER_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Every tensor is contiguous. PER_ROW: `x_scale` has one for each row, else one for all."""
    tiles = tl.cdiv(N, BLOCK_N)
    # 64 bits: M * N and N * K may be beyond 2**31
    m = ((tl.program_id(0) // tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = ((tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        rows = tl.load(codes + m * K + k[None, :], mask=(m < M) & (k[None, :] < K), other=0)
        weight = tl.load(qdata + n * K + k[:, None], mask=(n < N) & (k[:, None] < K), other=0)
        total = tl.dot(rows, weight, total, out_dtype=tl.int32)
    step = tl.load(x_scale + m, mask=m < M, other=0.0) if PER_ROW else tl.load(x_scale)
    result = total.to(tl.float32) * step * tl.load(scale + n, mask=n < N, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + m * N + n, result.to(out.dtype.element_ty), mask=(m < M) & (n < N))


def int8_dynamic_linear(
    x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """As the operator of that name; None where the arguments don't fit."""
    if not _takes(x, qdata, scale, bias):
        return None
    return _linear(x, row_scale(x), qdata, scale, bias)


def int8_static_linear(
    x: torch.Tensor, x_scale: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """As the operator of that name; None where the arguments don't fit."""
    if not (_takes(x, qdata, scale, bias, x_scale) and x_scale.dtype == torch.float32 and x_scale.numel() == 1):
        return None
    return _linear(x, x_scale.reshape(1, 1), qdata, scale, bias)


def _takes(
    x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, x_scale: torch.Tensor | None = None
) -> bool:
    return (
        takes(x, qdata.shape, bias, (qdata, scale, x_scale))
        and qdata.dtype == torch.int8
        and scale.dtype == torch.float32
        and scale.shape == (qdata.shape[0], 1)
        and qdata.shape[1] <= MOST_SUMMED
        and (bias is None or bias.dtype in DTYPES)
    )


def _linear(
    x: torch.Tensor, x_scale: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    codes, (count, width) = row_codes(x, x_scale).contiguous(), qdata.shape
    out = x.new_empty((len(codes), count))
    with torch.cuda.device_of(x):
        _scaled_tile[grid(len(codes), count)](
            out, codes, qdata.contiguous(), x_scale.contiguous(), scale.contiguous(), out if bias is None else bias.contiguous(),
            len(codes), count, width,
            PER_ROW=x_scale.shape[0] > 1, HAS_BIAS=bias is not None,
            BLOCK_M=tile_rows(len(codes)), BLOCK_N=TILE_COLUMNS, BLOCK_K=TILE_SUMMED,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out.reshape(*x.shape[:-1], count)
