"""The definition of the operator in plain torch: what the kernels compute, said plainly.

    scores  = scale * query @ key^T + float mask          (*B, Hq, L, S)
    visible = bool mask, float mask != -inf, causal       which pairs (query i, key j) may attend
    weights = softmax(scores) over the visible keys, else 0; all 0 in a row without a visible key
    output  = weights @ value                             (*B, Hq, L, Dv)
    lse     = log(sum(exp(scores))) over the visible keys; -inf in a row without one

Everything here stores L x S numbers per head; the kernels never do. Below the definition stand its
derivatives: the tangents (directional derivatives) of the forward and of the backward, from which
forward mode and double backward are made. They use differentiable operations only, so every higher
derivative follows.

Hidden means unread: what lies in a hidden key, value or upstream gradient never reaches a result.
Since 0 * NaN is NaN, that takes more than a weight of 0: see `_pair_products` and `_weighted_sum`.
There a visible infinity counts as NaN. Half inputs are computed in float32.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """The arguments of one call, as the caller gave them."""

    query: Tensor  # (*B, Hq, L, D)
    key: Tensor  # (*B, Hkv, S, D)
    value: Tensor  # (*B, Hkv, S, Dv)
    attn_mask: Tensor | None = None  # broadcastable to (*B, Hq, L, S); bool (True: see) or added
    is_causal: bool = False  # query i sees the keys j <= i; with lower_right j <= i + S - L
    scale: float | None = None  # factor on the dot products; None: 1 / sqrt(D)
    enable_gqa: bool = False  # query head h reads key and value head h // (Hq // Hkv)
    lower_right: bool = False


class Direction(NamedTuple):
    """Tangents of query, key and value, or derivatives with respect to them; None is zero."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None


class _Problem(NamedTuple):
    """A call with options resolved, heads repeated, half widened; leading dims still broadcast."""

    query: Tensor  # (*B, Hq, L, D)
    key: Tensor  # (*B, Hq, S, D)
    value: Tensor  # (*B, Hq, S, Dv)
    bias: Tensor | None  # broadcastable to (*B, Hq, L, S); 0 on hidden pairs
    visible: Tensor | None  # (*B, Hq, L, S) bool; None: all
    scale: float
    pairs: tuple[int, ...]  # the shape (*B, Hq, L, S)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    lower_right: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of attention.

    Args:
        query: (*B, Hq, L, D).
        key: (*B, Hkv, S, D).
        value: (*B, Hkv, S, Dv).
        attn_mask: Broadcastable to (*B, Hq, L, S); bool (True: may attend) or floating point
            (added).
        is_causal: Query i sees the keys j <= i; with `lower_right` the keys j <= i + S - L.
        scale: Factor on the dot products; None: 1 / sqrt(D).
        enable_gqa: Query head h reads key and value head h // (Hq // Hkv).
        lower_right: See `is_causal`.

    Returns:
        The output, (*B, Hq, L, Dv) in the query's dtype, and lse, (*B, Hq, L) in float32 (float64
        for float64).

    Example:
        >>> query, key = torch.tensor([[2.0, 1.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> output, lse = attention(query, key, value=torch.eye(2), scale=1.0)  # scores 4 and 1
        >>> torch.testing.assert_close(output, torch.tensor([[4.0, 1.0]]).softmax(-1))
    """
    problem = _prepare(
        Call(query, key, value, attn_mask, is_causal, scale, enable_gqa, lower_right)
    )
    weights, lse = _softmax(problem)
    return _weighted_sum(weights, problem.value, problem.visible).to(query.dtype), lse


def attention_weights(call: Call, lse: Tensor) -> Tensor:
    """Return the softmax weights, given lse: exp(scores - lse) on visible pairs, 0 elsewhere.

    Args:
        call: The arguments of the call; its value is not looked at.
        lse: (*B, Hq, L), as the operator returned it.

    Returns:
        (*B, Hq, L, S) in the query's dtype.
    """
    problem = _prepare(call)
    scores = _scores(problem)
    if problem.visible is not None:
        scores = scores.masked_fill(~problem.visible, -math.inf)
        lse = lse.masked_fill(lse == -math.inf, 0.0)  # an empty row: exp(-inf - 0) = 0
    return (scores - lse.unsqueeze(-1)).exp().to(call.query.dtype)


def visible_pairs(
    seqlen_q: int,
    seqlen_kv: int,
    lower_right: bool = False,
    device: torch.device | None = None,
) -> Tensor:
    """Return which pairs a causal call shows: bool, (L, S).

    Example:
        >>> visible_pairs(2, 5).int().tolist()
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
        >>> visible_pairs(2, 5, lower_right=True).int().tolist()
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    """
    position = torch.arange(seqlen_q, device=device).unsqueeze(-1)  # of query i on the key axis
    if lower_right:
        position = position + (seqlen_kv - seqlen_q)
    return torch.arange(seqlen_kv, device=device) <= position


def attention_tangent(call: Call, direction: Direction) -> tuple[Tensor, Tensor]:
    """Return the tangents of output and lse in a direction of query, key and value.

    With a prime for a tangent, and all sums over the visible keys:

        scores'  = scale * (query' @ key^T + query @ key'^T)
        lse'     = rowsum(weights * scores')
        weights' = weights * (scores' - lse')
        output'  = weights' @ value + weights @ value'
    """
    problem = _prepare(call)
    weights, _ = _softmax(problem)
    motion = _moving(problem, call, direction)
    weights_tangent, lse_tangent = _softmax_tangent(problem, weights, motion)
    output_tangent = _weighted_sum(weights_tangent, problem.value, problem.visible)
    output_tangent = output_tangent + _weighted_sum(weights, motion.value, problem.visible)
    return output_tangent.to(call.query.dtype), lse_tangent


def backward_tangent(
    call: Call,
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    direction: Direction,
    grad_output_tangent: Tensor | None = None,
    grad_lse_tangent: Tensor | None = None,
) -> tuple[Direction, Tensor, Tensor]:
    """Return the tangents of the backward, and those of output and lse.

    The backward, for one upstream gradient of the output (*B, Hq, L, Dv) and one of lse (*B, Hq,
    L):

        delta        = rowsum(grad_output * output) - grad_lse
        grad_weights = grad_output @ value^T
        grad_scores  = weights * (grad_weights - delta)
        grad_query = scale * grad_scores @ key   grad_key = scale * grad_scores^T @ query
        grad_value = weights^T @ grad_output

    Its tangent is the product rule on every line. It is also the backward of the backward: the
    gradients of `<G, backward>` with respect to query, key, value are, by the symmetry of second
    derivatives, the tangents of the backward in the direction G, and those with respect to
    grad_output and grad_lse are output' and lse'.
    """
    problem = _prepare(call)
    query, key, value, _, visible, scale, _ = problem
    motion = _moving(problem, call, direction)
    weights, lse = _softmax(problem)
    weights_tangent, lse_tangent = _softmax_tangent(problem, weights, motion)
    output = _weighted_sum(weights, value, visible)
    output_tangent = _weighted_sum(weights_tangent, value, visible)
    output_tangent = output_tangent + _weighted_sum(weights, motion.value, visible)

    upstream, moving = (_or_zeros(x, output) for x in (grad_output, grad_output_tangent))
    upstream_lse, moving_lse = (_or_zeros(x, lse) for x in (grad_lse, grad_lse_tangent))
    delta = (upstream * output).sum(-1, keepdim=True) - upstream_lse.unsqueeze(-1)
    delta_tangent = (moving * output + upstream * output_tangent).sum(-1, keepdim=True)
    delta_tangent = delta_tangent - moving_lse.unsqueeze(-1)
    excess = _pair_products(upstream, value, visible) - delta  # (*B, Hq, L, S), as all below
    excess_tangent = _pair_products(moving, value, visible) - delta_tangent
    excess_tangent = excess_tangent + _pair_products(upstream, motion.value, visible)
    grad_scores = _select(weights * excess, visible) * scale
    grad_scores_tangent = weights_tangent * excess + weights * excess_tangent
    grad_scores_tangent = _select(grad_scores_tangent, visible) * scale

    grad_query = _weighted_sum(grad_scores_tangent, key, visible)
    grad_query = grad_query + _weighted_sum(grad_scores, motion.key, visible)
    grad_key = _weighted_sum_t(grad_scores_tangent, query, visible)
    grad_key = grad_key + _weighted_sum_t(grad_scores, motion.query, visible)
    grad_value = _weighted_sum_t(weights_tangent, upstream, visible)
    grad_value = grad_value + _weighted_sum_t(weights, moving, visible)
    grads = zip((grad_query, grad_key, grad_value), call[:3], strict=True)
    tangents = Direction(*(_reduce_to(grad, tensor) for grad, tensor in grads))
    return tangents, output_tangent.to(call.query.dtype), lse_tangent


# ---- steps of the definition ----


def _prepare(call: Call) -> _Problem:
    """Resolve the options of a call."""
    query, key, value, attn_mask, is_causal, scale, enable_gqa, lower_right = call
    if scale is None:
        scale = query.shape[-1] ** -0.5 if query.shape[-1] > 0 else 1.0
    if enable_gqa:
        key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    query, key, value = _widen(query), _widen(key), _widen(value)
    seqlen_q, seqlen_kv = query.shape[-2], key.shape[-2]
    shapes = query.shape[:-2], key.shape[:-2], value.shape[:-2]
    leading = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    pairs = (*leading, seqlen_q, seqlen_kv)
    visible = bias = None
    if is_causal:
        visible = visible_pairs(seqlen_q, seqlen_kv, lower_right, query.device)
    if attn_mask is not None:
        while attn_mask.dim() > len(pairs):
            attn_mask = attn_mask.squeeze(0)
        shown = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf
        visible = shown if visible is None else visible & shown
        if attn_mask.dtype != torch.bool:
            bias = torch.where(visible, attn_mask.to(query.dtype), 0.0)
    if visible is not None:
        visible = visible.expand(pairs)
    return _Problem(query, key, value, bias, visible, scale, pairs)


def _scores(problem: _Problem) -> Tensor:
    """(*B, Hq, L, S); 0 on hidden pairs."""
    scores = _pair_products(problem.query, problem.key, problem.visible) * problem.scale
    if problem.bias is not None:
        scores = scores + problem.bias
    return scores.expand(problem.pairs)


def _softmax(problem: _Problem) -> tuple[Tensor, Tensor]:
    """The weights, (*B, Hq, L, S), and lse, (*B, Hq, L)."""
    scores, visible = _scores(problem), problem.visible
    if visible is None:
        return scores.softmax(-1), scores.logsumexp(-1)
    # An empty row keeps its zeros here, for finite derivatives, and is taken out afterwards.
    empty = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~(visible | empty), -math.inf)
    lse = scores.logsumexp(-1).masked_fill(empty.squeeze(-1), -math.inf)
    return _select(scores.softmax(-1), visible), lse


def _softmax_tangent(problem: _Problem, weights: Tensor, motion: _Problem) -> tuple[Tensor, Tensor]:
    """The tangents of the weights and of lse."""
    scores_tangent = _pair_products(motion.query, problem.key, problem.visible)
    scores_tangent = scores_tangent + _pair_products(problem.query, motion.key, problem.visible)
    scores_tangent = scores_tangent * problem.scale
    lse_tangent = (weights * scores_tangent).sum(-1)
    weights_tangent = weights * (scores_tangent - lse_tangent.unsqueeze(-1))
    return _select(weights_tangent, problem.visible), lse_tangent


def _moving(problem: _Problem, call: Call, direction: Direction) -> _Problem:
    """The problem with a direction in the place of query, key and value, in their shapes."""
    tensors = zip(direction, call[:3], strict=True)
    query, key, value = (_or_zeros(tangent, tensor) for tangent, tensor in tensors)
    if call.enable_gqa:
        key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    return problem._replace(query=_widen(query), key=_widen(key), value=_widen(value))


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


def _weighted_sum_t(weights: Tensor, rows: Tensor, visible: Tensor | None) -> Tensor:
    """(L, S), (L, D) -> (S, D): the same for the transposed weights."""
    visible_t = None if visible is None else visible.transpose(-1, -2)
    return _weighted_sum(weights.transpose(-1, -2), rows, visible_t)


def _select(pairs: Tensor, visible: Tensor | None) -> Tensor:
    """0 on hidden pairs, whatever stood there."""
    return pairs if visible is None else pairs.masked_fill(~visible, 0.0)


# ---- shapes and dtypes ----


def _widen(tensor: Tensor) -> Tensor:
    """In the dtype of the sums: float32, or float64 for float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _or_zeros(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor.to(like.dtype)


def _repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Grouped queries: (*B, Hkv, S, D) -> (*B, Hq, S, D). A 2-D tensor, one head, broadcasts."""
    if tensor.dim() < 3 or query.dim() < 3 or tensor.shape[-3] == query.shape[-3]:
        return tensor
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], dim=-3)


def _reduce_to(grad: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over groups of heads and broadcast dimensions, to the shape of `like`."""
    if like.dim() > 2 and grad.shape[-3] != like.shape[-3] != 1:
        # not unflatten: the old vmap, which gradcheck's batched checks use, has no rule for it
        grouped = grad.reshape(*grad.shape[:-3], like.shape[-3], -1, *grad.shape[-2:])
        grad = grouped.sum(-3)
    if grad.dim() > like.dim():
        grad = grad.sum(tuple(range(grad.dim() - like.dim())))
    broadcast = [dim for dim in range(like.dim()) if like.shape[dim] == 1 != grad.shape[dim]]
    return (grad.sum(broadcast, keepdim=True) if broadcast else grad).to(like.dtype)
