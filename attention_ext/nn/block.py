"""One block of a decoder: what every token gathers from others, then what it does by itself."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, AttentionCall
from .config import DecoderConfig
from .mlp import make_mlp
from .norm import make_norm


class Block(nn.Module):
    """Attention, then feed-forward, each behind a normalisation and around a residual.

    Args:
        config: the decoder's configuration.
        layer: index of the block.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)

    def forward(self, x: Tensor, call: AttentionCall) -> Tensor:
        """Update the residual stream x (batch, L, hidden)."""
        x = x + self._drop(self.attention(self.attention_norm(x), call))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, update: Tensor) -> Tensor:
        """Dropout of a residual branch; no operation where there is none."""
        if not (self.training and self.dropout):
            return update
        return F.dropout(update, self.dropout)
