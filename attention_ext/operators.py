"""The operators on calls: tuples of the leading fields of `reference.Call`.

A call has three, five, eight, sixteen or all fields, as few as say what is wanted, because each
argument of an operator costs time.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import library
from .derivatives import Direction, Optional
from .reference import Call

SLOPES, SINKS = Call._fields.index("alibi_slopes"), Call._fields.index("sinks")
SEED, OFFSETS = Call._fields.index("seed"), Call._fields.index("cu_seq_q")


def tensors_of(call: Sequence[Any]) -> tuple[Optional, ...]:
    """Query, key, value, mask, slopes, sinks, seqused_k, seed, offsets, as far as there are any."""
    return (*call[:4], *call[SLOPES : SEED + 1], *call[OFFSETS : OFFSETS + 2])


def numbers_of(call: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """What stands between and behind the tensors."""
    return call[4:SLOPES], call[SEED + 1 : OFFSETS], call[OFFSETS + 2 :]


def call_of(tensors: Sequence[Optional], numbers: tuple[Sequence[Any], ...]) -> tuple[Any, ...]:
    """Put a call together again."""
    first, second, third = numbers
    return *tensors[:4], *first, *tensors[4:8], *second, *tensors[8:], *third


def per_argument(grads: Sequence[Optional], call: Sequence[Any]) -> tuple[Optional, ...]:
    """Derivatives with respect to every argument of a call."""
    result: list[Optional] = [None] * len(call)
    for place, grad in zip((0, 1, 2, 3, SLOPES, SINKS), grads, strict=True):
        if place < len(call):
            result[place] = grad
    return tuple(result)


def direction_of(tangents: Sequence[Optional]) -> Direction:
    """The other way round."""
    places = (0, 1, 2, 3, SLOPES, SINKS)
    return Direction(*(tangents[place] if place < len(tangents) else None for place in places))


def run_forward(with_weights: bool, *call: Any) -> tuple[Tensor, Tensor, Optional, Tensor]:
    """Return output, lse, weights and state."""
    output, lse, state = library.forward(*call)
    weights = library.weights(*call[:3], state, *call[3:]) if with_weights else None
    return output, lse, weights, state


def run_backward(with_mask: bool, *arguments: Any) -> Direction:
    """Return the gradients; arguments: those of `BackwardFunction.forward`."""
    upstream, output, state, call = arguments[:3], *arguments[3:5], arguments[5:]
    arguments = (*upstream, *call[:3], output, state, *call[3:])
    query, key, value, slopes, sinks = library.backward(*arguments)
    mask = library.mask_gradient(*arguments) if with_mask else None
    return Direction(query, key, value, mask, *_present(call, slopes, sinks))


def run_backward_tangent(with_mask: bool, *arguments: Any) -> Direction:
    """Return their tangents; arguments: those of `BackwardTangentFunction.forward`."""
    before, output, state, call = arguments[:12], *arguments[12:14], arguments[14:]
    arguments = (*before, *call[:3], output, state, *call[3:])
    query, key, value, slopes, sinks = library.backward_tangent(*arguments)
    mask = library.mask_gradient_tangent(*arguments) if with_mask else None
    return Direction(query, key, value, mask, *_present(call, slopes, sinks))


def run_tangent(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the tangents of output and lse; arguments: those of `TangentFunction.forward`."""
    direction, output, state, call = arguments[:6], *arguments[6:8], arguments[8:]
    return library.tangent(*direction, *call[:3], output, state, *call[3:])


def _present(call: Sequence[Any], slopes: Tensor, sinks: Tensor) -> tuple[Optional, Optional]:
    """None for what the call does not have, of which the operators return an empty tensor."""
    if len(call) <= SLOPES:
        return None, None
    return None if call[SLOPES] is None else slopes, None if call[SINKS] is None else sinks
