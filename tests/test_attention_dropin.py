"""Replacing torch's function by ours changes no result beyond rounding; and its four exceptions."""

import math

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_close, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attention_ext
from attention_ext import scaled_dot_product_attention as attention


def torchs(*args, **kwargs):
    """torch's function by the plain formula, which takes every call."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


@st.composite
def calls(draw):
    """A call that torch's function takes: (query, key, value, mask), options."""
    size = st.integers(1, 5)
    seqlen_q, seqlen_kv = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    width, value_dim = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    leading = draw(st.lists(size, max_size=3))
    options = {}
    if leading and draw(st.booleans()):
        groups, share = draw(size), draw(size)
        shapes = [(*leading[:-1], heads) for heads in (groups * share, groups, groups)]
        options["enable_gqa"] = True
    else:
        masks = [draw(st.lists(st.booleans(), min_size=3, max_size=3)) for _ in leading]
        shapes = [[1 if m[i] else n for n, m in zip(leading, masks, strict=True)] for i in range(3)]
        shapes = [tuple(shape[draw(st.integers(0, len(shape))) :]) for shape in shapes]
    # torch adds the mask to the scores in place, so it may not have more batches than query and key
    pairs = shapes[0] if "enable_gqa" in options else torch.broadcast_shapes(*shapes[:2])
    ends = (seqlen_q, width), (seqlen_kv, width), (seqlen_kv, value_dim)
    inputs = [
        torch.randn(*s, *end, dtype=torch.float64) for s, end in zip(shapes, ends, strict=True)
    ]
    mask = None
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        shape = [n if draw(st.booleans()) else 1 for n in (*pairs, seqlen_q, seqlen_kv)]
        shape = shape[draw(st.integers(0, len(shape) - 2)) :]  # torch takes rank 2 and above
        mask = torch.rand(shape) < 0.7
        if kind == "float":
            mask = torch.randn(shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, -1.0, 0.125, 2.0]))
    return [*inputs, mask], options


@settings(max_examples=300, deadline=None, derandomize=True)
@given(calls())
def test_random_calls_equal_those_of_torchs_function(call):
    (*inputs, mask), options = call
    results = []
    for function in (attention, torchs):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        output = function(*leaves, mask, **options)
        upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, upstream)])
    assert_close(results[0], results[1], 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}, {"scale": 0.3}])
def test_torchs_default_kernel_gives_the_same_in_every_dtype(options, dtype):
    heads = (4, 2, 2) if options.get("enable_gqa") else (4, 4, 4)
    inputs = [torch.randn(2, h, 65, 32).to(dtype) for h in heads]
    output = attention(*inputs, **options)
    expected = F.scaled_dot_product_attention(*inputs, **options)
    assert output.dtype == expected.dtype
    assert_close(output.float(), expected.float(), 16 * torch.finfo(dtype).eps)


def test_the_first_eight_arguments_are_torchs_by_position_and_name():
    query, key, value = (torch.randn(1, 4, 9, 8) for _ in range(3))
    mask = torch.rand(9, 9) < 0.5
    expected = torchs(query, key, value, mask, 0.0, False, scale=0.5, enable_gqa=False)
    assert_close(attention(query, key, value, mask, 0.0, False, 0.5, False), expected, 1e-6)
    named = {"query": query, "key": key, "value": value, "attn_mask": mask, "scale": 0.5}
    named |= {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
    assert_close(attention(**named), expected, 1e-6)
    positional = query, key, value, None, 0, True
    assert_close(attention(*positional), torchs(*positional), 1e-6)
    assert_close(attention(query, key, value, scale=2), torchs(query, key, value, scale=2), 1e-4)


# ---- CausalBias ----


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(5, 5), (5, 20), (1, 7), (20, 5)])
def test_a_causal_bias_means_what_it_means_to_torch(seqlen_q, seqlen_kv):
    inputs = [torch.randn(2, 3, s, 8) for s in (seqlen_q, seqlen_kv, seqlen_kv)]
    upper = attention(*inputs, causal_upper_left(seqlen_q, seqlen_kv))
    assert_same_bits(upper, attention(*inputs, is_causal=True))
    if seqlen_q <= seqlen_kv:  # torch warns of NaN otherwise
        bias = causal_lower_right(seqlen_q, seqlen_kv)
        lower = attention(*inputs, bias)
        assert_close(lower, F.scaled_dot_product_attention(*inputs, bias), 1e-6)
    else:
        with pytest.warns(UserWarning, match="Lower right"):
            bias = causal_lower_right(seqlen_q, seqlen_kv)
        lower = attention(*inputs, bias)
    expected = attention(*inputs, is_causal=True, causal_variant="lower_right")
    assert_same_bits(lower, expected)


def test_a_causal_bias_works_with_gradients_grouped_heads_and_any_rank():
    leaves = [torch.randn(2, h, 6, 8, requires_grad=True) for h in (4, 2, 2)]
    bias = causal_upper_left(6, 6)
    attention(*leaves, bias, enable_gqa=True).sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert attention(*(leaf[0, 0] for leaf in leaves), bias).shape == (6, 8)


# ---- autocast ----


def test_autocast_casts_as_it_does_for_torchs_function():
    floats = torch.float32, torch.float64, torch.bfloat16, torch.float16
    for autocast in (torch.bfloat16, torch.float16):
        for dtype in floats:
            for mask_dtype in (None, torch.bool, *floats):
                inputs = [torch.randn(1, 2, 5, 4).to(dtype) for _ in range(3)]
                mask = None if mask_dtype is None else torch.ones(5, 5).to(mask_dtype)
                with torch.autocast("cpu", autocast):
                    try:
                        expected = F.scaled_dot_product_attention(*inputs, mask)
                    except RuntimeError:
                        with pytest.raises(attention_ext.ArgumentTypeError, match="attn_mask"):
                            attention(*inputs, mask)
                        continue
                    output = attention(*inputs, mask)
                assert output.dtype == expected.dtype
                assert_close(output, expected, 2e-2)


def test_autocast_gradients_come_back_in_the_dtype_of_the_leaves():
    leaves = [torch.randn(2, 5, 4, requires_grad=True) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(*leaves)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)


def test_autocast_leaves_slopes_and_sinks_in_float32():
    inputs = [torch.randn(2, 4, 5, 8) for _ in range(3)]
    slopes, sinks = torch.rand(4, requires_grad=True), torch.randn(4, requires_grad=True)
    halves = [x.bfloat16() for x in inputs]
    options = {"alibi_slopes": slopes, "sinks": sinks}
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(*inputs, **options)
        half = attention(*inputs, **{name: x.bfloat16() for name, x in options.items()})
        fused = attention_ext.causal_attention(*(x[0, 0] for x in inputs))[0]
    assert output.dtype == half.dtype == fused.dtype == torch.bfloat16
    assert_same_bits(output, attention(*halves, **options))
    assert_close(half.float(), output.float(), 3e-2)
    grads = torch.autograd.grad(output.float().sum(), (slopes, sinks))
    assert all(grad.dtype == torch.float32 and grad.any() for grad in grads)
    doubles = [x.double() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*doubles, **options).dtype == torch.float64


# ---- the textbook ----


def test_numbers_of_the_textbook():
    query = torch.tensor([[2.0, 1.0]])
    assert (query @ torch.tensor([2.0, 0.0])).item() == 4.0
    query, key = torch.tensor([[0.0, 0.0], [2.0, 1.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    _, lse, _ = attention(query, key, key, is_causal=True, return_lse=True)
    score = 4.0 / math.sqrt(2.0)
    assert round(score, 2) == 2.83
    assert_close(lse, torch.tensor([0.0, math.log(math.exp(score) + 1.0)]), 1e-6)


def test_weights_of_three_and_one_quarter_mix_the_values():
    query = torch.tensor([[1.0], [1.0]])
    key = torch.tensor([[math.log(3.0)], [0.0]])  # odds 3 : 1
    value = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    output, weights = attention_ext.causal_attention(query, key, value)
    assert_close(weights, torch.tensor([[1.0, 0.0], [0.75, 0.25]]), 1e-6)
    assert_close(output, torch.tensor([[2.0, 0.0], [1.5, 0.5]]), 1e-6)


@pytest.mark.parametrize("length", [1, 2, 17, 70])
def test_causal_attention_has_n_times_n_plus_1_over_2_visible_pairs(length):
    inputs = [torch.randn(length, width) for width in (8, 8, 5)]
    output, weights = attention_ext.causal_attention(*inputs)
    assert (output.shape, weights.shape) == ((length, 5), (length, length))
    assert_close(weights[0, 0], torch.tensor(1.0), 1e-6)
    assert (weights > 0).sum().item() == length * (length + 1) // 2
    assert not weights.triu(1).any()
    assert_close(weights.sum(-1), torch.ones(length), 1e-6)
    assert_same_bits(output, attention(*inputs, is_causal=True))
    assert_close(output, weights @ inputs[2], 1e-5)


def test_causal_attention_is_differentiable_through_both_results():
    leaves = [torch.randn(6, w, dtype=torch.float64, requires_grad=True) for w in (3, 3, 2)]
    assert torch.autograd.gradcheck(attention_ext.causal_attention, leaves)


def test_causal_attention_does_not_read_later_positions():
    inputs = [torch.randn(6, 3) for _ in range(3)]
    expected = attention_ext.causal_attention(*inputs)
    for tensor in inputs:
        tensor[4:] = math.nan
    actual = attention_ext.causal_attention(*inputs)
    assert_same_bits([x[:4] for x in actual], [x[:4] for x in expected])
