"""Every kind of wrong call of the operator: what is changed, and what its error says."""

import warnings

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attention_ext import ArgumentError, ArgumentTypeError


def tensors(**changes):
    """A right call with some arguments changed; a tuple is the shape of a tensor."""
    call = {"query": (2, 3, 5, 4), "key": (2, 3, 7, 4), "value": (2, 3, 7, 6)} | changes
    return {
        name: torch.randn(value) if isinstance(value, tuple) and name != "window_size" else value
        for name, value in call.items()
    }


def cast(dtype, *names):
    return {name: x.to(dtype) for name, x in tensors().items() if name in names}


ALL = ("query", "key", "value")
WRONG_VALUES = {
    "rank 0 query": ({"query": ()}, r"of at least 2 dimensions, got query \(\)"),
    "rank 1 query": ({"query": (4,)}, r"at least 2 dimensions, got query \(4,\)"),
    "rank 1 key": ({"key": (4,)}, r"at least 2 dimensions, got key \(4,\)"),
    "rank 1 value": ({"value": (6,)}, r"at least 2 dimensions, got value \(6,\)"),
    "widths differ": (
        {"key": (2, 3, 7, 5)},
        r"query and key of the same width .*, got query \(2, 3, 5, 4\) and key \(2, 3, 7, 5\)",
    ),
    "lengths differ": (
        {"value": (2, 3, 8, 6)},
        r"key and value of the same length .*, got key \(2, 3, 7, 4\) and value \(2, 3, 8, 6\)",
    ),
    "heads do not broadcast": (
        {"query": (2, 4, 5, 4), "key": (2, 2, 7, 4), "value": (2, 2, 7, 6)},
        r"heads that broadcast \(equal, or 1; or pass enable_gqa=True\), got query \(2, 4, 5, 4\)",
    ),
    "batches do not broadcast": (
        {"query": (4, 3, 5, 4)},
        r"leading dimensions of query, key and value that broadcast, got query \(4, 3, 5, 4\)",
    ),
    "batches of different rank do not broadcast": (
        {"query": (4, 2, 3, 5, 4), "key": (5, 2, 3, 7, 4)},
        "leading dimensions of query, key and value that broadcast",
    ),
    "heads not a multiple": (
        {"enable_gqa": True, "key": (2, 2, 7, 4), "value": (2, 2, 7, 6)},
        "multiple of the key heads with enable_gqa=True, got 3 query heads and 2 key heads",
    ),
    "value heads not a multiple": (
        {"enable_gqa": True, "key": (2, 1, 7, 4), "value": (2, 2, 7, 6)},
        "multiple of the value heads with enable_gqa=True, got 3 query heads and 2 value heads",
    ),
    "more key heads than query heads": (
        {"enable_gqa": True, "key": (2, 6, 7, 4), "value": (2, 6, 7, 6)},
        "got 3 query heads and 6 key heads",
    ),
    "no key heads": (
        {"enable_gqa": True, "key": (2, 0, 7, 4), "value": (2, 0, 7, 6)},
        "got 3 query heads and 0 key heads",
    ),
    "grouped heads without a head dimension": (
        {"enable_gqa": True, "query": (5, 4), "key": (7, 4), "value": (7, 6)},
        r"a head dimension \(at least 3 dimensions\) with enable_gqa=True, got query \(5, 4\)",
    ),
    "mask too short": ({"attn_mask": (5, 6)}, r"mask that broadcasts .*, got attn_mask \(5, 6\)"),
    "mask of too many rows": ({"attn_mask": (6, 7)}, r"attn_mask that broadcasts to .*\(6, 7\)"),
    "mask of other heads": ({"attn_mask": (2, 2, 5, 7)}, r"mask that broadcasts .*\(2, 2, 5, 7\)"),
    "mask of more batches": (
        {"attn_mask": (4, 2, 3, 5, 7)}, r"attn_mask that broadcasts to .*\(4, 2, 3, 5, 7\)",
    ),
    "variant unknown": (
        {"causal_variant": "top_left"},
        "causal_variant to be 'upper_left' or 'lower_right', got 'top_left'",
    ),
    "dropout below 0": ({"dropout_p": -0.1}, r"dropout_p from 0 to 1, got -0\.1"),
    "dropout above 1": ({"dropout_p": 1.1}, r"dropout_p from 0 to 1, got 1\.1"),
    "dropout NaN": ({"dropout_p": float("nan")}, "dropout_p from 0 to 1, got nan"),
    "window below -1": (
        {"window_size": (3, -2)}, r"window_size of two integers of at least -1 .*, got \(3, -2\)"
    ),
    "window of one side": ({"window_size": (3,)}, r"window_size to be two integers .*, got \(3,\)"),
    "negative softcap": ({"softcap": -1.0}, "softcap that is positive and finite, .*, got -1"),
    "infinite softcap": ({"softcap": float("inf")}, "softcap that is positive and finite, .* inf"),
    "softcap NaN": ({"softcap": float("nan")}, "softcap that is positive and finite, .* nan"),
    "slopes of other heads": (
        {"alibi_slopes": (4,)}, r"alibi_slopes of shape .*, got alibi_slopes \(4,\)"
    ),
    "slopes of more batches": ({"alibi_slopes": (3, 3)}, r"alibi_slopes of shape .* \(3, 3\)"),
    "slopes of rank 0": ({"alibi_slopes": ()}, r"alibi_slopes of shape .* \(\)"),
    "sinks of other heads": ({"sinks": (2,)}, r"sinks of shape .*, got sinks \(2,\)"),
    "sinks of rank 0": ({"sinks": ()}, r"sinks of shape .*, got sinks \(\)"),
    "lengths of more batches": (
        {"seqused_k": torch.tensor([1, 2, 3])}, r"seqused_k of shape \(\*batch,\), got .* \(3,\)"
    ),
    "lengths per head": (
        {"seqused_k": torch.ones(2, 3, dtype=torch.int32)}, r"seqused_k of shape .* \(2, 3\)"
    ),
    "a negative length": (
        {"seqused_k": torch.tensor([1, -1])}, "seqused_k from 0 to the key length 7, got -1 for"
    ),
    "a length beyond the keys": (
        {"seqused_k": torch.tensor([8, 1])}, "seqused_k from 0 to the key length 7, got 8 for batch"
    ),
    "CausalBias beside is_causal": (
        {"attn_mask": causal_upper_left(5, 7), "is_causal": True},
        "is_causal=False beside a CausalBias.*CausalBias should not be used with causal=True",
    ),
    "CausalBias of another length": (
        {"attn_mask": causal_lower_right(5, 8)}, r"sizes \(L, S\) = \(5, 7\) .*, got \(5, 8\)",
    ),
    "CausalBias of other queries": (
        {"attn_mask": causal_upper_left(4, 7)}, r"sizes \(L, S\) = \(5, 7\) .*, got \(4, 7\)",
    ),
    "devices differ": (
        {"query": torch.randn(2, 3, 5, 4, device="meta")},
        "query, key, value on one device, got meta, cpu, cpu",
    ),
}  # fmt: skip

WRONG_TYPES = {
    "query a list": ({"query": [[1.0]]}, "query to be a torch.Tensor, got list"),
    "key None": ({"key": None}, "key to be a torch.Tensor, got NoneType"),
    "value a number": ({"value": 1.0}, "value to be a torch.Tensor, got float"),
    "mask a list": ({"attn_mask": [[True]]}, "attn_mask to be a torch.Tensor or None, got list"),
    "scale a string": ({"scale": "1"}, "scale to be a float, got str"),
    "scale a tensor that requires grad": (
        {"scale": torch.ones((), requires_grad=True)}, "scale to be a float, got Tensor"
    ),
    "is_causal a number": ({"is_causal": 1}, "is_causal to be a bool, got int"),
    "is_causal None": ({"is_causal": None}, "is_causal to be a bool, got NoneType"),
    "enable_gqa a string": ({"enable_gqa": "yes"}, "enable_gqa to be a bool, got str"),
    "dropout a string": ({"dropout_p": "0"}, "dropout_p to be a float, got str"),
    "dropout None": ({"dropout_p": None}, "dropout_p to be a float, got NoneType"),
    "variant None": ({"causal_variant": None}, "causal_variant to be .*, got None"),
    "dropout two numbers": ({"dropout_p": torch.rand(2)}, "dropout_p to be a float, got Tensor"),
    "window a number": ({"window_size": 3}, r"window_size to be two integers .*, got 3"),
    "window of floats": ({"window_size": (3.0, 1)}, r"window_size to be two .*, got \(3\.0, 1\)"),
    "window None": ({"window_size": None}, "window_size to be two integers .*, got None"),
    "softcap a string": ({"softcap": "1"}, "softcap to be a float, got str"),
    "softcap that requires grad": (
        {"softcap": torch.ones((), requires_grad=True)}, "softcap to be a float, got Tensor"
    ),
    "slopes a list": ({"alibi_slopes": [1.0] * 3}, "alibi_slopes to be a torch.Tensor or None"),
    "sinks a number": ({"sinks": 1.0}, "sinks to be a torch.Tensor or None, got float"),
    "lengths a list": ({"seqused_k": [1, 2]}, "seqused_k to be a torch.Tensor or None, got list"),
    "slopes of integers": (
        {"alibi_slopes": torch.ones(3, dtype=torch.int64)},
        "alibi_slopes of torch.float32 or the query's dtype, got alibi_slopes torch.int64",
    ),
    "sinks of doubles": (
        {"sinks": torch.ones(3).double()},
        "sinks of torch.float32 or the query's dtype, got sinks torch.float64 with query torch.flo",
    ),
    "lengths of floats": (
        {"seqused_k": torch.ones(2)}, "seqused_k of torch.int32 or torch.int64, got torch.float32"
    ),
    "int": (cast(torch.int64, *ALL), "query of torch.float64, .* or torch.float16, got torch.int"),
    "bool": (cast(torch.bool, *ALL), "query of torch.float64, .*, got torch.bool"),
    "float8": (
        cast(torch.float8_e4m3fn, *ALL), "query of torch.float64, .*, got torch.float8_e4m3fn"
    ),
    "dtypes differ": (
        cast(torch.float64, "key"),
        "of one dtype, got query torch.float32, key torch.float64, value torch.float32",
    ),
    "int mask": (
        {"attn_mask": torch.ones(5, 7, dtype=torch.int32)},
        "attn_mask of torch.bool, torch.float32 or the query's dtype, got attn_mask torch.int32",
    ),
    "double mask": (
        {"attn_mask": torch.ones(5, 7, dtype=torch.float64)},
        "got attn_mask torch.float64 with query torch.float32",
    ),
    "half mask": (
        cast(torch.bfloat16, *ALL) | {"attn_mask": torch.ones(5, 7).half()},
        "got attn_mask torch.float16 with query torch.bfloat16",
    ),
}  # fmt: skip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # nested and sparse CSR tensors are a prototype
    NESTED = torch.nested.nested_tensor([torch.randn(5, 4), torch.randn(7, 4)], layout=torch.jagged)
    STRIDED_NESTED = torch.nested.nested_tensor([torch.randn(5, 4), torch.randn(7, 4)])
    CSR = torch.randn(5, 4).to_sparse_csr()

UNSUPPORTED = {
    "complex": (cast(torch.complex64, *ALL), "real tensors, got query of torch.complex64"),
    "more than 8 dimensions": (
        {"query": (1,) * 7 + (5, 4)}, "at most 8 dimensions, got query .*; flatten some of",
    ),
    "sparse": (
        {"query": torch.randn(5, 4).to_sparse()},
        r"query to be a dense tensor on the CPU, got .*sparse_coo: call its to_dense\(\)",
    ),
    "sparse CSR": ({"key": CSR}, "key to be a dense tensor on the CPU, got .*sparse_csr"),
    "nested": (dict.fromkeys(ALL, NESTED), "query to be a dense .*nested tensor: .*varlen_attn"),
    "nested, strided": (dict.fromkeys(ALL, STRIDED_NESTED), "query to be a dense .*varlen_attn"),
    "sparse slopes": (
        {"alibi_slopes": torch.ones(3).to_sparse()}, "alibi_slopes to be a dense tensor on the CPU"
    ),
}  # fmt: skip

TABLE = [
    pytest.param(kind, *entry, id=name)
    for kind, entries in (
        (ArgumentError, WRONG_VALUES),
        (ArgumentTypeError, WRONG_TYPES),
        (NotImplementedError, UNSUPPORTED),
    )
    for name, entry in entries.items()
]
