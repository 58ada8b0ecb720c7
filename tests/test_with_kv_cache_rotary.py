"""attention_with_kv_cache with rotary tables: the same as apply_rotary before a call without."""

import pytest
import torch
from assertions import assert_close, assert_same_bits
from caches import copied, in_pages, keywords, make, run
from cases import DTYPES

from attention_ext import ArgumentError, apply_rotary, attention_with_kv_cache, reference

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


def tables(count, half, dtype=torch.float32):
    angles = torch.randn(count, half, dtype=torch.float64)
    return {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}


def rotated_before(call):
    """The call without tables, on a query and key that are rotated already."""
    added = 0 if call.key is None else call.query.shape[2]
    first = call.cache_seqlens.unsqueeze(1) + added - call.query.shape[2]
    positions = (first + torch.arange(call.query.shape[2])).clamp_min(0)
    options = {"positions": positions, "interleaved": call.rotary_interleaved}
    query, key = (
        None if x is None else apply_rotary(x, call.rotary_cos, call.rotary_sin, **options)
        for x in (call.query, call.key)
    )
    return call._replace(query=query, key=key, rotary_cos=None, rotary_sin=None)


@pytest.mark.parametrize("page_size", [None, 1, 5])
@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("seqlen_q", [1, 3, 30])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [0, 3, 8])
def test_it_equals_rotating_before_to_the_bit(half, interleaved, seqlen_q, append, page_size):
    options = {"rotary_interleaved": interleaved, "append": append, **tables(40, half)}
    call = make((5, 9), seqlen_q, 39, **options)
    call = call if page_size is None else in_pages(call, page_size)
    before = rotated_before(copied(call))
    assert_same_bits(run(call)[:2], run(before)[:2])
    assert_same_bits(call[1:3], before[1:3])


@pytest.mark.parametrize("own_tables", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_equals_the_definition(dtype, own_tables):
    options = tables(40, 5, dtype if own_tables else torch.float32)
    call = make((0, 7), 4, 20, dtype=dtype, **options)
    expected = reference.attention_with_kv_cache(copied(call))
    assert_close(run(call)[:2], expected, TOLERANCE[dtype])


def test_a_prompt_in_chunks_equals_one_pass():
    options = tables(30, 8, torch.float64)
    query, key, value = (torch.randn(2, h, 30, 16, dtype=torch.float64) for h in (4, 2, 2))
    results = []
    for chunks in ([30], [7, 1, 1, 21], [1] * 30):
        caches = [x.new_full((2, 2, 32, 16), torch.nan) for x in (key, value)]
        seqlens, parts = torch.zeros(2, dtype=torch.int64), []
        for new in zip(*(x.split(chunks, 2) for x in (query, key, value)), strict=True):
            parts.append(attention_with_kv_cache(new[0], *caches, seqlens, *new[1:], **options))
            seqlens += new[0].shape[2]
        results.append((torch.cat(parts, 2), caches[0][:, :, :30]))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


def test_any_strides_give_the_same_bits():
    call = make((5, 9), 3, 20, **tables(20, 6))
    changes = {
        name: tensor.transpose(1, 2).contiguous().transpose(1, 2).repeat_interleave(2, -1)[..., ::2]
        for name, tensor in call._asdict().items()
        if name in ("query", "key", "key_cache")
    }
    wide = {name: getattr(call, name).repeat_interleave(2, -1)[:, ::2] for name in tables(1, 1)}
    strided = copied(call)._replace(**changes, **wide)
    assert_same_bits(run(call)[:2], run(strided)[:2])
    assert_same_bits(call.key_cache, strided.key_cache)


def test_threads_do_not_change_a_bit(threads):
    call, results = make((300, 700), 70, 800, **tables(800, 8)), []
    for count in (1, 2):
        threads(count)
        results.append(run(copied(call))[:2])
    assert_same_bits(*results)


def test_queries_before_the_first_position_see_nothing():
    call = make((0, 2), 4, 20, append=False, **tables(2, 8))
    output, lse, _ = run(call)
    assert (output[0] == 0).all()
    assert (output[1, :, :2] == 0).all()
    assert (lse[1, :, :2] == -torch.inf).all()
    assert output[1, :, 2:].isfinite().all()
    empty = make((0, 0), 4, 20, append=False, **tables(0, 8))
    assert (run(empty).output == 0).all()


def test_tables_that_are_too_short_are_named_before_anything_is_written():
    call = make((5, 9), 3, 20, **tables(11, 8))
    before = copied(call)
    with pytest.raises(ArgumentError, match=r"rotary tables that reach position 11, got rot"):
        run(call)
    assert_same_bits(call[1:3], before[1:3])


def test_it_compiles_to_one_graph(fresh_dynamo):
    call = make((5, 9), 3, 20, rotary_interleaved=True, **tables(20, 8))
    compiled = torch.compile(attention_with_kv_cache, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same_bits(compiled(**keywords(copied(call))), run(call).output)
