"""Rotary position embedding as one operator, with its derivatives."""

from typing import Any

import torch
from torch import Tensor

from . import library, reference
from .autograd import is_transformed
from .errors import TRANSLATED, ArgumentError, translate, wrong_type
from .fused import in_front, make_layer, run

# the arguments of the operator
Arguments = tuple[Tensor, Tensor, Tensor, Tensor | None, bool, bool, int]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Turn the pairs of every row by the angles of its position.

    Row i of x stands at position p; its first R columns, R being twice the tables' width, are pairs
    (a, b), of which number j turns by the angle with cosine ``cos[p, j]`` and sine ``sin[p, j]``:

        (a, b) -> (a cos - b sin, b cos + a sin)

    Columns beyond R are left alone. Half types are computed in float32 and rounded once.

    The gradient is the rotation backwards, by the same kernel; it flows to x only. All orders of
    derivatives, forward mode, `torch.func`, vmap, torch.compile and export work.

    Args:
        x: (..., L, D), float64, float32, bfloat16 or float16, any strides.
        cos: (positions, R/2), R <= D, of float32, float64 or x's dtype.
        sin: (positions, R/2), the same.
        positions: (L,), or (B, L) with B the first dimension of x, int32 or int64: the position of
            each row. None: 0 to L - 1.
        interleaved: Pairs are neighbours (2j, 2j + 1) instead of halves (j, j + R/2).

    Returns:
        A tensor of x's shape and dtype, laid out as `torch.empty_like(x)`.

    Raises:
        ArgumentError: A wrong shape, a position outside of the tables, or tables that require grad
            while grad mode is on.
        ArgumentTypeError: A wrong type or dtype.
        NotImplementedError: Complex, sparse and nested tensors, other devices than the CPU.

    Equivalent to, with halves and R = D:
        ```
        a, b = x.chunk(2, -1)
        c, s = cos[positions], sin[positions]
        torch.cat([a * c - b * s, b * c + a * s], -1)
        ```

    Example:
        >>> angles = torch.tensor([[0.0], [torch.pi / 2]])
        >>> x = torch.tensor([[1.0, 0.0, 5.0], [1.0, 0.0, 5.0]])
        >>> apply_rotary(x, angles.cos(), angles.sin()).round(decimals=4).abs()
        tensor([[1., 0., 5.],
                [0., 1., 5.]])
    """
    try:
        if interleaved is not False and (
            error := wrong_type("apply_rotary", {"interleaved": interleaved})
        ):
            raise error  # the dispatcher would make something of it
        if torch.is_grad_enabled():
            _check_gradients(cos, sin)
        return rotary(x, cos, sin, positions, interleaved)
    except TRANSLATED as raised:
        if torch.compiler.is_compiling():
            raise  # Dynamo wraps it in a type of its own
        arguments = {"x": x, "cos": cos, "sin": sin, "positions": positions}
        raise translate(raised, "apply_rotary", arguments) from None


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
    position_dim: int = -2,
) -> Tensor:
    """`apply_rotary` without translated errors, along any dimension of x but the last."""
    return run(_LAYER, x.requires_grad, x, cos, sin, positions, interleaved, False, position_dim)


def _check_gradients(cos: Tensor, sin: Tensor) -> None:
    if cos.requires_grad or sin.requires_grad:
        name = "cos" if cos.requires_grad else "sin"
        raise ArgumentError(
            f"apply_rotary: expected tables without gradient, got {name} that requires grad: "
            "detach it"
        )


class _CompiledRotary(torch.autograd.Function):
    """For torch.compile and export: no jvp, which would break the graph, and no vmap."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return library.rotary(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Arguments, output: Tensor) -> None:
        _, cos, sin, positions, ctx.interleaved, ctx.inverse, ctx.position_dim = inputs
        ctx.save_for_backward(cos, sin, positions)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return library.rotary(*_turned(ctx, grad, not ctx.inverse)), *_NO_GRADS


class _Rotary(_CompiledRotary):
    """Eager: the rotation is linear, so that each of its derivatives is a rotation again."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Arguments, output: Tensor) -> None:
        _CompiledRotary.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:4])
        ctx.set_materialize_grads(False)  # a table without tangent is then None

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, *_NO_GRADS
        # A first derivative alone, the usual case, is the operator itself.
        again = torch.is_grad_enabled() or is_transformed()
        operator: Any = _Rotary.apply if again else library.rotary
        return operator(*_turned(ctx, grad, not ctx.inverse)), *_NO_GRADS

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *of_tables: Any) -> Tensor:
        if of_tables[0] is not None or of_tables[1] is not None:
            raise ArgumentError("apply_rotary: expected tables without tangent, got one with it")
        turned: Tensor = _Rotary.apply(*_turned(ctx, tangent, ctx.inverse))  # type: ignore[no-untyped-call]
        return turned

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        samples, (x, cos, sin, positions, *others) = info.batch_size, arguments
        of_x, of_cos, of_sin, of_positions = in_dims[:4]
        x = in_front(x, of_x, samples)
        if positions is not None and (of_positions is not None or positions.dim() > 1):
            positions = in_front(positions, of_positions, samples)
        apply: Any = _Rotary.apply
        if of_cos is None and of_sin is None:
            return apply(x, cos, sin, positions, *others), 0
        cos, sin = in_front(cos, of_cos, samples), in_front(sin, of_sin, samples)
        shared = (
            [None] * samples if positions is None else in_front(arguments[3], of_positions, samples)
        )
        each = zip(x, cos, sin, shared, strict=True)
        return torch.stack([apply(*given, *others) for given in each]), 0


_NO_GRADS = (None,) * 6


def _turned(ctx: Any, x: Tensor, inverse: bool) -> Arguments:
    """The arguments that turn another tensor by the same angles."""
    return x, *ctx.saved_tensors, ctx.interleaved, inverse, ctx.position_dim


_LAYER = make_layer(library.rotary, _Rotary, _CompiledRotary, reference.rotary)
