"""From the arguments of the public functions to a call of the operators.

Only what Python alone can check is checked here (types that the dispatcher would make something
of); all rules on values, shapes and dtypes stand in csrc/checks.cpp.
"""

from typing import Any

import torch
from torch import Tensor

from .errors import ArgumentError, ArgumentTypeError, wrong_type
from .reference import Call

PLAIN_TYPES = (Tensor, torch.nn.Parameter, type(None))
SCALE_TYPES = (float, int, type(None))
UNLIMITED = (-1, -1)


def is_lower_right(causal_variant: object) -> bool:
    """Read `causal_variant`."""
    if causal_variant == "lower_right":
        return True
    if causal_variant == "upper_left":
        return False
    kind = ArgumentError if isinstance(causal_variant, str) else ArgumentTypeError
    raise kind(
        "scaled_dot_product_attention: expected causal_variant to be 'upper_left' or "
        f"'lower_right', got {causal_variant!r}"
    )


def options_of(
    query: Tensor,
    window_size: Any,
    softcap: float | None,
    dropout_p: Any,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    seqused_k: Tensor | None,
) -> tuple[Any, ...]:
    """Return what a call has after `lower_right`, up to the seed; draw it if there is dropout."""
    if type(softcap) not in SCALE_TYPES or type(dropout_p) not in SCALE_TYPES:
        # the dispatcher would make something of a tensor, and no gradient
        numbers = {"softcap": softcap, "dropout_p": dropout_p}
        if error := wrong_type("scaled_dot_product_attention", numbers):
            raise error
    left, right = window_of(window_size)
    softcap = 0.0 if softcap is None else float(softcap)
    dropout_p = float(dropout_p)  # True and False too, as of `training and p`
    seed = _draw_seed(query, dropout_p) if dropout_p != 0.0 else None
    return left, right, softcap, dropout_p, alibi_slopes, sinks, seqused_k, seed


def window_of(window_size: Any) -> tuple[int, int]:
    """Read `window_size`."""
    if window_size == UNLIMITED:
        return UNLIMITED
    sides = tuple(window_size) if isinstance(window_size, tuple | list) else (None,)
    right_type = all(
        isinstance(side, int | torch.SymInt) and not isinstance(side, bool) for side in sides
    )
    if right_type and len(sides) == 2:
        return sides
    kind = ArgumentError if right_type else ArgumentTypeError
    raise kind(
        "scaled_dot_product_attention: expected window_size to be two integers (left, right), "
        f"got {window_size!r}"
    )


def _draw_seed(query: Tensor, dropout_p: float) -> Tensor | None:
    """Draw the seed of dropout from torch's generator of the device.

    A tensor, so that it is saved with the call, drawn again under activation checkpointing, and
    drawn by vmap's rules of randomness. A probability out of range is left to the operator.
    """
    if not 0.0 < dropout_p <= 1.0:
        return None
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=query.device)


def resolve_bias(call: Call) -> Call:
    """Turn a CausalBias of torch, whose storage is uninitialised, into what it means.

    It hides keys by its own variant and leaves positions alone: `causal_variant` says where windows
    and slopes count from.
    """
    from torch.nn.attention.bias import CausalBias, CausalVariant  # takes a second: imports Dynamo

    bias = call.attn_mask
    if not isinstance(bias, CausalBias):
        return call
    if call.is_causal:
        raise ArgumentError(
            "scaled_dot_product_attention: expected is_causal=False beside a CausalBias, got "
            "is_causal=True: CausalBias should not be used with causal=True"
        )
    sizes = (bias.seq_len_q, bias.seq_len_kv)
    lengths = (call.query.shape[-2], call.key.shape[-2])
    if sizes != lengths:
        raise ArgumentError(
            "scaled_dot_product_attention: expected attn_mask, a CausalBias, to have the "
            f"sizes (L, S) = {lengths} of query and key, got {sizes}"
        )
    lower_right = bias.variant == CausalVariant.LOWER_RIGHT
    windows = (call.window_left, call.window_right) != UNLIMITED
    if call.seqused_k is None and not windows and call.alibi_slopes is None:
        call = call._replace(lower_right=lower_right)  # positions serve nothing else
    if lower_right == call.lower_right and (not lower_right or call.seqused_k is None):
        return call._replace(attn_mask=None, is_causal=True)
    shown = torch.ones(sizes, dtype=torch.bool, device=call.query.device)
    shown = shown.tril(sizes[1] - sizes[0] if lower_right else 0)
    return call._replace(attn_mask=shown)
