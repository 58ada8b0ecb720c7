"""Score options one by one: results that are known without another implementation. Float64."""

import itertools
import math

import pytest
import torch
from assertions import assert_close, assert_same_bits, distances, shown
from cases import DTYPES
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attention_ext import paths
from attention_ext import scaled_dot_product_attention as attention
from attention_ext.reference import Call

pytestmark = pytest.mark.parity

VARIANTS = ("upper_left", "lower_right")


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def run(inputs, **options):
    """Output, lse, and the gradients of query, key, value."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output, lse, _ = attention(*leaves, **options, return_lse=True)
    upstream = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output.detach(), lse.detach(), *torch.autograd.grad(output, leaves, upstream)]


# ---- windows ----


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [(0, 0), (2, 1), (-1, 3), (5, -1), (1000, 0), (0, 1000)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(9, 9), (3, 70), (70, 3), (130, 100)])
def test_a_window_shows_from_left_to_right_of_the_position(seqlen_q, seqlen_kv, window, variant):
    value = torch.arange(seqlen_kv, dtype=torch.float64).reshape(1, -1, 1)
    query, key = zeros(1, seqlen_q, 4), randn(1, seqlen_kv, 4)
    output, lse, _ = attention(
        query, key, value, window_size=window, causal_variant=variant, return_lse=True
    )
    for i in range(seqlen_q):
        position = i + (seqlen_kv - seqlen_q if variant == "lower_right" else 0)
        first = 0 if window[0] < 0 else max(position - window[0], 0)
        last = seqlen_kv - 1 if window[1] < 0 else min(position + window[1], seqlen_kv - 1)
        count = max(last - first + 1, 0)
        mean = (first + last) / 2 if count else 0.0
        assert output[0, i, 0].item() == pytest.approx(mean, abs=1e-12)
        assert lse[0, i].item() == pytest.approx(math.log(count) if count else -math.inf)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_window_without_a_left_end_and_zero_on_the_right_is_causal_to_the_bit(dtype, variant):
    inputs = [torch.randn(2, 2, s, 16).to(dtype) for s in (40, 60, 60)]
    causal = run(inputs, is_causal=True, causal_variant=variant)
    assert_same_bits(run(inputs, window_size=(-1, 0), causal_variant=variant), causal)
    both = run(inputs, window_size=(-1, 9), is_causal=True, causal_variant=variant)
    assert_same_bits(both, causal)


def test_a_list_is_a_window_too():
    inputs = [randn(2, 9, 4) for _ in range(3)]
    assert_same_bits(attention(*inputs, window_size=[2, 1]), attention(*inputs, window_size=(2, 1)))


# ---- soft caps ----


def test_a_softcap_bounds_the_scores():
    query, key = torch.tensor([[1.0]]).double(), torch.tensor([[1e6], [-1e6], [0.0]]).double()
    value = torch.eye(3, dtype=torch.float64)
    output = attention(query, key, value, softcap=2.0, scale=1.0)
    assert_close(output, torch.tensor([[2.0, -2.0, 0.0]]).double().softmax(-1))


def test_a_softcap_is_what_tanh_says():
    query, key = randn(5, 8), randn(70, 8)
    output = attention(query, key, torch.eye(70).double(), softcap=1.5, scale=0.9)
    assert_close(output, (1.5 * (query @ key.T * 0.9 / 1.5).tanh()).softmax(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_none_and_zero_switch_a_softcap_off(dtype):
    inputs = [torch.randn(2, 2, 40, 16).to(dtype) for _ in range(3)]
    for off in (None, 0, 0.0):
        assert_same_bits(run(inputs, softcap=off), run(inputs))


def test_the_cap_comes_before_mask_and_slopes():
    query, key = torch.tensor([[1.0]]).double(), torch.tensor([[1e6], [1e6], [1e6]]).double()
    mask = torch.tensor([[0.0, 50.0, 30.0]]).double()
    weights = attention(
        query, key, key, mask, softcap=1.0, alibi_slopes=torch.ones(1).double(),
        return_weights=True,
    ).weights  # fmt: skip
    scores = torch.tensor([[1.0, 1.0 + 50.0 - 1.0, 1.0 + 30.0 - 2.0]])
    assert_close(weights, scores.double().softmax(-1))


# ---- slopes ----


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(5, 5), (3, 70), (70, 3)])
def test_slopes_weigh_keys_by_their_distance(seqlen_q, seqlen_kv, variant):
    slopes = torch.tensor([0.0, 0.25, 3.0]).double()
    inputs = zeros(1, 3, seqlen_q, 4), randn(1, 3, seqlen_kv, 4)
    value = torch.eye(seqlen_kv).double().expand(1, 3, seqlen_kv, seqlen_kv)
    output = attention(*inputs, value, alibi_slopes=slopes, causal_variant=variant)
    offset = seqlen_kv - seqlen_q if variant == "lower_right" else 0
    position = torch.arange(seqlen_q).unsqueeze(-1) + offset
    distance = (position - torch.arange(seqlen_kv)).abs()
    assert_close(output[0], (-slopes[:, None, None] * distance).softmax(-1))


def test_slopes_and_sinks_per_batch_element_equal_calls_of_their_own():
    inputs = [randn(3, heads, 20, 8) for heads in (4, 2, 2)]
    slopes = torch.rand(3, 4).double()
    options = {"enable_gqa": True, "causal_variant": "lower_right"}
    together = attention(*inputs, alibi_slopes=slopes, **options)
    for row in range(3):
        alone = attention(*(x[row] for x in inputs), alibi_slopes=slopes[row], **options)
        assert_close(together[row], alone)
    sinks = torch.randn(3, 4).double()
    together = attention(*inputs, sinks=sinks, **options)
    for row in range(3):
        alone = attention(*(x[row] for x in inputs), sinks=sinks[row], **options)
        assert_close(together[row], alone)
    shared = attention(*inputs, alibi_slopes=slopes[:1], **options)
    assert_close(shared, attention(*inputs, alibi_slopes=slopes[0], **options))


# ---- sinks ----


def test_a_sink_takes_its_share_of_the_weights():
    sinks = torch.tensor([-1.0, 0.0, 2.0, -math.inf]).double()
    query, key, value = zeros(4, 5, 8), randn(4, 6, 8), randn(4, 6, 3)
    output, lse, weights = attention(
        query, key, value, sinks=sinks, return_lse=True, return_weights=True
    )
    total = 6 + sinks.exp()[:, None]
    assert_close(lse, total.log().expand(4, 5))
    assert_close(weights, (1 / total)[..., None].expand(4, 5, 6))
    assert_close(output, weights @ value)


def test_a_sink_is_one_more_key_without_a_value():
    query, key, value, sinks = randn(3, 5, 8), randn(3, 70, 8), randn(3, 70, 4), randn(3)
    bias = torch.cat([zeros(3, 1, 70), sinks[:, None, None]], dim=-1)
    longer_key, longer_value = (torch.cat([x, zeros(3, 1, x.shape[-1])], 1) for x in (key, value))
    expected = attention(query, longer_key, longer_value, bias, return_lse=True)
    actual = attention(query, key, value, sinks=sinks, return_lse=True)
    assert_close(actual[:2], expected[:2])


def test_a_row_without_keys_has_the_sink_for_its_lse():
    inputs = [randn(2, s, 4) for s in (5, 3, 3)]
    sinks = torch.tensor([0.7, -math.inf]).double()
    output, lse, _ = attention(
        *inputs, is_causal=True, causal_variant="lower_right", sinks=sinks, return_lse=True
    )
    assert not output[:, :2].any()
    assert_close(lse[:, :2], sinks[:, None].expand(2, 2), 1e-15)
    output, lse, _ = attention(
        inputs[0], *(x[:, :0] for x in inputs[1:]), sinks=sinks, return_lse=True
    )
    assert not output.any()
    assert_close(lse, sinks[:, None].expand(2, 5), 1e-15)


# ---- lengths ----


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_keys_in_use_equal_a_call_on_them_alone(kind, causal, variant):
    inputs = [randn(4, 2, s, 8) for s in (7, 60, 60)]
    lengths = torch.tensor([60, 0, 33, 5], dtype=kind)
    options = {"is_causal": causal, "causal_variant": variant, "window_size": (20, -1)}
    together = run(inputs, seqused_k=lengths, **options)
    upstream = torch.linspace(-1, 1, 4 * 2 * 7 * 8, dtype=torch.float64).reshape(4, 2, 7, 8)
    for row, length in enumerate(lengths.tolist()):
        leaves = [x[row].clone().requires_grad_() for x in inputs]
        query, key, value = leaves[0], *(x[:, :length] for x in leaves[1:])
        output, lse, _ = attention(query, key, value, **options, return_lse=True)
        grads = torch.autograd.grad(output, leaves, upstream[row])
        assert_close([output, lse, *grads], [x[row] for x in together])
        assert not together[3][row, :, length:].any()


def test_lengths_broadcast_and_hold_for_every_head():
    inputs = [randn(2, 3, 2, s, 8) for s in (7, 20, 20)]
    expected = attention(*inputs, seqused_k=torch.tensor([[5, 9, 2]] * 2))
    assert_same_bits(attention(*inputs, seqused_k=torch.tensor([5, 9, 2])), expected)
    single = attention(*inputs, seqused_k=torch.tensor(5))
    assert_same_bits(single, attention(*inputs, seqused_k=torch.tensor([[5, 5, 5]] * 2)))


# ---- together ----


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_hidden_by_any_one_is_hidden(kind, variant):
    inputs = [randn(2, 2, s, 8) for s in (40, 70, 70)]
    mask = torch.rand(2, 1, 40, 70) < 0.8
    if kind == "float":
        mask = randn(2, 1, 40, 70).masked_fill(~mask, -math.inf)
    lower_right = variant == "lower_right"
    call = Call(
        *inputs, mask, True, None, False, lower_right, 30, 2, seqused_k=torch.tensor([70, 45])
    )
    visible = shown(call)
    if kind == "float":
        visible = mask.masked_fill(~visible, -math.inf)
    expected = run(inputs, attn_mask=visible)
    actual = run(
        inputs, attn_mask=mask, is_causal=True, causal_variant=variant, window_size=(30, 2),
        seqused_k=call.seqused_k,
    )  # fmt: skip
    assert_close(actual, expected)


@pytest.mark.parametrize(
    "options", list(itertools.product(VARIANTS, [False, True], [False, True])), ids=str
)
@pytest.mark.parametrize("bias", VARIANTS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(5, 9), (9, 9), (4, 70)])
def test_a_causal_bias_hides_by_itself_and_leaves_positions_alone(
    seqlen_q, seqlen_kv, bias, options
):
    variant, with_window, with_lengths = options
    inputs = [randn(2, 2, s, 8) for s in (seqlen_q, seqlen_kv, seqlen_kv)]
    lengths = torch.tensor([seqlen_kv, seqlen_kv - 2]) if with_lengths else None
    options = {
        "causal_variant": variant, "window_size": (3, -1) if with_window else (-1, -1),
        "alibi_slopes": torch.tensor([0.1, 0.2]).double(), "seqused_k": lengths,
    }  # fmt: skip
    make = causal_lower_right if bias == "lower_right" else causal_upper_left
    diagonal = seqlen_kv - seqlen_q if bias == "lower_right" else 0
    mask = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool).tril(diagonal)
    actual = run(inputs, attn_mask=make(seqlen_q, seqlen_kv), **options)
    assert_close(actual, run(inputs, attn_mask=mask, **options))


def test_the_score_order_is_the_documented_one():
    query, key, value = randn(2, 3, 5, 4), randn(2, 3, 7, 4), randn(2, 3, 7, 2)
    mask, slopes, sinks = randn(5, 7), torch.rand(3).double(), randn(3)
    used = torch.tensor([7, 4])
    call = Call(
        query, key, value, mask, True, -0.8, False, True, 3, 1, 1.7, 0.0, slopes, sinks, used
    )
    scores = 1.7 * ((query @ key.mT) * -0.8 / 1.7).tanh() + mask
    scores = scores - slopes[:, None, None] * distances(call).abs()
    scores = scores.masked_fill(~shown(call), -math.inf)
    logits = torch.cat([scores, sinks[:, None, None].expand(2, 3, 5, 1)], -1)
    weights = logits.softmax(-1)[..., :-1]
    output, lse, ours = paths.attention(call, True)
    assert_close((ours, output, lse), (weights, weights @ value, logits.logsumexp(-1)))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_slopes_and_sinks_may_be_float32_beside_halves(dtype):
    inputs = [torch.randn(2, 4, 9, 16).to(dtype) for _ in range(3)]
    slopes, sinks = torch.rand(4), torch.randn(4)
    actual = attention(*inputs, alibi_slopes=slopes, sinks=sinks)
    exact = attention(
        *(x.double() for x in inputs), alibi_slopes=slopes.double(), sinks=sinks.double()
    )
    assert_close(actual.double(), exact, 8 * torch.finfo(dtype).eps)
    leaves = [x.requires_grad_() for x in (slopes, sinks)]
    output = attention(*inputs, alibi_slopes=slopes, sinks=sinks)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(output.sum(), leaves))
