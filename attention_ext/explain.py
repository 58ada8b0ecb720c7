"""Which kernel a call takes, in words."""

import math
from typing import Any

import torch

from . import library, paths, reference
from .arguments import UNLIMITED, is_lower_right, options_of, resolve_bias
from .errors import TRANSLATED, translate, wrong_type
from .reference import Call

# csrc/cpu: vec_*.h (bytes of a vector, vectors of a lane tile), few_rows.inc.h (keys of a chunk),
# parallel.h (multiply-adds that a second thread is worth)
_VECTORS = {"baseline": (16, 2), "avx2": (32, 2), "avx512": (64, 4)}
_CHUNK = 512
_SERIAL_WORK = 5e5


def explain(  # noqa: D417 (its arguments are those of another)
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
    *,
    causal_variant: Any = "upper_left",
    window_size: Any = UNLIMITED,
    softcap: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    seqused_k: Any = None,
    return_lse: Any = False,
    return_weights: Any = False,
) -> str:
    """Say which kernel a call of `scaled_dot_product_attention` takes, on how many threads and why.

    Nothing is computed, read or drawn. A wrong call raises what the call itself would raise, except
    for what only the numbers in `seqused_k` show.

    Args:
        query: As all arguments, those of `scaled_dot_product_attention`.

    Returns:
        Sentences, for a person to read: their words may change.

    Example:
        >>> query, key = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 500, 64)
        >>> print(explain(query, key, key, enable_gqa=True))  # doctest: +ELLIPSIS
        The few-rows kernel of the ... instruction set: ...
    """
    given = dict(locals())
    for name in ("causal_variant", "return_lse", "return_weights"):
        given.pop(name)
    try:
        if error := wrong_type("scaled_dot_product_attention", given):
            raise error
        lower_right = is_lower_right(causal_variant)
        call = Call(query, key, value, attn_mask, is_causal, scale, enable_gqa, lower_right)
        options = options_of(query, window_size, softcap, 0.0, alibi_slopes, sinks, seqused_k)
        call = resolve_bias(Call(*call[:8], *options))._replace(dropout_p=dropout_p)
        library.check(call)
    except TRANSLATED as raised:
        raise translate(raised, "scaled_dot_product_attention", given) from None
    if query.device.type == "meta":
        return "No kernel: tensors on the meta device have shapes only."
    if paths.nested_forward_mode():
        return (
            "Plain torch operations, with L x S numbers per head: forward mode is nested here, "
            "where torch gives wrong values for the tangent of a kernel."
        )
    if 0 in reference.leading_shape(call) or query.shape[-2] == 0:
        return "No kernel: there is no row to compute."
    return " ".join([*_forward(call), _derivatives(call, return_weights)])


def _forward(call: Call) -> list[str]:
    heads = reference.leading_shape(call)
    num_heads = heads[-1] if heads else 1
    shares = [num_heads // (x.shape[-3] if x.dim() > 2 else 1) for x in (call.key, call.value)]
    together = math.gcd(*shares)  # query heads that read one key head and one value head
    rows, units = together * call.query.shape[-2], math.prod(heads) // together
    capability = library.cpu_capability()
    vector_bytes, vectors = _VECTORS[capability]
    width = vector_bytes // (8 if call.query.dtype == torch.float64 else 4)
    seqlen_kv = call.key.shape[-2]
    few = rows <= width
    tasks = units * math.ceil((seqlen_kv if few else rows) / (_CHUNK if few else width * vectors))
    kernel = (
        f"The {'few-rows' if few else 'tiled'} kernel of the {capability} instruction set: {rows} "
        f"row{'s' * (rows > 1)} ({together} head{'s' * (together > 1)} of {call.query.shape[-2]}) "
        f"read the same keys, and a vector holds {width}."
    )
    causal = call.is_causal or call.window_right != UNLIMITED[1]
    work = rows * units * seqlen_kv * (call.query.shape[-1] + call.value.shape[-1])
    return [kernel, _threads(work / 2 if causal else work, max(tasks, 1))]


def _threads(work: float, tasks: int) -> str:
    available = torch.get_num_threads()
    if work < _SERIAL_WORK:
        return f"One thread: {work:.2g} multiply-adds are not worth a second one."
    used = min(available, tasks)
    return (
        f"{used} of {available} thread{'s' * (available > 1)}: {work:.2g} multiply-adds in at most "
        f"{tasks} piece{'s' * (tasks > 1)}."
    )


def _derivatives(call: Call, return_weights: bool) -> str:
    mask = call.attn_mask
    sentences = []
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        sentences.append("The gradient of the mask takes a kernel of its own.")
    if return_weights:
        sentences.append(
            "The weights take a second pass and L x S numbers per head; through them, second "
            "derivatives and forward mode go through plain torch operations."
        )
    sentences.append(
        "First and second derivatives and forward mode run on kernels; nested forward mode, third "
        "derivatives and torch.func inside torch.compile in plain torch operations."
    )
    return " ".join(sentences)
