"""What attention_with_kv_cache reads and writes, and what must not show in its bits."""

import pytest
import torch
from assertions import assert_close, assert_same_bits
from caches import copied, gathered, in_pages, make, run
from cases import DTYPES

from attention_ext import attention_with_kv_cache, reference

pytestmark = pytest.mark.parity

# few rows and many, one chunk of keys and several
SIZES = [((5, 9), 1), ((1100, 40), 2), ((70, 0), 40)]
# what belongs to a sequence
ROWS = ("query", "cache_seqlens", "key", "value", "block_table")
CACHES = ("key_cache", "value_cache")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lengths", "seqlen_q"), SIZES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 48, 2000])
def test_page_size_and_order_of_pages_leave_every_bit(page_size, lengths, seqlen_q, dtype):
    call = make(lengths, seqlen_q, max(lengths) + seqlen_q, dtype=dtype)
    paged = in_pages(call, page_size)
    assert_same_bits(run(paged)[:2], run(call)[:2])
    for b in range(2):
        assert_same_bits(gathered(paged, b), gathered(call, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lengths", "seqlen_q"), SIZES)
def test_the_capacity_and_what_lies_beyond_the_length_leave_every_bit(lengths, seqlen_q, dtype):
    need = max(lengths) + seqlen_q
    call = make(lengths, seqlen_q, need, dtype=dtype)
    expected = run(copied(call))
    for rest, capacity in ((torch.inf, need), (1e4, need + 1), (0.0, 5000)):
        caches = []
        for cache in (call.key_cache, call.value_cache):
            larger = cache.new_full((*cache.shape[:2], capacity, cache.shape[3]), rest)
            for b, length in enumerate(lengths):
                larger[b, :, :length] = cache[b, :, :length]
            caches.append(larger)
        actual = run(call._replace(key_cache=caches[0], value_cache=caches[1]))
        assert_same_bits(actual[:2], expected[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [None, 3, 32])
@pytest.mark.parametrize("seqlen_q", [1, 2, 40])
def test_a_sequence_has_the_same_bits_alone_as_among_others(seqlen_q, page_size, dtype):
    lengths = (0, 700, 5, 63)
    call = make(lengths, seqlen_q, 750, dtype=dtype, window_left=100)
    if page_size is not None:
        call = in_pages(call, page_size)
    before = copied(call)
    together = run(call)
    for b in range(4):
        own = {name: getattr(before, name) for name in ROWS}
        own = {name: None if x is None else x[b : b + 1] for name, x in own.items()}
        alone = before._replace(**own)
        if page_size is None:
            alone = alone._replace(**{n: getattr(alone, n)[b : b + 1].clone() for n in CACHES})
        result = run(alone)
        assert_same_bits([x[0] for x in result[:2]], [x[b] for x in together[:2]])


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("seqlen_q", [1, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_the_same_bits_for_every_number_of_threads(dtype, seqlen_q, page_size, threads):
    call = make((3000, 1500, 10), seqlen_q, 3100, heads=(8, 2), widths=(64, 64), dtype=dtype)
    if page_size is not None:
        call = in_pages(call, page_size)
    threads(1)
    first = copied(call)
    expected = run(first)
    for count in (2, 3):
        threads(count)
        again = copied(call)
        assert_same_bits(run(again)[:2], expected[:2])
        assert_same_bits(again[1:3], first[1:3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [None, 1, 4])
def test_append_writes_exactly_the_addressed_slots(page_size, dtype):
    call = make((0, 7, 13), 5, 21, dtype=dtype, widths=(6, 11))
    if page_size is not None:
        call = in_pages(call, page_size)
    expected, actual = copied(call), copied(call)
    for b, length in enumerate((0, 7, 13)):
        for i in range(5):
            row, slot = b, length + i
            if page_size is not None:
                row, slot = int(call.block_table[b, slot // page_size]), slot % page_size
            expected.key_cache[row, :, slot] = call.key[b, :, i]
            expected.value_cache[row, :, slot] = call.value[b, :, i]
    run(actual)
    assert_same_bits(actual[1:3], expected[1:3])
    assert_same_bits(actual.cache_seqlens, torch.tensor([0, 7, 13]))


def test_nothing_is_written_without_new_keys():
    call = make(append=False)
    before = copied(call)
    run(call)
    assert_same_bits(call[1:3], before[1:3])


def test_sequences_choose_their_rows_of_the_cache():
    call = make((5, 9), 3)
    pool = make((0,) * 5, capacity=32)
    index = torch.tensor([3, 1])
    for cache, own in ((pool.key_cache, call.key_cache), (pool.value_cache, call.value_cache)):
        cache[index] = own
    chosen = call._replace(
        key_cache=pool.key_cache, value_cache=pool.value_cache, cache_batch_idx=index.int()
    )
    before = copied(chosen)
    assert_same_bits(run(chosen)[:2], run(call)[:2])
    others = torch.tensor([0, 2, 4])
    for cache, old, own in zip(chosen[1:3], before[1:3], call[1:3], strict=True):
        assert_same_bits(cache[others], old[others])
        assert_same_bits(cache[index], own)


def test_sequences_may_share_what_they_only_read():
    call = make((9, 9), 2, append=False)
    same = call._replace(cache_batch_idx=torch.tensor([1, 1]), cache_seqlens=torch.tensor([4, 9]))
    assert_close(run(same)[:2], reference.attention_with_kv_cache(same), 2e-6)
    prefix = in_pages(make((9, 9), 3, 16), 4)
    prefix.block_table[0, :2] = prefix.block_table[1, :2]  # both begin with the same eight keys
    assert_close(run(copied(prefix))[:2], reference.attention_with_kv_cache(prefix), 2e-6)


def longer_buffer(cache):
    """A slice of a longer buffer, with rows before and after it, and room between rows."""
    batch, heads, capacity, width = cache.shape
    buffer = cache.new_full((batch, heads, capacity + 9, width + 3), torch.nan)
    return buffer[:, :, 4 : capacity + 4, 1 : width + 1].copy_(cache)


def heads_inside(cache):
    """(B, S, H, D) in memory."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def columns_apart(cache):
    """A last stride that is not 1."""
    return cache.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [None, 5])
@pytest.mark.parametrize("layout", [longer_buffer, heads_inside, columns_apart])
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_caches_of_any_strides(seqlen_q, layout, page_size, dtype):
    call = make((5, 300), seqlen_q, 350, dtype=dtype)
    if page_size is not None:
        call = in_pages(call, page_size)
    key_cache, value_cache = (layout(x) for x in call[1:3])
    changed = call._replace(key_cache=key_cache, value_cache=value_cache)
    whole = [x._base.clone() for x in (key_cache, value_cache)]
    expected = run(call)
    assert_same_bits(run(changed)[:2], expected[:2])
    assert_same_bits(changed[1:3], call[1:3])
    for cache, before in zip((key_cache, value_cache), whole, strict=True):  # the gaps too
        view = before.as_strided(cache.shape, cache.stride(), cache.storage_offset())
        view.copy_(cache)
        assert_same_bits(cache._base, before)


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_keys_and_values_side_by_side_in_one_buffer(seqlen_q):
    call = make((5, 9), seqlen_q, 64, widths=(16, 8))
    expected = run(copied(call))
    buffers = [
        torch.cat(call[1:3], -1),  # columns
        torch.cat([x.transpose(1, 2).flatten(2) for x in call[1:3]], -1),  # columns of all heads
    ]
    pairs = [
        (buffers[0][..., :16], buffers[0][..., 16:]),
        tuple(
            x.unflatten(2, (2, -1)).transpose(1, 2)
            for x in (buffers[1][..., :32], buffers[1][..., 32:])
        ),
    ]
    for keys, values in pairs:
        assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        actual = run(call._replace(key_cache=keys, value_cache=values))
        assert_same_bits(actual[:2], expected[:2])
    alike = make((5, 9), seqlen_q, 64)
    stacked = torch.stack(alike[1:3], 1).contiguous()  # (B, 2, H, S, D): of one page, both
    changed = alike._replace(key_cache=stacked[:, 0], value_cache=stacked[:, 1])
    assert_same_bits(run(changed)[:2], run(alike)[:2])


@pytest.mark.parametrize("layout", [longer_buffer, heads_inside, columns_apart])
def test_queries_and_new_keys_of_any_strides(layout):
    call = make()
    expanded = call.query[:, :, :, :1].expand(-1, -1, -1, 16)
    for query, key, value in (
        (layout(call.query), layout(call.key), layout(call.value)),
        (expanded, call.key[:1].expand(2, -1, -1, -1), call.value[:, :1].expand(-1, 2, -1, -1)),
    ):
        changed = copied(call)._replace(query=query, key=key, value=value)
        dense = copied(call)._replace(
            query=query.contiguous(), key=key.contiguous(), value=value.contiguous()
        )
        assert_same_bits(run(changed)[:2], run(dense)[:2])
        assert_same_bits(changed[1:3], dense[1:3])


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_nan_in_keys_that_the_window_hides_changes_nothing(seqlen_q):
    call = make((200, 90), seqlen_q, 250, window_left=20)
    expected = run(copied(call))
    for cache in call[1:3]:
        for b, length in enumerate((200, 90)):
            cache[b, :, : length - 20] = torch.nan
    assert_same_bits(run(call)[:2], expected[:2])


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_nan_in_a_visible_key_stays_nan_where_it_is_seen(seqlen_q):
    call = make((50, 90), seqlen_q, 140)
    call.value_cache[0, 1, 30, 2] = torch.nan
    output = run(call).output
    assert output[0, 2:, :, 2].isnan().all()
    assert output[0, :2].isfinite().all()
    assert output[1].isfinite().all()


def test_a_new_key_reaches_no_query_before_it():
    call = make((50, 90), 40, 140)
    expected = run(copied(call)).output
    call.key[:, :, 25:], call.value[:, :, 25:] = 50.0, torch.inf
    actual = run(call).output
    assert_same_bits(actual[:, :, :25], expected[:, :, :25])
    assert not actual[:, :, 25:].isfinite().all()


def test_a_larger_batch_than_one_thread_takes_appends_every_row(threads):
    threads(3)
    lengths = tuple(range(64))
    call = make(lengths, 16, 80, heads=(8, 8), widths=(128, 128))
    expected = reference.attention_with_kv_cache(again := copied(call))
    output = attention_with_kv_cache(*call[:6])
    assert_close(output, expected[0], 5e-6)
    assert_same_bits(call[1:3], again[1:3])
