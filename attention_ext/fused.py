"""Which way a fused layer takes: the raw operator wherever nothing asks for more.

    run(layer, …) -> layer.operator      nothing is differentiated or transformed
                  -> layer.function      eager: derivatives and vmap
                  -> layer.compiled      while torch.compile or export traces
                  -> layer.definition    nested forward mode, torch.func inside torch.compile

As `paths.py` for attention.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .autograd import is_transformed
from .paths import nested_forward_mode, traced_transform


class Layer(NamedTuple):
    """The forms of one operator; all take the same arguments and give one tensor."""

    operator: Callable[..., Tensor]  # the kernel, without derivatives
    function: Any  # a torch.autograd.Function with backward, jvp and vmap
    compiled: Any  # one with a backward alone
    definition: Callable[..., Tensor]  # plain torch
    apply: Any  # function.apply without the inspection of its arguments


def make_layer(
    operator: Callable[..., Tensor], function: Any, compiled: Any, definition: Any
) -> Layer:
    """Put the forms together."""
    apply = super(torch.autograd.Function, function).apply
    return Layer(operator, function, compiled, definition, apply)


def run(layer: Layer, requires_grad: bool, *arguments: Any) -> Tensor:
    """Call a layer; `requires_grad`: whether an input asks for a gradient."""
    needs_grad = requires_grad and torch.is_grad_enabled()
    result: Tensor
    if torch.compiler.is_compiling():
        if traced_transform() or forward_ad._current_level >= 0:
            return layer.definition(*arguments)
        result = layer.compiled.apply(*arguments) if needs_grad else layer.operator(*arguments)
        return result
    if is_transformed():
        if nested_forward_mode():  # where torch gives wrong values for a Function's jvp
            return layer.definition(*arguments)
        result = layer.function.apply(*arguments)
        return result
    if needs_grad:
        result = layer.apply(*arguments)
        return result
    return layer.operator(*arguments)


def in_front(tensor: Tensor, dim: int | None, samples: int) -> Tensor:
    """A mapped tensor with its samples in front; one that all share, expanded."""
    return tensor.expand(samples, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
