"""The gradients of out = x @ weight.T + bias, and of the scale of a quantized weight."""

import torch

from reference_impls.kernels.quantization import block_size


def weight_gradient(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """d loss / d weight (N, K) of a linear from x (..., K) and d loss / d out (..., N); batch dimensions are summed."""
    return grad.reshape(-1, grad.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


def bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    """d loss / d bias (N,) from d loss / d out (..., N)."""
    return grad.reshape(-1, grad.shape[-1]).sum(0)


def scale_gradient(grad_weight: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each scale multiplies the levels (codes less zero point) of its block: the sum over it of d loss / d weight * level."""
    block = block_size(levels.shape, scale.shape)
    product = grad_weight.to(scale.dtype) * levels
    return product.reshape(levels.shape[0] // block[0], block[0], levels.shape[1] // block[1], block[1]).sum((1, 3))
