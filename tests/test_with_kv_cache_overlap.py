"""Tensors that share memory: attention_with_kv_cache finds just those, element by element."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ext import ArgumentError, attention_with_kv_cache

views = st.tuples(
    st.integers(0, 60),  # first element
    st.tuples(*(st.integers(0, 12) for _ in range(4))),  # strides
)
sizes = st.tuples(st.just(1), st.integers(1, 2), st.integers(1, 4), st.integers(1, 3))


def elements(view, shape):
    start, strides = view
    indices = itertools.product(*(range(size) for size in shape))
    return [start + sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices]


def is_apart(views, shapes):
    """No element of a cache, the first two, is another element of itself or of another tensor."""
    places = [elements(view, shape) for view, shape in zip(views, shapes, strict=True)]
    for i in range(2):
        if len(set(places[i])) < len(places[i]):
            return False
        if any(set(places[i]) & set(other) for other in places[i + 1 :]):
            return False
    return True


def attend(tensors):
    key_cache, value_cache, query, key, value = tensors
    return attention_with_kv_cache(
        query, key_cache, value_cache, torch.tensor([key_cache.shape[2] - 1]), key, value
    )


@settings(max_examples=400, deadline=None, derandomize=True)
@given(sizes, st.lists(views, min_size=5, max_size=5))
def test_an_overlap_is_found_exactly(shape, views):
    batch, heads, _, width = shape
    shapes = [shape, shape, *[(batch, heads, 1, width)] * 3]
    buffer = torch.randn(150)
    tensors = [buffer.as_strided(shape, v[1], v[0]) for v, shape in zip(views, shapes, strict=True)]
    if is_apart(views, shapes):
        attend(tensors)
    else:
        with pytest.raises(ArgumentError, match="share memory"):
            attend(tensors)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(sizes, views, views)
def test_two_caches_woven_into_each_other(shape, first, second):
    batch, heads, _, width = shape
    buffer = torch.zeros(150)
    caches = [buffer.as_strided(shape, v[1], v[0]) for v in (first, second)]
    others = [torch.randn(batch, heads, 1, width) for _ in range(3)]
    if is_apart([first, second], [shape, shape]):
        attend([*caches, *others])
        for cache, new in zip(caches, others[1:], strict=True):
            assert torch.equal(cache[:, :, -1:], new)
        outside = set(range(150)) - {e for v in (first, second) for e in elements(v, shape)}
        assert (buffer[sorted(outside)] == 0).all()
    else:
        with pytest.raises(ArgumentError, match="share memory"):
            attend([*caches, *others])


def test_elements_of_caches_may_alternate_in_memory():
    pairs = torch.zeros(2, 2, 8, 16, 2)  # key and value side by side, element by element
    new = [torch.randn(2, 2, 3, 16) for _ in range(2)]
    query, seqlens = torch.randn(2, 4, 3, 16), torch.tensor([5, 0])
    attention_with_kv_cache(query, pairs[..., 0], pairs[..., 1], seqlens, *new)
    assert torch.equal(pairs[0, :, 5:], torch.stack([x[0] for x in new], -1))
    assert torch.equal(pairs[1, :, :3], torch.stack([x[1] for x in new], -1))
    shifted = pairs.flatten()[1:-1].as_strided((2, 2, 7, 16), pairs.stride()[:4])
    with pytest.raises(
        ArgumentError, match="key_cache that does not share memory with value_cache"
    ):
        attention_with_kv_cache(query, pairs[:, :, :7, :, 1], shifted, seqlens * 0, *new)
