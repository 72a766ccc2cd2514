"""Every broken class shows its defect, and its parent doesn't."""

from __future__ import annotations

import pytest
import torch

from tests.zoo.registry import load_zoo
from tests.zoo.witnesses import WITNESSES, source

CORRECT, BROKEN = load_zoo()
SHOWN = [entry for entry in BROKEN if entry.group != "isolation"]  # a killer can't be watched from its own process


@pytest.mark.parametrize("entry", SHOWN, ids=lambda entry: entry.name)
def test_defect_shows(entry):
    assert (entry.witness or WITNESSES[entry.name])(entry.cls)


@pytest.mark.parametrize("entry", SHOWN, ids=lambda entry: entry.name)
def test_parent_is_right(entry):
    assert not (entry.witness or WITNESSES[entry.name])(entry.parent)


@pytest.mark.parametrize("entry", CORRECT + BROKEN, ids=lambda entry: entry.name)
def test_can_be_built(entry):
    make = getattr(entry.cls, "from_hp", None) or entry.cls.from_float
    w = make(source())
    assert w.shape == (6, 16)
    d = w.dequantize()
    torch.set_grad_enabled(True)
    assert type(d) is torch.Tensor


def test_names_are_unique():
    names = [entry.name for entry in CORRECT + BROKEN]
    assert len(set(names)) == len(names)
