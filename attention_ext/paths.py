"""Which way a call takes: the front door of everything that computes attention.

    output(...) -> library.forward_output          the output of a plain call, no derivative
                -> ShortAttentionFunction          the same with derivatives, eager
                -> attention(...)
    attention(...) -> library.forward              nothing is differentiated or transformed
                   -> AttentionFunction            eager: derivatives and vmap
                   -> CompiledAttentionFunction    while torch.compile or export traces
                   -> reference.attention          where no Function can be right: nested forward
                                                   mode, torch.func inside torch.compile

The first ways are the fast ones: nothing on them looks at more than it must.
"""

# ruff: noqa: D102 (the methods of a Function are torch's protocol)

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import library, reference, sharding
from .arguments import PLAIN_TYPES
from .autograd import AttentionFunction, ShortAttentionFunction, is_transformed, kept
from .derivatives import Optional
from .operators import numbers_of, per_argument, run_backward, run_forward, tensors_of
from .reference import Call

Results = tuple[Tensor, Tensor, Optional]  # output, lse, weights


def output(call: Sequence[Any]) -> Tensor:
    """Return the output alone, differentiable in every way; call: as for `attention`."""
    if (
        len(call) > library.SHORT
        or torch.compiler.is_compiling()
        or is_transformed()
        or torch._C._is_any_autocast_enabled()
        or type(call[0]) not in PLAIN_TYPES
    ):
        return attention(call)[0]
    if not (torch.is_grad_enabled() and _requires_grad(call)):
        return library.forward_output(*call)
    if len(call) > 3 and call[3] is not None and call[3].requires_grad:
        return attention(call)[0]
    result: Tensor = _short_apply(*call)
    return result


def attention(call: Sequence[Any], with_weights: bool = False) -> Results:
    """Return (output, lse, weights or None), differentiable in every way.

    Args:
        call: Leading fields of `reference.Call`.
        with_weights: Return the weights too.
    """
    try:
        return _attention(call, with_weights)
    except NotImplementedError as error:  # a DTensor, whose rules are not there yet
        if not sharding.register(error):
            raise
    return _attention(call, with_weights)


def _attention(call: Sequence[Any], with_weights: bool) -> Results:
    if torch._C._is_any_autocast_enabled():
        call = library.autocast(call)
    needs_grad = torch.is_grad_enabled() and _requires_grad(call)
    if torch.compiler.is_compiling():
        # Dynamo would inline the Function there, and raw operators have no derivative.
        if traced_transform() or forward_ad._current_level >= 0:
            return _definition(call, with_weights)
        if not needs_grad:
            return run_forward(with_weights, *call)[:3]
        with_mask = len(call) > 3 and call[3] is not None and call[3].requires_grad
        run: Any = CompiledAttentionFunction.apply
        output, lse, *others = run(with_weights, with_mask, *_distinct(call))
        return output, lse, others[1] if with_weights else None
    if is_transformed():
        # torch gives wrong values for a Function's jvp under nested forward mode.
        if nested_forward_mode():
            return _definition(call, with_weights)
        run = AttentionFunction.apply
    elif needs_grad:
        run = _attention_apply
    elif with_weights:
        run = run_forward
    else:
        output, lse, _ = library.forward(*call)
        return output, lse, None
    output, lse, weights, _ = run(with_weights, *call)
    return output, lse, weights


def _distinct(call: Sequence[Any]) -> list[Any]:
    """The call without a tensor that stands there twice, which Dynamo refuses."""
    distinct: list[Any] = []
    for argument in call:
        again = isinstance(argument, Tensor) and any(argument is x for x in distinct)
        distinct.append(argument.view_as(argument) if again else argument)
    return distinct


def _definition(call: Sequence[Any], with_weights: bool) -> Results:
    output, lse, weights = reference.attention(Call(*call))
    return output, lse, weights if with_weights else None


def _requires_grad(call: Sequence[Any]) -> bool:
    if call[0].requires_grad or call[1].requires_grad or call[2].requires_grad:
        return True
    mask_and_more = tensors_of(call)[3:6] if len(call) > 3 else ()
    return any(x is not None and x.requires_grad for x in mask_and_more)


class CompiledAttentionFunction(torch.autograd.Function):
    """For torch.compile and export: no jvp, which would break the graph, and no vmap.

    (with_weights, with_mask, *call) -> output, lse, state, and the weights if asked for.
    """

    @staticmethod
    def forward(with_weights: bool, with_mask: bool, *call: Any) -> tuple[Tensor, ...]:
        output, lse, weights, state = run_forward(with_weights, *call)
        return (output, lse, state) if weights is None else (output, lse, state, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        _, ctx.with_mask, *call = inputs
        ctx.mark_non_differentiable(results[2])
        ctx.save_for_backward(results[0], results[2], *tensors_of(call))
        ctx.numbers = numbers_of(call)
        ctx.before = 2

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        (output, state), call = kept(ctx)
        weights = upstream[3] if len(upstream) > 3 else None
        arguments = (*upstream[:2], weights, output, state)
        return None, None, *per_argument(run_backward(ctx.with_mask, *arguments, *call), call)


_short_apply: Any = super(torch.autograd.Function, ShortAttentionFunction).apply
# Function.apply with a setup_context runs inspect.signature().bind() on every call, about four
# times the cost of everything else. Outside of transforms it then calls this:
_attention_apply: Any = super(torch.autograd.Function, AttentionFunction).apply


# ---- what is going on around the call ----


def nested_forward_mode() -> bool:
    """Inside more than one forward-mode transform (eager)."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    levels = sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)
    return levels > 1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def traced_transform() -> bool:
    """Inside a torch.func transform, asked while tracing; Dynamo guards on the stack itself."""
    return torch._C._functorch.peek_interpreter_stack() is not None
