"""Hidden means unread, for what options hide: forward, backward, second order, forward mode."""

import math

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from assertions import (
    assert_same_bits,
    attend,
    finite_lse,
    floating,
    fresh,
    leaves_of,
    replaced,
)
from cases import DTYPES

from attention_ext.reference import Call

pytestmark = pytest.mark.parity

POISON = [math.nan, math.inf, 1e30]


def derivatives(call):
    """Results, gradients, second derivatives, tangents."""
    call = fresh(call)
    leaves = leaves_of(call)
    output, lse = attend(call)
    lse = finite_lse(lse)
    upstream = [torch.ones_like(output), torch.ones_like(lse)]
    grads = torch.autograd.grad((output, lse), leaves, upstream, create_graph=True)
    second = torch.autograd.grad(grads, leaves, [torch.ones_like(x) for x in grads])
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in leaves]
        moved = [forward_ad.unpack_dual(x).tangent for x in attend(replaced(call, duals))]
    return [output, lse, *grads, *second, moved[0], finite_lse(moved[1])]


def make(dtype, seqlen_q, seqlen_kv, **options):
    inputs = [torch.randn(2, 2, s, 16).to(dtype) for s in (seqlen_q, seqlen_kv, seqlen_kv)]
    return Call(*inputs, **options)


# which keys every row of the first batch element misses
HIDERS = {
    "keys beyond those in use": (9, 70, {"seqused_k": torch.tensor([45, 70])}, slice(45, None)),
    "keys beyond those in use, lower right": (
        9, 70, {"seqused_k": torch.tensor([45, 70]), "lower_right": True, "is_causal": True},
        slice(45, None),
    ),
    "no key in use": (9, 70, {"seqused_k": torch.tensor([0, 70])}, slice(None)),
    "keys behind every window": (
        9, 130, {"window_left": 20, "lower_right": True}, slice(0, 130 - 9 - 20)
    ),
    "keys beyond every window": (9, 130, {"window_right": 20}, slice(9 + 20, None)),
    "one row, keys in use": (1, 130, {"seqused_k": torch.tensor([70, 130])}, slice(70, None)),
    "one row, behind the window": (
        1, 130, {"window_left": 20, "lower_right": True}, slice(0, 130 - 1 - 20)
    ),
}  # fmt: skip
EXTRAS = {
    "": {},
    "scores changed": {
        "softcap": 3.0, "alibi_slopes": torch.tensor([0.1, 0.2]), "sinks": torch.tensor([0.3, -1.0])
    },
    "dropout": {"dropout_p": 0.3, "seed": torch.tensor(5)},
}  # fmt: skip


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", HIDERS)
@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
def test_what_options_hide_changes_no_bit_of_any_derivative(dtype, name, extra, poison):
    seqlen_q, seqlen_kv, options, hidden = HIDERS[name]
    call = make(dtype, seqlen_q, seqlen_kv, **options, **EXTRAS[extra])
    poisoned = call._replace(key=call.key.clone(), value=call.value.clone())
    rows = slice(0, 1) if "use" in name else slice(None)
    for tensor in poisoned[1:3]:
        tensor[rows, :, hidden] = poison
    assert_same_bits(derivatives(poisoned), derivatives(call))
    grads = dict(zip(floating(call), derivatives(poisoned)[2:], strict=False))
    assert not grads["key"][rows, :, hidden].any()
    assert not grads["value"][rows, :, hidden].any()


@pytest.mark.parametrize("content", [math.nan, math.inf, 1e30, -1e30])
@pytest.mark.parametrize("name", HIDERS)
def test_what_a_float_mask_holds_where_options_hide_changes_no_bit(name, content):
    seqlen_q, seqlen_kv, options, hidden = HIDERS[name]
    mask = torch.randn(2, 1, seqlen_q, seqlen_kv)
    call = make(torch.float32, seqlen_q, seqlen_kv, attn_mask=mask, **options)
    other = mask.clone()
    other[slice(0, 1) if "use" in name else slice(None), ..., hidden] = content
    assert_same_bits(derivatives(call._replace(attn_mask=other)), derivatives(call))


@pytest.mark.parametrize("content", [1e30, math.nan, math.inf])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
def test_an_empty_row_gives_zero_and_gets_zero_in_every_derivative(dtype, extra, content):
    call = make(dtype, 9, 5, is_causal=True, lower_right=True, **EXTRAS[extra])
    poisoned = call._replace(query=call.query.clone())
    poisoned.query[..., :4, :] = content  # rows 0 to 3 of 9 see none of 5 keys
    actual, expected = derivatives(poisoned), derivatives(call)
    assert_same_bits(actual, expected)
    assert not actual[0][..., :4, :].any()
    grads = dict(zip(floating(call), actual[2:], strict=False))
    assert not grads["query"][..., :4, :].any()


@pytest.mark.parametrize("content", [math.nan, math.inf])
def test_an_upstream_gradient_on_an_empty_row_is_not_read(content):
    results, inputs = [], make(torch.float32, 9, 5, is_causal=True, lower_right=True, softcap=2.0)
    for value in (0.0, content):
        call = fresh(inputs)
        upstream = torch.ones(2, 2, 9, 16)
        upstream[..., :4, :] = value
        grads = torch.autograd.grad(attend(call)[0], leaves_of(call), upstream, create_graph=True)
        ones = [torch.ones_like(x) for x in grads]
        results.append([*grads, *torch.autograd.grad(grads, leaves_of(call), ones)])
    assert_same_bits(*results)


@pytest.mark.parametrize("name", ["softcap", "slopes", "sinks"])
def test_nan_in_an_option_reaches_just_the_heads_it_belongs_to(name):
    options = {
        "softcap": {"softcap": 2.0},
        "slopes": {"alibi_slopes": torch.tensor([0.1, math.nan])},
        "sinks": {"sinks": torch.tensor([0.1, math.nan])},
    }[name]
    call = make(torch.float32, 9, 20, **options)
    if name == "softcap":
        call.key[:, 1, 3, 2] = math.nan
    output, _ = attend(call)
    assert output[:, 0].isfinite().all()
    assert output[:, 1].isnan().all()
