"""Derivatives in float64 on the compiled kernels: first, second, forward mode, mixed, batched."""

import math

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from assertions import assert_close, assert_same_bits
from cases import BY_NAME, AttentionCase, keywords
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from attention_ext import reference
from attention_ext import scaled_dot_product_attention as attention
from attention_ext.reference import Direction

SMALL = [
    AttentionCase("plain", (2, 2, 3, 3), (2, 2, 4, 3), (2, 2, 4, 2)),
    AttentionCase("causal", (1, 2, 3, 2), (1, 2, 4, 2), (1, 2, 4, 2), is_causal=True),
    AttentionCase(
        "lower right with empty rows", (2, 4, 2), (2, 3, 2), (2, 3, 2),
        is_causal=True, lower_right=True,
    ),
    AttentionCase(
        "grouped heads", (1, 4, 2, 2), (1, 2, 3, 2), (1, 2, 3, 2), enable_gqa=True, is_causal=True
    ),
    AttentionCase(
        "key and value differ in heads", (1, 4, 2, 2), (1, 1, 3, 2), (1, 2, 3, 2), enable_gqa=True
    ),
    AttentionCase("bool mask", (2, 3, 2), (2, 4, 2), (2, 4, 2), mask="bool", mask_shape=(2, 1, 4)),
    AttentionCase(
        "float mask and causal", (2, 3, 2), (2, 4, 2), (2, 4, 2), mask="float", mask_shape=(3, 4),
        is_causal=True, scale=-0.7,
    ),
    AttentionCase("broadcast", (2, 1, 2, 2), (3, 3, 2), (1, 3, 2), mask="bool", mask_shape=(3,)),
    AttentionCase("rank 2", (3, 2), (4, 2), (4, 3), is_causal=True),
]  # fmt: skip
small_cases = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


def function_of(call, outputs):
    """The call as a function of query, key and value; lse of an empty row, -inf, left out."""

    def run(query, key, value):
        options = keywords(call._replace(query=query, key=key, value=value))
        output, lse, _ = attention(**options, return_lse=True)
        lse = torch.where(lse == -math.inf, 0.0, lse)
        return {"output": output, "lse": lse, "both": (output, lse)}[outputs]

    return run


@pytest.mark.parametrize("outputs", ["output", "lse", "both"])
@small_cases
def test_first_derivatives_in_both_modes_and_batched(case, outputs):
    call = case.make(requires_grad=True)
    assert gradcheck(
        function_of(call, outputs),
        call[:3],
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@pytest.mark.parametrize("outputs", ["output", "both"])
@small_cases
def test_second_derivatives_in_all_mixtures(case, outputs):
    call = case.make(requires_grad=True)
    assert gradgradcheck(
        function_of(call, outputs),
        call[:3],
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
        check_batched_grad=True,
    )


@pytest.mark.parametrize("layout", ["projection", "transposed", "sliced", "expanded"])
def test_first_derivatives_for_any_strides(layout):
    shape = (1, 2, 3, 2)
    call = AttentionCase(layout, shape, shape, shape, layout=layout, is_causal=True).make()
    leaves = [tensor.detach().requires_grad_() for tensor in call[:3]]
    if layout == "expanded":  # gradcheck perturbs in place: it needs memory of its own
        leaves = [leaf.detach().contiguous().requires_grad_() for leaf in leaves]
        expand = (slice(0, 1), slice(0, 1))
        run = function_of(call, "both")
        assert gradcheck(lambda *x: run(*(t[expand].expand(t.shape) for t in x)), leaves)
    else:
        assert gradcheck(function_of(call, "both"), leaves)


@small_cases
def test_tangents_are_those_of_the_definition(case):
    call = case.make()
    tangents = [torch.randn_like(tensor) for tensor in call[:3]]
    for moving in ((0,), (1,), (2,), (0, 1, 2)):  # a missing tangent is zero
        results = []
        for run in (function_of(call, "both"), reference_of(call)):
            with forward_ad.dual_level():
                inputs = [
                    forward_ad.make_dual(x, t) if i in moving else x
                    for i, (x, t) in enumerate(zip(call[:3], tangents, strict=True))
                ]
                results.append([forward_ad.unpack_dual(x) for x in run(*inputs)])
        for ours, other in zip(*results, strict=True):
            assert ours.tangent is not None or moving == (2,)
            assert_close(ours.primal, other.primal)
            zero = torch.zeros_like(ours.primal)
            assert_close(
                *(zero if x.tangent is None else x.tangent for x in (ours, other)),
            )


def reference_of(call):
    def run(*inputs):
        output, lse = reference.attention(*inputs, *call[3:])
        return output, torch.where(lse == -math.inf, 0.0, lse)

    return run


def test_forward_and_reverse_mode_are_adjoint():
    call = BY_NAME["float mask and causal"].make(requires_grad=True)
    output, lse, _ = attention(**keywords(call), return_lse=True)
    lse = torch.where(lse == -math.inf, 0.0, lse)
    directions = [torch.randn_like(x) for x in call[:3]]
    upstream = [torch.randn_like(output), torch.randn_like(lse)]
    grads = torch.autograd.grad((output, lse), call[:3], upstream)
    moved = reference.attention_tangent(call, Direction(*directions))
    left = sum((a * b).sum() for a, b in zip(upstream, moved, strict=True))
    assert_close(left, sum((a * b).sum() for a, b in zip(grads, directions, strict=True)), 1e-10)


def test_a_gradient_penalty_trains_in_float32():
    leaves = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]
    output = attention(*leaves, is_causal=True)
    grads = torch.autograd.grad(output.square().sum(), leaves[:1], create_graph=True)
    grads[0].square().sum().backward()
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output = reference.attention(*doubles, None, True)[0]
    grads = torch.autograd.grad(output.square().sum(), doubles[:1], create_graph=True)
    grads[0].square().sum().backward()
    for leaf, other in zip(leaves, doubles, strict=True):
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=1e-3, atol=1e-4)


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


# ---- what has no derivative yet raises ----


def test_a_mask_that_requires_grad_raises_and_works_without_grad_mode():
    inputs = [torch.randn(2, 5, 4) for _ in range(3)]
    mask = torch.randn(5, 5, requires_grad=True)
    with pytest.raises(NotImplementedError, match="expected an attn_mask without gradient"):
        attention(*inputs, mask)
    with pytest.raises(NotImplementedError, match="expected an attn_mask without gradient"):
        torch.func.grad(lambda m: attention(*inputs, m).sum())(mask.detach())
    with torch.no_grad():
        assert_same_bits(attention(*inputs, mask), attention(*inputs, mask.detach()))


def test_a_tangent_of_the_mask_raises():
    inputs = [torch.randn(2, 5, 4) for _ in range(3)]
    mask = torch.randn(5, 5)
    with pytest.raises(NotImplementedError, match="expected an attn_mask without gradient"):
        torch.func.jvp(lambda m: attention(*inputs, m), (mask,), (mask,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(mask, mask)
        with pytest.raises(NotImplementedError, match="expected an attn_mask without gradient"):
            attention(*inputs, dual)


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
