"""Plain weights that reveal faults of constructors, as source text; and what a quantizer may make of them."""

from __future__ import annotations

import math

import torch

from subclass_testkit import inputs

KINDS = ("zero row", "all zero", "constant", "outlier", "subnormal row", "all positive", "all negative", "one sign a row")
LAYOUTS = {
    "transposed": "hp.transpose(-1, -2).contiguous().transpose(-1, -2)",
    "a part of the columns": "torch.cat([hp, hp], -1)[..., : hp.shape[-1]]",
    "a part with an offset": "torch.cat([hp * 2, hp])[hp.shape[0] :]",
    "every second row": "hp.repeat_interleave(2, 0)[::2]",
    "expanded": "hp[:1].expand(hp.shape)",
    "requires grad": "hp.clone().requires_grad_()",
}
ILLEGAL = ("0-D", "1-D", "no rows", "no columns", "integers", "one column too many")


def kind(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """The source text of a weight of one of ``KINDS`` (or ``standard``); at least two rows and four columns."""
    if name == "standard":
        return inputs.weight(shape, dtype)
    if name == "zero row":
        return inputs.with_zero_row(shape, dtype)
    if name == "all zero":
        return inputs.constant(shape, dtype, 0.0)
    if name == "constant":
        return inputs.constant(shape, dtype)
    if name == "outlier":
        return inputs.with_outlier(shape, dtype)
    if name == "subnormal row":
        return inputs.tiny(shape, dtype)
    if name == "all positive":
        return inputs.positive(shape, dtype)
    if name == "all negative":
        return f"-({inputs.positive(shape, dtype)})"
    return f"({inputs.positive(shape, dtype)}) * (1 - torch.arange({shape[-2]})[:, None] % 2 * 2)"


def unusual_shapes(shape: tuple[int, ...], multiples_of: tuple[int, ...] | int) -> dict[str, tuple[int, ...]]:
    """Legal but unusual shapes by name: one row, the fewest columns, the smallest, odd ones. Legal as far as declared."""
    given = (multiples_of,) * 2 if isinstance(multiples_of, int) else (1, 1, *multiples_of)[-2:]
    rows, columns, lead = given[0], given[1], shape[:-2]
    return {
        "one row": (*lead, rows, shape[-1]),
        "fewest columns": (*lead, shape[-2], columns),
        "smallest": (*lead, rows, columns),
        "odd": (*lead, 3 * rows, 5 * columns),
        "many rows": (*lead, 7 * shape[-2], shape[-1]),
    }


def illegal(name: str, shape: tuple[int, ...], dtype: torch.dtype, multiples_of: tuple[int, ...] | int) -> str | None:
    """The source text of one of ``ILLEGAL``; None where it would be legal by what the subject declares."""
    columns = multiples_of if isinstance(multiples_of, int) else multiples_of[-1]
    texts = {
        "0-D": inputs.cast("torch.tensor(0.75)", dtype),
        "1-D": inputs.activation((shape[-1],), dtype),
        "no rows": inputs.cast(f"torch.zeros(0, {shape[-1]})", dtype),
        "no columns": inputs.cast(f"torch.zeros({shape[-2]}, 0)", dtype),
        "integers": f"torch.arange({math.prod(shape)}).reshape({', '.join(map(str, shape))})",
        "one column too many": inputs.weight((*shape[:-1], shape[-1] + 1), dtype) if columns > 1 else None,
    }
    return texts[name]
