"""Numerical kernels on plain tensors: they know nothing of tensor subclasses."""
