"""The cache in pages: same results, memory as rows grow, shared prefixes, and what it refuses."""

import pytest
import torch
from decoders import OPTIONS, VOCAB, make_config, make_decoder, pad, random_ids

from attention_ext import ArgumentError, ArgumentTypeError
from attention_ext.nn import KVCache, PagedKVCache

every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def snapshot(cache):
    return [x.clone() for x in (cache.keys, cache.values, cache.seqlens, cache.block_table)]


def unchanged(cache, before):
    return all(torch.equal(a, b) for a, b in zip(snapshot(cache), before, strict=True))


def tables(cache):
    """The pages of each row."""
    return [[page for page in row if page >= 0] for row in cache.block_table.tolist()]


@every_option
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_any_split_of_a_text_equals_one_pass(options, page_size):
    decoder = make_decoder(**options)
    ids = random_ids(2, 10)
    cache = PagedKVCache(decoder.config, 2, 20, page_size)
    logits = [decoder(part, cache=cache) for part in ids.split([4, 1, 0, 1, 4], dim=1)]
    close(torch.cat(logits, dim=1), decoder(ids).detach())
    assert cache.seqlens.tolist() == [10, 10]


@every_option
def test_ragged_rows_equal_each_row_alone(options):
    decoder = make_decoder(**options)
    rows = [random_ids(1, length)[0] for length in (5, 2, 7)]
    cache = PagedKVCache(decoder.config, 3, 20, page_size=4)
    ids, mask = pad(rows, "left", filler=-1)
    logits = decoder(ids, cache=cache, attention_mask=mask)
    assert logits.isfinite().all()
    news = random_ids(3, 4)
    steps = torch.cat([decoder(part, cache=cache) for part in news.split([1, 2, 1], 1)], 1)
    for index, (own, new) in enumerate(zip(rows, news, strict=True)):
        alone = decoder(torch.cat([own, new])[None])[0].detach()
        close(logits[index][mask[index]], alone[: len(own)])
        close(steps[index], alone[-4:])
    assert cache.seqlens.tolist() == [9, 6, 11]


def test_the_bits_are_those_of_the_cache_without_pages():
    decoder = make_decoder(num_key_value_heads=2)
    ids = random_ids(2, 12)
    caches = [KVCache(decoder.config, 2, 12)]
    caches += [PagedKVCache(decoder.config, 2, 24, size) for size in (1, 5, 24)]
    for part in ids.split([5, 1, 4, 1, 1], dim=1):
        expected, *others = (decoder(part, cache=cache) for cache in caches)
        assert all(torch.equal(other, expected) for other in others)


def test_rows_take_pages_as_they_grow_and_give_them_back():
    decoder = make_decoder()
    cache = PagedKVCache(decoder.config, 3, 5, page_size=4)
    assert cache.pages_in_use == 0
    decoder(random_ids(1, 4), cache=cache.rows([1]))
    assert [len(row) for row in tables(cache)] == [0, 1, 0]
    decoder(random_ids(2, 1), cache=cache.rows([1, 2]))
    assert [len(row) for row in tables(cache)] == [0, 2, 1]
    for _ in range(3):
        decoder(random_ids(2, 1), cache=cache.rows([1, 2]))
    assert [len(row) for row in tables(cache)] == [0, 2, 1]
    assert cache.pages_in_use == 3
    cache.rows([1]).reset()
    assert cache.pages_in_use == 1
    assert cache.seqlens.tolist() == [0, 0, 4]
    decoder(random_ids(1, 16), cache=cache.rows([0]))
    pages = tables(cache)
    assert sorted(pages[0] + pages[2]) == [0, 1, 2, 3, 4]
    cache.reset()
    assert cache.pages_in_use == 0
    assert tables(cache) == [[], [], []]


# ---- shared prefixes ----


@pytest.mark.parametrize("length", [0, 3, 4, 7, 8, None])
def test_rows_with_a_shared_prefix_go_their_own_ways(length):
    decoder = make_decoder()
    cache = PagedKVCache(decoder.config, 3, 12, page_size=4)
    prefix, news = random_ids(1, 9), random_ids(2, 5)
    decoder(prefix, cache=cache.rows([0]))
    before = cache.pages_in_use
    cache.share(0, 2, length)
    assert cache.pages_in_use == before == 3
    kept = 9 if length is None else length
    assert cache.seqlens.tolist() == [9, 0, kept]
    logits = torch.cat(
        [decoder(part, cache=cache.rows([0, 2])) for part in news.split([1, 3, 1], dim=1)], 1
    )
    for own, new, used in zip(logits, news, (9, kept), strict=True):
        alone = decoder(torch.cat([prefix[0, :used], new])[None])[0, -5:]
        close(own, alone.detach())


def test_only_a_page_that_is_written_to_is_copied():
    decoder = make_decoder()
    cache = PagedKVCache(decoder.config, 4, 8, page_size=4)
    decoder(random_ids(1, 6), cache=cache.rows([0]))
    (full, last), *_ = tables(cache)
    for row in (1, 2, 3):
        cache.share(0, row)
    assert tables(cache) == [[full, last]] * 4
    decoder(random_ids(4, 1), cache=cache)
    pages = tables(cache)
    assert [row[0] for row in pages] == [full] * 4
    assert len({row[1] for row in pages}) == 4
    assert last in pages[3]  # the last user needs no copy
    assert cache.pages_in_use == 5
    decoder(random_ids(4, 1), cache=cache)
    assert tables(cache) == pages


def test_a_page_lives_as_long_as_a_row_uses_it():
    decoder = make_decoder()
    cache = PagedKVCache(decoder.config, 2, 4, page_size=4)
    prefix, new = random_ids(1, 8), random_ids(1, 1)
    decoder(prefix, cache=cache.rows([0]))
    cache.share(0, 1)
    cache.rows([0]).reset()
    assert cache.pages_in_use == 2
    decoder(random_ids(1, 8), cache=cache.rows([0]))  # takes none of them
    cache.rows([0]).reset()
    logits = decoder(new, cache=cache.rows([1]))
    close(logits, decoder(torch.cat([prefix, new], 1))[:, -1:].detach())
    cache.reset()
    assert cache.pages_in_use == 0


# ---- what it refuses ----


def test_an_exhausted_pool_leaves_the_cache_as_it_was():
    decoder = make_decoder()
    cache = PagedKVCache(decoder.config, 3, 4, page_size=4)
    decoder(random_ids(1, 6), cache=cache.rows([0]))
    cache.share(0, 1)
    before = snapshot(cache)
    sentence = r"^PagedKVCache: expected at most 2 new pages, .* num_pages = 4, got .* needs 4$"
    ids, mask = pad([random_ids(1, 1)[0], random_ids(1, 3)[0], random_ids(1, 5)[0]], "left")
    with pytest.raises(ArgumentError, match=sentence):  # a copy and three new ones
        decoder(ids, cache=cache, attention_mask=mask)
    with pytest.raises(ArgumentError, match="expected at most 2 new pages"):
        cache.reserve(9, [2])
    assert unchanged(cache, before)
    assert cache.pages_in_use == 2
    decoder(random_ids(2, 2), cache=cache.rows([0, 1]))  # the copy alone fits
    assert cache.seqlens.tolist() == [8, 8, 0]


def test_wrong_tokens_leave_the_cache_as_it_was():
    decoder = make_decoder()
    cache = PagedKVCache(decoder.config, 1, 10, page_size=4)
    decoder(random_ids(1, 20), cache=cache)
    before = snapshot(cache)
    with pytest.raises(ArgumentError, match=f"expected ids from 0 to {VOCAB - 1}"):
        decoder(torch.tensor([[VOCAB]]), cache=cache)
    with pytest.raises(ArgumentError, match="max_position_embeddings = 24 positions, got 25"):
        decoder(random_ids(1, 5), cache=cache)
    assert unchanged(cache, before)


def test_a_prefix_is_one_that_the_source_has_and_begins_an_empty_row():
    decoder = make_decoder()
    cache = PagedKVCache(decoder.config, 3, 8)
    decoder(random_ids(2, 5), cache=cache.rows([0, 1]))
    before = snapshot(cache)
    for arguments, error, sentence in (
        ((0, 1), ArgumentError, "expected row 1 to be empty, got one of 5 positions"),
        ((0, 2, 6), ArgumentError, "length of at most 5, as many as row 0 has, got 6"),
        ((0, 2, -1), ArgumentError, "expected length to be at least 0, got -1"),
        ((0, 2, 1.0), ArgumentTypeError, "expected length to be an integer, got 1.0"),
        ((0, 0), ArgumentError, r"expected distinct rows, got \[0, 0\]"),
    ):
        with pytest.raises(error, match=sentence):
            cache.share(*arguments)
    assert unchanged(cache, before)


def test_sizes_are_checked():
    config = make_config()
    for arguments, error, sentence in (
        ((-1, 4), ArgumentError, "batch_size to be at least 0, got -1"),
        ((1, -4), ArgumentError, "num_pages to be at least 0, got -4"),
        ((1, 4, 0), ArgumentError, "page_size to be at least 1, got 0"),
        ((1, 4.0), ArgumentTypeError, "num_pages to be an integer, got 4.0"),
    ):
        with pytest.raises(error, match=f"^PagedKVCache: expected {sentence}"):
            PagedKVCache(config, *arguments)
    with pytest.raises(ArgumentError, match="expected a causal decoder"):
        PagedKVCache(make_config(causal=False), 1, 4)
    with pytest.raises(ArgumentError, match="reserve: expected count to be at least 0, got -1"):
        PagedKVCache(config, 1, 4).reserve(-1)


def test_shapes_follow_the_configuration():
    config = make_config(num_key_value_heads=2, value_dim=5)
    cache = PagedKVCache(config, 3, 7, page_size=5, dtype=torch.float64)
    assert cache.keys.shape == (2, 7, 2, 5, 8)
    assert cache.values.shape == (2, 7, 2, 5, 5)
    assert cache.block_table.shape == (3, 5)
    assert cache.block_table.dtype == torch.int32
    assert cache.nbytes == (2 * 7 * 2 * 5) * (8 + 5) * 8
