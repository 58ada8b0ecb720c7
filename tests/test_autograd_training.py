"""Derivatives in use: training, half types, checkpointing, hidden and empty rows, any strides."""

import math

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from assertions import (
    assert_same_bits,
    attend,
    exact,
    fresh,
    leaves_of,
    replaced,
)
from cases import BY_NAME
from torch.utils.checkpoint import checkpoint

from attention_ext import scaled_dot_product_attention as attention
from attention_ext.reference import Call


def test_a_gradient_penalty_trains_in_float32():
    leaves = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]
    output = attention(*leaves, is_causal=True)
    grads = torch.autograd.grad(output.square().sum(), leaves[:1], create_graph=True)
    grads[0].square().sum().backward()
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output = exact(Call(*doubles, is_causal=True))[0]
    grads = torch.autograd.grad(output.square().sum(), doubles[:1], create_graph=True)
    grads[0].square().sum().backward()
    for leaf, other in zip(leaves, doubles, strict=True):
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["everything", "several tiles, causal", "one query, many keys"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)], ids=str
)
def test_tangents_and_second_derivatives_are_accurate_in_every_dtype(dtype, tolerance, name):
    results = []
    call = BY_NAME[name].make(dtype)
    for run, kind in ((attend, dtype), (exact, torch.float64)):
        changed = fresh(call, kind)
        leaves = leaves_of(changed)

        def output_of(*inputs, run=run, changed=changed):
            return run(replaced(changed, inputs))[0]

        tangents = [torch.linspace(-1, 1, x.numel()).reshape(x.shape).to(kind) for x in leaves]
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, tangents, strict=True)]
            moved = forward_ad.unpack_dual(output_of(*duals)).tangent
        grads = torch.autograd.grad(output_of(*leaves).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(grads, leaves, tangents)
        results.append([x.double() for x in (moved, *second)])
    for ours, truth in zip(*results, strict=True):
        assert (ours - truth).abs().max() <= tolerance * max(1.0, truth.abs().max())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_bits(reentrant):
    leaves = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]

    def run(*inputs):
        return attention(*inputs, is_causal=True)

    expected = torch.autograd.grad(run(*leaves).pow(3).sum(), leaves)
    checkpoint(run, *leaves, use_reentrant=reentrant).pow(3).sum().backward()
    assert_same_bits([leaf.grad for leaf in leaves], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_hidden_keys_are_unread_in_second_order_and_forward_mode(poison, dtype):
    inputs = [torch.randn(2, 2, 6, 4).to(dtype) for _ in range(3)]
    mask = torch.tensor([True, True, False, True, False, True])
    poisoned = [tensor.clone() for tensor in inputs]
    for tensor in poisoned[1:]:
        tensor[..., ~mask, :] = poison

    def derivatives(tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        output = attention(*leaves, mask, is_causal=True)
        grads = torch.autograd.grad(output.float().square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.float().square().sum() for x in grads), leaves)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in leaves]
            moved = forward_ad.unpack_dual(attention(*duals, mask, is_causal=True)).tangent
        return *grads, *second, moved

    for ours, other in zip(derivatives(poisoned), derivatives(inputs), strict=True):
        assert ours.isfinite().all()
        assert_same_bits(ours, other)


def test_an_empty_row_stays_zero_in_second_order_whatever_it_holds():
    leaves = [torch.randn(1, 4, 3), torch.randn(1, 2, 3), torch.randn(1, 2, 3)]
    leaves[0][:, :2] = math.nan  # lower right: rows 0 and 1 of 4 see none of 2 keys
    leaves = [leaf.requires_grad_() for leaf in leaves]
    upstream = torch.randn(1, 4, 3)
    upstream[:, :2] = math.nan
    output = attention(*leaves, is_causal=True, causal_variant="lower_right")
    grads = torch.autograd.grad(output, leaves, upstream, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in grads), leaves)
    for grad in (*grads, *second):
        assert grad.isfinite().all()
    assert not second[0][:, :2].any()


def test_changing_an_input_in_place_before_the_backward_raises():
    leaves = [torch.randn(2, 5, 4, requires_grad=True) for _ in range(3)]
    key = leaves[1] * 1.0
    output = attention(leaves[0], key, leaves[2])
    key.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_the_backward_with_an_upstream_gradient_of_any_strides():
    leaves = [torch.randn(49, 32, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    output = attention(*leaves)
    upstream = torch.randn(32, 49, dtype=torch.float64).T
    actual = torch.autograd.grad(output, leaves, upstream, retain_graph=True)
    assert_same_bits(actual, torch.autograd.grad(output, leaves, upstream.contiguous()))
