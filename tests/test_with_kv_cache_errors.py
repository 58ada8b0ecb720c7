"""Every wrong call of attention_with_kv_cache: one sentence, and nothing is written."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.func as tf
from caches import in_pages, keywords, make
from torch._subclasses.fake_tensor import FakeTensorMode

from attention_ext import ArgumentError, ArgumentTypeError, attention_with_kv_cache


def ints(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype)


def arguments(changes):
    """A right call (2 sequences with 5 and 9 of 32 positions, 3 new ones) with some changed."""
    call = make()
    if "block_table" in changes:
        call = in_pages(call, 4)  # 16 and 3 more pages
    given = keywords(call)
    for name, value in changes.items():
        given[name] = value(given) if callable(value) else value
        if isinstance(value, tuple) and name != "window_size":
            given[name] = torch.randn(value)
    return given


def entry(row, column, page):
    """A table with another page at one place."""

    def change(given):
        table = given["block_table"].clone()
        table[row, column] = page
        return table

    return change


def same_page(given):
    """The page that sequence 1 writes, for sequence 0 too."""
    table = given["block_table"].clone()
    table[0, 1] = table[1, 2]
    return table


def inside(name, start):
    """New rows that are a slice of a cache."""
    return lambda given: given[name][:, :, start : start + 3]


OVERLAPPING = (64, 16, 32, 1)  # the second batch element begins inside the first
WRONG_VALUES = {
    "query of rank 3": ({"query": (2, 4, 16)}, r"query of shape \(batch, heads, new positions, wi"),
    "cache of rank 3": (
        {"key_cache": (2, 32, 16)}, r"key_cache of shape \(batch, heads, capacity, width\), got"
    ),
    "pages of rank 3": (
        {"block_table": ints(0, 1).reshape(2, 1), "value_cache": (2, 32, 16)},
        r"value_cache of shape \(pages, heads, page size, width\), got",
    ),
    "caches of different capacity": (
        {"value_cache": (2, 2, 31, 16)},
        r"key_cache and value_cache of one shape but for the width, got key_cache \(2, 2, 32, 16\)",
    ),
    "caches of different heads": ({"key_cache": (2, 1, 32, 16)}, "of one shape but for the width"),
    "heads not a multiple": (
        {"query": (2, 3, 3, 16)}, r"multiple of the cache's heads, got query \(2, 3, 3, 16\) and"
    ),
    "widths differ": ({"query": (2, 4, 3, 8)}, "query and key_cache of the same width, got query"),
    "lengths of another batch": (
        {"cache_seqlens": ints(1, 2, 3)}, r"cache_seqlens of shape \(2,\), .* cache_seqlens \(3,\)"
    ),
    "lengths of rank 0": ({"cache_seqlens": torch.tensor(1)}, r"cache_seqlens of shape \(2,\)"),
    "another batch": (
        {"query": (3, 4, 3, 16), "cache_seqlens": ints(1, 2, 3)},
        r"caches of the query's batch size \(or pass cache_batch_idx\), got query \(3, 4, 3, 16\)",
    ),
    "a negative length": (
        {"cache_seqlens": ints(5, -1)}, "cache_seqlens of at least 0, got -1 for sequence 1"
    ),
    "a write past the capacity": (
        {"cache_seqlens": ints(5, 30)},
        "cache_seqlens and new positions within the capacity, 32, got 30 and 3 for sequence 1",
    ),
    "a length beyond the capacity": (
        {"cache_seqlens": ints(33, 5), "key": None, "value": None}, "32, got 33 and 0 for"
    ),
    "the largest length": ({"cache_seqlens": ints(5, 2**63 - 1)}, f"got {2**63 - 1} and 3 for"),
    "a write past the pages": (
        {"block_table": lambda given: given["block_table"][:, :3], "cache_seqlens": ints(5, 10)},
        "within the capacity, 12, got 10 and 3 for sequence 1",
    ),
    "key alone": ({"value": None}, "key and value together or neither, got key alone"),
    "value alone": ({"key": None}, "key and value together or neither, got value alone"),
    "key of another length": (
        {"key": (2, 2, 4, 16)},
        r"key of the query's batch .*, \(2, 2, 3, 16\), got key \(2, 2, 4, 16\)",
    ),
    "key of query heads": ({"key": (2, 4, 3, 16)}, r"key of .* \(2, 4, 3, 16\)"),
    "value of another width": ({"value": (2, 2, 3, 8)}, r"value of .* got value \(2, 2, 3, 8\)"),
    "value of rank 3": ({"value": (2, 2, 3)}, r"value of .* got value \(2, 2, 3\)"),
    "table of another batch": (
        {"block_table": ints(1, 2, 3).reshape(3, 1)}, r"block_table of shape .* \(3, 1\) with query"
    ),
    "table of rank 1": ({"block_table": ints(1, 2)}, r"block_table of shape .*block_table \(2,\)"),
    "pages of no positions": (
        {"block_table": ints(0, 1).reshape(2, 1), "key_cache": (2, 2, 0, 16),
         "value_cache": (2, 2, 0, 16)},
        "pages of at least one position",
    ),
    "a page below 0": (
        {"block_table": entry(1, 0, -1)},
        "block_table of page indices from 0 to 18, got -1 for page 0 of sequence 1",
    ),
    "a page that does not exist": (
        {"block_table": entry(0, 1, 19)}, "from 0 to 18, got 19 for page 1 of sequence 0"
    ),
    "a page of two writers": (
        {"block_table": same_page, "cache_seqlens": ints(5, 9)},
        "block_table that gives each new position a slot of its own, got page .* sequences 0 and 1",
    ),
    "a table and rows": (
        {"block_table": entry(0, 0, 0), "cache_batch_idx": ints(0, 1)},
        "block_table or cache_batch_idx, got both",
    ),
    "rows of another batch": ({"cache_batch_idx": ints(0)}, r"cache_batch_idx of shape \(2,\)"),
    "a row below 0": (
        {"cache_batch_idx": ints(0, -1)}, "cache_batch_idx of rows .* 0 to 1, got -1 for sequence 1"
    ),
    "a row that does not exist": ({"cache_batch_idx": ints(2, 1)}, "0 to 1, got 2 for sequence 0"),
    "a row of two writers": (
        {"cache_batch_idx": ints(1, 1), "cache_seqlens": ints(5, 6)},
        "cache_batch_idx of distinct rows for new positions, got row 1 for sequences 0 and 1",
    ),
    "cos without sin": (
        {"rotary_cos": (40, 8)}, "rotary_cos and rotary_sin together or neither, got rotary_cos al"
    ),
    "sin without cos": ({"rotary_sin": (40, 8)}, "together or neither, got rotary_sin alone"),
    "tables of different shapes": (
        {"rotary_cos": (40, 8), "rotary_sin": (40, 4)}, "rotary_cos and rotary_sin of one shape"
    ),
    "tables of rank 1": ({"rotary_cos": (40,), "rotary_sin": (40,)}, "rotary_sin of one shape"),
    "tables too wide": (
        {"rotary_cos": (40, 9), "rotary_sin": (40, 9)}, r"a rotary width of at most .*, 16, got rot"
    ),
    "tables too short": (
        {"rotary_cos": (11, 8), "rotary_sin": (11, 8)},
        r"rotary tables that reach position 11, got rotary_cos \(11, 8\)",
    ),
    "window below -1": ({"window_size": (-2, 0)}, r"window_size of two integers of at least -1"),
    "window of one side": ({"window_size": (3,)}, r"window_size to be two integers .*, got \(3,\)"),
    "negative softcap": ({"softcap": -1.0}, "softcap that is positive and finite, .*, got -1"),
    "slopes of other heads": ({"alibi_slopes": (2,)}, r"alibi_slopes of shape .* \(2,\) with"),
    "sinks of another batch": ({"sinks": (3, 4)}, r"sinks of shape .*, got sinks \(3, 4\)"),
    "key inside the key cache": (
        {"key": inside("key_cache", 5)}, "key_cache that does not share memory with key, got two"
    ),
    "value inside the value cache": (
        {"value": inside("value_cache", 9)}, "value_cache that does not share memory with value"
    ),
    "key inside the value cache": (
        {"key": inside("value_cache", 20)}, "value_cache that does not share memory with key"
    ),
    "query inside the key cache": (
        {"query": inside("key_cache", 2)},
        "key_cache that does not share memory with query",
    ),
    "one cache for both": (
        {"value_cache": lambda given: given["key_cache"]},
        "key_cache that does not share memory with value_cache",
    ),
    "an expanded cache": (
        {"key_cache": lambda given: given["key_cache"][:1].expand(2, -1, -1, -1)},
        "key_cache whose elements do not share memory, got one that is expanded",
    ),
    "a cache that overlaps itself": (
        {"value_cache": lambda given: given["value_cache"].as_strided((2, 2, 32, 16), OVERLAPPING)},
        "value_cache whose elements do not share memory, got one that is expanded or overlaps",
    ),
}  # fmt: skip
CAST = {"dtype": torch.bfloat16}
WRONG_TYPES = {
    "query None": ({"query": None}, "query to be a torch.Tensor, got NoneType"),
    "lengths a list": ({"cache_seqlens": [1, 2]}, "cache_seqlens to be a torch.Tensor, got list"),
    "key a number": ({"key": 3.0}, "key to be a torch.Tensor, got float"),
    "table a list": ({"block_table": [[1], [2]]}, "block_table to be a torch.Tensor or None"),
    "interleaved a number": ({"rotary_interleaved": 1}, "rotary_interleaved to be a bool, got int"),
    "softcap a string": ({"softcap": "x"}, "softcap to be a float, got str"),
    "scale a string": ({"scale": "x"}, "scale to be a float, got str"),
    "window a number": ({"window_size": 3}, "window_size to be two integers"),
    "query of integers": (
        {"query": torch.ones(2, 4, 3, 16, dtype=torch.int64)}, "query of torch.float64, .*, got tor"
    ),
    "a cache of another dtype": (
        {"key_cache": torch.zeros(2, 2, 32, 16, **CAST)},
        "key_cache of the query's dtype, torch.float32, got torch.bfloat16",
    ),
    "a value cache of another dtype": (
        {"value_cache": torch.zeros(2, 2, 32, 16).half()}, "value_cache of the query's dtype"
    ),
    "a key of another dtype": ({"key": torch.zeros(2, 2, 3, 16).double()}, "key of the query's dt"),
    "a value of another dtype": ({"value": torch.zeros(2, 2, 3, 16, **CAST)}, "value of the query"),
    "lengths of floats": (
        {"cache_seqlens": torch.ones(2)}, "cache_seqlens of torch.int32 or torch.int64, got torch.f"
    ),
    "table of int16": (
        {"block_table": ints(0, 1, dtype=torch.int16).reshape(2, 1)}, "block_table of torch.int32"
    ),
    "rows of bools": ({"cache_batch_idx": torch.ones(2).bool()}, "cache_batch_idx of torch.int32"),
    "tables of integers": (
        {"rotary_cos": torch.ones(40, 8).int(), "rotary_sin": torch.ones(40, 8)},
        "rotary_cos of torch.float32 or the query's dtype",
    ),
    "slopes of float64": ({"alibi_slopes": torch.ones(4).double()}, "alibi_slopes of torch.float3"),
    "sinks of integers": ({"sinks": torch.ones(4).int()}, "sinks of torch.float32 or the query's"),
}  # fmt: skip
UNSUPPORTED = {
    "complex": ({"query": torch.ones(2, 4, 3, 16, dtype=torch.complex64)}, "real tensors"),
    "sparse": ({"key": torch.zeros(2, 2, 3, 16).to_sparse()}, "key to be a dense tensor"),
}
TABLE = [
    pytest.param(kind, changes, text, id=name)
    for kind, table in (
        (ArgumentError, WRONG_VALUES),
        (ArgumentTypeError, WRONG_TYPES),
        (NotImplementedError, UNSUPPORTED),
    )
    for name, (changes, text) in table.items()
]


@pytest.mark.parametrize(("kind", "changes", "text"), TABLE)
def test_a_wrong_call_raises_one_sentence_and_writes_nothing(kind, changes, text):
    given = arguments(changes)
    caches = [given[name] for name in ("key_cache", "value_cache")]
    before = [cache.clone() for cache in caches]
    with pytest.raises(kind, match=f"^attention_with_kv_cache: expected .*{text}") as caught:
        attention_with_kv_cache(**given)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert "csrc" not in str(caught.value)
    for cache, old in zip(caches, before, strict=True):
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


# what shapes and dtypes alone show
SHAPES_AND_DTYPES = [
    param
    for param in TABLE
    if any(word in param.values[2] for word in (" of shape", "dtype", "one shape", "together"))
]


@pytest.mark.parametrize(("kind", "changes", "text"), SHAPES_AND_DTYPES)
def test_fake_tensors_give_the_same_sentence(kind, changes, text):
    given = arguments(changes)
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for name, x in given.items()
        }
        with pytest.raises(kind, match=f"^attention_with_kv_cache: expected .*{text}"):
            attention_with_kv_cache(**fakes)


TENSORS = ("query", "key_cache", "value_cache", "key", "value", "alibi_slopes", "sinks")


@pytest.mark.parametrize("name", TENSORS)
def test_an_input_that_requires_grad_raises_while_grad_mode_is_on(name):
    given = arguments({"alibi_slopes": torch.rand(4), "sinks": torch.rand(4)})
    given[name].requires_grad_()
    caches = [given[name].detach().clone() for name in ("key_cache", "value_cache")]
    with pytest.raises(ArgumentError, match=f"inputs without gradient, got {name} that requires g"):
        attention_with_kv_cache(**given)
    for cache, old in zip((given["key_cache"], given["value_cache"]), caches, strict=True):
        torch.testing.assert_close(cache.detach(), old, rtol=0, atol=0, equal_nan=True)
    with torch.no_grad():
        assert not attention_with_kv_cache(**given).requires_grad
    with torch.inference_mode():
        attention_with_kv_cache(**given)


def test_transforms_and_forward_mode_raise():
    given = arguments({})
    query = given.pop("query")
    text = "a call outside of torch.func transforms and forward mode"

    def call(query):
        return attention_with_kv_cache(query, **given)

    with torch.no_grad():
        with pytest.raises(NotImplementedError, match=text):
            tf.vmap(call)(query.expand(3, -1, -1, -1, -1))
        with pytest.raises(NotImplementedError, match=text):
            tf.jvp(call, (query,), (query,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=text):
            call(forward_ad.make_dual(query, query))


def test_other_devices_and_mixed_ones_raise():
    given = arguments({})
    with pytest.raises(ArgumentError, match="on one device, got meta, cpu"):
        attention_with_kv_cache(**given | {"query": given["query"].to("meta")})


def test_only_the_table_of_writers_must_differ():
    given = arguments({"cache_batch_idx": ints(1, 1), "key": None, "value": None})
    attention_with_kv_cache(**given)  # two that read
    given = arguments({"block_table": same_page, "cache_seqlens": ints(4, 10)})
    one = {name: given[name][:, :, :1] for name in ("query", "key", "value")}
    attention_with_kv_cache(**given | one)  # slots 0 and 2 of one page
