"""Derivatives in float64 on the compiled kernels: first, second, forward mode, mixed, batched."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.func as tf
from assertions import (
    assert_close,
    attend,
    exact,
    finite_lse,
    leaves_of,
    replaced,
)
from cases import BY_NAME, AttentionCase
from torch.autograd import gradcheck, gradgradcheck

from attention_ext import library, paths, reference
from attention_ext import scaled_dot_product_attention as attention
from attention_ext.reference import Call

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
    AttentionCase(
        "learned bias per key", (2, 2, 3, 2), (2, 2, 4, 2), (2, 2, 4, 2),
        mask="finite", mask_shape=(2, 1, 1, 4),
    ),
    AttentionCase(
        "learned bias per head, grouped heads", (2, 4, 2, 2), (2, 2, 3, 2), (2, 2, 3, 2),
        mask="finite", mask_shape=(4, 2, 1), enable_gqa=True,
    ),
    AttentionCase("window", (2, 4, 2), (2, 5, 2), (2, 5, 2), window=(1, 1), lower_right=True),
    AttentionCase("softcap", (2, 3, 2), (2, 4, 2), (2, 4, 2), softcap=0.8, scale=1.5),
    AttentionCase("slopes (H,)", (2, 2, 3, 2), (2, 2, 4, 2), (2, 2, 4, 2), slopes=(2,)),
    AttentionCase(
        "slopes (B, H)", (2, 2, 2, 2), (2, 1, 4, 2), (2, 1, 4, 2), slopes=(2, 2), lower_right=True,
        enable_gqa=True,
    ),
    AttentionCase("sinks", (2, 2, 3, 2), (2, 2, 4, 2), (2, 2, 4, 2), sinks=True, is_causal=True),
    AttentionCase(
        "sinks and empty rows", (2, 3, 2), (2, 2, 2), (2, 2, 2), sinks=True, is_causal=True,
        lower_right=True,
    ),
    AttentionCase("keys in use", (2, 2, 2, 2), (2, 2, 4, 2), (2, 2, 4, 2), used=(0, 3)),
    AttentionCase("dropout", (2, 3, 2), (2, 4, 2), (2, 4, 2), dropout_p=0.4),
    AttentionCase(
        "everything", (2, 2, 3, 2), (2, 1, 4, 2), (2, 1, 4, 3), mask="float",
        mask_shape=(2, 1, 1, 4), is_causal=True, window=(2, -1), softcap=1.2, slopes=(2,),
        sinks=True, used=(4, 3), dropout_p=0.3, lower_right=True, enable_gqa=True,
    ),
]  # fmt: skip
small_cases = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


def function_of(call, outputs=("output", "lse"), run=None):
    """The call as a function of its differentiable inputs; lse of an empty row, -inf, left out."""

    def function(*inputs):
        changed = replaced(call, inputs)
        results = run(changed) if run else paths.attention(changed, "weights" in outputs)
        named = dict(zip(("output", "lse", "weights"), results, strict=True))
        named["lse"] = finite_lse(named["lse"])
        return tuple(named[name] for name in outputs)

    return function


@pytest.mark.parametrize("outputs", [("output",), ("lse",), ("output", "lse")], ids=str)
@small_cases
def test_first_derivatives_in_both_modes_and_batched(case, outputs):
    call = case.make(requires_grad=True)
    assert gradcheck(
        function_of(call, outputs),
        leaves_of(call),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@small_cases
def test_second_derivatives_in_all_mixtures(case):
    call = case.make(requires_grad=True)
    assert gradgradcheck(
        function_of(call),
        leaves_of(call),
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
        check_batched_grad=True,
    )


def test_a_double_backward_through_one_result_alone():
    call = SMALL[0].make(requires_grad=True)
    for outputs in (("output",), ("lse",)):
        assert gradgradcheck(function_of(call, outputs), leaves_of(call), check_fwd_over_rev=True)


WITH_WEIGHTS = ["causal", "lower right with empty rows", "sinks", "everything"]


@pytest.mark.parametrize("outputs", [("weights",), ("output", "lse", "weights")], ids=str)
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_derivatives_through_the_weights(name, outputs):
    call = next(case for case in SMALL if case.name == name).make(requires_grad=True)
    function = function_of(call, outputs)
    assert gradcheck(function, leaves_of(call), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, leaves_of(call), check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("layout", ["projection", "transposed", "sliced", "expanded"])
def test_first_derivatives_for_any_strides(layout):
    shape = (1, 2, 3, 2)
    call = AttentionCase(layout, shape, shape, shape, layout=layout, is_causal=True).make()
    leaves = [tensor.detach().requires_grad_() for tensor in call[:3]]
    if layout == "expanded":  # gradcheck perturbs in place: it needs memory of its own
        leaves = [leaf.detach().contiguous().requires_grad_() for leaf in leaves]
        expand = (slice(0, 1), slice(0, 1))
        run = function_of(call)
        assert gradcheck(lambda *x: run(*(t[expand].expand(t.shape) for t in x)), leaves)
    else:
        assert gradcheck(function_of(call), leaves)


@small_cases
def test_tangents_are_those_of_the_definition(case):
    call = case.make()
    inputs = leaves_of(call)
    tangents = [torch.randn_like(tensor) for tensor in inputs]
    for moving in (*((i,) for i in range(len(inputs))), range(len(inputs))):  # others: zero
        results = []
        for run in (function_of(call), function_of(call, run=reference.attention)):
            with forward_ad.dual_level():
                duals = [
                    forward_ad.make_dual(x, t) if i in moving else x
                    for i, (x, t) in enumerate(zip(inputs, tangents, strict=True))
                ]
                results.append([forward_ad.unpack_dual(x) for x in run(*duals)])
        for ours, other in zip(*results, strict=True):
            assert_close(ours.primal, other.primal)
            zero = torch.zeros_like(ours.primal)
            assert_close(
                *(zero if x.tangent is None else x.tangent for x in (ours, other)),
            )


@pytest.mark.parametrize("name", ["float mask and causal", "sinks", "everything"])
def test_forward_and_reverse_mode_are_adjoint(name):
    call = BY_NAME[name].make(requires_grad=True)
    function, leaves = function_of(call), leaves_of(call)
    outputs = function(*leaves)
    directions, upstream = ([torch.randn_like(x) for x in tensors] for tensors in (leaves, outputs))
    grads = torch.autograd.grad(outputs, leaves, upstream)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, directions, strict=True)]
        moved = [forward_ad.unpack_dual(x).tangent for x in function(*duals)]
    left = sum((a * b).sum() for a, b in zip(upstream, moved, strict=True))
    assert_close(left, sum((a * b).sum() for a, b in zip(grads, directions, strict=True)), 1e-10)


@pytest.fixture
def no_plain_torch(monkeypatch):
    """Make the definition fail: what runs meanwhile runs on kernels."""

    def fail(call):
        raise AssertionError("went through plain torch operations")

    monkeypatch.setattr(reference, "attention", fail)


@small_cases
def test_first_and_second_order_and_forward_mode_stay_on_the_kernels(case, no_plain_torch):
    call = case.make(requires_grad=True)
    function, leaves = function_of(call), leaves_of(call)
    grads = torch.autograd.grad(function(*leaves)[0].sin().sum(), leaves, create_graph=True)
    torch.autograd.grad(sum(x.sin().sum() for x in grads), leaves)

    def loss(*inputs):
        return function(*inputs)[0].sin().sum()

    inputs = tuple(leaf.detach() for leaf in leaves)
    every = tuple(range(len(inputs)))
    tf.jvp(tf.grad(loss, every), inputs, inputs)
    tf.grad(lambda *x: tf.jvp(loss, x, inputs)[1], every)(*inputs)
    tf.vmap(tf.grad(loss), (0, *(None,) * (len(inputs) - 1)))(
        inputs[0].expand(2, *inputs[0].shape), *inputs[1:]
    )


def test_the_gradient_of_a_mask_is_computed_only_when_it_is_asked_for(monkeypatch):
    calls = []
    kernel = library.mask_gradient
    monkeypatch.setattr(library, "mask_gradient", lambda *x: calls.append(x) or kernel(*x))
    leaves = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(3)]
    mask = torch.randn(3, 3)
    attention(*leaves, mask).sum().backward()
    assert not calls
    attention(*leaves, mask.requires_grad_()).sum().backward()
    assert len(calls) == 1
    assert mask.grad.shape == mask.shape


@pytest.mark.parametrize(
    "shape",
    [(), (9,), (5, 1), (5, 9), (3, 1, 9), (2, 1, 1, 9), (2, 3, 5, 9), (2, 1, 5, 1)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_mask_of_any_shape_has_a_gradient_of_its_own_shape(shape, dtype):
    inputs = [torch.randn(2, 3, s, 4).to(dtype) for s in (5, 9, 9)]
    mask = torch.randn(shape, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    upstream, grads = torch.randn(2, 3, 5, 4).to(dtype), []
    for bias in (mask.requires_grad_(), mask.detach().double().requires_grad_()):
        call = Call(*(x.to(bias.dtype) if bias is not mask else x for x in inputs), bias)
        output = attend(call)[0] if bias is mask else exact(call)[0]
        grads += torch.autograd.grad(output, bias, upstream.to(output.dtype))
    assert (grads[0].shape, grads[0].dtype) == (mask.shape, mask.dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    if dtype == torch.bfloat16:
        tolerance = 2e-2
    assert_close(grads[0].double(), grads[1], tolerance)


def test_every_order_is_right_without_end():
    call = SMALL[-1].make()
    results = []
    for run in (None, reference.attention):
        leaves = [tensor.clone().requires_grad_() for tensor in leaves_of(call)]
        value, orders = function_of(call, ("output",), run)(*leaves)[0].pow(3).sum(), []
        for _ in range(4):
            grads = torch.autograd.grad(value, leaves, create_graph=True)
            value = sum(grad.square().sum() for grad in grads)
            orders += grads
        results.append(orders)
    assert_close(*results, 1e-9)
