"""attention_with_kv_cache: it equals one full causal pass, whatever the cache looks like."""

import math

import pytest
import torch
from assertions import assert_close, assert_same_bits
from caches import copied, in_pages, make, run
from cases import DTYPES

from attention_ext import AttentionResult, attention_with_kv_cache, reference
from attention_ext import scaled_dot_product_attention as attention

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


def decode(query, key, value, chunks, page_size=None, **options):
    """Output and lse of a prompt that arrives in chunks, in a cache of a few positions more."""
    batch, kv_heads, length, _ = key.shape
    shape, table = (batch, kv_heads, length + 3), None
    if page_size is not None:
        each = -(-(length + 3) // page_size)
        table = torch.randperm(batch * each + 2)[: batch * each].reshape(batch, each).int()
        shape = (batch * each + 2, kv_heads, page_size)
    caches = [x.new_full((*shape, x.shape[3]), torch.nan) for x in (key, value)]
    seqlens, results = torch.zeros(batch, dtype=torch.int32), []
    for new in zip(*(x.split(chunks, 2) for x in (query, key, value)), strict=True):
        step = attention_with_kv_cache(
            new[0], *caches, seqlens, *new[1:], block_table=table, return_lse=True, **options
        )
        results.append(step)
        seqlens += new[0].shape[2]
    return torch.cat([x.output for x in results], 2), torch.cat([x.lse for x in results], 2)


@pytest.mark.parametrize("page_size", [None, 1, 3, 16, 64])
@pytest.mark.parametrize(
    "chunks", [[70], [1] * 70, [64, 6], [3, 30, 1, 1, 35], [5] * 14], ids=lambda x: str(x[:5])
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_chunking_and_paging_of_a_prompt_equals_one_causal_pass(dtype, chunks, page_size):
    query, key, value = (torch.randn(2, h, 70, 16).to(dtype) for h in (4, 2, 2))
    whole = attention(query, key, value, is_causal=True, enable_gqa=True, return_lse=True)
    output, lse = decode(query, key, value, chunks, page_size)
    assert_close(output, whole.output, TOLERANCE[dtype])
    assert_close(lse, whole.lse, 1e-12 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("page_size", [None, 7, 32])
def test_a_long_prompt_in_chunks_equals_one_causal_pass(page_size):
    query, key, value = (torch.randn(1, h, 2300, 8, dtype=torch.float64) for h in (2, 1, 1))
    whole = attention(query, key, value, is_causal=True, enable_gqa=True, return_lse=True)
    chunks = [1100, 600, 1, 400, *[1] * 7, 190, 2]
    output, lse = decode(query, key, value, chunks, page_size)
    assert_close(output, whole.output)
    assert_close(lse, whole.lse)


@pytest.mark.parametrize("name", ["window", "softcap", "alibi_slopes", "sinks", "scale", "all"])
def test_any_chunking_is_the_same_with_score_options(name):
    query, key, value = (torch.randn(2, h, 45, 8, dtype=torch.float64) for h in (4, 2, 2))
    options = {
        "window": {"window_size": (9, -1)},
        "softcap": {"softcap": 1.5},
        "alibi_slopes": {"alibi_slopes": torch.rand(2, 4)},
        "sinks": {"sinks": torch.randn(4)},
        "scale": {"scale": -0.7},
    }
    options["all"] = {k: v for given in options.values() for k, v in given.items()}
    given = options[name]
    whole = attention(query, key, value, is_causal=True, enable_gqa=True, return_lse=True, **given)
    for chunks in ([45], [20, 1, 1, 23], [1] * 45):
        output, lse = decode(query, key, value, chunks, 4, **given)
        assert_close(output, whole.output)
        assert_close(lse, whole.lse)


# lengths and new positions: few and many rows, one chunk of keys and several, empty sequences
SIZES = [
    pytest.param(lengths, seqlen_q, id=f"{seqlen_q} after {lengths}")
    for lengths, seqlen_q in [
        ((5, 9), 1), ((0, 0), 1), ((0, 31), 2), ((700, 33), 1), ((1500, 3), 2), ((3, 1030), 1),
        ((0, 70), 40), ((530, 1), 40), ((2, 3), 9),
    ]
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize(("lengths", "seqlen_q"), SIZES)
def test_it_equals_the_definition(lengths, seqlen_q, append, dtype):
    call = make(lengths, seqlen_q, max(lengths) + seqlen_q + 5, append=append, dtype=dtype)
    expected = reference.attention_with_kv_cache(copied(call))
    assert_close(run(call)[:2], expected, TOLERANCE[dtype])


OPTIONS = {
    "none": {},
    "window": {"window_left": 6},
    "a window's right side never shows the future": {"window_left": 6, "window_right": 4},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": torch.linspace(0.05, 0.4, 4)},
    "slopes per sequence": {"alibi_slopes": torch.linspace(0.05, 0.4, 8).reshape(2, 4)},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)},
    "scale": {"scale": 0.3},
    "scale 0": {"scale": 0.0},
    "all": {
        "window_left": 20, "softcap": 2.0, "alibi_slopes": torch.linspace(0.05, 0.4, 4),
        "sinks": torch.linspace(-1, 1, 4), "scale": 0.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("page_size", [None, 5])
@pytest.mark.parametrize("seqlen_q", [1, 25])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_score_options_equal_the_definition(name, dtype, seqlen_q, page_size):
    call = make((11, 40), seqlen_q, 70, dtype=dtype, widths=(24, 10), **OPTIONS[name])
    expected = reference.attention_with_kv_cache(copied(call))
    if page_size is not None:
        call = in_pages(call, page_size)
    assert_close(run(call)[:2], expected, TOLERANCE[dtype])


@pytest.mark.parametrize(("name", "dtype"), [("slopes", "bfloat16"), ("sinks", "bfloat16")])
def test_slopes_and_sinks_may_have_the_querys_dtype(name, dtype):
    half = {k: v.to(getattr(torch, dtype)) for k, v in OPTIONS[name].items()}
    call = make(dtype=torch.bfloat16, **half)
    widened = call._replace(**{k: v.float() for k, v in half.items()})
    assert_same_bits(run(copied(call))[:2], run(widened)[:2])


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 2), (6, 1), (32, 1)], ids=str)
def test_heads_are_grouped(heads):
    call = make(heads=heads, dtype=torch.float64)
    assert_close(run(copied(call))[:2], reference.attention_with_kv_cache(call))


@pytest.mark.parametrize("widths", [(1, 1), (3, 33), (64, 80), (257, 5), (128, 128)], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_widths(widths, seqlen_q):
    call = make(seqlen_q=seqlen_q, capacity=48, widths=widths, dtype=torch.float64)
    paged = in_pages(call, 3)
    expected = reference.attention_with_kv_cache(copied(call))
    assert_close(run(call)[:2], expected)
    assert_close(run(paged)[:2], expected)


def test_without_new_keys_the_queries_are_the_last_positions_in_use():
    call = make((5, 9), 3, append=False, dtype=torch.float64)
    output = run(call).output
    for b, length in enumerate((5, 9)):
        keys, values = (x[b, :, :length] for x in call[1:3])
        options = {"is_causal": True, "causal_variant": "lower_right", "enable_gqa": True}
        assert_close(output[b], attention(call.query[b], keys, values, **options))


def test_attending_after_an_append_repeats_its_bits():
    call = make()
    first = run(call)
    after = call._replace(key=None, value=None, cache_seqlens=call.cache_seqlens + 3)
    assert_same_bits(run(after)[:2], first[:2])


@pytest.mark.parametrize("seqlen_q", [4, 40])
def test_queries_before_the_first_position_see_nothing(seqlen_q):
    call = make((0, 3), seqlen_q, 64, append=False)
    call.query[0] = torch.nan
    output, lse, _ = run(call)
    assert (output[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    assert (output[1, :, : seqlen_q - 3] == 0).all()
    assert (lse[1, :, : seqlen_q - 3] == -math.inf).all()
    assert output[1, :, seqlen_q - 3 :].isfinite().all()
    sinks = torch.tensor([0.0, 1.0, 2.0, 3.0])
    with_sinks = run(call._replace(sinks=sinks))
    assert_same_bits(with_sinks.lse[0], sinks[:, None].expand(4, seqlen_q))


def test_results_are_what_was_asked_for():
    call = make(dtype=torch.bfloat16)
    arguments = call[:6]
    output = attention_with_kv_cache(*arguments)
    assert type(output) is torch.Tensor
    result = attention_with_kv_cache(*arguments, return_lse=True)
    assert type(result) is AttentionResult
    assert result.weights is None
    assert (output.dtype, result.lse.dtype) == (torch.bfloat16, torch.float32)
    assert run(make(dtype=torch.float64)).lse.dtype == torch.float64
    assert (output.shape, result.lse.shape) == ((2, 4, 3, 16), (2, 4, 3))


def test_the_output_lies_in_memory_as_the_query():
    query = torch.randn(2, 3, 4, 16).transpose(1, 2)
    output = run(make()._replace(query=query)).output
    assert output.stride() == query.stride()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lengths_pages_and_rows_may_be_int32_or_int64_with_any_stride(dtype):
    def integers(tensor):
        return tensor.to(dtype).repeat_interleave(2, -1)[..., ::2]

    call = in_pages(make(), 4)
    changed = call._replace(
        cache_seqlens=integers(call.cache_seqlens), block_table=integers(call.block_table)
    )
    assert_same_bits(run(copied(changed))[:2], run(call)[:2])
    call = make()._replace(cache_batch_idx=torch.tensor([1, 0]))
    changed = call._replace(cache_batch_idx=integers(call.cache_batch_idx))
    assert_same_bits(run(copied(changed))[:2], run(call)[:2])


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize(
    "zero",
    [
        {"lengths": ()}, {"seqlen_q": 0}, {"heads": (0, 2)}, {"heads": (0, 0)},
        {"widths": (16, 0)}, {"widths": (0, 16)}, {"lengths": (0, 0), "append": False},
        {"lengths": (0, 0), "capacity": 0, "append": False},
    ],
    ids=str,
)  # fmt: skip
def test_zero_sizes(zero, page_size):
    call = make(**zero)
    if page_size is not None:
        call = in_pages(call, page_size)
    output, lse, _ = run(call)
    assert output.shape == (*call.query.shape[:3], call.value_cache.shape[3])
    assert lse.shape == call.query.shape[:3]
    if "capacity" in zero or "append" in zero:
        assert (output == 0).all()
        assert (lse == -math.inf).all()
    if zero.get("widths") == (0, 16):  # every score is 0: the mean of what is visible
        values = reference.attention_with_kv_cache(make(lengths=(0, 0), widths=(0, 16), seqlen_q=1))
        assert values[0].shape == (2, 4, 1, 16)
        assert lse[0, 0, 0] == pytest.approx(math.log(6))


def test_it_works_in_inference_mode_on_caches_from_inside_and_outside():
    call = make()
    expected = run(copied(call))
    with torch.inference_mode():
        inside = copied(call)
        assert_same_bits(run(copied(call))[:2], expected[:2])
        assert_same_bits(run(inside)[:2], expected[:2])
    after = inside._replace(key=None, value=None, cache_seqlens=call.cache_seqlens + 3)
    assert_same_bits(run(after)[:2], expected[:2])
