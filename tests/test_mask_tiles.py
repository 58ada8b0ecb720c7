"""Masks and dropout over lengths of several tiles: what whole tiles and parts of tiles hide."""

import math

import pytest
import torch
from assertions import assert_close, assert_same_bits, attend, exact, fresh, leaves_of
from cases import DTYPES

from attention_ext import scaled_dot_product_attention as attention
from attention_ext.reference import Call

pytestmark = pytest.mark.parity

SEQLEN_Q, SEQLEN_KV = 300, 250


def make_masks():
    """Bool masks (L, S) by name."""
    query, key = torch.arange(SEQLEN_Q)[:, None], torch.arange(SEQLEN_KV)
    everything = torch.ones(SEQLEN_Q, SEQLEN_KV, dtype=torch.bool)
    return {
        "causal": everything.tril(),
        "band": everything.tril(-20).triu(-70),
        "upper": everything.triu(40),
        "padding": everything & (key < 170),
        "left padding": everything & (key >= 117),
        "blocks": query // 70 == key // 60,
        "holes": (query // 50 + key // 30) % 3 == 0,
        "rows": (query % 90 < 3) & (key > 100),
        "corner": (query > 290) & (key > 240),
        "random": torch.rand(SEQLEN_Q, SEQLEN_KV) < 0.5,
        "sparse": torch.rand(SEQLEN_Q, SEQLEN_KV) < 0.01,
    }


MASKS = list(make_masks())


def make_inputs(width, dtype, heads=2, kv_heads=2):
    shapes = (1, heads, SEQLEN_Q, width), (1, kv_heads, SEQLEN_KV, width)
    return [torch.randn(shapes[i > 0], dtype=dtype) for i in range(3)]


def differentiate(call, upstream, run=attend):
    """Output, lse where it is finite, and the gradients of all inputs."""
    call = fresh(call, torch.float64 if run is exact else None)
    output, lse = run(call)
    grads = torch.autograd.grad(output, leaves_of(call), upstream.to(output.dtype))
    return [output.detach(), lse.detach().nan_to_num(neginf=0.0), *grads]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_what_it_hides(name, kind, dropout_p):
    mask = make_masks()[name]
    if kind == "float":
        mask = torch.randn(mask.shape).masked_fill(~mask, -math.inf)
    upstream = torch.randn(1, 2, SEQLEN_Q, 12, dtype=torch.float64)
    seed = torch.tensor(11) if dropout_p else None
    call = Call(*make_inputs(12, torch.float64), mask, dropout_p=dropout_p, seed=seed)
    output, lse, *grads = differentiate(call, upstream, exact)
    if kind == "float":
        grads[3] = grads[3].float()
    assert_close(differentiate(call, upstream)[:5], [output, lse, *grads[:3]], 1e-12)
    single = call._replace(**{x: getattr(call, x).float() for x in ("query", "key", "value")})
    for x, y in zip(differentiate(single, upstream), [output, lse, *grads], strict=True):
        assert_close(x.double(), y.double(), 1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": True, "lower_right": True},
        {"window_left": 60, "window_right": 5},
        {"softcap": 2.0},
        {"alibi_slopes": torch.tensor([0.1, 0.01, 0.2, 0.3], dtype=torch.float64)},
        {"sinks": torch.tensor([0.1, 2.0, -1.0, 0.3], dtype=torch.float64)},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("width", [16, 160])
@pytest.mark.parametrize("name", ["band", "holes", "random"])
def test_a_mask_and_dropout_go_with_every_option(name, width, options):
    inputs = make_inputs(width, torch.float64, heads=4)
    options = options | {"enable_gqa": True, "dropout_p": 0.2, "seed": torch.tensor(5)}
    call = Call(*inputs, make_masks()[name], **options)
    upstream = torch.randn(1, 4, SEQLEN_Q, width, dtype=torch.float64)
    assert_close(differentiate(call, upstream), differentiate(call, upstream, exact), 1e-11)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("width", [16, 160])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_mask_hides_from_other_rows_changes_no_bit_of_a_row(dtype, width, kind, dropout_p):
    """Of which it depends what a kernel skips, and where it looks at the mask at all."""
    inputs = [x.to(dtype) for x in make_inputs(width, torch.float32)]
    upstream = torch.randn(1, 2, SEQLEN_Q, width).to(dtype)
    own, row_sees = torch.arange(SEQLEN_Q) % 37 == 0, torch.rand(SEQLEN_KV) < 0.7
    row_sees[60:200] = True  # whole tiles
    seed = torch.tensor(3) if dropout_p else None
    results = []
    for others in [torch.ones(SEQLEN_Q, SEQLEN_KV, dtype=torch.bool), *make_masks().values()]:
        mask = torch.where(own[:, None], row_sees, others)
        if kind == "float":
            mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
        call = Call(*inputs, mask, dropout_p=dropout_p, seed=seed)
        output, lse, grad_query, *_ = differentiate(call, upstream)
        results.append([output[:, :, own], lse[:, :, own], grad_query[:, :, own]])
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_a_mask_that_hides_nothing_changes_no_bit():
    inputs = make_inputs(16, torch.float32)
    upstream = torch.randn(1, 2, SEQLEN_Q, 16)
    shown = torch.ones(SEQLEN_Q, SEQLEN_KV, dtype=torch.bool)
    plain = differentiate(Call(*inputs), upstream)
    assert_same_bits(differentiate(Call(*inputs, shown), upstream), plain)
    assert_same_bits(differentiate(Call(*inputs, shown.float() - 1.0), upstream)[:2], plain[:2])


@pytest.mark.parametrize("heads", [2, 4])  # 4: two query heads share a key head
@pytest.mark.parametrize(
    "shape", [(1, 1000), (150, 1), (150, 1000), (2, 1, 150, 1000), (4, 150, 1000)], ids=str
)
def test_the_gradient_of_a_mask_of_many_tiles(shape, heads):
    if len(shape) == 3:
        shape = (heads, *shape[1:])
    query, key, value = (
        torch.randn(2, h, s, 8, dtype=torch.float64)
        for h, s in ((heads, 150), (2, 1000), (2, 1000))
    )
    mask = torch.randn(shape, dtype=torch.float64)
    if shape[-2:] == (150, 1000):
        mask[..., :64, 96:600] = -math.inf
        mask[..., 100:110, :] = -math.inf
    call = Call(query, key, value, mask, enable_gqa=True)
    upstream = torch.randn_like(query)
    assert_close(differentiate(call, upstream), differentiate(call, upstream, exact), 1e-12)


def test_bytes_other_than_0_and_1_show():
    query, key, value = make_inputs(16, torch.float32)
    shown = torch.rand(SEQLEN_Q, SEQLEN_KV) < 0.5
    shown[:, :100] = True
    odd = (shown * torch.randint(1, 255, shown.shape)).to(torch.uint8).view(torch.bool)
    output, expected = (attention(query, key, value, attn_mask=mask) for mask in (odd, shown))
    assert_same_bits(output, expected)
