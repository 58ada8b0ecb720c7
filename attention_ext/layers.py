"""RMSNorm and SwiGLU as one operator each, with their derivatives.

The first derivative runs on a kernel. Second order and forward mode are the formulas below in plain
torch, which stay differentiable.
"""

from typing import Any

import torch
from torch import Tensor

from . import library
from .autograd import is_transformed
from .errors import TRANSLATED, translate
from .fused import in_front, make_layer, run
from .reference import widen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last dimension: `torch.nn.functional.rms_norm`.

        y = x / sqrt(mean(x^2) + eps) * weight

    Half types are computed in float32 and rounded once.

    Args:
        x: (..., width), float64, float32, bfloat16 or float16, any strides.
        weight: (width,), float32 or x's dtype.
        eps: At least 0.

    Returns:
        A tensor of x's shape and dtype, laid out as `torch.empty_like(x)`.

    Raises:
        ArgumentError: A wrong shape or number.
        ArgumentTypeError: A wrong type or dtype.

    Example:
        >>> rms_norm(torch.tensor([3.0, 3.0]), torch.tensor([1.0, 2.0]), 0.0)
        tensor([1., 2.])
    """
    try:
        return run(_RMS_NORM, x.requires_grad or weight.requires_grad, x, weight, eps)
    except TRANSLATED as raised:
        if torch.compiler.is_compiling():
            raise  # Dynamo wraps it in a type of its own
        raise translate(raised, "rms_norm", {"x": x, "weight": weight, "eps": eps}) from None


def swiglu(x: Tensor) -> Tensor:
    """Gated linear unit with SiLU: `silu(gate) * up` for `gate, up = x.chunk(2, -1)`.

        y = gate / (1 + exp(-gate)) * up

    Half types are computed in float32 and rounded once.

    Args:
        x: (..., 2 * width), float64, float32, bfloat16 or float16, any strides: the gate, then up.

    Returns:
        (..., width) in x's dtype, its dimensions in memory as x's are.

    Raises:
        ArgumentError: A wrong shape.
        ArgumentTypeError: A wrong type or dtype.

    Example:
        >>> swiglu(torch.tensor([0.0, 100.0, 5.0, 2.0]))
        tensor([  0., 200.])
    """
    try:
        return run(_SWIGLU, x.requires_grad, x)
    except TRANSLATED as raised:
        if torch.compiler.is_compiling():
            raise  # Dynamo wraps it in a type of its own
        raise translate(raised, "swiglu", {"x": x}) from None


# ---- the formulas, in plain torch ----


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x^ = x r and r = 1 / sqrt(mean(x^2) + eps)."""
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * r, r


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (_normalised(widen(x), eps)[0] * widen(weight)).to(x.dtype)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    normal, r = _normalised(widen(x), eps)
    weighted = widen(grad) * widen(weight)
    grad_x = r * (weighted - normal * (weighted * normal).mean(-1, keepdim=True))
    grad_weight = (widen(grad) * normal).sum(tuple(range(x.dim() - 1)))
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def _rms_norm_tangent(
    x_tangent: Tensor | None, weight_tangent: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> Tensor:
    normal, r = _normalised(widen(x), eps)
    total = torch.zeros_like(normal)
    if x_tangent is not None:
        moved = widen(x_tangent)
        turned = moved - normal * (normal * moved).mean(-1, keepdim=True)
        total = total + r * turned * widen(weight)
    if weight_tangent is not None:
        total = total + normal * widen(weight_tangent)
    return total.to(x.dtype)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = widen(x).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def _swiglu_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The derivatives of y by gate and by up."""
    gate, up = widen(x).chunk(2, -1)
    s = torch.sigmoid(gate)
    return up * s * (1 + gate * (1 - s)), gate * s


def _swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.cat([widen(grad) * slope for slope in _swiglu_slopes(x)], -1).to(x.dtype)


def _swiglu_tangent(tangent: Tensor, x: Tensor) -> Tensor:
    pairs = zip(widen(tangent).chunk(2, -1), _swiglu_slopes(x), strict=True)
    gate, up = (part * slope for part, slope in pairs)
    return (gate + up).to(x.dtype)


# ---- derivatives; the compiled Functions have no jvp, which would break the graph ----


def _differentiable() -> bool:
    """Whether a backward may itself be differentiated or transformed."""
    return torch.is_grad_enabled() or is_transformed()


class _CompiledRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return library.rms_norm(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *library.rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps), None


class _RmsNorm(_CompiledRmsNorm):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _CompiledRmsNorm.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:2])
        ctx.set_materialize_grads(False)  # no zeros where only one input has a tangent

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        gradients = _rms_norm_backward if _differentiable() else library.rms_norm_backward
        return *gradients(grad, x, weight, ctx.eps), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        x, weight = ctx.saved_tensors
        return _rms_norm_tangent(tangents[0], tangents[1], x, weight, ctx.eps)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, int]:
        x = in_front(x, in_dims[0], info.batch_size)
        apply: Any = _RmsNorm.apply
        if in_dims[1] is None:
            return apply(x, weight, eps), 0
        weight = weight.movedim(in_dims[1], 0)  # (samples, width)
        return _rms_norm(x, weight.reshape(len(weight), *[1] * (x.dim() - 2), -1), eps), 0


class _CompiledSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return library.swiglu(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return library.swiglu_backward(grad, *ctx.saved_tensors)


class _Swiglu(_CompiledSwiglu):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gradient = _swiglu_backward if _differentiable() else library.swiglu_backward
        return gradient(grad, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return _swiglu_tangent(tangent, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        apply: Any = _Swiglu.apply
        return apply(x.movedim(in_dims[0], 0)), 0


_RMS_NORM = make_layer(library.rms_norm, _RmsNorm, _CompiledRmsNorm, _rms_norm)
_SWIGLU = make_layer(library.swiglu, _Swiglu, _CompiledSwiglu, _swiglu)
