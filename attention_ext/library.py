"""The compiled library: loading it, its operators, and what torch wants to know about them.

Handles of the operators are bound here once. The operators are private: called by themselves they
have no derivative, and torch drops tangents without a word. `autograd.py` is the way in.

Beside each operator stand its fake kernel (shapes, dtypes and memory order without data, for
torch.compile, export and the meta device) and the rule of autocast. Fake kernels never branch on a
size that is not known while tracing.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .errors import translate

LIBRARY_PATH = Path(__file__).parent / "_C.so"


def _load() -> None:
    try:
        torch.ops.load_library(LIBRARY_PATH)  # type: ignore[no-untyped-call]
    except OSError as error:
        # torch hides the linker's message in the cause
        reason = str(error.__cause__ or error) if LIBRARY_PATH.is_file() else "no such file"
        raise ImportError(
            f"attention_ext: expected its compiled library at {LIBRARY_PATH}, got: {reason}. "
            "Build it with `python setup.py build_ext --inplace` in a source tree, or install the "
            "package with `pip install .`"
        ) from error


_load()

forward: Callable[..., tuple[Tensor, Tensor]] = torch.ops.attention_ext.forward.default
backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.attention_ext.backward.default
_check_forward: Callable[..., None] = torch.ops.attention_ext.check_forward.default
cpu_capability: Callable[[], str] = torch.ops.attention_ext.cpu_capability.default


# ---- autocast ----


def autocast(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cast the inputs as autocast does for torch's function: a float mask too, float64 left alone.

    Plain torch casts outside of the operator, so that they are differentiated like everything else.
    """
    device = query.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return query, key, value, attn_mask
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    mask = None if attn_mask is None else cast(attn_mask)
    return cast(query), cast(key), cast(value), mask


# ---- fake kernels ----


def _forward_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    lower_right: bool = False,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    leading = _leading_shape(query, key, value, enable_gqa)
    rows = (*leading, query.shape[-2])
    output = _empty_ordered_like(query, (*rows, value.shape[-1]))
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return output, query.new_empty(rows, dtype=lse_dtype)


def _backward_fake(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: object,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [_empty_ordered_like(tensor, tuple(tensor.shape)) for tensor in (query, key, value)]
    return grads[0], grads[1], grads[2]


torch.library.register_fake("attention_ext::forward", _forward_fake)
torch.library.register_fake("attention_ext::backward", _backward_fake)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> None:
    """Give a wrong call the text that the real operator gives it.

    Symbolic sizes are checked by their example, which adds no guard.
    """
    arguments = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    tensors = [tensor for tensor in arguments.values() if tensor is not None]
    if len({tensor.device for tensor in tensors}) > 1:
        raise translate(RuntimeError("devices"), "scaled_dot_product_attention", arguments)
    shapes = [_example_sizes(tensor.shape) for tensor in tensors]
    if None in shapes:
        return  # a size that depends on data: the real operator checks it
    dtypes = [_scalar_type(tensor.dtype) for tensor in tensors]
    if attn_mask is None:
        shapes, dtypes = [*shapes, None], [*dtypes, -1]
    try:
        with _disable_current_modes():
            _check_forward(*shapes, *dtypes, scale, is_causal, enable_gqa)
    except RuntimeError as error:
        raise translate(error, "scaled_dot_product_attention", arguments) from None


def _example_sizes(shape: torch.Size) -> list[int] | None:
    """The sizes as numbers, without a guard on any of them; None where one has no number yet."""
    sizes = []
    for size in shape:
        hint = size.node.hint if isinstance(size, torch.SymInt) else size
        if hint is None:
            return None
        sizes.append(int(hint))
    return sizes


@functools.cache
def _scalar_type(dtype: torch.dtype) -> int:
    """The number of a dtype in C++."""
    with _disable_current_modes():
        return int(torch.ops.prim.dtype.default(torch.empty(0, dtype=dtype)))


def _leading_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> torch.Size:
    """(*B, Hq)."""
    shapes = [tuple(tensor.shape[:-2]) for tensor in (query, key, value)]
    if enable_gqa:  # the heads are the query's: key and value take part as if they had one
        shapes[1:] = [(*shape[:-1], 1) if shape else shape for shape in shapes[1:]]
    return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _empty_ordered_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Uninitialised, dense, with its dimensions in memory in the order of `tensor`'s.

    What `torch.empty_like(tensor)` does, for a last dimension that may differ in size; contiguous
    where `tensor` is broadcast. The rule of `empty_laid_out_like` in csrc/pack_params.cpp.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    sizes, strides = tensor.shape, tensor.stride()
    same_rows = len(sizes) == len(shape) and all(
        guard_or_true(a == b) for a, b in zip(sizes[:-1], shape[:-1], strict=True)
    )
    expanded = any(
        guard_or_false(stride == 0) and guard_or_true(size > 1)
        for size, stride in zip(sizes, strides, strict=True)
    )
    if expanded or not same_rows:
        return tensor.new_empty(shape)

    def outside(a: int, b: int) -> bool:
        if guard_or_true(strides[a] != strides[b]):
            return guard_or_false(strides[a] > strides[b])
        return guard_or_false(sizes[a] > sizes[b])

    ones = [dim for dim in range(len(sizes)) if guard_or_false(sizes[dim] == 1)]
    order: list[int] = []  # the other dimensions, the outermost in memory first
    for dim in range(len(sizes)):
        if dim not in ones:
            place = len(order)
            while place > 0 and outside(dim, order[place - 1]):
                place -= 1
            order.insert(place, dim)
    order = ones + order
    return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)
