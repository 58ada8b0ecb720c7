"""The cache: any chunking, ragged rows, full or not, what it leaves alone and what it refuses."""

import pytest
import torch
from decoders import OPTIONS, VOCAB, make_config, make_decoder, pad, random_ids

from attention_ext import ArgumentError, ArgumentTypeError
from attention_ext.nn import KVCache, PagedKVCache

every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def snapshot(cache):
    return cache.keys.clone(), cache.values.clone(), cache.seqlens.clone()


def unchanged(cache, before):
    return all(torch.equal(a, b) for a, b in zip(snapshot(cache), before, strict=True))


@every_option
@pytest.mark.parametrize("sizes", [[1] * 10, [10], [4, 1, 5], [9, 1], [1, 0, 9]])
def test_any_split_of_a_text_equals_one_pass(options, sizes):
    decoder = make_decoder(**options)
    ids = random_ids(2, 10)
    cache = KVCache(decoder.config, 2, 12)
    logits = [decoder(part, cache=cache) for part in ids.split(sizes, dim=1)]
    close(torch.cat(logits, dim=1), decoder(ids).detach())
    assert cache.seqlens.tolist() == [10, 10]


def test_float64_splits_agree_to_twelve_digits():
    decoder = make_decoder().double()
    ids = random_ids(2, 10)
    cache = KVCache(decoder.config, 2, 10, dtype=torch.float64)
    logits = [decoder(part, cache=cache) for part in ids.split([3, 1, 1, 5], dim=1)]
    torch.testing.assert_close(torch.cat(logits, 1), decoder(ids).detach(), rtol=0, atol=1e-12)


@every_option
@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_rows_equal_each_row_alone(options, side):
    decoder = make_decoder(**options)
    rows = [random_ids(1, length)[0] for length in (5, 2, 7)]
    cache = KVCache(decoder.config, 3, 16)
    ids, mask = pad(rows, side, filler=-1)
    logits = decoder(ids, cache=cache, attention_mask=mask)
    assert logits.isfinite().all()
    assert cache.seqlens.tolist() == [5, 2, 7]
    news = random_ids(3, 4)
    for row, own, real, new in zip(range(3), rows, mask, news, strict=True):
        close(logits[row][real], decoder(own[None])[0].detach())
        rows[row] = torch.cat([own, new])
    steps = torch.cat([decoder(part, cache=cache) for part in news.split([1, 2, 1], 1)], 1)
    for row, own in enumerate(rows):
        close(steps[row], decoder(own[None])[0, -4:].detach())
    assert cache.seqlens.tolist() == [9, 6, 11]


def test_padded_chunks_continue_ragged_rows():
    decoder = make_decoder(num_key_value_heads=2)
    rows = [random_ids(1, length)[0] for length in (9, 4, 6)]
    cuts = [(0, 4, 9), (0, 1, 4), (0, 6, 6)]
    cache = KVCache(decoder.config, 3, 9)
    parts = [[], [], []]
    for chunk, side in ((0, "left"), (1, "right")):
        ids, mask = pad([r[c[chunk] : c[chunk + 1]] for r, c in zip(rows, cuts, strict=True)], side)
        logits = decoder(ids, cache=cache, attention_mask=mask)
        assert logits.isfinite().all()
        for part, row, real in zip(parts, logits, mask, strict=True):
            part.append(row[real])
    for part, row in zip(parts, rows, strict=True):
        close(torch.cat(part), decoder(row[None])[0].detach())


def test_only_the_addressed_slots_are_written():
    decoder = make_decoder()
    cache = KVCache(decoder.config, 2, 8)
    cache.keys.fill_(7.0)
    cache.values.fill_(7.0)
    ids, mask = pad([torch.tensor([1, 2, 3]), torch.tensor([4])], "left")
    decoder(ids, cache=cache, attention_mask=mask)
    for store in (cache.keys, cache.values):
        assert (store[:, 0, :, 3:] == 7).all()
        assert (store[:, 1, :, 1:] == 7).all()
        assert not (store[:, 0, :, :3] == 7).any()
        assert not (store[:, 1, :, :1] == 7).any()
    before = snapshot(cache)
    decoder(torch.tensor([[5], [6]]), cache=cache)
    assert torch.equal(cache.keys[:, 0, :, :3], before[0][:, 0, :, :3])
    assert (cache.keys[:, 0, :, 4:] == 7).all()
    assert (cache.keys[:, 1, :, 2:] == 7).all()


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), 1e30])
def test_what_lies_beyond_the_length_changes_nothing(rubbish):
    decoder = make_decoder(num_key_value_heads=2)
    ids, mask = pad([random_ids(1, 5)[0], random_ids(1, 3)[0]], "right")
    results = []
    for filler in (0.0, rubbish):
        cache = KVCache(decoder.config, 2, 12)
        cache.keys.fill_(filler)
        cache.values.fill_(filler)
        results.append(decoder(ids, cache=cache, attention_mask=mask)[mask])
        results.append(decoder(ids[:, :1], cache=cache))
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


def test_the_capacity_changes_nothing():
    decoder = make_decoder()
    ids = random_ids(2, 6)
    tight, wide = (KVCache(decoder.config, 2, capacity) for capacity in (6, 100))
    for part in ids.split([4, 1, 1], dim=1):
        assert torch.equal(decoder(part, cache=tight), decoder(part, cache=wide))


def test_a_call_without_room_leaves_the_cache_as_it_was():
    decoder = make_decoder()
    cache = KVCache(decoder.config, 2, 6)
    decoder(random_ids(2, 4), cache=cache)
    before = snapshot(cache)
    with pytest.raises(ArgumentError, match=r"capacity = 6 positions .* got 3 new ones after 4"):
        decoder(random_ids(2, 3), cache=cache)
    ids, mask = pad([random_ids(1, 1)[0], random_ids(1, 3)[0]], "left")
    with pytest.raises(ArgumentError, match=r"capacity = 6 positions .* got 3 new ones after 4"):
        decoder(ids, cache=cache, attention_mask=mask)
    assert unchanged(cache, before)
    decoder(random_ids(2, 2), cache=cache)
    assert cache.seqlens.tolist() == [6, 6]


def test_a_call_with_wrong_tokens_leaves_the_cache_as_it_was():
    decoder = make_decoder()
    cache = KVCache(decoder.config, 1, 40)
    decoder(random_ids(1, 20), cache=cache)
    before = snapshot(cache)
    with pytest.raises(ArgumentError, match="expected ids from 0 to 63"):
        decoder(torch.tensor([[64]]), cache=cache)
    with pytest.raises(ArgumentError, match="max_position_embeddings = 24 positions, got 25"):
        decoder(random_ids(1, 5), cache=cache)
    assert unchanged(cache, before)


def test_padding_that_would_not_fit_needs_no_room():
    decoder = make_decoder()
    cache = KVCache(decoder.config, 2, 3)
    ids, mask = pad([random_ids(1, 3)[0], random_ids(1, 2)[0]], "left")
    wider = torch.cat([torch.zeros(2, 30, dtype=torch.int64), ids], 1)
    wider_mask = torch.cat([torch.zeros(2, 30, dtype=torch.bool), mask], 1)
    decoder(wider, cache=cache, attention_mask=wider_mask)
    assert cache.seqlens.tolist() == [3, 2]


def test_a_cache_for_another_decoder_is_refused():
    decoder = make_decoder()
    ids = random_ids(2, 3)
    other = make_config(num_key_value_heads=2, rope_theta=5.0)
    for cache, error, sentence in (
        (KVCache(other, 2, 8), ArgumentError, "num_key_value_heads 2 for 4, rope_theta 5.0"),
        (KVCache(decoder.config, 3, 8), ArgumentError, "batch size of ids, 2, got 3"),
        (
            KVCache(decoder.config, 2, 8, dtype=torch.bfloat16),
            ArgumentTypeError,
            "dtype of the weights, torch.float32, got torch.bfloat16",
        ),
        (KVCache(decoder.config, 2, 8, device="meta"), ArgumentError, "device of the weights, cpu"),
    ):
        with pytest.raises(error, match=sentence):
            decoder(ids, cache=cache)
    decoder(ids, cache=KVCache(make_config(), 2, 8))  # an equal configuration will do
    for call in (decoder, lambda ids, cache: decoder.generate(ids, 2, cache=cache)):
        with pytest.raises(ArgumentTypeError, match=r"a KVCache, .* or rows of one, got list"):
            call(ids, cache=[])


@pytest.mark.parametrize(("batch_size", "capacity"), [(-1, 4), (2, -4)])
def test_negative_sizes_are_refused(batch_size, capacity):
    with pytest.raises(ArgumentError, match=r"^KVCache: expected .* to be at least 0, got -"):
        KVCache(make_config(), batch_size, capacity)


def test_sizes_are_integers():
    with pytest.raises(ArgumentTypeError, match=r"expected capacity to be an integer, got 4.0"):
        KVCache(make_config(), 2, 4.0)


def test_shapes_follow_the_configuration():
    cache = KVCache(make_config(num_key_value_heads=2, value_dim=5), 3, 7, dtype=torch.float64)
    assert cache.keys.shape == (2, 3, 2, 7, 8)
    assert cache.values.shape == (2, 3, 2, 7, 5)
    assert cache.keys.dtype == cache.values.dtype == torch.float64
    assert cache.seqlens.dtype == torch.int64
    assert cache.nbytes == (2 * 3 * 2 * 7) * (8 + 5) * 8


def test_reset_forgets_everything():
    decoder = make_decoder()
    cache = KVCache(decoder.config, 2, 8)
    ids = random_ids(2, 5)
    first = decoder(ids, cache=cache)
    cache.reset()
    assert cache.seqlens.tolist() == [0, 0]
    assert torch.equal(decoder(ids, cache=cache), first)


def test_a_cache_works_in_and_out_of_inference_mode():
    decoder = make_decoder()
    ids = random_ids(1, 6)
    with torch.inference_mode():
        cache = KVCache(decoder.config, 1, 8)
        decoder(ids[:, :3], cache=cache)
    close(decoder(ids[:, 3:], cache=cache), decoder(ids)[:, 3:].detach())


def test_a_call_with_a_cache_records_no_gradient():
    decoder = make_decoder()
    cache = KVCache(decoder.config, 1, 8)
    assert not decoder(random_ids(1, 3), cache=cache).requires_grad
    assert not cache.keys.requires_grad


def test_an_empty_batch_has_an_empty_cache():
    decoder = make_decoder()
    cache = KVCache(decoder.config, 0, 8)
    assert decoder(random_ids(0, 3), cache=cache).shape == (0, 3, 64)
    assert cache.seqlens.shape == (0,)


# ---- rows that join and leave; the same for caches in pages ----

KINDS = {
    "contiguous": lambda config, batch_size: KVCache(config, batch_size, 24),
    "pages": lambda config, batch_size: PagedKVCache(config, batch_size, 30, page_size=3),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@every_kind
@pytest.mark.parametrize("name", ["grouped queries", "everything", "like gpt-2"])
def test_rows_that_join_and_leave_write_what_they_write_alone(make, name):
    decoder = make_decoder(**OPTIONS[name])
    cache = make(decoder.config, 3)
    texts, written = {}, {}
    schedule = [{0: 5}, {0: 1, 2: 1}, {2: 4, 1: 4}, {1: 1, 0: 1}, {2: 2}, {0: 3, 1: 3, 2: 3}]
    for step, rows in enumerate(schedule):
        if step == 4:
            cache.rows([2]).reset()
            texts.pop(2)
            written.pop(2)
        ids = random_ids(len(rows), next(iter(rows.values())))
        logits = decoder(ids, cache=cache.rows(list(rows)))
        for row, new, own in zip(rows, ids, logits, strict=True):
            texts.setdefault(row, []).append(new)
            written.setdefault(row, []).append(own)
    assert cache.seqlens.tolist() == [sum(map(len, texts[row])) for row in range(3)]
    for row, parts in texts.items():
        close(torch.cat(written[row]), decoder(torch.cat(parts)[None])[0].detach())


@every_kind
@pytest.mark.parametrize("name", ["grouped queries", "everything", "like gpt-2"])
def test_padded_rows_of_a_selection(make, name):
    decoder = make_decoder(**OPTIONS[name])
    cache = make(decoder.config, 4)
    decoder(random_ids(1, 3), cache=cache.rows([1]))
    before = cache.seqlens.clone()
    rows = [random_ids(1, length)[0] for length in (2, 6)]
    ids, mask = pad(rows, "right", filler=99)
    logits = decoder(ids, cache=cache.rows([3, 0]), attention_mask=mask)
    for own, real, row in zip(logits, mask, rows, strict=True):
        close(own[real], decoder(row[None])[0].detach())
    assert (cache.seqlens - before).tolist() == [6, 0, 0, 2]


@pytest.mark.parametrize("cache_type", [KVCache, PagedKVCache])
@pytest.mark.parametrize(
    ("rows", "error", "sentence"),
    [
        ([0, 3], ArgumentError, r"expected rows from 0 to 2, got \[0, 3\]"),
        ([-1], ArgumentError, r"expected rows from 0 to 2, got \[-1\]"),
        ([1, 1], ArgumentError, r"expected distinct rows, got \[1, 1\]"),
        (1, ArgumentTypeError, "expected a sequence of rows, got 1"),
        (["a"], ArgumentError, r"expected rows from 0 to 2, got \['a'\]"),
    ],
)
def test_rows_are_distinct_and_exist(cache_type, rows, error, sentence):
    cache = cache_type(make_config(), 3, 8)
    with pytest.raises(error, match=f"^{cache_type.__name__}.rows: {sentence}"):
        cache.rows(rows)


@every_kind
def test_a_selection_has_as_many_rows_as_ids(make):
    decoder = make_decoder()
    cache = make(decoder.config, 3)
    with pytest.raises(ArgumentError, match="a cache of the batch size of ids, 1, got 2"):
        decoder(random_ids(1, 2), cache=cache.rows([0, 1]))
    assert decoder(random_ids(0, 2), cache=cache.rows([])).shape == (0, 2, VOCAB)


def test_other_rows_are_left_alone():
    decoder = make_decoder()
    cache = KVCache(decoder.config, 4, 8)
    cache.keys.fill_(7.0)
    cache.values.fill_(7.0)
    decoder(random_ids(2, 3), cache=cache.rows([3, 1]))
    for store in (cache.keys, cache.values):
        assert (store[:, [0, 2]] == 7).all()
        assert not (store[:, [1, 3], :, :3] == 7).any()
    cache.rows([3]).reset()
    assert cache.seqlens.tolist() == [0, 3, 0, 0]
    assert cache.rows([1, 0]).seqlens.tolist() == [3, 0]


@every_kind
def test_nothing_drops_out_behind_a_cache(make):
    decoder = make_decoder(dropout=0.5).train()
    cache = make(decoder.config, 1)
    with pytest.raises(
        ArgumentError, match=r"evaluation mode, .* training mode with dropout = 0.5"
    ):
        decoder(random_ids(1, 2), cache=cache)
    assert make_decoder().train()(random_ids(1, 2), cache=make(make_config(), 1)).isfinite().all()
