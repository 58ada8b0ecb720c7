"""Multi-head attention of a decoder block on the package's operator.

One product gives queries, keys and values: ``qkv_proj.weight`` holds, from the first row on, the
``num_attention_heads * head_dim`` rows of the queries (head by head), the
``num_key_value_heads * head_dim`` rows of the keys and the ``num_key_value_heads * value_dim`` rows
of the values. Queries and keys lie side by side, so that the rotation treats both at once. Heads
stay in the projection's layout (batch, L, heads, width); the operator reads them through strides,
and its output, laid out likewise, goes into ``o_proj`` without a copy.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from attention_ext import scaled_dot_product_attention

from .config import DecoderConfig
from .kv_cache import CacheWrite, KVCache
from .norm import RMSNorm
from .rotary import RotaryTable, rotate


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What every layer of one decoder call shares.

    Attributes:
        rotary: factors of the call's positions, or None.
        alibi_slopes: (num_heads,) slopes of the distance, or None.
        seqused_k: (batch,) keys in use of each row, or None: all of them.
        cache: where past keys and values lie, or None.
        write: the slots of this call's tokens in the cache, or None.
        weights: for the layers that have a key here, where their weights go.
    """

    rotary: RotaryTable | None = None
    alibi_slopes: Tensor | None = None
    seqused_k: Tensor | None = None
    cache: KVCache | None = None
    write: CacheWrite | None = None
    weights: dict[int, Tensor | None] = dataclasses.field(default_factory=dict)


class Attention(nn.Module):
    """Projections, position, cache and operator of one layer.

    Args:
        config: the decoder's configuration.
        layer: index of the layer, the place of its keys in a cache.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        sizes = config.heads
        self.sizes = sizes
        self.causal = config.causal
        self.window = config.window(layer)
        self.softcap = config.softcap
        self.dropout = config.dropout
        self.layer = layer
        query_key = (sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim
        values = sizes.num_kv_heads * sizes.value_dim
        self.widths = [query_key, values]
        bias = config.attention_bias
        self.qkv_proj = nn.Linear(config.hidden_size, query_key + values, bias=bias)
        self.o_proj = nn.Linear(sizes.num_heads * sizes.value_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(sizes.head_dim) if config.qk_norm else None
        self.k_norm = RMSNorm(sizes.head_dim) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(sizes.num_heads)) if config.sinks else None

    def forward(self, x: Tensor, call: AttentionCall) -> Tensor:
        """Attend from x to itself and to the cache.

        Args:
            x: normalised hidden states (batch, L, hidden).
            call: what the layers of this call share.

        Returns:
            The update (batch, L, hidden).
        """
        query, key, value = self._project(x, call.rotary)
        if call.cache is not None and call.write is not None:
            key, value = call.cache.append(call.write, self.layer, key, value)
        output = self.attend(query, key, value, call)
        update: Tensor = self.o_proj(output.transpose(1, 2).flatten(2))
        return update

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Call the operator with this layer's options.

        Without a cache query i is at position i of the keys; behind one the queries are the last
        positions in use, of each row.

        Args:
            query: (batch, num_heads, L, head_dim).
            key: (batch, num_kv_heads, S, head_dim).
            value: (batch, num_kv_heads, S, value_dim).
            call: what the layers of this call share.

        Returns:
            The output (batch, num_heads, L, value_dim).
        """
        result = scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=True,
            causal_variant="upper_left" if call.cache is None else "lower_right",
            window_size=self.window,
            softcap=self.softcap,
            alibi_slopes=call.alibi_slopes,
            sinks=self.sinks,
            seqused_k=call.seqused_k,
            return_lse=False,
            return_weights=self.layer in call.weights,
        )
        if isinstance(result, Tensor):
            return result
        if result.weights is not None:
            call.weights[self.layer] = result.weights
        return result.output

    def _project(self, x: Tensor, rotary: RotaryTable | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as (batch, heads, L, width) views."""
        sizes = self.sizes
        query_key, value = self.qkv_proj(x).split(self.widths, dim=-1)
        query_key = query_key.unflatten(-1, (-1, sizes.head_dim))  # (batch, L, q and k heads, D)
        value = value.unflatten(-1, (-1, sizes.value_dim))
        heads = [sizes.num_heads, sizes.num_kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = query_key.split(heads, dim=-2)
            query, key = self.q_norm(query), self.k_norm(key)
            if rotary is not None:
                query, key = rotate(query, rotary), rotate(key, rotary)
        else:
            if rotary is not None:
                query_key = rotate(query_key, rotary)
            query, key = query_key.split(heads, dim=-2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
