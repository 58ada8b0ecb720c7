"""Every derivative that torch can ask for, around the raw operators.

    attention(...) -> library.forward              nothing is differentiated or transformed
                   -> AttentionFunction            eager: reverse and forward mode, mixed, repeated;
                                                   vmap
                   -> CompiledAttentionFunction    while torch.compile or export traces
                   -> reference.attention          where no Function can be right, see `attention`

The Functions stand outside of the operators, so that these stay opaque to torch.compile. A backward
is a Function of its own, which gives double backward and forward over reverse; a first derivative
alone calls the operator directly. The tangents and the double backward come from `reference.py`:
plain torch, so memory grows with L x S there.

All Functions take the fields of `reference.Call`, in its order. The float mask is not
differentiated.
"""

# ruff: noqa: D102 (the methods of a Function are torch's protocol)

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import library, reference
from .reference import Call, Direction

_OPTIONS = 5  # fields of Call after query, key and value; they have no gradient
_NO_GRADS = (None,) * _OPTIONS


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
    """Return (output, lse), differentiable with respect to query, key and value.

    The arguments are those of `reference.Call`.
    """
    grad_mode = torch.is_grad_enabled()
    if attn_mask is not None and grad_mode and attn_mask.requires_grad:
        raise NotImplementedError(_NO_MASK_GRADIENT)
    if torch._C._is_any_autocast_enabled():
        query, key, value, attn_mask = library.autocast(query, key, value, attn_mask)
    needs_grad = grad_mode and (query.requires_grad or key.requires_grad or value.requires_grad)
    run: Any = library.forward
    if torch.compiler.is_compiling():
        # Dynamo would inline the Function there, and raw operators have no derivative.
        if _traced_transform() or forward_ad._current_level >= 0:
            run = reference.attention
        elif needs_grad:
            run = CompiledAttentionFunction.apply
    elif _transformed():
        # torch gives wrong values for a Function's jvp under nested forward mode.
        run = reference.attention if _nested_forward_mode() else AttentionFunction.apply
    elif needs_grad:
        run = _attention_apply
    output, lse = run(query, key, value, attn_mask, is_causal, scale, enable_gqa, lower_right)
    return output, lse


_NO_MASK_GRADIENT = (
    "scaled_dot_product_attention: expected an attn_mask without gradient, got one that "
    "requires grad: its gradient is not supported yet; pass attn_mask.detach(), or call under "
    "torch.no_grad()"
)


# ---- what is going on around the call ----


def _transformed() -> bool:
    """Inside a torch.func transform or a forward-mode level (eager)."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _nested_forward_mode() -> bool:
    stack = torch._C._functorch.get_interpreter_stack() or ()
    levels = sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)
    return levels > 1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced_transform() -> bool:
    """Inside a torch.func transform, asked while tracing; Dynamo guards on the stack itself."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# ---- Functions ----


class AttentionFunction(torch.autograd.Function):
    """The eager operator: reverse, forward, mixed and repeated differentiation, and vmap."""

    @staticmethod
    def forward(*call: Any) -> tuple[Tensor, Tensor]:
        return library.forward(*call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, attn_mask, *ctx.options = inputs
        ctx.save_for_backward(query, key, value, attn_mask, *output)
        ctx.save_for_forward(query, key, value, attn_mask)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        query, key, value, attn_mask, output, lse = ctx.saved_tensors
        # A first derivative alone, the usual case, is the operator itself.
        again = torch.is_grad_enabled() or _transformed()
        run = BackwardFunction.apply if again else library.backward
        grads = run(grad_output, grad_lse, query, key, value, output, lse, attn_mask, *ctx.options)
        return *grads, *_NO_GRADS

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:
        call = Call(*ctx.saved_tensors[:4], *ctx.options)
        if tangents[3] is not None:
            raise NotImplementedError(_NO_MASK_GRADIENT)
        return reference.attention_tangent(call, Direction(*tangents[:3]))

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        call, dims, samples = Call(*args), list(in_dims[:4]), info.batch_size
        rank = _rank(call, dims)
        query = call.query
        if dims[:3] == [None, None, None]:  # the mask alone is mapped
            query, dims[0] = query.expand(samples, *query.shape), 0
        tensors = (query, call.key, call.value, call.attn_mask)
        mapped = (_lead(tensor, dim, rank) for tensor, dim in zip(tensors, dims, strict=True))
        run: Any = AttentionFunction.apply
        return run(*mapped, *call[4:]), (0, 0)


class BackwardFunction(torch.autograd.Function):
    """The backward as a function of its own.

    Output and lse count as functions of query, key and value: their part is contained in those
    derivatives.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return library.backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad_output, grad_lse, query, key, value, _, _, attn_mask, *ctx.options = inputs
        ctx.save_for_backward(grad_output, grad_lse, query, key, value, attn_mask)
        ctx.save_for_forward(grad_output, grad_lse, query, key, value, attn_mask)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> tuple[Any, ...]:
        grad_output, grad_lse, *tensors = ctx.saved_tensors
        call = Call(*tensors, *ctx.options)
        grads, output_tangent, lse_tangent = reference.backward_tangent(
            call, grad_output, grad_lse, Direction(*directions)
        )
        upstream = (
            None if grad_output is None else output_tangent,
            None if grad_lse is None else lse_tangent,
        )
        return *upstream, *grads, None, None, *_NO_GRADS

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Direction:
        grad_output, grad_lse, *tensors = ctx.saved_tensors
        call = Call(*tensors, *ctx.options)
        if tangents[7] is not None:
            raise NotImplementedError(_NO_MASK_GRADIENT)
        return reference.backward_tangent(
            call, grad_output, grad_lse, Direction(*tangents[2:5]), *tangents[:2]
        )[0]

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        grad_output, grad_lse, query, key, value, output, lse, *others = args
        call, samples = Call(query, key, value, *others), info.batch_size
        rank = _rank(call, in_dims[2:])

        # Every sample has gradients of its own: all but the mask get the new dimension, expanded
        # where not mapped.
        def lead(tensor: Tensor | None, index: int, rank: int = 0) -> Tensor | None:
            if tensor is not None and in_dims[index] is None:
                return _lead(tensor.expand(samples, *tensor.shape), 0, rank)
            return _lead(tensor, in_dims[index], rank)

        inputs = [lead(tensor, 2 + i, rank) for i, tensor in enumerate(call[:3])]
        run: Any = BackwardFunction.apply
        grads = run(
            lead(grad_output, 0),
            lead(grad_lse, 1),
            *inputs,
            lead(output, 5),
            lead(lse, 6),
            _lead(call.attn_mask, in_dims[7], rank),
            *call[4:],
        )
        # Without the ones that were inserted for the rank.
        shapes = [
            (samples, *_logical_shape(tensor, dim))
            for tensor, dim in zip(call[:3], in_dims[2:5], strict=True)
        ]
        return tuple(map(Tensor.reshape, grads, shapes)), (0, 0, 0)


class CompiledAttentionFunction(torch.autograd.Function):
    """For torch.compile and export: no jvp, which would break the graph, and no vmap."""

    @staticmethod
    def forward(*call: Any) -> tuple[Tensor, Tensor]:
        return library.forward(*call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, attn_mask, *ctx.options = inputs
        ctx.save_for_backward(query, key, value, attn_mask, *output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        query, key, value, attn_mask, output, lse = ctx.saved_tensors
        grads = library.backward(
            grad_output, grad_lse, query, key, value, output, lse, attn_mask, *ctx.options
        )
        return *grads, *_NO_GRADS


# Function.apply with a setup_context runs inspect.signature().bind() on every call, about four
# times the cost of everything else. Outside of transforms it then calls this:
_attention_apply = super(torch.autograd.Function, AttentionFunction).apply


# ---- vmap: one more leading dimension, which the operators broadcast ----


def _logical_shape(tensor: Tensor, dim: int | None) -> tuple[int, ...]:
    """The shape that the mapped function sees."""
    return tuple(size for i, size in enumerate(tensor.shape) if i != dim)


def _rank(call: Call, in_dims: Sequence[int | None]) -> int:
    """Dimensions of the output that the mapped function sees."""
    return max(len(_logical_shape(t, d)) for t, d in zip(call[:3], in_dims[:3], strict=True))


def _lead(tensor: Tensor | None, dim: int | None, rank: int) -> Tensor | None:
    """Put the mapped dimension in front, and ones behind it until `rank` dimensions follow."""
    if tensor is None or dim is None:
        return tensor
    tensor = tensor.movedim(dim, 0)
    for _ in range(rank + 1 - tensor.dim()):
        tensor = tensor.unsqueeze(1)
    return tensor
