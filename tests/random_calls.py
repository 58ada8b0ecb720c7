"""Random calls over the whole option space, for hypothesis: small sizes, options combined."""

import math
from typing import Any

import torch
from assertions import floating
from hypothesis import strategies as st
from torch import Tensor

from attention_ext.reference import Call

# around vectors (2 to 16 numbers), lane tiles (4 to 64 rows), kv tiles (48 and 96 keys)
_LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 65, 97, 130)
_WIDTHS = (0, 1, 2, 3, 4, 5, 8, 16, 17, 20, 33)
_WINDOWS = (-1, 0, 1, 3, 20, 1000)


@st.composite
def calls(draw: Any, most: int = 130) -> Call:
    """A legal call in float64, of at most `most` queries and keys; no tensor requires grad."""
    lengths = st.sampled_from([length for length in _LENGTHS if length <= most])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def maybe() -> bool:
        return draw(st.integers(0, 3)) == 0

    is_packed = draw(st.integers(0, 7)) == 0
    make = _packed_inputs if is_packed else _padded_inputs
    inputs, options, batch, heads = make(draw, randn, lengths)
    seqlen_q, seqlen_kv = inputs[0].shape[-2], inputs[1].shape[-2]
    if maybe() and not is_packed:
        options["attn_mask"] = _mask(draw, randn, (*batch, heads, seqlen_q, seqlen_kv))
    if maybe():
        shape = _broadcast(draw, batch)[draw(st.integers(0, len(batch))) :]
        options["alibi_slopes"] = randn(*([] if is_packed else shape), heads).abs()
    if maybe():
        shape = _broadcast(draw, batch)[draw(st.integers(0, len(batch))) :]
        options["sinks"] = randn(*([] if is_packed else shape), heads)
        if maybe():
            options["sinks"][..., 0] = -math.inf
    if maybe():
        if is_packed:
            keys = options["cu_seq_k"].diff()
        else:
            keys = torch.full(_broadcast(draw, batch), seqlen_kv)
        used = torch.rand(keys.shape, generator=generator) * (keys + 1)
        options["seqused_k"] = used.to(draw(st.sampled_from([torch.int32, torch.int64])))
    if maybe():
        options["dropout_p"] = draw(st.sampled_from([0.1, 0.5, 1.0]))
        # Philox reads all 64 bits
        options["seed"] = torch.tensor(draw(st.integers(-(2**63), 2**63 - 1)))
        options["shared_batch_dims"] = 0 if is_packed else draw(st.integers(0, len(batch)))
    options["window_left"] = draw(st.sampled_from(_WINDOWS)) if maybe() else -1
    options["window_right"] = draw(st.sampled_from(_WINDOWS)) if maybe() else -1
    options["softcap"] = draw(st.sampled_from([0.5, 2.0, 30.0])) if maybe() else 0.0
    options["scale"] = draw(st.sampled_from([None, None, 0.0, -0.4, 1.0]))
    options["lower_right"] = draw(st.booleans())
    options["is_causal"] = draw(st.booleans())
    call = Call(*inputs, **options)
    return call._replace(**{name: _laid_out(draw, x) for name, x in floating(call).items()})


def _laid_out(draw: Any, tensor: Tensor) -> Tensor:
    """The same values in another memory order, or between gaps that hold NaN."""
    layout = draw(st.sampled_from(["contiguous", "contiguous", "last dimension outside", "gaps"]))
    if layout == "contiguous" or tensor.dim() == 0:
        return tensor
    if layout == "last dimension outside":
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1)
    buffer = tensor.new_full([2 * size + 1 for size in tensor.shape], math.nan)
    view = buffer[(slice(1, None, 2),) * tensor.dim()]
    return view.copy_(tensor)


def _padded_inputs(draw: Any, randn: Any, lengths: Any) -> Any:
    """Inputs, options, batch dimensions, heads of the output."""
    rank = draw(st.sampled_from([2, 3, 4, 4, 4, 5]))
    sizes = st.sampled_from([1, 2, 3, 1, 2, 3, 1, 2, 3, 0])
    batch = tuple(draw(sizes) for _ in range(rank - 3))
    seqlen_q, seqlen_kv = draw(lengths), draw(lengths)
    width, value_dim = draw(st.sampled_from(_WIDTHS)), draw(st.sampled_from(_WIDTHS))
    ends = (seqlen_q, width), (seqlen_kv, width), (seqlen_kv, value_dim)
    if rank == 2:
        return [randn(*end) for end in ends], {}, (), 1
    enable_gqa = draw(st.booleans())
    if enable_gqa:
        shares = draw(st.sampled_from([(1, 1), (2, 2), (3, 3), (6, 6), (2, 4), (6, 3)]))
        groups = draw(st.integers(1, 2))
        heads = groups * math.lcm(*shares)
        all_heads = heads, heads // shares[0], heads // shares[1]
    else:
        heads = draw(st.integers(1, 3))
        all_heads = [heads if draw(st.integers(0, 3)) else 1 for _ in range(3)]
        heads = max(all_heads)
    shapes = [_broadcast(draw, batch) for _ in range(3)]
    inputs = [
        randn(*shape[draw(st.integers(0, len(shape))) if draw(st.booleans()) else 0 :], h, *end)
        for shape, h, end in zip(shapes, all_heads, ends, strict=True)
    ]
    batch = tuple(torch.broadcast_shapes(*(x.shape[:-3] for x in inputs)))
    return inputs, {"enable_gqa": enable_gqa}, batch, heads


def _packed_inputs(draw: Any, randn: Any, lengths: Any) -> Any:
    count = draw(st.integers(0, 4))
    sizes = st.lists(lengths, min_size=count, max_size=count)
    options: dict[str, Any] = {"enable_gqa": True}
    totals = []
    for name in ("q", "k"):
        offsets = torch.tensor([0, *draw(sizes)]).cumsum(0)
        options[f"max_{name}"] = int(offsets.diff().max()) if count else 0
        options[f"cu_seq_{name}"] = offsets.to(draw(st.sampled_from([torch.int32, torch.int64])))
        totals.append(int(offsets[-1]) + draw(st.sampled_from([0, 0, 2])))  # slack
    heads, groups = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1)]))
    width, value_dim = draw(st.sampled_from(_WIDTHS)), draw(st.sampled_from(_WIDTHS))
    ends = (totals[0], heads, width), (totals[1], groups, width), (totals[1], groups, value_dim)
    return [randn(*end) for end in ends], options, (count,), heads


def _mask(draw: Any, randn: Any, pairs: tuple[int, ...]) -> Tensor:
    shape = _broadcast(draw, pairs)[draw(st.integers(0, len(pairs))) :]
    mask = randn(*shape)
    kind = draw(st.sampled_from(["bool", "float", "finite", "rows"]))
    if kind == "bool":
        return mask > -0.5
    if kind == "float":
        return mask.masked_fill(mask < -0.5, -math.inf)
    if kind == "rows" and len(shape) > 1 and shape[-2] > 1:  # whole rows hidden
        mask[..., : shape[-2] // 2, :] = -math.inf
    return mask


def _broadcast(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size if draw(st.integers(0, 2)) else 1 for size in shape)
