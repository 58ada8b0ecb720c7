"""Closed forms: results that are known without another implementation. Float64, tight tolerance."""

import math

import pytest
import torch
from assertions import (
    assert_close,
    assert_same_bits,
    attend,
    exact,
    finite_lse,
    leaves_of,
    unfused,
)
from cases import CASES

from attention_ext import scaled_dot_product_attention as attention

pytestmark = pytest.mark.parity


def randn(*shape, requires_grad=False):
    return torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_lse_and_gradients_are_those_of_the_definition(case):
    call = case.make(requires_grad=True)
    results, expected = attend(call), exact(call)
    assert_close(results, expected)
    upstream = [torch.randn_like(results[0]), finite_lse(torch.randn_like(results[1]))]
    grads = [torch.autograd.grad(x, leaves_of(call), upstream) for x in (results, expected)]
    assert_close(*grads, 1e-11)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_definition_is_the_plain_formula(case):
    call = case.make()._replace(dropout_p=0.0)
    assert_close(exact(call)[0], unfused(call))


@pytest.mark.parametrize("lower_right", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(5, 5), (3, 40), (40, 3), (1, 70), (70, 70)])
def test_query_of_zeros_gives_the_mean_of_the_visible_values(seqlen_q, seqlen_kv, lower_right):
    query, key = torch.zeros(2, seqlen_q, 8, dtype=torch.float64), randn(2, seqlen_kv, 8)
    value = torch.arange(seqlen_kv, dtype=torch.float64).reshape(1, -1, 1)  # value_j = j
    output, lse, _ = attention(
        query,
        key,
        value,
        is_causal=True,
        return_lse=True,
        causal_variant="lower_right" if lower_right else "upper_left",
    )
    position = torch.arange(seqlen_q) + (seqlen_kv - seqlen_q if lower_right else 0)
    last = position.clamp(max=seqlen_kv - 1).double()  # the last visible key
    mean = torch.where(last >= 0, last / 2, 0.0)
    assert_close(output, mean.reshape(1, -1, 1).expand(2, -1, 1))
    assert_close(lse, torch.where(last >= 0, (last + 1).log(), -math.inf).expand(2, -1))


def test_one_key_gives_its_value_and_all_the_gradient():
    query, key, value = (randn(2, 3, s, 8, requires_grad=True) for s in (5, 1, 1))
    output = attention(query, key, value)
    assert_close(output, value.expand_as(output))
    upstream = torch.randn_like(output)
    grads = torch.autograd.grad(output, (query, key, value), upstream)
    assert_close(grads[0], torch.zeros_like(query), 1e-15)
    assert_close(grads[1], torch.zeros_like(key), 1e-14)
    assert_close(grads[2], upstream.sum(-2, keepdim=True))


def test_a_constant_added_to_a_row_of_the_mask_moves_lse_alone():
    query, key, value = (randn(2, 3, s, 8, requires_grad=True) for s in (5, 9, 9))
    mask, shift = randn(5, 9), randn(5, 1)
    plain = attention(query, key, value, mask, return_lse=True)
    moved = attention(query, key, value, mask + shift, return_lse=True)
    assert_close(moved.output, plain.output)
    assert_close(moved.lse, plain.lse + shift.squeeze(-1))
    for a, b in zip(
        torch.autograd.grad(moved.output.sin().sum(), (query, key, value)),
        torch.autograd.grad(plain.output.sin().sum(), (query, key, value)),
        strict=True,
    ):
        assert_close(a, b)


def test_lse_has_the_gradient_of_a_log_sum_exp():
    query, key, value = (randn(s, 8, requires_grad=True) for s in (5, 9, 9))
    lse = attention(query, key, value, scale=0.3, return_lse=True).lse
    upstream = torch.randn_like(lse)
    grads = torch.autograd.grad(lse, (query, key, value), upstream)
    probs = (query @ key.T * 0.3).softmax(-1) * upstream.unsqueeze(-1)
    assert_close(grads[0], 0.3 * probs @ key)
    assert_close(grads[1], 0.3 * probs.T @ query)
    assert_close(grads[2], torch.zeros_like(value), 0.0)


def test_results_over_disjoint_keys_merge_by_lse():
    query, key, value = randn(2, 5, 8), randn(2, 90, 8), randn(2, 90, 8)
    whole = attention(query, key, value, return_lse=True)
    parts = [
        attention(query, key[:, a:b], value[:, a:b], return_lse=True)
        for a, b in ((0, 7), (7, 64), (64, 90))
    ]
    lse = torch.stack([part.lse for part in parts]).logsumexp(0)
    output = sum(part.output * (part.lse - lse).exp().unsqueeze(-1) for part in parts)
    assert_close(lse, whole.lse)
    assert_close(output, whole.output)


def test_permuting_keys_with_values_changes_nothing_and_queries_permute_rows():
    query, key, value, mask = randn(5, 8), randn(70, 8), randn(70, 8), randn(5, 70)
    rows, columns = torch.randperm(5), torch.randperm(70)
    expected = attention(query, key, value, mask)
    assert_close(attention(query, key[columns], value[columns], mask[:, columns]), expected)
    assert_close(attention(query[rows], key, value, mask[rows]), expected[rows])


def test_output_is_linear_in_the_value_and_weights_sum_to_one():
    query, key, value, other = randn(5, 8), randn(70, 8), randn(70, 8), randn(70, 8)
    both = attention(query, key, 2.0 * value - other)
    assert_close(both, 2.0 * attention(query, key, value) - attention(query, key, other))
    ones = attention(query, key, torch.ones(70, 3, dtype=torch.float64))
    assert_close(ones, torch.ones(5, 3, dtype=torch.float64), 1e-14)


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 1), (9, 3), (10, 2), (16, 2)])
def test_grouped_heads_equal_repeated_heads(heads, groups):
    query = randn(2, heads, 11, 8, requires_grad=True)
    key, value = (randn(2, groups, 11, 8, requires_grad=True) for _ in range(2))
    repeated = [tensor.repeat_interleave(heads // groups, dim=1) for tensor in (key, value)]
    output = attention(query, key, value, is_causal=True, enable_gqa=True)
    expected = attention(query, *repeated, is_causal=True)
    assert_close(output, expected)
    upstream = torch.randn_like(output)
    grads = torch.autograd.grad(output, (query, key, value), upstream)
    assert_close(grads, torch.autograd.grad(expected, (query, key, value), upstream))


def test_zero_width_gives_the_mean_of_the_values():
    value = randn(2, 3, 7, 5, requires_grad=True)
    query, key = randn(2, 3, 4, 0, requires_grad=True), randn(2, 3, 7, 0, requires_grad=True)
    output, lse, _ = attention(query, key, value, return_lse=True)
    assert_close(output, value.mean(-2, keepdim=True).expand_as(output))
    assert_close(lse, torch.full((2, 3, 4), math.log(7), dtype=torch.float64))
    grads = torch.autograd.grad(output.sum(), (query, key, value))
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]
    assert_close(grads[2], torch.full_like(value, 4 / 7))


def test_huge_scores_give_the_value_of_the_largest_and_finite_gradients():
    query, key, value = (randn(6, 8).requires_grad_() for _ in range(3))
    output = attention(query, key, value, scale=1e6)
    assert_close(output, value[(query @ key.T).argmax(-1)])
    grads = torch.autograd.grad(output.sum(), (query, key, value))
    assert all(grad.isfinite().all() for grad in grads)


def test_gradients_do_not_depend_on_which_inputs_ask_for_one():
    inputs = [randn(2, 9, 8) for _ in range(3)]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    grads = torch.autograd.grad(attention(*leaves, is_causal=True).sin().sum(), leaves)
    for i, expected in enumerate(grads):
        alone = [tensor.clone().requires_grad_(j == i) for j, tensor in enumerate(inputs)]
        attention(*alone, is_causal=True).sin().sum().backward()
        assert_same_bits(alone[i].grad, expected)
        assert all(tensor.grad is None for j, tensor in enumerate(alone) if j != i)
