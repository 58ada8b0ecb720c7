"""Attention over packed sequences."""

from typing import Any, Protocol

import torch
from torch import Tensor

from . import paths
from .arguments import UNLIMITED, options_of
from .errors import TRANSLATED, ArgumentError, ArgumentTypeError, translate, wrong_type


class AuxRequest(Protocol):
    """What `torch.nn.attention.varlen.AuxRequest` has."""

    @property
    def lse(self) -> bool:
        """Whether to return lse."""


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = UNLIMITED,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over packed sequences: each sequence attends to itself, nothing is padded.

    The arguments up to `num_splits` are those of `torch.nn.attention.varlen.varlen_attn`, with its
    names and meaning, here on the CPU; the others are the score options of
    `scaled_dot_product_attention`. Sequence n is rows cu_seq_q[n] to cu_seq_q[n + 1] of the query
    and rows cu_seq_k[n] to cu_seq_k[n + 1] of key and value. The result is that of
    `scaled_dot_product_attention(..., causal_variant="lower_right")` for each sequence on its own,
    gradients included. Empty sequences are legal, and so are slack rows beyond the last offset:
    they give 0 and receive 0.

    First and second order and forward mode run on compiled kernels; `vmap` calls them once for
    every sample, since packed sequences have no leading dimension.

    Args:
        query: (T, Hq, D), all sequences one after the other.
        key: (Tk, Hkv, D); with `block_table` (pages, page size, Hkv, D).
        value: (Tk, Hkv, Dv); with `block_table` (pages, page size, Hkv, Dv).
        cu_seq_q: (N + 1,), int32 or int64: where sequences begin, from 0 on, never decreasing.
        cu_seq_k: (N + 1,), the same for key and value; None with `block_table`.
        max_q: At least the longest sequence of queries. Under torch.compile pass a bound that
            stays the same: each value compiles anew.
        max_k: The same for keys.
        return_aux: With `lse` true (`torch.nn.attention.varlen.AuxRequest(lse=True)`) return lse.
        scale: Factor on the dot products; None: 1 / sqrt(D).
        window_size: (left, right) around the position of the query, which counts from the end: the
            last query stands at the last key. (-1, 0) is causal; -1 is without a limit.
        enable_gqa: Hkv divides Hq, head h reads key and value head h // (Hq // Hkv).
        seqused_k: (N,), how many keys of each sequence are in use. For inference, as in torch.
        block_table: (N, pages per sequence), int32: which pages hold the keys of a sequence, in
            order; needs `seqused_k`, and entries beyond the last page in use are not read. For
            inference. Pages are gathered into one packed tensor for every call, which takes memory
            for N times as many keys as `max_k`.
        num_splits: A hint that changes nothing here: results never depend on a split.
        softcap: See `scaled_dot_product_attention`, as the following.
        alibi_slopes: (Hq,).
        sinks: (Hq,).
        dropout_p: Probability of dropping a weight.

    Returns:
        The output, (T, Hq, Dv) in the query's dtype. If asked for, also lse, (Hq, T) in float32
        (float64 for float64): transposed, as torch's operator returns it.

    Raises:
        ArgumentError: A wrong shape or number, offsets that decrease or a page that does not exist.
        ArgumentTypeError: A wrong type or dtype.

    Example:
        >>> documents = [torch.randn(length, 4, 16) for length in (3, 5)]
        >>> packed, offsets = torch.cat(documents), torch.tensor([0, 3, 8])
        >>> lengths = offsets, offsets, 5, 5
        >>> output = varlen_attn(packed, packed, packed, *lengths, window_size=(-1, 0))
        >>> first = documents[0].transpose(0, 1)  # (heads, length, width)
        >>> from attention_ext import scaled_dot_product_attention
        >>> alone = scaled_dot_product_attention(first, first, first, is_causal=True)
        >>> torch.testing.assert_close(output[:3], alone.transpose(0, 1))
    """
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "cu_seq_q": cu_seq_q,
        "cu_seq_k": cu_seq_k,
        "max_q": max_q,
        "max_k": max_k,
        "scale": scale,
        "window_size": window_size,
        "enable_gqa": enable_gqa,
        "seqused_k": seqused_k,
        "block_table": block_table,
        "num_splits": num_splits,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "dropout_p": dropout_p,
    }
    try:
        if error := wrong_type("varlen_attn", arguments):
            raise error
        _check_inference(arguments)
        if block_table is not None:
            key, value, cu_seq_k, max_k = _gather_pages(key, value, block_table, seqused_k, max_k)
        if cu_seq_k is None:
            raise ArgumentError(
                "varlen_attn: expected cu_seq_k to be a tensor of offsets, or a block_table and "
                "seqused_k in its place, got None"
            )
        call = query, key, value, None, False, scale, enable_gqa, True
        options = options_of(query, window_size, softcap, dropout_p, alibi_slopes, sinks, seqused_k)
        sequences = 0, cu_seq_q, cu_seq_k, max_q, max_k
        output, lse, _ = paths.attention((*call, *options, *sequences))
    except TRANSLATED as raised:
        if torch.compiler.is_compiling():
            raise  # Dynamo wraps it in a type of its own
        raise translate(raised, "varlen_attn", arguments) from None
    if return_aux is not None and return_aux.lse:
        return output, lse.transpose(0, 1)
    return output


def _check_inference(arguments: dict[str, Any]) -> None:
    for name in ("block_table", "seqused_k"):
        if arguments[name] is None or not torch.is_grad_enabled():
            continue
        for learned in ("query", "key", "value", "alibi_slopes", "sinks"):
            if arguments[learned] is not None and arguments[learned].requires_grad:
                raise ArgumentError(
                    f"varlen_attn: expected inputs without gradient beside {name}, got {learned} "
                    f"that requires grad: {name} is an inference-only parameter, call under "
                    "torch.no_grad()"
                )


def _gather_pages(
    key: Tensor, value: Tensor, block_table: Tensor, seqused_k: Tensor | None, max_k: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Copy the pages in use into packed sequences of one length.

    Returns:
        Key and value, (N * length, Hkv, D), the offsets (N + 1,), and the length.
    """
    _check_pages(key, value, block_table, seqused_k)
    assert seqused_k is not None
    pages, page_size = key.shape[:2]
    table = block_table[:, : -(-max_k // page_size)]
    place = torch.arange(table.shape[1], device=table.device)
    used = place < (seqused_k.unsqueeze(-1) + (page_size - 1)) // page_size
    wrong = used & ((table < 0) | (table >= pages))
    if not torch.compiler.is_compiling() and bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise ArgumentError(
            f"varlen_attn: expected block_table to hold page indices from 0 to {pages - 1}, got "
            f"{int(table[row, column])} for page {column} of sequence {row}"
        )
    rows = torch.where(used, table, 0).flatten()
    length = table.shape[1] * page_size
    offsets = torch.arange(table.shape[0] + 1, device=table.device) * length
    key, value = (x.index_select(0, rows).flatten(0, 1) for x in (key, value))
    return key, value, offsets, length


def _check_pages(key: Tensor, value: Tensor, block_table: Tensor, seqused_k: Tensor | None) -> None:
    shapes = f"key {tuple(key.shape)} and value {tuple(value.shape)}"
    if seqused_k is None:
        raise ArgumentError(
            "varlen_attn: expected seqused_k beside block_table: how many keys are in use, got None"
        )
    if key.dim() != 4 or value.dim() != 4 or key.shape[:2] != value.shape[:2]:
        raise ArgumentError(
            "varlen_attn: expected key and value of shape (pages, page size, heads, width) beside "
            f"block_table, got {shapes}"
        )
    if key.shape[0] == 0 or key.shape[1] == 0:
        raise ArgumentError(
            f"varlen_attn: expected at least one page of at least one key, got {shapes}"
        )
    if block_table.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(
            "varlen_attn: expected block_table of torch.int32 or torch.int64, "
            f"got {block_table.dtype}"
        )
    if block_table.dim() != 2 or seqused_k.shape != block_table.shape[:1]:
        raise ArgumentError(
            "varlen_attn: expected block_table of shape (N, pages per sequence) and seqused_k of "
            f"shape (N,), got {tuple(block_table.shape)} and {tuple(seqused_k.shape)}"
        )
