"""Hidden means unread, empty rows, and how masks compose and broadcast."""

import math

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_close, assert_same_bits
from cases import DTYPES

from attention_ext import scaled_dot_product_attention as attention

pytestmark = pytest.mark.parity

POISON = [math.nan, math.inf, -math.inf, 1e30]
LENGTHS = [(9, 9), (5, 70), (70, 5), (40, 150)]


def make(seqlen_q, seqlen_kv, dtype=torch.float32, width=16):
    shapes = (2, 3, seqlen_q, width), (2, 3, seqlen_kv, width), (2, 3, seqlen_kv, width)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def run(inputs, upstream=None, **options):
    """Output, lse, and the gradients of query, key, value."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output, lse, _ = attention(*leaves, **options, return_lse=True)
    if upstream is None:
        upstream = torch.ones_like(output)
    return [output.detach(), lse.detach(), *torch.autograd.grad(output, leaves, upstream)]


def padding(seqlen_kv, as_float=False, dtype=torch.float32):
    """Hide the last third of the keys of the first batch element, none of the second's."""
    length = torch.tensor([seqlen_kv - seqlen_kv // 3, seqlen_kv]).reshape(2, 1, 1, 1)
    mask = torch.arange(seqlen_kv) < length
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf) if as_float else mask


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), LENGTHS)
def test_what_lies_in_masked_keys_and_values_changes_no_bit(
    seqlen_q, seqlen_kv, dtype, as_float, poison
):
    inputs = make(seqlen_q, seqlen_kv, dtype)
    mask = padding(seqlen_kv, as_float, dtype)
    expected = run(inputs, attn_mask=mask)
    hidden = slice(seqlen_kv - seqlen_kv // 3, None)
    poisoned = [tensor.clone() for tensor in inputs]
    for tensor in poisoned[1:]:
        tensor[0, :, hidden] = poison
    actual = run(poisoned, attn_mask=mask)
    assert_same_bits(actual, expected)
    assert not actual[3][0, :, hidden].any()  # the gradients of hidden keys and values are 0
    assert not actual[4][0, :, hidden].any()


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), LENGTHS)
def test_what_lies_in_later_positions_changes_no_bit_of_earlier_rows(
    seqlen_q, seqlen_kv, dtype, poison
):
    inputs = make(seqlen_q, seqlen_kv, dtype)
    place = min(seqlen_q, seqlen_kv) // 2  # visible to the rows from here on, hidden before
    upstream = torch.randn(2, 3, seqlen_q, 16).to(dtype)
    upstream[..., place:, :] = 0.0
    expected = run(inputs, upstream, is_causal=True)
    poisoned = [tensor.clone() for tensor in inputs]
    for tensor in poisoned[1:]:
        tensor[..., place, :] = poison
    output, lse, *_ = run(poisoned, upstream, is_causal=True)
    assert_same_bits(output[..., :place, :], expected[0][..., :place, :])
    assert_same_bits(lse[..., :place], expected[1][..., :place])
    if math.isnan(poison):
        assert output[..., place:, :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_reaches_just_the_rows_that_see_it(dtype):
    query, key, value = make(40, 40, dtype)
    value[0, 1, 20, 3] = math.nan
    output = attention(query, key, value, is_causal=True)
    expected = torch.zeros_like(output, dtype=torch.bool)
    expected[0, 1, 20:, 3] = True
    assert torch.equal(output.isnan(), expected)
    query[1, 2, 7] = math.nan
    output, lse, *grads = run((query, key, value), is_causal=True)
    assert output[1, 2].isnan().any(-1).nonzero().flatten().tolist() == [7]
    assert lse.isnan().nonzero().tolist() == [[1, 2, 7]]
    assert grads[0][1, 2].isnan().any(-1).nonzero().flatten().tolist() == [7]
    assert grads[1][1, 2].isnan().any(-1).nonzero().flatten().tolist() == list(range(8))


@pytest.mark.parametrize("queries", [1, 16, 17, 70])
@pytest.mark.parametrize(
    "options",
    [{}, {"attn_mask": torch.arange(60) % 5 != 0}, {"dropout_p": 0.2}, {"softcap": 5.0}],
    ids=["plain", "mask", "dropout", "softcap"],
)
def test_a_key_of_minus_infinity_leaves_gradients_of_keys_and_values_finite(options, queries):
    query, key, value = make(queries, 60)
    key[:, :, 7] = -math.inf  # of weight 0 for positive queries
    grads = run((query.abs() + 0.1, key, value), **options)[3:]
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("content", [math.nan, math.inf, 1e30, -1e30])
def test_what_a_float_mask_holds_in_cells_hidden_by_causality_changes_no_bit(content):
    inputs = make(40, 40)
    mask = torch.randn(40, 40)
    expected = run(inputs, attn_mask=mask, is_causal=True)
    above = torch.ones(40, 40, dtype=torch.bool).triu(1)
    actual = run(inputs, attn_mask=mask.masked_fill(above, content), is_causal=True)
    assert_same_bits(actual, expected)


# ---- empty rows ----


def empty_rows():
    """Calls in which rows 0 to 2 of 6 see nothing."""
    shown = torch.ones(6, 3, dtype=torch.bool)
    shown[:3] = False
    bias = torch.zeros(6, 3).masked_fill(~shown, -math.inf)
    return {
        "lower right": {"is_causal": True, "causal_variant": "lower_right"},
        "bool mask": {"attn_mask": shown},
        "float mask": {"attn_mask": bias},
        "bool mask and causal": {"attn_mask": shown, "is_causal": True},
    }


@pytest.mark.parametrize("content", [1.0, 1e30, math.nan, math.inf])
@pytest.mark.parametrize("name", empty_rows())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_without_visible_keys_gives_zero_and_gets_zero(dtype, name, content):
    options = dict(empty_rows()[name])
    if options.get("attn_mask") is not None and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].to(dtype)
    inputs = make(6, 3, dtype)
    upstream = torch.randn(2, 3, 6, 16).to(dtype)
    clean = upstream.clone()
    clean[..., :3, :] = 0.0
    expected = run(inputs, clean, **options)
    inputs[0][..., :3, :] *= content
    upstream[..., :3, :] *= content
    output, lse, *grads = run(inputs, upstream, **options)
    assert not output[..., :3, :].any()
    assert (lse[..., :3] == -math.inf).all()
    assert not grads[0][..., :3, :].any()
    assert_same_bits([output, lse, *grads], expected)


def test_no_keys_at_all_give_empty_rows():
    inputs = [torch.randn(2, 3, 5, 8), torch.randn(2, 3, 0, 8), torch.randn(2, 3, 0, 4)]
    output, lse, *grads = run(inputs)
    assert_same_bits(output, torch.zeros(2, 3, 5, 4))
    assert_same_bits(lse, torch.full((2, 3, 5), -math.inf))
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in inputs]
    assert not grads[0].any()


def test_an_empty_row_does_not_poison_the_projections_behind_it():
    layer = torch.nn.Linear(8, 24)
    mask = torch.tensor([[False, False, True, True]]).expand(4, 4)
    mask = mask & torch.ones(4, 4, dtype=torch.bool).tril(0).triu(-1)  # a band of two
    query, key, value = layer(torch.randn(2, 4, 8)).chunk(3, dim=-1)
    attention(query, key, value, mask)[:, 2:].sum().backward()
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.any()


# ---- composition and broadcasting ----


@pytest.mark.parametrize("variant", ["upper_left", "lower_right"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_and_causality_hide_what_either_hides(kind, variant):
    inputs = make(20, 31, torch.float64)
    diagonal = 11 if variant == "lower_right" else 0
    causal = torch.ones(20, 31, dtype=torch.bool).tril(diagonal)
    if kind == "bool":
        mask = torch.rand(2, 1, 20, 31) < 0.6
        both = mask & causal
    else:
        mask = torch.randn(2, 1, 20, 31, dtype=torch.float64)
        both = mask.masked_fill(~causal, -math.inf)
    actual = run(inputs, attn_mask=mask, is_causal=True, causal_variant=variant)
    assert_close(actual, run(inputs, attn_mask=both))


@pytest.mark.parametrize(
    "shape",
    [
        (), (1,), (9,), (1, 9), (5, 1), (5, 9), (3, 5, 9), (1, 5, 9), (3, 1, 9), (3, 5, 1),
        (2, 1, 1, 9), (2, 3, 5, 9), (1, 3, 1, 9), (2, 1, 5, 1), (1, 1, 1, 1), (1, 2, 3, 5, 9),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_any_broadcastable_shape_equals_its_expansion(kind, shape):
    inputs = make(5, 9, torch.float64)
    mask = torch.rand(shape) < 0.7 if kind == "bool" else torch.randn(shape, dtype=torch.float64)
    expanded = mask.expand(1, 2, 3, 5, 9)[0]
    assert_same_bits(run(inputs, attn_mask=mask), run(inputs, attn_mask=expanded.contiguous()))
    assert_same_bits(run(inputs, attn_mask=mask), run(inputs, attn_mask=expanded))


def test_a_mask_broadcasts_over_five_dimensions():
    query, key = torch.randn(3, 2, 4, 7, 16), torch.randn(3, 2, 4, 5, 16)
    value, mask = torch.randn(3, 2, 4, 5, 32), torch.rand(1, 1, 5) < 0.5
    assert_close(
        attention(query, key, value, mask),
        F.scaled_dot_product_attention(query, key, value, mask),
        1e-5,
    )


def test_true_means_may_attend():
    query, key = torch.randn(1, 8), torch.randn(3, 8)
    value = torch.tensor([[1.0], [2.0], [3.0]])
    mask = torch.tensor([[False, True, False]])
    assert attention(query, key, value, mask).item() == 2.0


def test_only_what_may_be_seen_matters_in_a_padded_batch():
    lengths, width = [3, 32, 33, 65], 16
    prompts = [torch.randn(1, 2, n, width) for n in lengths]
    padded = torch.full((4, 2, max(lengths), width), math.nan)
    shown = torch.zeros(4, 1, 1, max(lengths), dtype=torch.bool)
    for row, prompt in enumerate(prompts):  # left padding
        padded[row, :, -prompt.shape[2] :] = prompt[0]
        shown[row, ..., -prompt.shape[2] :] = True
    output = attention(padded, padded, padded, shown, is_causal=True)
    for row, prompt in enumerate(prompts):
        alone = attention(prompt, prompt, prompt, is_causal=True)
        assert_close(output[row, :, -prompt.shape[2] :], alone[0], 1e-5)
        assert not output[row, :, : -prompt.shape[2]].any()
