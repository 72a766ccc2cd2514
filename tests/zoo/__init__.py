"""Tensor subclasses to test the kit with: correct ones, and ones broken by a single defect each."""
