"""attention_with_kv_cache under torch.compile: lengths are data, so one graph serves a text."""

import itertools

import pytest
import torch
from assertions import assert_close, assert_same_bits
from caches import copied, in_pages, keywords, make, run
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attention_ext import attention_with_kv_cache, library
from attention_ext import scaled_dot_product_attention as attention

OPTIONS = {
    "window_left": 6, "softcap": 2.0, "alibi_slopes": torch.rand(4), "sinks": torch.rand(4),
    "scale": 0.3, "rotary_cos": torch.rand(32, 6), "rotary_sin": torch.rand(32, 6),
    "rotary_interleaved": True,
}  # fmt: skip


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_text_is_decoded_by_one_graph(backend, page_size):
    counter = CompileCounterWithBackend(backend)
    call = make((0, 0), 20, 20)
    keys, values = (torch.full_like(x, torch.nan) for x in call[1:3])
    table, seqlens = None, torch.tensor([0, 0])
    if page_size is not None:
        paged = in_pages(call, page_size)
        keys, values, table = paged.key_cache, paged.value_cache, paged.block_table

    def step(query, key, value):
        result = attention_with_kv_cache(
            query * 1.5, keys, values, seqlens, key, value, block_table=table, return_lse=True
        )
        seqlens.add_(1)
        return result.output.sin(), result.lse

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    steps = []
    with torch.no_grad():
        for i in range(20):
            new = (x[:, :, i : i + 1].clone() for x in (call.query, call.key, call.value))
            steps.append(compiled(*new))
        options = {"is_causal": True, "enable_gqa": True, "return_lse": True}
        whole = attention(call.query * 1.5, call.key, call.value, **options)
    assert counter.frame_count == 1
    assert_same_bits(seqlens, torch.tensor([20, 20]))
    assert_close(torch.cat([x for x, _ in steps], 2), whole.output.sin(), 2e-6)
    assert_close(torch.cat([x for _, x in steps], 2), whole.lse, 2e-6)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("inference", [False, True])
def test_the_layers_of_one_cache_tensor_are_one_graph(inference):
    call = make((3, 5), 2, 16)
    stacked = [torch.stack([x, x.flip(1)]) for x in call[1:3]]  # (layers, …): views of one tensor
    expected = [x.clone() for x in stacked]

    def step(query, keys, values, seqlens, key, value):
        for k, v in zip(keys, values, strict=True):
            query = attention_with_kv_cache(query, k, v, seqlens, key, value).relu()
        return query

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.inference_mode(inference):
        actual = compiled(call.query, *stacked, *call[3:6])
        assert_same_bits(actual, step(call.query, *expected, *call[3:6]))
    assert_same_bits(stacked, expected)


@pytest.mark.usefixtures("fresh_dynamo")
def test_batch_and_number_of_new_positions_may_be_dynamic():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=True)
    frames = []
    # sizes that are equal the first time stay equal, in Dynamo's eyes
    for lengths, seqlen_q in (((3, 5, 0), 5), ((3, 5, 0, 1, 1), 3), ((1, 2, 3, 4, 5, 6), 9)):
        call = make(lengths, seqlen_q, **OPTIONS)
        assert_same_bits(compiled(copied(call))[:2], run(call)[:2])
        frames.append(counter.frame_count)
    assert frames[0] == frames[2]


@pytest.mark.usefixtures("fresh_dynamo")
def test_errors_keep_their_sentence():
    compiled = torch.compile(attention_with_kv_cache, fullgraph=True, backend="aot_eager")
    wrong = keywords(make()) | {"value": None}
    with pytest.raises(Exception, match="key and value together or neither, got key alone"):
        compiled(**wrong)
    full = keywords(make()) | {"cache_seqlens": torch.tensor([5, 30])}
    with pytest.raises(Exception, match="within the capacity, 32, got 30 and 3 for sequence 1"):
        compiled(**full)
    learned = keywords(make())
    learned["query"].requires_grad_()
    with pytest.raises(Exception, match="inputs without gradient, got query that requires grad"):
        compiled(**learned)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("append", "page_size", "value_dim"),
    list(itertools.product([False, True], [None, 4], [16, 7])),
    ids=str,
)
def test_fake_results_look_like_real_ones(append, page_size, value_dim, symbolic):
    call = make(append=append, widths=(16, value_dim), dtype=torch.bfloat16, **OPTIONS)
    call = call._replace(query=torch.randn(2, 3, 4, 16, dtype=torch.bfloat16).transpose(1, 2))
    if page_size is not None:
        call = in_pages(call, page_size)
    real = run(call)
    with FakeTensorMode(shape_env=ShapeEnv() if symbolic else None) as mode:
        fakes = (mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in call)
        faked = run(type(call)(*fakes))
    for a, b in zip(real[:2], faked[:2], strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("page_size", [None, 4])
def test_the_operator_passes_opcheck(page_size, append):
    call = make(append=append, **OPTIONS)
    call.key_cache.nan_to_num_(), call.value_cache.nan_to_num_()  # opcheck compares bits
    if page_size is not None:
        call = in_pages(call, page_size)
        call.key_cache.nan_to_num_(), call.value_cache.nan_to_num_()
    torch.library.opcheck(library.attention_with_kv_cache, tuple(call))


def test_opcheck_with_rows_of_the_cache():
    call = make((5, 9, 2), 2)._replace(cache_batch_idx=torch.tensor([2, 0, 1]))
    call.key_cache.nan_to_num_(), call.value_cache.nan_to_num_()
    torch.library.opcheck(library.attention_with_kv_cache, tuple(call))
