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
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attention_ext import attention_with_kv_cache, scaled_dot_product_attention

from .cache import CacheWrite
from .config import DecoderConfig
from .norm import RMSNorm
from .rotary import RotaryTable, rotate


class CachedCall(NamedTuple):
    """What every layer of a call with a cache shares.

    Attributes:
        writes: where the new tokens go, by rows with equally many.
        keys, values: the cache of each layer.
        rotary: cos and sin of all positions, (positions, R/2) each, or (None, None).
    """

    writes: tuple[CacheWrite, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    rotary: tuple[Tensor | None, Tensor | None]


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What every layer of one decoder call shares.

    Attributes:
        rotary: factors of the call's positions, or None: no rotation, or the cache's.
        alibi_slopes: (num_heads,) slopes of the distance, or None.
        seqused_k: (batch,) keys in use of each row, or None: all of them.
        cached: past keys and values, or None.
        weights: for the layers that have a key here, where their weights go.
    """

    rotary: RotaryTable | None = None
    alibi_slopes: Tensor | None = None
    seqused_k: Tensor | None = None
    cached: CachedCall | None = None
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
        self.rope_interleaved = config.rope_interleaved
        self.dropout = config.dropout
        self.layer = layer
        query_key = (sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim
        values = sizes.num_kv_heads * sizes.value_dim
        self.widths = [query_key, values]
        self.head_counts = [sizes.num_heads, sizes.num_kv_heads]
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
        if call.cached is None:
            output = self.attend(query, key, value, call)
        else:
            output = self._attend_cached(query, key, value, call.alibi_slopes, call.cached)
        update: Tensor = self.o_proj(output.transpose(1, 2).flatten(2))
        return update

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Call the operator without a cache, with this layer's options.

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

    def _attend_cached(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alibi_slopes: Tensor | None,
        cached: CachedCall,
    ) -> Tensor:
        """Rotate, append to the cache and attend; arguments and result as in `attend`.

        Rows with unequal numbers of new tokens have them on the left; the rest of the output is 0.
        """
        keys, values = cached.keys[self.layer], cached.values[self.layer]
        cos, sin = cached.rotary
        if query.dtype != keys.dtype:  # autocast's type, which the cache does not follow
            query, key, value = (x.to(keys.dtype) for x in (query, key, value))

        def append(query: Tensor, key: Tensor, value: Tensor, write: CacheWrite) -> Tensor:
            return attention_with_kv_cache(
                query,
                keys,
                values,
                write.seqlens,
                key,
                value,
                block_table=write.block_table,
                cache_batch_idx=write.cache_batch_idx,
                rotary_cos=cos,
                rotary_sin=sin,
                rotary_interleaved=self.rope_interleaved,
                window_size=self.window,
                softcap=self.softcap,
                alibi_slopes=alibi_slopes,
                sinks=self.sinks,
            )

        if len(cached.writes) == 1 and cached.writes[0].rows is None:
            return append(query, key, value, cached.writes[0])
        batch, heads, length, _ = query.shape
        output = query.new_zeros(batch, length, heads, self.sizes.value_dim).transpose(1, 2)
        for write in cached.writes:
            place = write.rows, slice(None), slice(0, write.length)
            output[place] = append(query[place], key[place], value[place], write)
        return output

    def _project(self, x: Tensor, rotary: RotaryTable | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as (batch, heads, L, width) views."""
        sizes = self.sizes
        batch, length, _ = x.shape
        # Methods of the tensor itself: `split` and `unflatten` are Python, 3 microseconds each.
        query_key, value = self.qkv_proj(x).split_with_sizes(self.widths, -1)
        query_key = query_key.view(batch, length, sum(self.head_counts), sizes.head_dim)
        value = value.view(batch, length, sizes.num_kv_heads, sizes.value_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = query_key.split_with_sizes(self.head_counts, -2)
            query, key = self.q_norm(query), self.k_norm(key)
            if rotary is not None:
                query, key = rotate(query, rotary), rotate(key, rotary)
        else:
            if rotary is not None:
                query_key = rotate(query_key, rotary)
            query, key = query_key.split_with_sizes(self.head_counts, -2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
