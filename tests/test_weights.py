"""The softmax weights beside the output, and merging results over disjoint keys."""

import math

import pytest
import torch
from assertions import assert_close, assert_same_bits
from cases import BY_NAME, CASES, DTYPES, keywords

from attention_ext import (
    ArgumentError,
    ArgumentTypeError,
    AttentionResult,
    merge_attention,
    paths,
    reference,
)
from attention_ext import scaled_dot_product_attention as attention

pytestmark = pytest.mark.parity


def randn(*shape, requires_grad=False):
    return torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_are_those_of_the_definition_and_change_no_bit_of_the_output(case):
    call = case.make()
    output, lse, weights = paths.attention(call, True)
    assert_close(weights, reference.attention(call).weights)
    assert_same_bits([output, lse], list(paths.attention(call)[:2]))


@pytest.mark.parametrize("name", ["everything for one position", "bool mask and causal"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_weights_have_the_querys_dtype_and_sum_to_one(name, dtype):
    call = BY_NAME[name].make(dtype)
    weights = attention(**keywords(call), return_weights=True).weights
    exact = reference.attention(call._replace(dropout_p=0.0)).weights
    assert weights.dtype == dtype
    assert_close(weights.float(), exact.float(), 8 * torch.finfo(dtype).eps)
    assert (weights.float().sum(-1) < 1.01).all()


def test_a_row_sums_to_one_to_less_with_a_sink_and_to_zero_if_it_is_empty():
    inputs = [randn(2, s, 4) for s in (5, 3, 3)]
    options = {"is_causal": True, "causal_variant": "lower_right", "return_weights": True}
    sums = attention(*inputs, **options).weights.sum(-1)
    assert_close(sums, torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]).double().expand(2, 5))
    sums = attention(*inputs, **options, sinks=randn(2)).weights.sum(-1)
    assert (sums[:, 2:] < 1.0).all()
    assert not sums[:, :2].any()


def test_what_is_not_asked_for_is_none():
    inputs = [randn(2, 5, 4) for _ in range(3)]
    assert isinstance(attention(*inputs), torch.Tensor)
    for lse in (False, True):
        for weights in (False, True):
            if lse or weights:
                result = attention(*inputs, return_lse=lse, return_weights=weights)
                assert isinstance(result, AttentionResult)
                assert (result.lse is not None, result.weights is not None) == (lse, weights)


def test_gradients_through_all_three_results_are_those_of_the_definition():
    for name in ("everything", "everything for one position", "key and value differ in heads"):
        results = []
        for run in (lambda call: paths.attention(call, True), reference.attention):
            call = BY_NAME[name].make(requires_grad=True)
            leaves = [x for x in call if isinstance(x, torch.Tensor) and x.requires_grad]
            loss = sum(x.masked_fill(x == -math.inf, 0.0).sin().sum() for x in run(call))
            results.append(torch.autograd.grad(loss, leaves))
        assert_close(*results, 1e-11)


# ---- merge_attention ----


def parts_of(query, key, value, cuts, **options):
    pieces = zip(key.split(cuts, -2), value.split(cuts, -2), strict=True)
    results = [attention(query, k, v, return_lse=True, **options) for k, v in pieces]
    return [r.output for r in results], [r.lse for r in results]


@pytest.mark.parametrize("cuts", [[90], [7, 57, 26], [1] * 90, [89, 1]], ids=lambda c: str(c[:3]))
def test_results_over_disjoint_keys_merge(cuts):
    query, key, value = randn(2, 3, 5, 8), randn(2, 3, 90, 8), randn(2, 3, 90, 4)
    whole = attention(query, key, value, softcap=2.0, return_lse=True)
    merged = merge_attention(*parts_of(query, key, value, cuts, softcap=2.0))
    assert_close(merged, whole[:2])


def test_a_sink_belongs_into_one_part():
    query, key, value, sinks = randn(3, 5, 8), randn(3, 20, 8), randn(3, 20, 4), randn(3)
    whole = attention(query, key, value, sinks=sinks, return_lse=True)
    first = attention(query, key[:, :9], value[:, :9], sinks=sinks, return_lse=True)
    second = attention(query, key[:, 9:], value[:, 9:], return_lse=True)
    merged = merge_attention([first.output, second.output], [first.lse, second.lse])
    assert_close(merged, whole[:2])


def test_parts_without_a_visible_key_count_for_nothing_whatever_they_hold():
    outputs = [randn(2, 3), torch.full((2, 3), math.nan).double(), randn(2, 3)]
    lses = [randn(2), torch.full((2,), -math.inf).double(), randn(2)]
    lses[0][0] = lses[2][0] = -math.inf
    output, lse = merge_attention(outputs, lses)
    assert not output[0].any()
    assert lse[0] == -math.inf
    expected = merge_attention([x[1:] for x in outputs[::2]], [x[1:] for x in lses[::2]])
    assert_close((output[1:], lse[1:]), expected)


def test_derivatives_are_those_of_the_whole_and_finite_beside_empty_rows():
    leaves = [randn(2, s, 4, requires_grad=True) for s in (5, 6, 6)]

    def merged(query, key, value):
        options = {"is_causal": True, "causal_variant": "upper_left"}
        early = attention(query, key[:, :2], value[:, :2], **options, return_lse=True)
        hidden = torch.zeros(5, 4, dtype=torch.bool)
        for i in range(5):
            hidden[i, : max(i - 1, 0)] = True
        late = attention(query, key[:, 2:], value[:, 2:], hidden, return_lse=True)
        return merge_attention([early.output, late.output], [early.lse, late.lse])

    def whole(query, key, value):
        return attention(query, key, value, is_causal=True, return_lse=True)[:2]

    assert_close(merged(*leaves), whole(*leaves))
    assert torch.autograd.gradcheck(merged, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(merged, leaves, check_fwd_over_rev=True)
    empty = [x.requires_grad_() for x in (torch.full((2,), -math.inf).double(), randn(2))]
    output, lse = merge_attention([randn(2, 3), randn(2, 3)], [empty[0], empty[0] * 1.0])
    grads = torch.autograd.grad(output.sum() + lse.clamp(min=-1e9).sum(), empty[0])
    assert grads[0].isfinite().all()


def test_the_dtypes_of_the_parts_stay():
    outputs = [torch.randn(2, 5, 4).bfloat16() for _ in range(2)]
    output, lse = merge_attention(outputs, [torch.randn(2, 5) for _ in range(2)])
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


WRONG = {
    "no part": (ArgumentError, [], [], "as many lses as outputs, at least one, got 0 outputs"),
    "one lse too many": (ArgumentError, [(2, 3)], [(2,), (2,)], "got 1 outputs and 2 lses"),
    "shapes differ": (
        ArgumentError, [(2, 3), (2, 4)], [(2,), (2,)], r"of one shape .*, got \(2, 4\) and \(2,\)"
    ),
    "lse of another shape": (
        ArgumentError, [(2, 3)], [(3,)], r"lses of shape \(\*B, H, L\), got \(2, 3\) and \(3,\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parts_raise(name):
    kind, outputs, lses, text = WRONG[name]
    parts = [[torch.randn(shape) for shape in shapes] for shapes in (outputs, lses)]
    with pytest.raises(kind, match=f"^merge_attention: expected .*{text}"):
        merge_attention(*parts)


def test_parts_of_a_wrong_type_raise():
    with pytest.raises(ArgumentTypeError, match="outputs to be a sequence of tensors, got Tensor"):
        merge_attention(torch.randn(2, 3), [torch.randn(2)])
    with pytest.raises(ArgumentTypeError, match="lses to be a sequence of tensors, got list"):
        merge_attention([torch.randn(2, 3)], [None])
