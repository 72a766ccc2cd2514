"""What a wrong result may be: hypotheses that need nothing but the result and what was expected."""

from __future__ import annotations

import torch

from subclass_testkit.oracle import widen


def guess(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor | None) -> str:
    """The first hypothesis that explains ``got`` within ``bound`` (None: a few roundings); empty if none does.

    ``got`` and ``want`` have equal shapes. Tried are: zeros, a constant factor, a factor for each row or column, other rows or
    columns, the transpose, and a result that is right in part.
    """
    if got.shape != want.shape or got.numel() < 4 or got.dtype.is_complex or "meta" in (got.device.type, want.device.type):
        return ""
    g, w = widen(got), widen(want)
    if not g.isfinite().all() or not w.isfinite().all():
        return _not_finite(g, w)
    slack = 1e-5 * float(w.abs().max()) + 1e-30 if bound is None else bound.to(g.device).nan_to_num(0) + 1e-30
    if not g.any():
        return "the result is all zeros."
    return _factor(g, w, slack) or _whole(g, w, slack) or (_lines(g, w, slack) if g.dim() > 1 else "")


def _near(a: torch.Tensor, b: torch.Tensor, slack: torch.Tensor | float) -> bool:
    return bool(((a - b).abs() <= slack).all())


def _not_finite(g: torch.Tensor, w: torch.Tensor) -> str:
    new = ~g.isfinite() & w.isfinite()
    if not new.any():
        return ""
    what = "NaN" if bool(g[new].isnan().all()) else "infinite"
    return f"the result is {what} in {int(new.sum())} elements where the values are finite."


def _factor(g: torch.Tensor, w: torch.Tensor, slack: torch.Tensor | float) -> str:
    factor = float((g * w).sum() / (w * w).sum())
    if _near(g, factor * w, slack):
        return f"the result is the expected one times {factor:.4g}."
    shift = float((g - w).mean())
    if _near(g, w + shift, slack):
        return f"the result is the expected one plus {shift:.4g}."
    return ""


def _whole(g: torch.Tensor, w: torch.Tensor, slack: torch.Tensor | float) -> str:
    if g.dim() == 2 and g.shape[0] == g.shape[1] and _near(g, w.t(), slack):
        return "the result is the expected one transposed."
    for dim in range(g.dim()):
        name = _name(g.dim(), dim)
        if g.shape[dim] > 1 and _near(g, w.flip(dim), slack):
            return f"the result has the expected {name}s in reverse order."
        for shift in (1, -1):
            if g.shape[dim] > 2 and _near(g, w.roll(shift, dim), slack):
                return f"the result has the expected {name}s, each moved by {shift}."
    return ""


def _lines(g: torch.Tensor, w: torch.Tensor, slack: torch.Tensor | float) -> str:
    """Along the last two dimensions: lines with a factor each, or right in some lines only."""
    for dim in (g.dim() - 2, g.dim() - 1):
        other = g.dim() - 1 if dim == g.dim() - 2 else g.dim() - 2
        name = _name(g.dim(), dim)
        if g.shape[other] < 3:
            continue
        factors = (g * w).sum(other, keepdim=True) / (w * w).sum(other, keepdim=True).clamp(min=1e-300)
        if _near(g, factors * w, slack):
            sample = ", ".join(f"{f:.4g}" for f in factors.flatten()[:3].tolist())
            return f"each {name} is the expected one times a factor of its own ({sample}, ...): the {name}s have other {name}s' scales."
        wrong = ((g - w).abs() > slack).any(other)
        if g.dim() == 2 and 0 < int(wrong.sum()) <= wrong.numel() // 2:
            return (
                f"only {name} {_ranges(wrong.nonzero().flatten().tolist())} is wrong."
                if int(wrong.sum()) == 1
                else (f"only the {name}s {_ranges(wrong.nonzero().flatten().tolist())} are wrong.")
            )
    return ""


def _name(dims: int, dim: int) -> str:
    return {dims - 1: "column", dims - 2: "row"}.get(dim, f"slice of dimension {dim}") if dims > 1 else "element"


def _ranges(indices: list[int]) -> str:
    """``0 to 3, 8``."""
    parts: list[list[int]] = []
    for i in indices:
        if parts and parts[-1][1] == i - 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in parts[:4]) + (", ..." if len(parts) > 4 else "")
