"""The definition of the operator in plain torch: what the kernels compute, said plainly.

    scores  = scale * query @ key^T                        (*B, Hq, L, S)
            -> softcap * tanh(scores / softcap)
            -> + float mask
            -> - slope of the head * |position of the query - position of the key|
    visible = bool mask, float mask != -inf, causal, window, seqused_k: which pairs may attend
    weights = softmax(scores) over the visible keys, else 0; exp(sink) is added to its denominator
    output  = dropout(weights) @ value                     (*B, Hq, L, Dv)
    lse     = log(exp(sink) + sum(exp(scores))) over the visible keys; -inf in a row without any

Everything here stores L x S numbers per head; the kernels never do. Differentiable operations only,
so that every derivative of every order follows: `derivatives.py` takes those from here that no
kernel computes.

Hidden means unread: what lies in a hidden key, value or upstream gradient never reaches a result.
Since 0 * NaN is NaN, that takes more than a weight of 0: see `_pair_products` and `_weighted_sum`.
There a visible infinity counts as NaN. Half inputs are computed in float32.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

UNLIMITED = -1  # a window without an end on this side


class Call(NamedTuple):
    """The arguments of one call, in the order of the operators; tensors as the caller gave them.

    Packed sequences: query is (T, Hq, D), key (Tk, Hkv, D), value (Tk, Hkv, Dv). The offsets
    `cu_seq_q` and `cu_seq_k` say where sequences begin; each is a batch element.
    """

    query: Tensor  # (*B, Hq, L, D)
    key: Tensor  # (*B, Hkv, S, D)
    value: Tensor  # (*B, Hkv, S, Dv)
    attn_mask: Tensor | None = None  # broadcastable to (*B, Hq, L, S); bool (True: see) or added
    is_causal: bool = False  # query i sees the keys j <= p_i
    scale: float | None = None  # factor on the dot products; None: 1 / sqrt(D)
    enable_gqa: bool = False  # query head h reads key and value head h // (Hq // Hkv)
    lower_right: bool = False  # p_i, the position of query i, is i + keys in use - L; else i
    window_left: int = UNLIMITED  # query i sees the keys j >= p_i - window_left
    window_right: int = UNLIMITED  # and j <= p_i + window_right
    softcap: float = 0.0  # 0: off
    dropout_p: float = 0.0  # probability of dropping a weight
    alibi_slopes: Tensor | None = None  # (Hq,) or broadcastable to (*B, Hq)
    sinks: Tensor | None = None  # the same
    seqused_k: Tensor | None = None  # broadcastable to (*B,): how many keys are in use
    seed: Tensor | None = None  # int64, broadcastable to (*B,): of dropout
    shared_batch_dims: int = 0  # leading batch dimensions that have one dropout pattern in common
    cu_seq_q: Tensor | None = None  # (N + 1,), packed sequences only
    cu_seq_k: Tensor | None = None  # (N + 1,)
    max_q: int = 0
    max_k: int = 0


class Result(NamedTuple):
    """What a call computes."""

    output: Tensor  # (*B, Hq, L, Dv); packed (T, Hq, Dv)
    lse: Tensor  # (*B, Hq, L); packed (T, Hq)
    weights: Tensor  # (*B, Hq, L, S); packed (Hq, T, Tk)


def attention(call: Call) -> Result:
    """Return output, log-sum-exp and weights of attention.

    Args:
        call: The arguments.

    Returns:
        The output and the weights (before dropout) in the query's dtype, lse in float32 (float64
        for float64). Slack rows of packed sequences have output and lse 0.

    Example:
        >>> query, key = torch.tensor([[2.0, 1.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> call = Call(query, key, value=torch.eye(2), scale=1.0)  # scores 4 and 1
        >>> expected = torch.tensor([[4.0, 1.0]]).softmax(-1)
        >>> torch.testing.assert_close(attention(call).output, expected)
    """
    if call.cu_seq_q is not None:
        return _packed_attention(call)
    single_head = max(tensor.dim() for tensor in call[:3]) == 2
    if single_head:
        query, key, value = (tensor.unsqueeze(0) for tensor in call[:3])
        call = call._replace(query=query, key=key, value=value)
    result = _attention(call, _places(call))
    return Result(*(x.squeeze(0) for x in result)) if single_head else result


class _Places(NamedTuple):
    """Where queries and keys stand. All broadcast to (*B, 1, L, S)."""

    query: Tensor  # i
    key: Tensor  # j
    position: Tensor  # p_i
    batch: Tensor  # index of the batch element among those with a dropout pattern of their own
    visible: Tensor | None = None  # what lengths show; None: all


def _places(call: Call) -> _Places:
    """Of a call that is not packed."""
    device, seqlen_q, seqlen_kv = call.query.device, call.query.shape[-2], call.key.shape[-2]
    query = torch.arange(seqlen_q, device=device).unsqueeze(-1)
    key = torch.arange(seqlen_kv, device=device)
    position, visible = query, None
    if call.seqused_k is not None:
        used = call.seqused_k.reshape(*call.seqused_k.shape, 1, 1, 1)
        visible = key < used
        position = query + (used - seqlen_q) if call.lower_right else query
    elif call.lower_right:
        position = query + (seqlen_kv - seqlen_q)
    batch = leading_shape(call)[:-1]
    order = torch.arange(math.prod(batch), device=device).reshape(*batch, 1, 1, 1)
    patterns = math.prod(batch[call.shared_batch_dims :])
    return _Places(query, key, position, order % patterns if patterns else order, visible)


def _packed_attention(call: Call) -> Result:
    """All sequences as one, in which a pair of different sequences is hidden."""
    assert call.cu_seq_q is not None
    assert call.cu_seq_k is not None
    starts = call.cu_seq_q, call.cu_seq_k
    lengths = [start.diff() for start in starts]
    indices, sequences = [], []
    for tensor, start in zip(call[:2], starts, strict=True):
        row = torch.arange(tensor.shape[0], device=tensor.device)
        sequence = torch.searchsorted(start[1:].contiguous(), row, right=True)  # slack: N
        indices.append(row - start[sequence])
        sequences.append(sequence)
    count = lengths[0].shape[0]
    used = lengths[1] if call.seqused_k is None else call.seqused_k
    # one more, without rows and keys: where slack rows belong
    used, length = (torch.nn.functional.pad(x, (0, 1)) for x in (used, lengths[0]))
    query, batch = indices[0].unsqueeze(-1), sequences[0].unsqueeze(-1)
    offset = (used - length)[batch] if call.lower_right else 0
    visible = (batch == sequences[1]) & (batch < count) & (indices[1] < used[batch])
    places = _Places(query, indices[1], query + offset, batch, visible)
    query_rows, key_rows, value_rows = (tensor.transpose(0, 1) for tensor in call[:3])
    heads_first = call._replace(query=query_rows, key=key_rows, value=value_rows)
    result = _attention(heads_first, places)
    lse = result.lse.masked_fill((batch == count).squeeze(-1), 0.0)
    return Result(result.output.transpose(0, 1), lse.transpose(0, 1), result.weights)


def _attention(call: Call, places: _Places) -> Result:
    """Steps of the definition, for inputs with a head dimension."""
    query, key, value = (widen(tensor) for tensor in call[:3])
    if call.enable_gqa:
        key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    pairs = (*leading_shape(call), query.shape[-2], key.shape[-2])
    visible = _visible(call, places)
    visible = None if visible is None else visible.expand(pairs)
    scores = _scores(call, query, key, places, visible).expand(pairs)
    weights, lse = _softmax(scores, visible, call.sinks)
    kept = weights
    if call.dropout_p > 0.0:
        factor = 1.0 / (1.0 - call.dropout_p) if call.dropout_p < 1.0 else 0.0
        kept = torch.where(_keeps(call, places), weights * factor, 0.0)
    output = _weighted_sum(kept, value, visible)
    if visible is not None:  # whatever the upstream gradient of an empty row holds
        empty = ~visible.any(-1, keepdim=True)
        output = output.masked_fill(empty, 0.0)
    dtype = call.query.dtype
    return Result(output.to(dtype), lse, weights.to(dtype))


def _visible(call: Call, places: _Places) -> Tensor | None:
    """Which pairs may attend, broadcastable to (*B, Hq, L, S); None: all."""
    distance = places.key - places.position
    shown = [] if places.visible is None else [places.visible]
    if call.is_causal:
        shown.append(distance <= 0)
    if call.window_left != UNLIMITED:
        shown.append(-distance <= call.window_left)
    if call.window_right != UNLIMITED:
        shown.append(distance <= call.window_right)
    mask = _mask(call)
    if mask is not None:
        shown.append(mask if mask.dtype == torch.bool else mask != -math.inf)
    visible = None
    for pairs in shown:
        visible = pairs if visible is None else visible & pairs
    return visible


def _scores(
    call: Call, query: Tensor, key: Tensor, places: _Places, visible: Tensor | None
) -> Tensor:
    """What the softmax is taken of; finite on hidden pairs."""
    scale = call.scale
    if scale is None:
        scale = query.shape[-1] ** -0.5 if query.shape[-1] > 0 else 1.0
    scores = _pair_products(query, key, visible) * scale
    if call.softcap > 0.0:
        scores = call.softcap * (scores / call.softcap).tanh()
    mask = _mask(call)
    if mask is not None and mask.dtype != torch.bool and visible is not None:
        scores = scores + torch.where(visible, mask.to(scores.dtype), 0.0)
    if call.alibi_slopes is not None:
        distance = (places.position - places.key).abs().to(scores.dtype)
        scores = scores - _per_head(call.alibi_slopes, scores) * distance
    return scores


def _softmax(scores: Tensor, visible: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights, (*B, Hq, L, S), and lse, (*B, Hq, L)."""
    sink = None if sinks is None else _per_head(sinks, scores).expand(*scores.shape[:-1], 1)
    empty = None
    if visible is not None or scores.shape[-1] == 0:
        shown = torch.ones_like(scores, dtype=torch.bool) if visible is None else visible
        empty = ~shown.any(-1, keepdim=True)
        if sink is not None:
            empty = empty & (sink == -math.inf)
        # An empty row gets zeros here, for finite derivatives, and is taken out afterwards.
        scores = scores.masked_fill(~(shown | empty), -math.inf)
        sink = None if sink is None else sink.masked_fill(empty, 0.0)
    logits = scores if sink is None else torch.cat([scores, sink], dim=-1)
    weights, lse = logits.softmax(-1)[..., : scores.shape[-1]], logits.logsumexp(-1)
    if empty is not None:
        lse = lse.masked_fill(empty.squeeze(-1), -math.inf)
        weights = _select(weights, visible)
    return weights, lse


# ---- dropout ----


def _keeps(call: Call, places: _Places) -> Tensor:
    """Whether dropout keeps a weight, broadcastable to (*B, Hq, L, S).

    Counter-based: each place (batch element, head, query, key) has 32 random bits, those of word
    j % 4 of `philox(seed, (j // 4, i, low and high half of b * Hq + h))`.
    """
    assert call.seed is not None
    heads = leading_shape(call)[-1]
    head = torch.arange(heads, device=call.query.device).reshape(-1, 1, 1)
    place = places.batch * heads + head
    counter = [places.key // 4, places.query, place & _WORD, place >> 32]
    seed = call.seed.reshape(*call.seed.shape, 1, 1, 1)
    words = philox(seed, counter)
    which = places.key % 4
    bits = words[3]
    for i in range(3):
        bits = torch.where(which == i, words[i], bits)
    return bits >= int(call.dropout_p * 2.0**32)


_WORD = 0xFFFFFFFF


def philox(seed: Tensor, counter: list[Tensor]) -> list[Tensor]:
    """Philox4x32-10: four words of 32 random bits for a seed and a place.

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". All tensors are int64; words
    lie in [0, 2^32), and products of two of them wrap around, which keeps their bits.

    Args:
        seed: Any int64.
        counter: Four words, of shapes that broadcast with the seed's.

    Returns:
        Four words.

    Example:
        >>> [hex(int(word)) for word in philox(torch.tensor(0), [torch.tensor(0)] * 4)]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    words = counter
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            ((second >> 32) & _WORD) ^ words[1] ^ keys[0],
            second & _WORD,
            ((first >> 32) & _WORD) ^ words[3] ^ keys[1],
            first & _WORD,
        ]
        keys = [(keys[0] + 0x9E3779B9) & _WORD, (keys[1] + 0xBB67AE85) & _WORD]
    return words


# ---- attention over a cache ----


class CacheCall(NamedTuple):
    """The arguments of `attention_with_kv_cache`, in the order of the operator."""

    query: Tensor  # (B, Hq, L, D)
    key_cache: Tensor  # (Bc, Hkv, capacity, D); with block_table (pages, Hkv, page_size, D)
    value_cache: Tensor  # the same with Dv
    cache_seqlens: Tensor  # (B,): positions in use before the call
    key: Tensor | None = None  # (B, Hkv, L, D), appended at [cache_seqlens, cache_seqlens + L)
    value: Tensor | None = None  # (B, Hkv, L, Dv)
    block_table: Tensor | None = None  # (B, max_pages): the page of each page_size positions
    cache_batch_idx: Tensor | None = None  # (B,): the row of the cache of each sequence; else b
    rotary_cos: Tensor | None = None  # (positions, R/2): rotates query and new key
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = False  # pairs are neighbours, else halves
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None  # (Hq,) or (B, Hq)
    sinks: Tensor | None = None  # the same
    scale: float | None = None


def attention_with_kv_cache(call: CacheCall) -> tuple[Tensor, Tensor]:
    """Append the new keys and values to the cache, in place, and attend to all in use.

    Returns:
        Output and lse of lower-right causal attention over the gathered cache.
    """
    query, key, seqlen_q = call.query, call.key, call.query.shape[-2]
    used = call.cache_seqlens.long() + (0 if key is None else seqlen_q)
    position = used.unsqueeze(-1) + torch.arange(-seqlen_q, 0, device=used.device)  # (B, L)
    if call.rotary_cos is not None and call.rotary_sin is not None:
        tables = call.rotary_cos, call.rotary_sin
        cos, sin = (x[position.clamp_min(0)].unsqueeze(1) for x in tables)  # (B, 1, L, R/2)
        query = _rotate(query, cos, sin, call.rotary_interleaved)
        key = None if key is None else _rotate(key, cos, sin, call.rotary_interleaved)
    if key is not None and call.value is not None:
        rows, slots = _slots(call, position)
        call.key_cache[rows, :, slots] = key.transpose(1, 2)
        call.value_cache[rows, :, slots] = call.value.transpose(1, 2)
    pages = 1 if call.block_table is None else call.block_table.shape[1]
    j = torch.arange(pages * call.key_cache.shape[2], device=used.device)
    in_use = j < used.unsqueeze(-1)
    rows, slots = (torch.where(in_use, x, 0) for x in _slots(call, j.expand_as(in_use)))
    keys, values = (x[rows, :, slots].transpose(1, 2) for x in call[1:3])  # (B, Hkv, S, …)
    options = call.window_left, call.window_right, call.softcap, 0.0, call.alibi_slopes, call.sinks
    return attention(
        Call(query, keys, values, None, True, call.scale, True, True, *options, seqused_k=used)
    )[:2]


def _slots(call: CacheCall, position: Tensor) -> tuple[Tensor, Tensor]:
    """Where positions (B, n) lie in the cache: row or page, and place in it."""
    if call.block_table is not None:
        size = call.key_cache.shape[2]
        return call.block_table.long().gather(1, position // size), position % size
    rows = call.cache_batch_idx
    if rows is None:
        rows = torch.arange(position.shape[0], device=position.device)
    return rows.long().unsqueeze(-1).expand_as(position), position


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    position_dim: int = -2,
) -> Tensor:
    """The definition of `apply_rotary`, along any dimension of x but the last."""
    rows = x.movedim(position_dim, -2)  # (..., L, D)
    if positions is None:
        cos, sin = (table[: rows.shape[-2]] for table in (cos, sin))
    else:
        leading, length = positions.shape[:-1], positions.shape[-1]
        ones = [1] * (rows.dim() - 2 - len(leading))
        place = positions.long().reshape(*leading, *ones, length)
        cos, sin = (table[place] for table in (cos, sin))  # (B, 1, ..., L, R/2)
    turned = _rotate(rows, cos, -sin if inverse else sin, interleaved)
    return turned.movedim(-2, position_dim)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the pairs (a, b) of the first R columns: (a cos - b sin, b cos + a sin)."""
    width = 2 * cos.shape[-1]
    turning = widen(x[..., :width])
    if interleaved:
        a, b = turning[..., ::2], turning[..., 1::2]
    else:
        a, b = turning.chunk(2, -1)
    cos, sin = cos.to(turning.dtype), sin.to(turning.dtype)
    turned = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([joined.to(x.dtype), x[..., width:]], -1)


# ---- products in which hidden means unread ----


def _pair_products(rows: Tensor, columns: Tensor, visible: Tensor | None) -> Tensor:
    """(L, D), (S, D) -> (L, S): their dot products, 0 on hidden pairs whatever their rows hold."""
    if visible is None:
        return rows @ columns.transpose(-1, -2)
    rows_finite, columns_finite = rows.isfinite(), columns.isfinite()
    products = torch.where(rows_finite, rows, 0.0) @ torch.where(
        columns_finite, columns, 0.0
    ).transpose(-1, -2)
    finite = rows_finite.all(-1).unsqueeze(-1) & columns_finite.all(-1).unsqueeze(-2)
    return _select(products.masked_fill(~finite, math.nan), visible)


def _weighted_sum(weights: Tensor, rows: Tensor, visible: Tensor | None) -> Tensor:
    """(L, S), (S, D) -> (L, D): sums over the visible pairs; the weights are 0 on hidden ones."""
    if visible is None:
        return weights @ rows
    finite = rows.isfinite()
    poisoned = visible.to(rows.dtype) @ (~finite).to(rows.dtype) > 0  # sees NaN or infinity
    return (weights @ torch.where(finite, rows, 0.0)).masked_fill(poisoned, math.nan)


def _select(pairs: Tensor, visible: Tensor | None) -> Tensor:
    """0 on hidden pairs, whatever stood there."""
    return pairs if visible is None else pairs.masked_fill(~visible, 0.0)


# ---- shapes and dtypes ----


def leading_shape(call: Call) -> tuple[int, ...]:
    """Return (*B, Hq); empty for a 2-D call; packed sequences have no batch dimension."""
    shapes = [tuple(tensor.shape[:-2]) for tensor in call[:3]]
    if call.enable_gqa:  # the heads are the query's: key and value take part as if they had one
        shapes[1:] = [(*shape[:-1], 1) if shape else shape for shape in shapes[1:]]
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _mask(call: Call) -> Tensor | None:
    """The mask without leading dimensions that the output does not have."""
    mask = call.attn_mask
    while mask is not None and mask.dim() > len(leading_shape(call)) + 2:
        mask = mask.squeeze(0)
    return mask


def _per_head(tensor: Tensor, like: Tensor) -> Tensor:
    """(*B, Hq) -> (*B, Hq, 1, 1)."""
    return tensor.to(like.dtype).reshape(*tensor.shape, 1, 1)


def widen(tensor: Tensor) -> Tensor:
    """In the dtype of the sums: float32, or float64 for float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Grouped queries: (*B, Hkv, S, D) -> (*B, Hq, S, D). A 2-D tensor, one head, broadcasts."""
    if tensor.dim() < 3 or query.dim() < 3 or tensor.shape[-3] == query.shape[-3]:
        return tensor
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], dim=-3)
