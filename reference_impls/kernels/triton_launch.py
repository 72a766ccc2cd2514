"""What the Triton kernels share: which tensors they take, and how the output is cut into tiles."""

from collections.abc import Iterable

import torch
import triton

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MINIMUM_CAPABILITY = (8, 0)  # the first with matrix units for bfloat16

TILE_COLUMNS = 64


def takes(x: torch.Tensor, shape: tuple[int, ...], bias: torch.Tensor | None, others: Iterable[torch.Tensor | None]) -> bool:
    """Whether the kernels can run a linear of `x` (..., K) with a weight of `shape` (N, K), a bias and other operands.

    What doesn't fit together isn't taken either: the plain implementation says what is wrong.
    """
    present = [t for t in (bias, *others) if t is not None]
    return (
        len(shape) == 2
        and x.dtype in DTYPES
        and x.dim() > 0
        and x.shape[-1] == shape[1]
        and x.numel() > 0
        and shape[0] > 0
        and (bias is None or bias.shape == shape[:1])
        and all(t.device == x.device for t in present)
        and _device_is_able(x)
    )


def _device_is_able(x: torch.Tensor) -> bool:
    """A tensor off the GPU comes here in Triton's interpreter only, which takes all."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= MINIMUM_CAPABILITY


def tile_rows(rows: int) -> int:
    """Rows of a tile: few for a short `x`, and no fewer than the 16 that a product of tiles needs."""
    return min(64, max(16, triton.next_power_of_2(rows)))


def grid(rows: int, columns: int) -> tuple[int]:
    """One program a tile, in one dimension: the others are limited to 65535."""
    return (triton.cdiv(rows, tile_rows(rows)) * triton.cdiv(columns, TILE_COLUMNS),)
