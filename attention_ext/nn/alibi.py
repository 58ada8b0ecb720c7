"""Attention with linear biases: a score falls with the distance, in each head at its own rate.

    score_h(i, j) - slope_h * |i - j|

The slopes are geometric, as in the paper (Press et al., 2021) and in BLOOM: for n heads, n a power
of two, ``slope_h = 2^(-8 (h + 1) / n)``. Any other number of heads takes the slopes of the power of
two below it, then every second one of twice that power.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fixed_table import FixedTable


def alibi_slopes(num_heads: int) -> Tensor:
    """The slope of each head, (num_heads,) float64.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
        >>> alibi_slopes(6)[4:].tolist()
        [0.5, 0.125]
    """
    power = 1 << (num_heads.bit_length() - 1)
    own = torch.arange(2, 2 * power + 1, 2, dtype=torch.float64, device="cpu")
    between = torch.arange(1, 2 * power, 2, dtype=torch.float64, device="cpu")
    slopes: Tensor = torch.exp2(-4 * torch.cat([own, between])[:num_heads] / power)
    return slopes


class AlibiSlopes(FixedTable):
    """The slopes of one decoder with ``position="alibi"``, (num_attention_heads,)."""

    def compute(self) -> Tensor:
        """The slopes in float64."""
        return alibi_slopes(self.config.num_attention_heads)
