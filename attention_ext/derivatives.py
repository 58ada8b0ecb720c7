"""Derivatives that no kernel computes: those of the definition, by automatic differentiation.

Third and higher orders, nested forward mode, and second order through the weights. They take L x S
numbers per head, like `reference.py`. Everything stays differentiable, so that there is no highest
order.

Functions here take tensors and None (absent, or a zero derivative) by position and return a tuple
of the same kind.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .reference import Call

Optional = Tensor | None
Function = Callable[..., Sequence[Optional]]


class Direction(NamedTuple):
    """Tangents of a call's differentiable inputs, or derivatives with respect to them."""

    query: Optional
    key: Optional
    value: Optional
    attn_mask: Optional
    alibi_slopes: Optional
    sinks: Optional


class Upstream(NamedTuple):
    """Gradients of a call's results."""

    output: Optional
    lse: Optional
    weights: Optional


def inputs_of(call: Call) -> Direction:
    """The differentiable inputs themselves; a bool mask among them."""
    return Direction(*(getattr(call, name) for name in Direction._fields))


def gradient(call: Call) -> Function:
    """The backward as a function of upstream gradients (3) and inputs (6): gradients (6)."""

    def run(*tensors: Optional) -> Sequence[Optional]:
        return pull(definition(call), tensors[3:], tensors[:3])

    return run


def gradient_tangent(call: Call) -> Function:
    """Its tangent (6), a function of tangents of the same (9) and of the same (9)."""

    def run(*tensors: Optional) -> Sequence[Optional]:
        return push(gradient(call), tensors[9:], tensors[:9])

    return run


def tangent(call: Call) -> Function:
    """Tangents of output and lse as a function of a direction (6) and inputs (6)."""

    def run(*tensors: Optional) -> Sequence[Optional]:
        return push(definition(call), tensors[6:], tensors[:6])[:2]

    return run


def definition(call: Call) -> Function:
    """Output, lse and weights as a function of the inputs (6)."""

    def run(*inputs: Optional) -> Sequence[Optional]:
        replaced = dict(zip(Direction._fields, inputs, strict=True))
        return reference.attention(call._replace(**replaced))  # type: ignore[arg-type]

    return run


def pull(
    function: Function, inputs: Sequence[Optional], upstream: Sequence[Optional]
) -> Sequence[Optional]:
    """Return the gradients of <upstream, function(*inputs)> with respect to the inputs."""
    places = [i for i, x in enumerate(inputs) if x is not None and x.is_floating_point()]
    results: list[int] = []  # places of the tensors that the function returns

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = list(inputs)
        for place, tensor in zip(places, tensors, strict=True):
            arguments[place] = tensor
        outputs = function(*arguments)
        results[:] = [i for i, x in enumerate(outputs) if x is not None]
        return tuple(x for x in outputs if x is not None)

    outputs, transpose, *_ = torch.func.vjp(run, *(inputs[place] for place in places))
    cotangents = (upstream[i] if i < len(upstream) else None for i in results)
    pairs = zip(outputs, cotangents, strict=True)
    grads = transpose(tuple(torch.zeros_like(x) if c is None else c for x, c in pairs))
    found = dict(zip(places, grads, strict=True))
    return [found.get(i) for i in range(len(inputs))]


def push(
    function: Function, inputs: Sequence[Optional], tangents: Sequence[Optional]
) -> Sequence[Optional]:
    """Return the tangents of function(*inputs).

    By transposing twice: torch nests reverse mode in anything, but not forward mode.
    """

    def transposed(*upstream: Optional) -> Sequence[Optional]:
        return pull(function, inputs, upstream)

    zeros = [None if x is None else torch.zeros_like(x) for x in function(*inputs)]
    return pull(transposed, zeros, tangents)
