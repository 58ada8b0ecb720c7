"""What both sides of a case are told, and the formula that they follow.

Where torch's function has no such argument, its side is what its users do instead: a mask made
beforehand (ALiBi, window, lengths), or the formula in plain torch (soft cap, sinks, and every
second derivative and forward mode, which torch's fused kernels do not have).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .cases import Case

DROPOUT = 0.1
SOFTCAP = 20.0
_CHUNK_SCORES = 1 << 22  # scores that `formula_by_rows` holds at a time


@dataclass(frozen=True)
class Score:
    """What happens to the scores of `formula`.

    Attributes:
        bias: added, broadcastable to (batch, heads, queries, keys).
        visible: bool, the same.
        softcap: c of c * tanh(score / c), before anything is added.
        sinks: (heads,), a logit more for each row.
        is_causal: query i sees the keys up to i.
    """

    bias: Tensor | None = None
    visible: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    is_causal: bool = False

    def to(self, dtype: torch.dtype) -> Score:
        """The same with floating point tensors in another type."""
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        return Score(bias, self.visible, self.softcap, sinks, self.is_causal)

    def of_first_heads(self, heads: int) -> Score:
        """What the first heads of the first batch element see of it."""

        def cut(mask: Tensor | None) -> Tensor | None:
            if mask is None:
                return None
            mask = mask[:1] if mask.dim() == 4 else mask
            return mask[..., :heads, :, :] if mask.dim() >= 3 else mask

        sinks = None if self.sinks is None else self.sinks[:heads]
        return Score(cut(self.bias), cut(self.visible), self.softcap, sinks, self.is_causal)


@dataclass(frozen=True)
class Rival:
    """Both sides of a case.

    Attributes:
        ours: arguments of our function.
        torchs: arguments of torch's, or None where only the formula does it.
        score: the same for `formula`.
        mask: a mask that requires grad, where its gradient is asked for.
    """

    ours: dict[str, Any] = field(default_factory=dict)
    torchs: dict[str, Any] | None = field(default_factory=dict)
    score: Score = Score()
    mask: Tensor | None = None


def formula(query: Tensor, key: Tensor, value: Tensor, score: Score, first_row: int = 0) -> Tensor:
    """Attention as plain torch operations, in the dtype of the inputs.

    Args:
        query: (batch, heads, rows, head_dim): the queries from ``first_row`` on.
        key: (batch, kv heads, keys, head_dim).
        value: (batch, kv heads, keys, value_dim).
        score: what happens to the scores.
        first_row: see ``query``.
    """
    group = query.shape[-3] // key.shape[-3]
    if group > 1:
        key, value = (x.repeat_interleave(group, dim=-3) for x in (key, value))
    rows, keys = query.shape[-2], key.shape[-2]
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]))
    if score.softcap is not None:
        scores = score.softcap * torch.tanh(scores / score.softcap)
    if score.bias is not None:
        scores = scores + _rows_of(score.bias, first_row, rows)
    if score.visible is not None:
        scores = scores.masked_fill(~_rows_of(score.visible, first_row, rows), -math.inf)
    if score.is_causal:
        visible = torch.ones(rows, keys, dtype=torch.bool).tril(first_row)
        scores = scores.masked_fill(~visible, -math.inf)
    if score.sinks is None:
        return scores.softmax(-1) @ value
    column = score.sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


def _rows_of(mask: Tensor, first_row: int, rows: int) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask[..., first_row : first_row + rows, :]


def formula_by_rows(query: Tensor, key: Tensor, value: Tensor, score: Score) -> Tensor:
    """`formula` with bounded memory, also in the backward."""
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    if scores <= _CHUNK_SCORES:
        return formula(query, key, value, score)
    step = max(1, _CHUNK_SCORES * query.shape[2] // scores)
    chunks = [
        checkpoint(formula, rows, key, value, score, i * step, use_reentrant=False)
        for i, rows in enumerate(torch.split(query, step, dim=-2))
    ]
    return torch.cat(chunks, -2)


def make_rival(case: Case) -> Rival:
    """The arguments of both sides, and what they mean."""
    shared: dict[str, Any] = {}
    if case.causal:
        shared["is_causal"] = True
    if case.sizes.heads != case.sizes.kv_heads:
        shared["enable_gqa"] = True
    rival = _OPTIONS[case.option](case)
    torchs = None if rival.torchs is None else {**shared, **rival.torchs}
    if case.direction in ("double", "jvp"):
        torchs = None
    score = Score(
        rival.score.bias, rival.score.visible, rival.score.softcap, rival.score.sinks, case.causal
    )
    return Rival({**shared, **rival.ours}, torchs, score, rival.mask)


def _plain(_: Case) -> Rival:
    return Rival()


def _bool_mask(visible: Tensor) -> Rival:
    arguments = {"attn_mask": visible}
    return Rival(arguments, arguments, Score(visible=visible))


def _bool_causal(case: Case) -> Rival:
    return _bool_mask(torch.ones(case.sizes.queries, case.sizes.keys, dtype=torch.bool).tril())


def _lengths_of(case: Case) -> Tensor:
    """From half of the keys for the first batch element to all for the last."""
    parts = (
        torch.linspace(0.5, 1.0, case.sizes.batch) if case.sizes.batch > 1 else torch.ones(1) / 2
    )
    return (parts * case.sizes.keys).ceil().long()


def _padding(case: Case) -> Tensor:
    return torch.arange(case.sizes.keys) < _lengths_of(case)[:, None, None, None]


def _bool_padding(case: Case) -> Rival:
    return _bool_mask(_padding(case))


def _bool_blocks(case: Case) -> Rival:
    """Four documents in one sequence, each of which sees itself."""

    def block(count: int) -> Tensor:
        return torch.arange(count) * 4 // count

    return _bool_mask(block(case.sizes.queries)[:, None] == block(case.sizes.keys))


def _bool_random(case: Case) -> Rival:
    visible = torch.rand(case.sizes.queries, case.sizes.keys) < 0.5
    visible[:, 0] = True
    return _bool_mask(visible)


def _float_mask(case: Case) -> Rival:
    mask = torch.randn(case.sizes.queries, case.sizes.keys).to(getattr(torch, case.dtype))
    arguments = {"attn_mask": mask}
    return Rival(arguments, arguments, Score(bias=mask))


def _mask_grad(case: Case) -> Rival:
    rival = _float_mask(case)
    mask: Tensor = rival.ours["attn_mask"].requires_grad_()
    return Rival(rival.ours, rival.torchs, rival.score, mask)


def _distance(case: Case) -> Tensor:
    return torch.arange(case.sizes.queries)[:, None] - torch.arange(case.sizes.keys)


def _alibi(case: Case) -> Rival:
    slopes = 2.0 ** -(8 * torch.arange(1, case.sizes.heads + 1) / case.sizes.heads)
    bias = -slopes[None, :, None, None] * _distance(case).abs()  # of another rank torch's is slow
    bias = bias.to(getattr(torch, case.dtype))
    return Rival({"alibi_slopes": slopes}, {"attn_mask": bias}, Score(bias=bias))


def _softcap(_: Case) -> Rival:
    return Rival({"softcap": SOFTCAP}, None, Score(softcap=SOFTCAP))


def _sinks(case: Case) -> Rival:
    sinks = torch.linspace(-1.0, 1.0, case.sizes.heads).to(getattr(torch, case.dtype))
    return Rival({"sinks": sinks}, None, Score(sinks=sinks))


def _dropout(_: Case) -> Rival:
    arguments = {"dropout_p": DROPOUT}
    return Rival(arguments, arguments)


def _window(case: Case) -> Rival:
    """An eighth of the keys, up to the query's own."""
    left = max(case.sizes.keys // 8 - 1, 0)
    visible = (_distance(case) >= 0) & (_distance(case) <= left)
    return Rival({"window_size": (left, 0)}, {"attn_mask": visible}, Score(visible=visible))


def _lengths(case: Case) -> Rival:
    visible = _padding(case)
    ours = {"seqused_k": _lengths_of(case)}
    return Rival(ours, {"attn_mask": visible}, Score(visible=visible))


_OPTIONS: dict[str, Callable[[Case], Rival]] = {
    "plain": _plain,
    "bool-causal": _bool_causal,
    "bool-padding": _bool_padding,
    "bool-blocks": _bool_blocks,
    "bool-random": _bool_random,
    "float-mask": _float_mask,
    "mask-grad": _mask_grad,
    "alibi": _alibi,
    "softcap": _softcap,
    "sinks": _sinks,
    "dropout": _dropout,
    "window": _window,
    "lengths": _lengths,
}
