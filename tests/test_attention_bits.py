"""The same bits: causality, thread counts, batch-mates, and what else must not show in a result."""

import pytest
import torch
from assertions import assert_close, assert_same_bits, attend, fresh, leaves_of
from cases import BY_NAME, CASES, DTYPES, keywords

from attention_ext import scaled_dot_product_attention as attention
from attention_ext.reference import Call

pytestmark = pytest.mark.parity


def run(call):
    """Output, lse, and the gradients of all inputs for a fixed upstream gradient."""
    call = fresh(call)
    output, lse = attend(call)
    generator = torch.Generator().manual_seed(2)
    upstream = [
        torch.randn(tensor.shape[-2:], generator=generator).to(tensor.dtype).expand(tensor.shape)
        for tensor in (output, lse)
    ]
    grads = torch.autograd.grad((output, lse), leaves_of(call), upstream)
    return [output.detach(), lse.detach(), *grads]


@pytest.mark.parametrize("variant", ["upper_left", "lower_right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(80, 80), (10, 90), (90, 10)])
def test_changing_a_token_leaves_all_earlier_outputs_bit_identical(
    seqlen_q, seqlen_kv, dtype, variant
):
    query, key, value = (
        torch.randn(2, 2, s, 16).to(dtype) for s in (seqlen_q, seqlen_kv, seqlen_kv)
    )
    options = {"is_causal": True, "causal_variant": variant, "return_lse": True}
    expected = attention(query, key, value, **options)
    offset = seqlen_kv - seqlen_q if variant == "lower_right" else 0
    for place in range(0, seqlen_kv, 7):
        changed = [tensor.clone() for tensor in (key, value)]
        for tensor in changed:
            tensor[..., place, :] = 50.0 * torch.randn(2, 2, 16).to(dtype)
        actual = attention(query, *changed, **options)
        first = min(max(place - offset, 0), seqlen_q)  # the first row that sees it
        assert_same_bits(actual.output[..., :first, :], expected.output[..., :first, :])
        assert_same_bits(actual.lse[..., :first], expected.lse[..., :first])
        if first < seqlen_q:
            assert not torch.equal(actual.output[..., first, :], expected.output[..., first, :])


def test_without_causality_every_token_matters():
    inputs = [torch.randn(1, 1, 20, 8) for _ in range(3)]
    expected = attention(*inputs)
    inputs[2][..., 19, :] += 1.0
    assert (attention(*inputs) != expected).all()


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_the_same_bits_for_one_and_three_threads(case, dtype, threads):
    call = case.make(dtype)
    threads(1)
    expected = run(call)
    threads(3)
    assert_same_bits(run(call), expected)


# what the small cases do on one thread alone: below a certain size a second is not worth it
LARGE = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window_left": 100, "window_right": 20},
    "dropout": {"dropout_p": 0.3, "seed": torch.tensor(7), "is_causal": True},
    "bool mask": {"attn_mask": torch.arange(700) % 7 > 0},
    "learned bias": {"attn_mask": torch.linspace(-1, 1, 700).reshape(1, 700)},
    "score options": {
        "softcap": 3.0, "alibi_slopes": torch.linspace(0.1, 0.6, 6), "sinks": torch.ones(6),
        "seqused_k": torch.tensor([700, 400]), "lower_right": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_calls_are_the_same_bits_for_every_thread_count(dtype, name, threads):
    inputs = [torch.randn(2, heads, 700, 32).to(dtype) for heads in (6, 3, 3)]
    call = Call(*inputs, **LARGE[name], enable_gqa=True)
    threads(1)
    expected = run(call)
    for count in (2, 5):
        threads(count)
        assert_same_bits(run(call), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [9, 130])
def test_a_batch_element_has_the_same_bits_alone_as_among_others(length, dtype):
    inputs = [torch.randn(5, heads, length, 24).to(dtype) for heads in (4, 2, 2)]
    mask = torch.randn(5, 1, length, length).to(dtype)
    slopes, used = torch.rand(5, 4).to(dtype), torch.tensor([0, 1, length // 2, length - 1, length])
    call = Call(*inputs, mask, True, enable_gqa=True, window_left=40, softcap=4.0)
    batch = {"alibi_slopes": slopes, "seqused_k": used}
    together = run(call._replace(**batch))
    for row in range(5):
        rows = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        inputs = dict(
            zip(Call._fields, (tensor[row : row + 1] for tensor in call[:4]), strict=False)
        )
        alone = run(call._replace(**inputs, **rows))
        assert_same_bits(alone, [tensor[row : row + 1] for tensor in together])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_mate_that_is_not_finite_changes_no_bit(dtype):
    inputs = [torch.randn(2, 2, 70, 16).to(dtype) for _ in range(3)]
    expected = [tensor[1] for tensor in run(Call(*inputs, is_causal=True))]
    for tensor in inputs:
        tensor[0] = torch.nan
    assert_same_bits([t[1] for t in run(Call(*inputs, is_causal=True))], expected)


def test_repeated_runs_give_the_same_bits():
    call = BY_NAME["two queries share a key head"].make(torch.float32)
    expected = run(call)
    for _ in range(20):
        assert_same_bits(run(call), expected)


@pytest.mark.parametrize("poison", [False, True], ids=["finite", "not finite"])
@pytest.mark.parametrize("length", [64, 100, 300])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_the_layout_of_the_inputs_changes_no_bit(dtype, length, poison):
    inputs = [torch.randn(2, 3, length, 32).to(dtype) for _ in range(3)]
    if poison:
        inputs[0][:, :, 5, 7] = torch.nan
    expected = run(Call(*inputs, is_causal=True))
    by_token = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs]
    assert_same_bits(run(Call(*by_token, is_causal=True)), expected)


@pytest.mark.parametrize("name", ["several tiles, causal", "one query, many keys", "sinks"])
def test_asking_for_lse_weights_or_gradients_changes_no_bit_of_the_output(name):
    call = BY_NAME[name].make(torch.float32)
    plain = attention(**keywords(call))
    assert_same_bits(attention(**keywords(call), return_lse=True).output, plain)
    assert_same_bits(attention(**keywords(call), return_weights=True).output, plain)
    training = BY_NAME[name].make(torch.float32, requires_grad=True)
    assert_same_bits(attention(**keywords(training)).detach(), plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options_that_change_nothing_change_no_bit(dtype):
    inputs = [torch.randn(2, 2, 130, 24).to(dtype) for _ in range(3)]
    plain = run(Call(*inputs, is_causal=True))
    for options in (
        {"window_left": 1000, "window_right": 1000},
        {"seqused_k": torch.tensor(130)},
        {"alibi_slopes": torch.zeros(2).to(dtype)},
        {"sinks": torch.full((2,), -torch.inf).to(dtype)},
        {"attn_mask": torch.ones(130, 130, dtype=torch.bool)},
        {"attn_mask": torch.zeros(130, dtype=dtype)},
    ):
        assert_same_bits(run(Call(*inputs, is_causal=True, **options))[:5], plain)


# ---- the cached step and the chunked prefill ----


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 65, 130])
def test_a_lower_right_step_of_one_query_sees_all_keys(length):
    query, key, value = (torch.randn(2, 3, s, 16) for s in (1, length, length))
    step = attention(query, key, value, is_causal=True, causal_variant="lower_right")
    assert_same_bits(step, attention(query, key, value))


@pytest.mark.parametrize("chunks", [[1, 3, 16, 80], [50, 50], [33, 1, 66], [99, 1]])
def test_a_prefill_in_chunks_equals_one_causal_pass(chunks):
    inputs = [torch.randn(2, 3, sum(chunks), 16, dtype=torch.float64) for _ in range(3)]
    whole = attention(*inputs, is_causal=True)
    start = 0
    for size in chunks:
        stop = start + size
        query, key, value = inputs[0][..., start:stop, :], *(x[..., :stop, :] for x in inputs[1:])
        part = attention(query, key, value, is_causal=True, causal_variant="lower_right")
        assert_close(part, whole[..., start:stop, :])
        start = stop


@pytest.mark.parametrize("mask", ["bool", "float"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_gives_a_row_the_same_bits_beside_a_row_of_large_scores(dtype, mask):
    """Of which a kernel might take a shorter way: without those no reference can move."""
    query, key, value = (torch.randn(1, 1, 70, 8).to(dtype) for _ in range(3))
    attn_mask = torch.rand(70, 70) < 0.7 if mask == "bool" else torch.randn(70, 70).to(dtype)
    attn_mask[3:5] = True if mask == "bool" else -torch.inf
    expected = attention(query, key, value, attn_mask=attn_mask)
    query[..., 40, :] *= 1000.0
    actual = attention(query, key, value, attn_mask=attn_mask)
    others = torch.arange(70) != 40
    assert_same_bits(actual[..., others, :], expected[..., others, :])
