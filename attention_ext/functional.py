"""The public functions of the operator: names, defaults, documentation, and errors."""

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import reference
from .autograd import attention
from .errors import ArgumentError, ArgumentTypeError, translate, wrong_type
from .reference import Call

_PLAIN_TYPES = (Tensor, torch.nn.Parameter, type(None))
_SCALE_TYPES = (float, int, type(None))
_TRANSLATED = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


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
    return_lse: Literal[False] = False,
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
    return_lse: Literal[True],
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
    return_lse: bool,
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
    return_lse: bool = False,
) -> Tensor | AttentionResult:
    """Exact attention by tiles: softmax(scale * query @ key^T + mask) @ value.

    The first eight arguments are those of `torch.nn.functional.scaled_dot_product_attention`, with
    its names, defaults and meaning. Replacing torch's function by this one changes no result beyond
    rounding, except that

    * a mask together with `is_causal` works: hidden by either is hidden;
    * NaN and infinity in hidden places (masked keys and values, a mask's cells that are hidden
      anyway) are harmless, forward and backward;
    * some calls that torch refuses work, such as a mask of rank 1, second derivatives and forward
      mode;
    * the pattern of dropout would differ; `dropout_p` other than 0 is not supported yet.

    Each of query i's scores is `s_ij = scale * <query_i, key_j> + mask_ij`. Where the mask (bool:
    False, float: -inf) or causality hides key j, it takes no part. A finite mask value never hides.
    A row in which every key is hidden gives output 0, lse -inf and zero gradients.

    `causal_variant` says which keys a causal call shows when the lengths differ. Rows are queries,
    columns are keys:

        L=2, S=5   upper_left   1 0 0 0 0     lower_right   1 1 1 1 0
                                1 1 0 0 0                   1 1 1 1 1

        L=5, S=2   upper_left   1 0           lower_right   0 0
                                1 1                         0 0
                                1 1                         0 0
                                1 1                         1 0
                                1 1                         1 1

    upper_left is what torch's `is_causal` means; lower_right is what a cache needs: the L queries
    are the last of S positions.

    Derivatives: query, key and value have gradients, through the output and through lse, on
    compiled kernels with O(L + S) memory per head beyond the tensors themselves. Double backward,
    forward mode and their nestings, and `torch.func` transforms inside torch.compile, go through
    plain torch operations: correct, but they store L x S numbers per head. `vmap` adds a leading
    dimension and stays on the kernels. A double backward through a compiled function raises, as
    everywhere in torch.

    Args:
        query: (*B, Hq, L, D); float64, float32, bfloat16 or float16; 2 to 8 dimensions, any
            strides. A 2-D tensor is one head. Half inputs are summed in float32.
        key: (*B, Hkv, S, D), the query's dtype. Leading dimensions broadcast among the three, heads
            too unless `enable_gqa`, and the ranks may differ.
        value: (*B, Hkv, S, Dv), the query's dtype.
        attn_mask: Broadcastable to (*B, Hq, L, S). Bool: True means *may attend*
            (`torch.nn.MultiheadAttention` uses the opposite). Floating point, the query's dtype (or
            float32 with half inputs): added to the scores; it must not require grad. Or a
            `torch.nn.attention.bias.CausalBias` of just (L, S).
        dropout_p: Only 0 so far.
        is_causal: Hide the keys to the right of the diagonal, see above.
        scale: Factor on the dot products, any float; None: 1 / sqrt(D).
        enable_gqa: Grouped queries: Hq is a multiple of Hkv, head h reads key and value head h //
            (Hq // Hkv). Nothing is repeated in memory.
        causal_variant: "upper_left" or "lower_right". Matters with `is_causal` only.
        return_lse: Also return the natural logarithm of each row's sum of exponentials.

    Returns:
        The output, (*B, Hq, L, Dv) in the query's dtype, its dimensions in memory as the query's
        are (`torch.empty_like(query)`). With `return_lse` an `AttentionResult` of output and lse,
        (*B, Hq, L), float32 (float64 for float64), differentiable too.

    Raises:
        ArgumentError: A wrong shape or number (a `ValueError` and a `RuntimeError`).
        ArgumentTypeError: A wrong type or dtype (a `TypeError` and a `RuntimeError`).
        NotImplementedError: Dropout, a mask that requires grad, sparse and nested tensors, other
            devices than the CPU.

    Equivalent to, for one head, lower_right:
        ```
        scores = query @ key.T * scale + attn_mask
        visible = torch.ones(L, S, dtype=torch.bool).tril(diagonal=S - L)
        output = scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num() @ value
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
        lower_right = causal_variant == "lower_right"
        if not lower_right and causal_variant != "upper_left":
            raise _wrong_variant(causal_variant)
        if dropout_p != 0.0:
            raise _dropout_error(dropout_p)
        if type(is_causal) is not bool or type(scale) not in _SCALE_TYPES:
            # the dispatcher would make something of 1, None or a tensor
            options = {"is_causal": is_causal, "scale": scale}
            if error := wrong_type("scaled_dot_product_attention", options):
                raise error
        if type(attn_mask) not in _PLAIN_TYPES:
            attn_mask, is_causal, lower_right = _resolve_bias(
                query, key, attn_mask, is_causal, lower_right
            )
        output, lse = attention(
            query, key, value, attn_mask, is_causal, scale, enable_gqa, lower_right
        )
    except _TRANSLATED as raised:
        if torch.compiler.is_compiling():
            raise  # Dynamo wraps it in a type of its own
        arguments = {
            "query": query,
            "key": key,
            "value": value,
            "attn_mask": attn_mask,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        raise translate(raised, "scaled_dot_product_attention", arguments) from None
    return AttentionResult(output, lse) if return_lse else output


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The causal attention of the textbook: one head, one sequence, and the weights beside it.

    With `s_ij = <query_i, key_j> / sqrt(D)` for j <= i:

        weights_ij = exp(s_ij) / sum_{j' <= i} exp(s_ij')
        output_i   = sum_{j <= i} weights_ij value_j

    The output comes from the same kernels as `scaled_dot_product_attention`, which store no
    weights. They are computed afterwards from the log-sum-exp that the kernels return: `weights_ij
    = exp(s_ij - lse_i)`. So the output is to the bit that of `scaled_dot_product_attention(query,
    key, value, is_causal=True)`, and the weights take T x T numbers.

    Args:
        query: (T, D), float64, float32, bfloat16 or float16.
        key: (T, D).
        value: (T, Dv).

    Returns:
        The output, (T, Dv), and the weights, (T, T), both in the query's dtype and differentiable.
        Row i of the weights is 0 beyond column i and sums to 1; a sequence of T has T(T + 1)/2
        visible pairs.

    Raises:
        ArgumentError: A wrong shape.
        ArgumentTypeError: A wrong type or dtype.

    Equivalent to:
        ```
        scores = query @ key.T / math.sqrt(D)
        visible = torch.ones(T, T, dtype=torch.bool).tril()
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        output = weights @ value
        ```

    Example:
        >>> query = torch.tensor([[1.0, 0.0], [2.0, 1.0]])
        >>> key = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
        >>> value = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
        >>> output, weights = causal_attention(query, key, value)
        >>> weights
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
        >>> output
        tensor([[2., 0.],
                [1., 1.]])
    """
    try:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != 2:
                raise ArgumentError(
                    f"causal_attention: expected {name} of 2 dimensions, a row for each position, "
                    f"got shape {tuple(tensor.shape)}"
                )
        if query.shape[0] != key.shape[0]:
            raise ArgumentError(
                "causal_attention: expected query and key of the same length T, got shapes "
                f"{tuple(query.shape)} and {tuple(key.shape)}"
            )
        output, lse = attention(query, key, value, is_causal=True)
        weights = reference.attention_weights(Call(query, key, value, is_causal=True), lse)
    except _TRANSLATED as error:
        if torch.compiler.is_compiling():
            raise
        arguments = {"query": query, "key": key, "value": value}
        raise translate(error, "causal_attention", arguments) from None
    return output, weights


def _wrong_variant(causal_variant: object) -> Exception:
    kind = ArgumentError if isinstance(causal_variant, str) else ArgumentTypeError
    return kind(
        "scaled_dot_product_attention: expected causal_variant to be 'upper_left' or "
        f"'lower_right', got {causal_variant!r}"
    )


def _dropout_error(dropout_p: object) -> Exception:
    if isinstance(dropout_p, Tensor) or not isinstance(dropout_p, int | float):
        return ArgumentTypeError(
            "scaled_dot_product_attention: expected dropout_p to be a float, "
            f"got {type(dropout_p).__name__}"
        )
    if not 0.0 <= dropout_p <= 1.0:
        return ArgumentError(
            "scaled_dot_product_attention: expected dropout_p to be a probability between 0 and 1, "
            f"got {dropout_p}"
        )
    return NotImplementedError(
        f"scaled_dot_product_attention: expected dropout_p=0.0, got {dropout_p}: dropout "
        "of the attention weights is not supported yet; apply dropout to the output instead"
    )


def _resolve_bias(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, lower_right: bool
) -> tuple[Tensor | None, bool, bool]:
    """Turn a CausalBias, whose storage is uninitialised, into what it means.

    Returns attn_mask, is_causal and lower_right.
    """
    from torch.nn.attention.bias import CausalBias, CausalVariant  # takes a second: imports Dynamo

    if not isinstance(attn_mask, CausalBias):
        return attn_mask, is_causal, lower_right
    if is_causal:
        raise ArgumentError(
            "scaled_dot_product_attention: expected is_causal=False beside a CausalBias, got "
            "is_causal=True: CausalBias should not be used with causal=True"
        )
    sizes, lengths = (attn_mask.seq_len_q, attn_mask.seq_len_kv), (query.shape[-2], key.shape[-2])
    if sizes != lengths:
        raise ArgumentError(
            "scaled_dot_product_attention: expected attn_mask, a CausalBias, to have the "
            f"sizes (L, S) = {lengths} of query and key, got {sizes}"
        )
    return None, True, attn_mask.variant == CausalVariant.LOWER_RIGHT
