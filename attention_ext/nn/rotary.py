"""Rotary position embedding: queries and keys turn with their position, scores see the difference.

Pair i of the first R components of a head turns by the angle ``position * frequency_i``,
``frequency_i = theta^(-2i / R)``, optionally scaled for longer contexts:

    (a, b) -> (a cos - b sin, b cos + a sin)

Pairs are neighbours (2i, 2i + 1) with ``rope_interleaved``, else halves (i, i + R/2). The angles
are computed in float64 and kept in float32 (float64 for a float64 model), also in a half-precision
model, whose heads are rotated in float32 and rounded once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_ext.rotary import rotary

from .config import DecoderConfig
from .fixed_table import FixedTable


class RotaryTable(NamedTuple):
    """What `rotate` turns by, of the positions of one call."""

    cos: Tensor  # (positions, R/2)
    sin: Tensor
    positions: Tensor | None  # (batch, L): rows of the tables; None: row i is position i
    interleaved: bool


def rotary_frequencies(config: DecoderConfig) -> Tensor:
    """Angle per position of each pair.

    Args:
        config: the decoder's configuration with ``position="rope"``.

    Returns:
        Frequencies (R/2,), float64, on the CPU.

    Example:
        >>> config = DecoderConfig(256, 8, 1, num_attention_heads=2, rope_theta=100.0)
        >>> rotary_frequencies(config)
        tensor([1.0000, 0.1000], dtype=torch.float64)
    """
    width = config.rotary_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    frequencies: Tensor = torch.pow(config.rope_theta, -exponents)
    scaling = config.rope_scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "linear":
        return frequencies / float(scaling["factor"])
    if scaling["rope_type"] == "llama3":
        return _llama3_frequencies(frequencies, scaling)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long waves slowed by the factor, short ones kept, a linear transition between the two."""
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # (R/2,): 1 = unchanged, 0 = slowed
    slowed: Tensor = frequencies * (kept + (1 - kept) / scaling["factor"])
    return slowed


class RotaryEmbedding(FixedTable):
    """The angles of one decoder, for positions 0 to max_position_embeddings - 1.

    Args:
        config: the decoder's configuration with ``position="rope"``.
    """

    def compute(self) -> Tensor:
        """Cos and sin as (positions, 2, R/2)."""
        count = self.config.max_position_embeddings
        positions = torch.arange(count, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, rotary_frequencies(self.config))
        return torch.stack([angles.cos(), angles.sin()], dim=1)

    def lookup(self, positions: slice | Tensor) -> RotaryTable:
        """The angles of some positions.

        Args:
            positions: a slice of L positions, or an integer tensor (batch, L).
        """
        interleaved = self.config.rope_interleaved
        if isinstance(positions, slice):
            cos, sin = self.table[positions].unbind(1)
            return RotaryTable(cos, sin, None, interleaved)
        cos, sin = self.table.unbind(1)
        return RotaryTable(cos, sin, positions, interleaved)


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Rotate the first R components of every head.

    Args:
        x: queries or keys (batch, L, heads, head_dim).
        table: what `RotaryEmbedding.lookup` returned for the L positions.

    Returns:
        A tensor of x's shape and dtype; components beyond R are copied.

    Example:
        >>> config = DecoderConfig(256, 2, 1, num_attention_heads=1, rope_theta=1.0)
        >>> x = torch.tensor([[[[1.0, 0.0]], [[1.0, 0.0]]]])
        >>> rotate(x, RotaryEmbedding(config).lookup(slice(0, 2)))[0, :, 0]
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])
    """
    return rotary(x, table.cos, table.sin, table.positions, table.interleaved, position_dim=-3)
