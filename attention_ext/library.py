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
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .errors import translate, wrong_type
from .reference import CacheCall, Call, leading_shape

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

_ops = torch.ops.attention_ext
forward: Callable[..., tuple[Tensor, Tensor, Tensor]] = _ops.forward.default
backward: Callable[..., tuple[Tensor, ...]] = _ops.backward.default
# Short forms, for calls of few fields; the first returns the output alone.
SHORT = 8
forward_output: Callable[..., Tensor] = _ops.forward.output
forward_with_state: Callable[..., tuple[Tensor, Tensor]] = _ops.forward.with_state
backward_short: Callable[..., tuple[Tensor, Tensor, Tensor]] = _ops.backward.short
mask_gradient: Callable[..., Tensor] = _ops.mask_gradient.default
weights: Callable[..., Tensor] = _ops.weights.default
tangent: Callable[..., tuple[Tensor, Tensor]] = _ops.tangent.default
backward_tangent: Callable[..., tuple[Tensor, ...]] = _ops.backward_tangent.default
mask_gradient_tangent: Callable[..., Tensor] = _ops.mask_gradient_tangent.default
attention_with_kv_cache: Callable[..., tuple[Tensor, Tensor]] = _ops.attention_with_kv_cache.default
rotary: Callable[..., Tensor] = _ops.rotary.default
rms_norm: Callable[..., Tensor] = _ops.rms_norm.default
rms_norm_backward: Callable[..., tuple[Tensor, Tensor]] = _ops.rms_norm_backward.default
swiglu: Callable[..., Tensor] = _ops.swiglu.default
swiglu_backward: Callable[..., Tensor] = _ops.swiglu_backward.default
_check_forward: Callable[..., None] = _ops.check_forward.default
_check_cache: Callable[..., None] = _ops.check_cache.default
_check_rotary: Callable[..., None] = _ops.check_rotary.default
_check_rms_norm: Callable[..., None] = _ops.check_rms_norm.default
_check_swiglu: Callable[..., None] = _ops.check_swiglu.default
cpu_capability: Callable[[], str] = _ops.cpu_capability.default


# ---- autocast ----


def autocast(call: Sequence[Any]) -> Sequence[Any]:
    """Cast the inputs as autocast does for torch's function: a float mask too, float64 left alone.

    Slopes and sinks, of which torch's function has none, stay in float32 or become that: they are
    added in float32. Plain torch casts outside of the operator, so that casts are differentiated
    like everything else.
    """
    device = call[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return call
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)

    tensors = [cast(tensor, dtype) for tensor in call[:4]]
    if len(call) <= 4:
        return tensors
    if len(call) <= 8:
        return *tensors, *call[4:]
    full = Call(*call)
    slopes, sinks = cast(full.alibi_slopes, torch.float32), cast(full.sinks, torch.float32)
    query, key, value, mask = tensors
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value, "attn_mask": mask}
    return full._replace(**inputs, alibi_slopes=slopes, sinks=sinks)


# ---- fake kernels ----


def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(query, key, value, *options, **named)
    check(call)
    rows = _rows(call)
    output = _empty_ordered_like(query, (*rows, value.shape[-1]))
    lse = query.new_empty(rows, dtype=_sum_dtype(query))
    return output, lse, query.new_empty((*rows, 2), dtype=lse.dtype)


def _forward_output_fake(*call: Any, **named: Any) -> Tensor:
    return _forward_fake(*call, **named)[0]


def _forward_with_state_fake(*call: Any, **named: Any) -> tuple[Tensor, Tensor]:
    output, _, state = _forward_fake(*call, **named)
    return output, state


def _weights_fake(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, *options: Any, **named: Any
) -> Tensor:
    rows = _rows(Call(query, key, value, *options, **named))
    return query.new_empty((*rows, key.shape[-2]))


def _backward_fake(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(*arguments[3:6], *arguments[8:], **named)


def _backward_short_fake(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(*arguments[3:], **named)[:3]


def _backward_tangent_fake(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(*arguments[12:15], *arguments[17:], **named)


def _gradients_fake(*call: Any, **named: Any) -> tuple[Tensor, ...]:
    full = Call(*call, **named)
    grads = [_empty_ordered_like(tensor, tuple(tensor.shape)) for tensor in full[:3]]
    for tensor in (full.alibi_slopes, full.sinks):
        grads.append(full.query.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape))
    return tuple(grads)


def _mask_gradient_fake(*arguments: Any, **named: Any) -> Tensor:
    return _mask_like(arguments[8] if len(arguments) > 8 else named["attn_mask"])


def _mask_gradient_tangent_fake(*arguments: Any, **named: Any) -> Tensor:
    return _mask_like(arguments[17] if len(arguments) > 17 else named["attn_mask"])


def _mask_like(attn_mask: Tensor) -> Tensor:
    return _empty_ordered_like(attn_mask, tuple(attn_mask.shape))


def _tangent_fake(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    query, output = arguments[6], arguments[9]
    moved = _empty_ordered_like(output, tuple(output.shape))
    return moved, query.new_empty(output.shape[:-1], dtype=_sum_dtype(query))


def _attention_with_kv_cache_fake(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    call = CacheCall(*arguments, **named)
    check_cache(call)
    rows = tuple(call.query.shape[:-1])
    output = _empty_ordered_like(call.query, (*rows, call.value_cache.shape[-1]))
    return output, call.query.new_empty(rows, dtype=_sum_dtype(call.query))


def _rotary_fake(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    position_dim: int = -2,
) -> Tensor:
    tensors = {"x": x, "cos": cos, "sin": sin, "positions": positions}
    _check("apply_rotary", tensors, 3, _check_rotary, (position_dim,))
    return _empty_ordered_like(x, tuple(x.shape))


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check("rms_norm", {"x": x, "weight": weight}, 2, _check_rms_norm, (eps,))
    return _empty_ordered_like(x, tuple(x.shape))


def _rms_norm_backward_fake(
    grad_output: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _rms_norm_fake(x, weight, eps), _empty_ordered_like(weight, tuple(weight.shape))


def _swiglu_fake(x: Tensor) -> Tensor:
    _check("swiglu", {"x": x}, 1, _check_swiglu, ())
    return _empty_ordered_like(x, (*x.shape[:-1], x.shape[-1] // 2))


def _swiglu_backward_fake(grad_output: Tensor, x: Tensor) -> Tensor:
    return _empty_ordered_like(x, tuple(x.shape))


_FAKES: dict[str, Callable[..., Any]] = {
    "forward": _forward_fake,
    "forward.output": _forward_output_fake,
    "forward.with_state": _forward_with_state_fake,
    "weights": _weights_fake,
    "backward": _backward_fake,
    "backward.short": _backward_short_fake,
    "mask_gradient": _mask_gradient_fake,
    "tangent": _tangent_fake,
    "backward_tangent": _backward_tangent_fake,
    "mask_gradient_tangent": _mask_gradient_tangent_fake,
    "attention_with_kv_cache": _attention_with_kv_cache_fake,
    "rotary": _rotary_fake,
    "rms_norm": _rms_norm_fake,
    "rms_norm_backward": _rms_norm_backward_fake,
    "swiglu": _swiglu_fake,
    "swiglu_backward": _swiglu_backward_fake,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"attention_ext::{_name}", _fake)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


_CHECKED = (
    "query", "key", "value", "attn_mask", "alibi_slopes", "sinks", "seqused_k", "cu_seq_q",
    "cu_seq_k",
)  # fmt: skip


def check(call: Call) -> None:
    """Give a wrong call the text that the real operator gives it."""
    function = "scaled_dot_product_attention" if call.cu_seq_q is None else "varlen_attn"
    tensors = {name: getattr(call, name) for name in _CHECKED}
    numbers = (call.window_left, call.window_right, call.softcap, call.dropout_p)
    _check(function, tensors, 3, _check_forward, (call.enable_gqa, *numbers))


def check_cache(call: CacheCall) -> None:
    """The same for `attention_with_kv_cache`; what lengths and tables hold is not looked at."""
    numbers = (call.window_left, call.window_right, call.softcap)
    tensors = {
        name: x
        for name, x in call._asdict().items()
        if name not in ("rotary_interleaved", "window_left", "window_right", "softcap", "scale")
    }
    _check("attention_with_kv_cache", tensors, 4, _check_cache, numbers)


def _check(
    function: str,
    tensors: dict[str, Tensor | None],
    required: int,
    operator: Callable[..., None],
    numbers: tuple[Any, ...],
) -> None:
    """Check shapes and dtypes; the first tensors are required.

    Symbolic sizes are checked by their example, which adds no guard.
    """
    always = list(tensors)[:required]
    given = {name: x for name, x in tensors.items() if x is not None or name in always}
    if error := wrong_type(function, given):
        raise error
    present = [x for x in given.values() if x is not None]
    if len({tensor.device for tensor in present}) > 1:
        raise translate(RuntimeError("devices"), function, given)
    sizes = []
    for tensor in present:
        example = _example_sizes(tensor.shape)
        if example is None:
            return  # a size that depends on data: the real operator checks it
        sizes += example
    ranks = [-1 if tensor is None else tensor.dim() for tensor in tensors.values()]
    dtypes = [-1 if x is None else _scalar_type(x.dtype) for x in tensors.values()]
    try:
        with _disable_current_modes():
            operator(ranks, sizes, dtypes, *numbers)
    except RuntimeError as error:
        raise translate(error, function, given) from None


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


def _rows(call: Call) -> tuple[int, ...]:
    """(*B, Hq, L); packed (T, Hq)."""
    if call.cu_seq_q is not None:
        return tuple(call.query.shape[:2])
    return (*leading_shape(call), call.query.shape[-2])


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
