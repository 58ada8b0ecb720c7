"""The two normalisations of a decoder, each over the last dimension.

The first keeps the mean, the second removes it:

    rms:   y = x / sqrt(mean(x^2) + eps) * weight
    layer: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention_ext.layers import rms_norm

from .config import DecoderConfig

EPSILON = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension; half types compute in float32.

    Args:
        width: size of the last dimension.

    Example:
        >>> RMSNorm(2)(torch.tensor([3.0, 3.0])).detach()
        tensor([1.0000, 1.0000])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width); the result has its shape and dtype."""
        return rms_norm(x, self.weight, EPSILON)


def make_norm(config: DecoderConfig) -> nn.Module:
    """The normalisation of a residual stream that ``config.norm`` asks for."""
    if config.norm == "rms":
        return RMSNorm(config.hidden_size)
    return nn.LayerNorm(config.hidden_size, eps=EPSILON)
