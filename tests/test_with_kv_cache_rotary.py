"""attention_with_kv_cache turns queries and new keys by their positions."""

import pytest
import torch
from assertions import assert_close, assert_same_bits
from caches import copied, gathered, in_pages, make, run
from cases import DTYPES

from attention_ext import reference
from attention_ext import scaled_dot_product_attention as attention

pytestmark = pytest.mark.parity

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


def tables(positions, width, dtype=torch.float32):
    """Cosines and sines of the first positions, for a rotary width."""
    frequencies = 100.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}


def turned(x, cos, sin, interleaved):
    """(…, L, D) at positions 0 to L - 1, pair by pair as complex numbers."""
    half, length = cos.shape[1], x.shape[-2]
    factors = torch.complex(cos[:length].double(), sin[:length].double())
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    result = x.double().clone()
    for i, (a, b) in enumerate(pairs):
        product = torch.complex(x[..., a].double(), x[..., b].double()) * factors[:, i]
        result[..., a], result[..., b] = product.real, product.imag
    return result


@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("seqlen_q", [1, 4, 40])
@pytest.mark.parametrize(
    ("rotary", "width"),
    [(16, 16), (4, 16), (2, 3), (6, 33), (0, 8), (128, 128), (34, 40)],
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_cache_equal_the_definition(
    dtype, interleaved, rotary, width, seqlen_q, page_size
):
    call = make((0, 9), seqlen_q, 50, widths=(width, 8), dtype=dtype, **tables(64, rotary))
    call = call._replace(rotary_interleaved=interleaved)
    if page_size is not None:
        call = in_pages(call, page_size)
    expected, theirs = reference.attention_with_kv_cache(defined := copied(call)), defined[1:3]
    assert_close(run(call)[:2], expected, TOLERANCE[dtype])
    assert_same_bits(call[1:3], theirs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [16, 6])
def test_pairs_turn_as_complex_numbers(rotary, interleaved):
    given = tables(40, rotary, torch.float64)
    call = make((0, 0), 40, 40, dtype=torch.float64, rotary_interleaved=interleaved, **given)
    query, key = (turned(x, *given.values(), interleaved) for x in (call.query, call.key))
    expected = attention(query, key, call.value, is_causal=True, enable_gqa=True)
    assert_close(run(call).output, expected)
    for b in range(2):
        assert_close(gathered(call, b)[0], key[b])


def test_any_chunking_gives_the_same_cache_to_the_bit_and_the_same_output():
    given = tables(64, 12)
    whole = make((0, 0), 60, 64, rotary_interleaved=True, **given)
    expected = run(once := copied(whole))
    for chunks in ([1] * 60, [20, 1, 39]):
        parts, call = [], copied(whole)
        seqlens = torch.zeros(2, dtype=torch.int64)
        for query, key, value in zip(
            *(x.split(chunks, 2) for x in (whole.query, whole.key, whole.value)), strict=True
        ):
            step = call._replace(query=query, key=key, value=value, cache_seqlens=seqlens)
            parts.append(run(step).output)
            seqlens = seqlens + query.shape[2]
        assert_close(torch.cat(parts, 2), expected.output, 2e-6)
        assert_same_bits(call[1:3], once[1:3])


@pytest.mark.parametrize("interleaved", [False, True])
def test_without_new_keys_only_queries_turn_by_the_last_positions(interleaved):
    given = tables(64, 16) | {"rotary_interleaved": interleaved}
    call = make((2, 9), 3, **given)
    first = run(call)
    after = call._replace(key=None, value=None, cache_seqlens=call.cache_seqlens + 3)
    before = copied(after)
    assert_same_bits(run(after)[:2], first[:2])
    assert_same_bits(after[1:3], before[1:3])


def test_queries_before_the_first_position_need_no_row_of_the_tables():
    call = make((0, 1), 3, append=False, **tables(1, 16))
    output, lse, _ = run(call)
    assert (output[0] == 0).all()
    assert_close(output[1, :, 2], call.value_cache[1, :, 0].repeat_interleave(2, 0), 1e-6)
    assert lse[1, :, 2].isfinite().all()
    nothing = make((0, 0), 2, append=False, **tables(0, 16))
    assert (run(nothing).output == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables_may_have_the_querys_dtype_and_any_strides(dtype):
    given = tables(64, 16, dtype)
    call = make(dtype=dtype, **given)
    widened = {name: x.float() if dtype != torch.float64 else x for name, x in given.items()}
    expected = run(copied(call._replace(**widened)))
    strided = {name: x.t().contiguous().t() for name, x in given.items()}
    assert_same_bits(run(copied(call))[:2], expected[:2])
    assert_same_bits(run(copied(call._replace(**strided)))[:2], expected[:2])


@pytest.mark.parametrize("interleaved", [False, True])
def test_inputs_and_caches_of_any_strides(interleaved):
    given = tables(64, 10) | {"rotary_interleaved": interleaved}
    call = make(**given)
    expected = run(dense := copied(call))
    for a, b in ((1, 2), (2, 3)):
        changed = {
            name: getattr(call, name).transpose(a, b).contiguous().transpose(a, b)
            for name in ("query", "key", "value", "key_cache", "value_cache")
        }
        apart = call._replace(**changed)
        assert_same_bits(run(apart)[:2], expected[:2])
        assert_same_bits(apart[1:3], dense[1:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_threads_batch_and_pages_leave_every_bit(dtype, threads):
    lengths, given = (100, 0, 37), tables(400, 64)
    call = make(lengths, 200, 300, (8, 2), (64, 64), dtype, **given)
    paged = in_pages(call, 7)
    threads(1)
    expected = run(once := copied(call))
    threads(3)
    assert_same_bits(run(call)[:2], expected[:2])
    assert_same_bits(call[1:3], once[1:3])
    assert_same_bits(run(paged)[:2], expected[:2])
    for b in range(3):
        assert_same_bits(gathered(paged, b), gathered(once, b))
