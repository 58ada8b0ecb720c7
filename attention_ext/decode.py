"""Attention over a cache of keys and values: the step of cached decoding."""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import library
from .arguments import UNLIMITED, window_of
from .autograd import is_transformed
from .errors import TRANSLATED, ArgumentError, translate, wrong_type
from .functional import AttentionResult
from .paths import traced_transform
from .reference import CacheCall


@overload
def attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
) -> AttentionResult: ...


@overload
def attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool,
) -> Tensor | AttentionResult: ...


def attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | AttentionResult:
    """Append new keys and values to a cache, in place, and attend to everything in use.

    One call per layer and step, for one new position per sequence, a few speculative ones or a
    chunk of a prompt. Sequence b has n_b = cache_seqlens[b] positions in use; new key and value i
    go to position n_b + i, and query i stands there too:

        length_b = n_b + L                           positions in use after the call
        p_i      = n_b + i                           position of query i and of new key i
        query i attends to the keys j <= p_i         as scaled_dot_product_attention with
                                                     is_causal, "lower_right", seqused_k=length_b

    Without `key` and `value` nothing is written, length_b is n_b, and the queries are the last L
    positions in use: p_i = n_b - L + i. (Where n_b < L the first queries stand before position 0
    and see nothing: output 0, lse -inf.)

    `cache_seqlens` is read and never written: the caller adds L when all layers are done. Position
    j of sequence b lies in row j of `key_cache[b]`; in row j of `key_cache[cache_batch_idx[b]]`; or
    in row j % page_size of page `block_table[b, j // page_size]`. Exactly the addressed slots are
    written; two positions of a call never share one, but sequences may share pages that they only
    read. What lies beyond the length, in unused pages and in unused entries of the table is not
    read.

    The result depends neither on the capacity, nor on the page size or the order of pages, nor on
    the other sequences, nor on the number of threads, to the bit. A prompt in chunks of any sizes
    gives the same as in one call up to rounding: kernels differ by the number of queries.

    For inference only: there are no derivatives. Under torch.compile lengths are data, so that
    nothing compiles anew as they grow.

    Args:
        query: (B, Hq, L, D), float64, float32, bfloat16 or float16, any strides.
        key_cache: (Bc, Hkv, capacity, D), with `block_table` (pages, Hkv, page_size, D); the
            query's dtype, any strides without overlap. Bc is B unless `cache_batch_idx` says which
            rows are used. Hq is a multiple of Hkv, query head h reads head h // (Hq // Hkv).
        value_cache: (Bc, Hkv, capacity, Dv), with `block_table` (pages, Hkv, page_size, Dv).
        cache_seqlens: (B,), int32 or int64: positions in use before this call.
        key: (B, Hkv, L, D), appended; it must not share memory with the caches.
        value: (B, Hkv, L, Dv), the same.
        block_table: (B, max_pages), int32 or int64: the pages of each sequence, in order. Any
            page_size from 1 on.
        cache_batch_idx: (B,), int32 or int64: which row of the cache each sequence has; not beside
            `block_table`. Rows may repeat if nothing is appended.
        rotary_cos: (positions, R/2), float32 or the query's dtype: rotate the first R <= D columns
            of the query and of the new key by their positions before anything else. The rotated key
            is what the cache holds.
        rotary_sin: (positions, R/2), the same.
        rotary_interleaved: Pairs are neighbours (2i, 2i + 1) instead of halves (i, i + R/2).
        window_size: (left, right): query i sees the keys from p_i - left on; the future stays
            hidden whatever `right` says. -1 is without a limit.
        softcap: See `scaled_dot_product_attention`, as the following.
        alibi_slopes: (Hq,) or (B, Hq), float32 or the query's dtype.
        sinks: (Hq,) or (B, Hq), float32 or the query's dtype.
        scale: Factor on the dot products; None: 1 / sqrt(D).
        return_lse: Also return lse.

    Returns:
        The output, (B, Hq, L, Dv) in the query's dtype, its dimensions in memory as the query's
        are. With `return_lse` an `AttentionResult` of output and lse, (B, Hq, L) in float32
        (float64 for float64).

    Raises:
        ArgumentError: A wrong shape or number, a length beyond the capacity, a page or row that
            does not exist, two positions in one slot, tensors that overlap, or an input that
            requires grad while grad mode is on. Nothing has been written then.
        ArgumentTypeError: A wrong type or dtype.
        NotImplementedError: Complex, sparse and nested tensors, other devices than the CPU, forward
            mode and `torch.func` transforms.

    Equivalent to, for sequence b, without rotary:
        ```
        key_cache[b, :, n:n + L], value_cache[b, :, n:n + L] = key[b], value[b]
        scaled_dot_product_attention(
            query[b], key_cache[b, :, :n + L], value_cache[b, :, :n + L],
            is_causal=True, causal_variant="lower_right", enable_gqa=True,
        )
        ```

    Example:
        A prompt in two chunks of different sizes, then one position:

        >>> query, key, value = (torch.randn(2, heads, 8, 16) for heads in (4, 2, 2))
        >>> key_cache, value_cache = torch.empty(2, 2, 32, 16), torch.empty(2, 2, 32, 16)
        >>> seqlens, parts = torch.zeros(2, dtype=torch.int64), []
        >>> for new in zip(*(x.split([5, 2, 1], dim=2) for x in (query, key, value))):
        ...     parts.append(
        ...         attention_with_kv_cache(new[0], key_cache, value_cache, seqlens, *new[1:])
        ...     )
        ...     seqlens += new[0].shape[2]
        >>> from attention_ext import scaled_dot_product_attention
        >>> whole = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        >>> torch.testing.assert_close(torch.cat(parts, dim=2), whole)
    """
    try:
        call: tuple[Any, ...] = query, key_cache, value_cache, cache_seqlens, key, value
        if (
            window_size != UNLIMITED
            or rotary_interleaved is not False
            or softcap is not None
            or scale is not None
            or block_table is not None
            or cache_batch_idx is not None
            or rotary_cos is not None
            or rotary_sin is not None
            or alibi_slopes is not None
            or sinks is not None
        ):  # each argument costs time
            numbers = {"rotary_interleaved": rotary_interleaved, "softcap": softcap, "scale": scale}
            if error := wrong_type("attention_with_kv_cache", numbers):
                raise error  # the dispatcher would make something of it
            call += block_table, cache_batch_idx, rotary_cos, rotary_sin, rotary_interleaved
            cap = 0.0 if softcap is None else float(softcap)
            call += *window_of(window_size), cap, alibi_slopes, sinks, scale
        if torch.is_grad_enabled():
            _check_gradients(call)
        if _is_transformed():
            raise NotImplementedError(
                "attention_with_kv_cache: expected a call outside of torch.func transforms and "
                "forward mode, got one inside: it is for inference, use "
                "attention_ext.scaled_dot_product_attention there"
            )
        output, lse = library.attention_with_kv_cache(*call)
    except TRANSLATED as raised:
        if torch.compiler.is_compiling():
            raise  # Dynamo wraps it in a type of its own
        arguments = {
            "query": query,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "cache_seqlens": cache_seqlens,
            **{name: x for name, x in (("key", key), ("value", value)) if x is not None},
            "block_table": block_table,
            "cache_batch_idx": cache_batch_idx,
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "rotary_interleaved": rotary_interleaved,
            "window_size": window_size,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "scale": scale,
        }
        raise translate(raised, "attention_with_kv_cache", arguments) from None
    return AttentionResult(output, lse) if return_lse else output


def _check_gradients(call: tuple[Any, ...]) -> None:
    """There is no derivative, so nothing may ask for one."""
    for place, argument in enumerate(call):
        if isinstance(argument, Tensor) and argument.requires_grad:
            raise ArgumentError(
                "attention_with_kv_cache: expected inputs without gradient, got "
                f"{CacheCall._fields[place]} that requires grad: call under torch.no_grad() or "
                "torch.inference_mode()"
            )


def _is_transformed() -> bool:
    return traced_transform() if torch.compiler.is_compiling() else is_transformed()
