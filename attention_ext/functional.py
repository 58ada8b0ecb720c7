"""The public operator: names, defaults, documentation, and errors."""

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import paths
from .arguments import (
    PLAIN_TYPES,
    SCALE_TYPES,
    UNLIMITED,
    is_lower_right,
    options_of,
    resolve_bias,
)
from .errors import TRANSLATED, translate, wrong_type
from .reference import Call


class AttentionResult(NamedTuple):
    """What a call returns that asks for more than the output; None is what was not asked for."""

    output: Tensor  # (*B, Hq, L, Dv)
    lse: Tensor | None = None  # (*B, Hq, L)
    weights: Tensor | None = None  # (*B, Hq, L, S)


@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_variant: str = "upper_left",
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: Literal[False] = False,
    return_weights: Literal[False] = False,
) -> Tensor: ...


@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_variant: str = "upper_left",
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: Literal[True],
    return_weights: bool = False,
) -> AttentionResult: ...


@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_variant: str = "upper_left",
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    return_weights: Literal[True],
) -> AttentionResult: ...


@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_variant: str = "upper_left",
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool,
    return_weights: bool = False,
) -> Tensor | AttentionResult: ...


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_variant: str = "upper_left",
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Tensor | AttentionResult:
    """Exact attention by tiles: softmax(scores) @ value, with every option and every derivative.

    The first eight arguments are those of `torch.nn.functional.scaled_dot_product_attention`, with
    its names, defaults and meaning. Replacing torch's function by this one changes no result beyond
    rounding, with four exceptions:

    * the pattern of dropout differs;
    * a mask together with `is_causal` works: hidden by either is hidden;
    * NaN and infinity in hidden places (masked keys and values, keys beyond `seqused_k`, a mask's
      cells that are hidden anyway) are harmless, forward and backward;
    * calls that torch refuses work: a mask of rank 1, second derivatives, forward mode, vmap.

    The score of query i and key j, in this order:

        s = scale * <query_i, key_j>
        s -> softcap * tanh(s / softcap)
        s -> s + attn_mask_ij              if it is floating point
        s -> s - alibi_slope * |p_i - j|
        hidden, where attn_mask_ij is False or -inf, or causality, the window or seqused_k says so
        weights_ij = exp(s_ij) / (exp(sink) + sum of exp(s_ij') over the visible j')
        output_i = sum over j of dropout(weights_ij) value_j
        lse_i = log(exp(sink) + sum of exp(s_ij'))

    A finite mask value never hides. A row in which every key is hidden gives output 0, lse -inf (or
    the sink) and zero gradients.

    Positions: p_i = i if `causal_variant` is "upper_left"; p_i = i + S_b - L if it is
    "lower_right", where S_b is `seqused_k` of the batch element or S. Windows and slopes count from
    p_i, also without `is_causal`. Rows are queries, columns keys:

        L=2, S=5   upper_left   1 0 0 0 0     lower_right   1 1 1 1 0
        causal                  1 1 0 0 0                   1 1 1 1 1

        L=5, S=2   upper_left   1 0           lower_right   0 0
        causal                  1 1                         0 0
                                1 1                         0 0
                                1 1                         1 0
                                1 1                         1 1

        L=2, S=5   upper_left   1 1 0 0 0     lower_right   0 0 1 1 1
        window (1, 1)           1 1 1 0 0                   0 0 0 1 1

    upper_left is what torch's `is_causal` means; lower_right is what a cache needs: the L queries
    are the last of S positions.

    Derivatives: query, key, value, a float mask, alibi_slopes and sinks have gradients, through
    output, lse and weights. First and second order, forward mode and their mixtures run on compiled
    kernels with O(L + S) memory per head beyond the tensors themselves and the weights, where they
    are asked for. `vmap` adds a leading dimension and stays on the kernels. Through plain torch
    operations, correct, but with L x S numbers per head, go: nested forward mode, third and higher
    orders, second order and forward mode through the weights, and `torch.func` transforms inside
    torch.compile. A double backward through a compiled function raises, as everywhere in torch.

    Dropout draws a seed from torch's generator of the device, nothing else: whether a weight is
    kept depends on the seed and its place (batch, head, query, key). So it is reproducible by
    `torch.manual_seed`, the same in every derivative, under activation checkpointing and for every
    number of threads; under vmap it follows `randomness`.

    Args:
        query: (*B, Hq, L, D); float64, float32, bfloat16 or float16; 2 to 8 dimensions, any
            strides. A 2-D tensor is one head. Half inputs are summed in float32.
        key: (*B, Hkv, S, D), the query's dtype. Leading dimensions broadcast among the three, heads
            too unless `enable_gqa`, and the ranks may differ.
        value: (*B, Hkv, S, Dv), the query's dtype.
        attn_mask: Broadcastable to (*B, Hq, L, S), and never expanded. Bool: True means *may
            attend* (`torch.nn.MultiheadAttention` uses the opposite). Floating point, float32 or
            the query's dtype: added to the scores. Or a `torch.nn.attention.bias.CausalBias` of
            just (L, S).
        dropout_p: Probability of dropping a weight; the kept ones are scaled by 1 / (1 - p).
        is_causal: Query i sees the keys j <= p_i.
        scale: Factor on the dot products, any float; None: 1 / sqrt(D).
        enable_gqa: Grouped queries: Hq is a multiple of Hkv, head h reads key and value head h //
            (Hq // Hkv). Nothing is repeated in memory.
        causal_variant: "upper_left" or "lower_right", see above.
        window_size: (left, right): query i sees the keys from p_i - left to p_i + right; -1 is
            without a limit. Work is proportional to what is visible.
        softcap: Bounds the scores, see above; None or 0: off.
        alibi_slopes: (Hq,) or broadcastable to (*B, Hq); float32 or the query's dtype.
        sinks: (Hq,) or broadcastable to (*B, Hq); float32 or the query's dtype: one more logit per
            head, without a value.
        seqused_k: (*B,), int32 or int64, from 0 to S: how many keys of a batch element are in use.
            What lies beyond them is not read.
        return_lse: Also return lse.
        return_weights: Also return the weights, before dropout. A second pass computes them, which
            changes no bit of the output.

    Returns:
        The output, (*B, Hq, L, Dv) in the query's dtype, its dimensions in memory as the query's
        are (`torch.empty_like(query)`). With one of the `return_` flags an `AttentionResult` of the
        output, lse, (*B, Hq, L) in float32 (float64 for float64), and weights, (*B, Hq, L, S) in
        the query's dtype; None for what was not asked for.

    Raises:
        ArgumentError: A wrong shape or number (a `ValueError` and a `RuntimeError`).
        ArgumentTypeError: A wrong type or dtype (a `TypeError` and a `RuntimeError`).
        NotImplementedError: Complex, sparse and nested tensors, other devices than the CPU.

    Equivalent to, for one head, with a window, a cap and a sink:
        ```
        distance = torch.arange(S) - torch.arange(L).unsqueeze(-1)
        scores = softcap * torch.tanh(query @ key.T * scale / softcap) + attn_mask
        scores = scores.masked_fill((distance < -left) | (distance > right), -math.inf)
        with_sink = torch.cat([scores, sink.expand(L, 1)], dim=-1)
        output = with_sink.softmax(-1)[:, :-1] @ value
        ```

    Example:
        >>> query, key, value = (torch.randn(2, heads, 5, 16) for heads in (8, 2, 2))
        >>> options = {"is_causal": True, "enable_gqa": True}
        >>> output = scaled_dot_product_attention(query, key, value, **options)
        >>> torchs = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
        >>> torch.testing.assert_close(output, torchs)

        A cached step, one query against all five keys:

        >>> step = scaled_dot_product_attention(
        ...     query[..., -1:, :], key, value, causal_variant="lower_right", **options
        ... )
        >>> torch.testing.assert_close(step, output[..., -1:, :])
    """
    try:
        lower_right = causal_variant != "upper_left" and is_lower_right(causal_variant)
        if (
            type(is_causal) is not bool
            or type(enable_gqa) is not bool
            or type(scale) not in SCALE_TYPES
        ):  # the dispatcher would make something of 1, None or a tensor
            given = {"is_causal": is_causal, "enable_gqa": enable_gqa, "scale": scale}
            if error := wrong_type("scaled_dot_product_attention", given):
                raise error
        call: tuple[Any, ...]
        if (
            window_size == UNLIMITED
            and dropout_p == 0.0
            and softcap is None
            and alibi_slopes is None
            and sinks is None
            and seqused_k is None
            and type(attn_mask) in PLAIN_TYPES
        ):  # each argument costs time: as few as say what is wanted
            if scale is None and not (enable_gqa or lower_right):
                call = (query, key, value)
                if is_causal or attn_mask is not None:
                    call = query, key, value, attn_mask, is_causal
            else:
                call = query, key, value, attn_mask, is_causal, scale, enable_gqa, lower_right
        else:
            call = query, key, value, attn_mask, is_causal, scale, enable_gqa, lower_right
            call += options_of(
                query, window_size, softcap, dropout_p, alibi_slopes, sinks, seqused_k
            )
            if type(attn_mask) not in PLAIN_TYPES:
                call = resolve_bias(Call(*call))
        if not (return_lse or return_weights):
            return paths.output(call)
        output, lse, weights = paths.attention(call, return_weights)
    except TRANSLATED as raised:
        if torch.compiler.is_compiling():
            raise  # Dynamo wraps it in a type of its own
        arguments = {
            "query": query,
            "key": key,
            "value": value,
            "attn_mask": attn_mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "window_size": window_size,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "seqused_k": seqused_k,
        }
        raise translate(raised, "scaled_dot_product_attention", arguments) from None
    return AttentionResult(output, lse if return_lse else None, weights)
