"""Wrong calls of varlen_attn: the type of each error and its sentence."""

import pytest
import torch

from attention_ext import ArgumentError, ArgumentTypeError, varlen_attn


def call(**changes):
    """A right call of two sequences with some arguments changed."""
    query, key, value = (torch.randn(7, h, d).double() for h, d in ((4, 8), (2, 8), (2, 5)))
    right = {"query": query, "key": key, "value": value, "enable_gqa": True}
    right |= {"cu_seq_q": ints(0, 4, 7), "cu_seq_k": ints(0, 5, 7), "max_q": 4, "max_k": 5}
    return right | changes


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


PAGES = {
    "key": torch.randn(6, 2, 2, 8).double(), "value": torch.randn(6, 2, 2, 5).double(),
    "cu_seq_k": None, "block_table": torch.zeros(2, 3, dtype=torch.int32), "seqused_k": ints(5, 2),
}  # fmt: skip
WRONG_VALUES = {
    "rank": ({"query": torch.randn(1, 7, 4, 8).double()}, r"of shape \(total length, heads, wid"),
    "heads": ({"enable_gqa": False}, "as many heads"),
    "heads not a multiple": (
        {"query": torch.randn(7, 3, 8).double()}, "multiple of the key heads .*, got 3 query heads"
    ),
    "widths": ({"key": torch.randn(7, 2, 3).double()}, "query and key of the same width"),
    "lengths": ({"value": torch.randn(6, 2, 5).double()}, "key and value of the same length"),
    "offsets decrease": ({"cu_seq_q": ints(0, 4, 3)}, "cu_seq_q that starts with 0 and does not"),
    "offsets start late": ({"cu_seq_k": ints(1, 5, 7)}, "cu_seq_k that starts with 0"),
    "offsets beyond the end": ({"cu_seq_k": ints(0, 5, 8), "max_k": 9}, "cu_seq_k of at most 7"),
    "negative offsets": ({"cu_seq_q": ints(0, -1, 7)}, "cu_seq_q that starts with 0 and does not"),
    "unequal counts": ({"cu_seq_k": ints(0, 7)}, "as many sequences"),
    "no offsets": ({"cu_seq_q": ints(), "cu_seq_k": ints()}, r"cu_seq_q of shape \(sequences"),
    "offsets of rank 2": ({"cu_seq_q": ints(0, 4, 7)[None]}, r"cu_seq_q of shape \(sequences"),
    "max_q too small": ({"max_q": 3}, "max_q of at least the longest sequence, got 3"),
    "max_k too small": ({"max_k": 4}, "max_k of at least the longest sequence, got 4"),
    "cu_seq_k missing": ({"cu_seq_k": None}, "cu_seq_k to be a tensor of offsets, or a block_ta"),
    "too many keys in use": ({"seqused_k": ints(6, 2)}, "seqused_k from 0 to the key length 5"),
    "lengths of another count": ({"seqused_k": ints(1)}, r"seqused_k of shape \(sequences,\)"),
    "slopes per batch": (
        {"alibi_slopes": torch.rand(2, 4).double()}, r"alibi_slopes of shape \(query heads,\)"
    ),
    "sinks of other heads": ({"sinks": torch.rand(2).double()}, "sinks of shape"),
    "window": ({"window_size": (-2, 0)}, r"window_size of two integers .*, got \(-2, 0\)"),
    "three sides": ({"window_size": (1, 2, 3)}, r"window_size to be two integers"),
    "softcap": ({"softcap": -1.0}, "softcap that is positive"),
    "dropout": ({"dropout_p": 1.5}, "dropout_p from 0 to 1, got 1.5"),
    "pages without lengths": (PAGES | {"seqused_k": None}, "seqused_k beside block_table"),
    "pages of rank 3": (PAGES | {"key": torch.randn(7, 2, 8).double()}, r"of shape \(pages, page"),
    "no pages": (
        PAGES | {n: PAGES[n][:0] for n in ("key", "value")}, "at least one page of at least one key"
    ),
    "table of rank 1": (PAGES | {"block_table": ints(0, 1)}, "block_table of shape"),
    "more keys than pages": (PAGES | {"seqused_k": ints(7, 2), "max_k": 6}, "seqused_k from 0 to"),
}  # fmt: skip
WRONG_TYPES = {
    "query None": ({"query": None}, "query to be a torch.Tensor, got NoneType"),
    "offsets a list": ({"cu_seq_q": [0, 4, 7]}, "cu_seq_q to be a torch.Tensor, got list"),
    "offsets of floats": ({"cu_seq_q": ints(0, 4, 7).float()}, "cu_seq_q of torch.int32 or"),
    "max_q a float": ({"max_q": 4.0}, "max_q to be an int, got float"),
    "window a number": ({"window_size": 3}, "window_size to be two integers"),
    "table of floats": (PAGES | {"block_table": torch.zeros(2, 3)}, "block_table of torch.int32"),
    "dtypes differ": ({"key": torch.randn(7, 2, 8)}, "of one dtype"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_raise_one_sentence(name):
    changes, text = WRONG_VALUES[name]
    with pytest.raises(ArgumentError, match=f"^varlen_attn: expected .*{text}") as caught:
        varlen_attn(**call(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types_raise_one_sentence(name):
    changes, text = WRONG_TYPES[name]
    with pytest.raises(ArgumentTypeError, match=f"^varlen_attn: expected .*{text}") as caught:
        varlen_attn(**call(**changes))
    assert "\n" not in str(caught.value)
