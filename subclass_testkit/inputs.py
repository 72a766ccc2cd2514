"""Plain data as source text, so that what a check ran on is what its reproduction script prints.

Values encode their position: every element, row, column and group differs in value and magnitude, so that an operation
which mixes up two of them can't give the right result by accident.
"""

from __future__ import annotations

import torch


def dtype_text(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as it is written in code."""
    return str(dtype)


def cast(text: str, dtype: torch.dtype) -> str:
    """``text`` converted to ``dtype``; nothing is added for float32, which the formulas give anyway."""
    return text if dtype is torch.float32 else f"({text}).to({dtype_text(dtype)})"


def weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> str:
    """A weight whose rows differ in magnitude and in mean (so that scales and zero points matter)."""
    numel = 1
    for n in shape:
        numel *= n
    start = f"torch.arange({seed}.0, {seed + numel}.0)" if seed else f"torch.arange({numel}.0)"
    text = f"{start}.sin().reshape({_csv(shape)})"
    if len(shape) >= 2:
        rows = shape[-2]
        text = f"{text} * torch.linspace(0.5, 3, {rows})[:, None] + torch.linspace(-1, 1, {rows})[:, None]"
    if len(shape) >= 3:
        text = f"({text}) * torch.linspace(1, 2, {shape[0]}).reshape({_csv((-1,) + (1,) * (len(shape) - 1))})"
    return cast(text, dtype)


def activation(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> str:
    """An activation; its values come from another function than a weight's."""
    numel = 1
    for n in shape:
        numel *= n
    if numel == 0:
        return cast(f"torch.zeros({_csv(shape)})", dtype)
    start = f"torch.arange({seed}.0, {seed + numel}.0)" if seed else f"torch.arange({numel}.0)"
    return cast(f"{start}.mul(0.7).cos().reshape({_csv(shape)})", dtype)


def bias(n: int, dtype: torch.dtype = torch.float32) -> str:
    """A bias large enough that dropping it can't hide in any tolerance."""
    return cast(f"torch.linspace(20, 60, {n})", dtype)


def with_zero_row(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> str:
    """A weight whose row 1 is all zeros."""
    return f"({weight(shape, dtype)}).index_fill(-2, torch.tensor([1]), 0)"


def with_outlier(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> str:
    """A weight with one huge element (10 000, in row 2 and column 3)."""
    position = (0,) * (len(shape) - 2) + (2, 3)
    return f"({weight(shape, dtype)}).index_put(({', '.join(f'torch.tensor({i})' for i in position)},), torch.tensor(1e4, dtype={dtype_text(dtype)}))"


def constant(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, value: float = 0.75) -> str:
    """A weight in which all elements are the same."""
    return f"torch.full(({_csv(shape)},), {value}, dtype={dtype_text(dtype)})"


def positive(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> str:
    """A weight in which every row is all positive, and far from zero: asymmetric formats need their zero point."""
    return f"({weight(shape, dtype)}).abs() + 2"


def tiny(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> str:
    """A weight whose row 1 is subnormal in its dtype."""
    smallest = torch.finfo(dtype).tiny
    return f"({weight(shape, dtype)}).index_fill(-2, torch.tensor([1]), {smallest / 4})"


def _csv(shape: tuple[int, ...]) -> str:
    return ", ".join(str(n) for n in shape)
