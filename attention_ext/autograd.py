"""Every derivative of the operators: first and second order, forward mode, vmap, in all mixtures.

The Functions stand outside of the operators, so that these stay opaque to torch.compile, and each
derivative is a Function again, on a kernel with O(L + S) memory:

    AttentionFunction    backward -> BackwardFunction           jvp -> TangentFunction
    ShortAttentionFunction, the same for plain calls outside of transforms
    BackwardFunction     backward -> BackwardTangentFunction    jvp -> the same
    TangentFunction      backward -> BackwardTangentFunction
    BackwardTangentFunction, and second order through the weights  -> derivatives.py, plain torch

One kernel serves the second order in all mixtures: the backward is the gradient of a scalar, so its
vector-Jacobian product is, by the symmetry of second derivatives, its tangent in that direction. A
first derivative alone calls the operator directly.

A call is a tuple of fields as in `operators.py`. `with_mask` asks for the gradient of a float mask,
a kernel of its own.
"""

# ruff: noqa: D102 (the methods of a Function are torch's protocol)

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import derivatives, library
from .batching import Batch, loop
from .derivatives import Direction, Optional, inputs_of
from .operators import (
    call_of,
    direction_of,
    numbers_of,
    per_argument,
    run_backward,
    run_backward_tangent,
    run_forward,
    run_tangent,
    tensors_of,
)
from .reference import Call


def keep(ctx: Any, before: Sequence[Optional], call: Sequence[Any]) -> None:
    """Save tensors that stand before the call, and the call."""
    tensors = *before, *tensors_of(call)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.numbers = numbers_of(call)
    ctx.before = len(before)
    ctx.set_materialize_grads(False)


def kept(ctx: Any) -> tuple[list[Optional], tuple[Any, ...]]:
    """The tensors that stood before the call, and the call."""
    tensors = ctx.saved_tensors
    before, tensors = tensors[: ctx.before], tensors[ctx.before :]
    return list(before), call_of(tensors, ctx.numbers)


def is_transformed() -> bool:
    """Inside a torch.func transform or a forward-mode level (eager)."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class AttentionFunction(torch.autograd.Function):
    """The eager operator: (with_weights, *call) -> output, lse, weights, state."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Optional, Tensor]:
        return run_forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        output, _, _, state = results
        ctx.mark_non_differentiable(state)
        keep(ctx, (output, state), inputs[1:])
        ctx.with_weights = inputs[0]

    @staticmethod
    def backward(ctx: Any, *upstream: Optional) -> tuple[Any, ...]:
        before, call = kept(ctx)
        with_mask = len(call) > 3 and ctx.needs_input_grad[4]
        # A first derivative alone, the usual case, is the operator itself.
        again = torch.is_grad_enabled() or is_transformed()
        run: Any = BackwardFunction.apply if again else run_backward
        return None, *per_argument(run(with_mask, *upstream[:3], *before, *call), call)

    @staticmethod
    def jvp(ctx: Any, *tangents: Optional) -> tuple[Optional, ...]:
        before, call = kept(ctx)
        direction = direction_of(tangents[1:])
        if ctx.with_weights:
            full = Call(*call)
            moved = derivatives.push(derivatives.definition(full), inputs_of(full), direction)
            return *moved, None
        run: Any = TangentFunction.apply
        return *run(*direction, *before, *call), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        with_weights, *call = arguments
        batch = _batch(info, call, in_dims[1:])
        library.check(batch.sample())  # an error is about the shapes that the caller sees
        if batch.loops:
            return loop(AttentionFunction, info.batch_size, in_dims, arguments)
        run: Any = AttentionFunction.apply
        return batch.results(run(with_weights, *batch.leading()))


class ShortAttentionFunction(torch.autograd.Function):
    """AttentionFunction for the output of calls of at most eight fields, outside of transforms.

    A small training step pays for Python most of all: each argument, result and saved tensor costs
    up to a microsecond. (query, key, value[, attn_mask without gradient, …]) -> output.
    """

    @staticmethod
    def forward(ctx: Any, *call: Any) -> Tensor:
        output, state = library.forward_with_state(*call)
        ctx.save_for_backward(output, state, *call[:4])
        if len(call) > 3:
            ctx.numbers = call[4:]
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        numbers = ctx.numbers if len(saved) > 5 else ()
        if torch.is_grad_enabled() or is_transformed():
            run: Any = BackwardFunction.apply
            grads = run(False, grad_output, None, None, *saved, *numbers)[:3]
        else:
            grads = library.backward_short(grad_output, *saved, *numbers)
        return (*grads, None, *(None,) * len(numbers)) if numbers else grads


class BackwardFunction(torch.autograd.Function):
    """Gradients: (with_mask, upstream of output, lse and weights, output, state, *call) -> six.

    Output and state count as functions of the inputs: their part is contained in those derivatives.
    """

    @staticmethod
    def forward(*arguments: Any) -> Direction:
        return run_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: Direction) -> None:
        ctx.with_mask = inputs[0]
        keep(ctx, inputs[1:6], inputs[6:])

    @staticmethod
    def backward(ctx: Any, *direction: Optional) -> tuple[Any, ...]:
        (*upstream, output, state), call = kept(ctx)
        if upstream[2] is not None:
            full = Call(*call)
            tensors = (*upstream, *inputs_of(full))
            grads = derivatives.pull(derivatives.gradient(full), tensors, direction)
            return None, *grads[:3], None, None, *per_argument(grads[3:], call)
        again = torch.is_grad_enabled() or is_transformed()
        run: Any = TangentFunction.apply if again else run_tangent
        moved = run(*direction, output, state, *call)
        run = BackwardTangentFunction.apply if again else run_backward_tangent
        grads = run(
            len(call) > 3 and ctx.needs_input_grad[9],
            *(None, None, *moved, *direction, *upstream[:2], output, state, *call),
        )
        of_upstream = (
            None if u is None else m for u, m in zip(upstream, (*moved, None), strict=True)
        )
        return None, *of_upstream, None, None, *per_argument(grads, call)

    @staticmethod
    def jvp(ctx: Any, *tangents: Optional) -> Direction:
        (*upstream, output, state), call = kept(ctx)
        direction, moving = direction_of(tangents[6:]), tangents[1:4]
        if upstream[2] is not None:
            full = Call(*call)
            tensors = (*moving, *direction, *upstream, *inputs_of(full))
            grads = Direction(*derivatives.gradient_tangent(full)(*tensors))
            return grads if ctx.with_mask else grads._replace(attn_mask=None)
        run: Any = TangentFunction.apply
        moved = run(*direction, output, state, *call)
        run = BackwardTangentFunction.apply
        before = (*moving[:2], *moved, *direction, *upstream[:2], output, state)
        return Direction(*run(ctx.with_mask, *before, *call))

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        batch = _batch(info, arguments[6:], in_dims[6:])
        if batch.loops:
            return loop(BackwardFunction, info.batch_size, in_dims, arguments)
        with_mask, grad_output, grad_lse, *others = arguments[:6]
        run: Any = BackwardFunction.apply
        grads = run(
            with_mask,
            batch.rows(grad_output, in_dims[1]),
            batch.lse(grad_lse, in_dims[2]),
            *(batch.rows(x, dim) for x, dim in zip(others, in_dims[3:6], strict=True)),
            *batch.leading(own_gradients=True),
        )
        return batch.gradients(grads)


class TangentFunction(torch.autograd.Function):
    """Forward mode: (direction: six, output, state, *call) -> tangents of output and lse."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return run_tangent(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
        keep(ctx, (*inputs[:8], *results), inputs[8:])

    @staticmethod
    def backward(ctx: Any, *upstream: Optional) -> tuple[Any, ...]:
        (*direction, output, state, output_tangent, lse_tangent), call = kept(ctx)
        moved = output_tangent, lse_tangent
        with_mask = direction[3] is not None
        run: Any = BackwardFunction.apply
        grads = run(with_mask, *upstream, None, output, state, *call)
        pairs = zip(direction, grads, strict=True)
        of_direction = (None if given is None else grad for given, grad in pairs)
        run = BackwardTangentFunction.apply
        grads = run(
            len(call) > 3 and ctx.needs_input_grad[11],
            *(None, None, *moved, *direction, *upstream, output, state, *call),
        )
        return *of_direction, None, None, *per_argument(grads, call)

    @staticmethod
    def jvp(ctx: Any, *tangents: Optional) -> tuple[Optional, ...]:
        (*direction, _, _, _, _), call = kept(ctx)
        full = Call(*call)
        inputs, moving = inputs_of(full), direction_of(tangents[8:])
        tensors = (*direction, *inputs), (*tangents[:6], *moving)
        return tuple(derivatives.push(derivatives.tangent(full), *tensors))

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        batch = _batch(info, arguments[8:], in_dims[8:])
        if batch.loops:
            return loop(TangentFunction, info.batch_size, in_dims, arguments)
        run: Any = TangentFunction.apply
        moved = run(
            *batch.like_inputs(arguments[:6], in_dims[:6]),
            batch.rows(arguments[6], in_dims[6]),
            batch.rows(arguments[7], in_dims[7]),
            *batch.leading(own_gradients=True),
        )
        return batch.results(moved)


class BackwardTangentFunction(torch.autograd.Function):
    """The tangent of the backward: second order in all mixtures.

    (with_mask, tangents of the upstream gradients of output and lse, tangents of output and lse,
    direction: six, upstream gradients of output and lse, output, state, *call) -> six. The tangents
    of output and lse are those that `TangentFunction` gives for the direction.
    """

    @staticmethod
    def forward(*arguments: Any) -> Direction:
        return run_backward_tangent(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: Direction) -> None:
        ctx.with_mask = inputs[0]
        # tangents of upstream, direction, upstream
        keep(ctx, (*inputs[1:3], *inputs[5:13]), inputs[15:])

    @staticmethod
    def backward(ctx: Any, *grads: Optional) -> tuple[Any, ...]:
        function, tensors, call = BackwardTangentFunction._definition(ctx)
        found = derivatives.pull(function, tensors, grads)
        upstream, direction, inputs = found[9:11], found[3:9], found[12:]
        of_call = per_argument(inputs, call)
        return None, *found[:2], None, None, *direction, *upstream, None, None, *of_call

    @staticmethod
    def jvp(ctx: Any, *tangents: Optional) -> Direction:
        function, tensors, _ = BackwardTangentFunction._definition(ctx)
        moving = (*tangents[1:3], None, *tangents[5:13], None, *direction_of(tangents[15:]))
        grads = Direction(*derivatives.push(function, tensors, moving))
        return grads if ctx.with_mask else grads._replace(attn_mask=None)

    @staticmethod
    def _definition(ctx: Any) -> tuple[Any, list[Optional], tuple[Any, ...]]:
        """A function in plain torch, its arguments, and the call."""
        before, call = kept(ctx)
        full = Call(*call)
        tensors = [*before[:2], None, *before[2:10], None, *inputs_of(full)]
        return derivatives.gradient_tangent(full), tensors, call

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        batch = _batch(info, arguments[15:], in_dims[15:])
        if batch.loops:
            return loop(BackwardTangentFunction, info.batch_size, in_dims, arguments)

        def upstream(first: int) -> tuple[Optional, Optional]:
            outputs = batch.rows(arguments[first], in_dims[first])
            return outputs, batch.lse(arguments[first + 1], in_dims[first + 1])

        run: Any = BackwardTangentFunction.apply
        grads = run(
            arguments[0],
            *upstream(1),
            *upstream(3),
            *batch.like_inputs(arguments[5:11], in_dims[5:11]),
            *upstream(11),
            batch.rows(arguments[13], in_dims[13]),
            batch.rows(arguments[14], in_dims[14]),
            *batch.leading(own_gradients=True),
        )
        return batch.gradients(grads)


def _batch(info: Any, call: Sequence[Any], in_dims: Sequence[int | None]) -> Batch:
    missing = (None,) * (len(Call._fields) - len(call))
    return Batch(info.batch_size, Call(*call), (*in_dims, *missing))
