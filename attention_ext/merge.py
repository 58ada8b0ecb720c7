"""Putting results over disjoint keys together."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import ArgumentError, ArgumentTypeError


def merge_attention(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the results of attention over disjoint keys into that over all of them.

        lse    = log(sum over the parts of exp(lse_part))
        output = sum over the parts of exp(lse_part - lse) * output_part

    In plain torch operations, differentiable in every way. A part in which a row sees no key (lse
    -inf) counts for nothing there, whatever its output holds; where all parts are like that, the
    output is 0 and lse is -inf. A sink belongs into one part only.

    Args:
        outputs: One (*B, Hq, L, Dv) per part, of one dtype.
        lses: One (*B, Hq, L) per part: the natural logarithms that `return_lse=True` gives. (Those
            of `varlen_attn` are transposed: pass `lse.T`.)

    Returns:
        The output in the dtype of the parts and lse in the dtype of theirs.

    Raises:
        ArgumentError: No part, or shapes that do not fit.
        ArgumentTypeError: Something that is not a sequence of tensors.

    Example:
        >>> from attention_ext import scaled_dot_product_attention
        >>> query, key, value = (torch.randn(2, 4, length, 16) for length in (3, 8, 8))
        >>> cuts = [5, 3]
        >>> parts = [
        ...     scaled_dot_product_attention(query, k, v, return_lse=True)
        ...     for k, v in zip(key.split(cuts, -2), value.split(cuts, -2))
        ... ]
        >>> output, lse = merge_attention([p.output for p in parts], [p.lse for p in parts])
        >>> torch.testing.assert_close(output, scaled_dot_product_attention(query, key, value))
    """
    _check(outputs, lses)
    stacked = torch.stack(tuple(lses))  # (parts, *B, Hq, L)
    hidden = stacked == -math.inf
    empty = hidden.all(0)
    # finite stand-ins, so that no derivative is NaN
    lse = torch.where(hidden & ~empty, -math.inf, torch.where(empty, 0.0, stacked)).logsumexp(0)
    shares = torch.where(hidden, 0.0, (torch.where(hidden, 0.0, stacked) - lse).exp())
    shares = torch.where(hidden, 0.0, shares).unsqueeze(-1)
    parts = torch.stack(tuple(outputs))
    merged = (torch.where(hidden.unsqueeze(-1), 0.0, parts) * shares).sum(0)
    return merged.to(parts.dtype), lse.masked_fill(empty, -math.inf)


def _check(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, parts in (("outputs", outputs), ("lses", lses)):
        is_sequence = isinstance(parts, Sequence) and not isinstance(parts, Tensor | str)
        if not is_sequence or not all(isinstance(part, Tensor) for part in parts):
            raise ArgumentTypeError(
                f"merge_attention: expected {name} to be a sequence of tensors, "
                f"got {type(parts).__name__}"
            )
    if len(outputs) != len(lses) or len(outputs) == 0:
        raise ArgumentError(
            "merge_attention: expected as many lses as outputs, at least one, "
            f"got {len(outputs)} outputs and {len(lses)} lses"
        )
    for output, lse in zip(outputs, lses, strict=True):
        if output.shape != outputs[0].shape or lse.shape != output.shape[:-1]:
            raise ArgumentError(
                "merge_attention: expected outputs of one shape (*B, H, L, Dv) and lses of shape "
                f"(*B, H, L), got {tuple(output.shape)} and {tuple(lse.shape)}"
            )
