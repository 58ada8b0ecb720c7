"""Padded rows without masks: the real tokens of each row moved to the left, and results back.

    columns of a padded row   . a b . c      (. is padding)
    packed                    a b c . .      the padding is behind the end of a causal row

Packed rows need no mask: counts say what is real, and index distances are distances of positions,
on which windows and slopes rely. The columns are permuted, so nothing is lost on the way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """Where each column of some padded rows goes.

    Attributes:
        counts: (batch,) int64, real tokens of each row.
        places: (batch, length) int64, the packed column of each of the caller's.
        width: packed columns that are kept.

    Example:
        >>> mask = torch.tensor([[False, True, True]])
        >>> packing = make_packing(mask)
        >>> packed = packing.pack(torch.tensor([[0, 8, 9]]))
        >>> packed.tolist(), packing.unpack(packed[..., None]).flatten().tolist()
        ([[8, 9, 0]], [0, 8, 9])
    """

    counts: Tensor
    places: Tensor
    width: int

    def pack(self, ids: Tensor) -> Tensor:
        """Tokens (batch, length) as (batch, width)."""
        return torch.empty_like(ids).scatter(1, self.places, ids)[:, : self.width]

    def unpack(self, x: Tensor, dim: int = 1, batch_dim: int = 0) -> Tensor:
        """Results for packed columns, (..., batch, ..., width, ...), in the caller's columns.

        Args:
            x: the results.
            dim: the dimension of the columns.
            batch_dim: the dimension of the rows.

        Returns:
            x with the caller's length in ``dim``. Columns of padding that were not kept get the
            numbers of another one.
        """
        places, length = self.places, self.places.shape[1]
        if self.width < length:
            places = places.clamp_max(self.width - 1)
        shape, full = [1] * x.dim(), list(x.shape)
        shape[batch_dim], shape[dim] = places.shape
        full[dim] = length
        return x.gather(dim, places.view(shape).expand(full))


def make_packing(attention_mask: Tensor, width: int | None = None) -> Packing:
    """Plan the packing of padded rows.

    Args:
        attention_mask: (batch, length) bool, True = a real token, in any order.
        width: packed columns to keep, at least the longest row's tokens; default: all.
    """
    length = attention_mask.shape[1]
    counts = attention_mask.sum(dim=-1)  # (batch,)
    real = attention_mask.cumsum(dim=-1) - 1  # (batch, length): rank among the row's real tokens
    padding = (~attention_mask).cumsum(dim=-1) - 1
    places = torch.where(attention_mask, real, padding + counts[:, None])
    return Packing(counts, places, length if width is None else width)
