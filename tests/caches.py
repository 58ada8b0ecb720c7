"""Calls of attention_with_kv_cache: making them, running them, moving their cache into pages."""

from typing import Any

import torch
from torch import Tensor

from attention_ext import AttentionResult, attention_with_kv_cache
from attention_ext.reference import CacheCall

NONE = torch.iinfo(torch.int32).min  # a page index that must not be read


def make(
    lengths: tuple[int, ...] = (5, 9),
    seqlen_q: int = 3,
    capacity: int = 32,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    append: bool = True,
    **options: Any,
) -> CacheCall:
    """A call with NaN in the cache where nothing is in use."""
    batch, (num_heads, kv_heads) = len(lengths), heads
    query = torch.randn(batch, num_heads, seqlen_q, widths[0]).to(dtype)
    caches = [torch.randn(batch, kv_heads, capacity, width).to(dtype) for width in widths]
    for cache in caches:
        for b, length in enumerate(lengths):
            cache[b, :, length:] = torch.nan
    new = [torch.randn(batch, kv_heads, seqlen_q, width).to(dtype) for width in widths]
    key, value = new if append else (None, None)
    seqlens = torch.tensor(lengths, dtype=torch.int64)
    return CacheCall(query, *caches, seqlens, key, value, **options)


def keywords(call: CacheCall) -> dict[str, Any]:
    """The arguments of the public function."""
    given = call._asdict()
    return given | {"window_size": (given.pop("window_left"), given.pop("window_right"))}


def run(call: CacheCall) -> AttentionResult:
    """The result, with lse."""
    return attention_with_kv_cache(**keywords(call), return_lse=True)


def copied(call: CacheCall) -> CacheCall:
    """The same call on copies of its caches, whatever their strides."""
    caches = (torch.empty_like(x).copy_(x) for x in (call.key_cache, call.value_cache))
    return call._replace(**dict(zip(("key_cache", "value_cache"), caches, strict=True)))


def in_pages(call: CacheCall, size: int) -> CacheCall:
    """The same call with its cache in pages, in random order, among pages of NaN."""
    batch, heads, capacity, _ = call.key_cache.shape
    added = 0 if call.key is None else call.query.shape[2]
    each = -(-capacity // size)
    order = torch.randperm(batch * each + 3)[: batch * each].reshape(batch, each)
    caches = []
    for cache in (call.key_cache, call.value_cache):
        pages = cache.new_full((batch * each + 3, heads, size, cache.shape[3]), torch.nan)
        padded = torch.nn.functional.pad(cache, (0, 0, 0, each * size - capacity), value=torch.nan)
        pages[order] = padded.unflatten(2, (each, size)).transpose(1, 2)
        caches.append(pages)
    table = order.int()
    for b, length in enumerate(call.cache_seqlens.tolist()):
        table[b, -(-(length + added) // size) :] = NONE
    return call._replace(key_cache=caches[0], value_cache=caches[1], block_table=table)


def gathered(call: CacheCall, sequence: int) -> tuple[Tensor, Tensor]:
    """Keys and values in use after the call, (Hkv, length, …), read position by position."""
    length = int(call.cache_seqlens[sequence])
    length += 0 if call.key is None else call.query.shape[2]
    size = call.key_cache.shape[2]
    rows = []
    for cache in (call.key_cache, call.value_cache):
        found = []
        for j in range(length):
            if call.block_table is not None:
                found.append(cache[int(call.block_table[sequence, j // size]), :, j % size])
            else:
                index = call.cache_batch_idx
                found.append(cache[sequence if index is None else int(index[sequence]), :, j])
        rows.append(torch.stack(found, 1) if found else cache.new_empty(cache.shape[1], 0, 0))
    return rows[0], rows[1]
