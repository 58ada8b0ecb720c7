"""As accurate as the plain formula in the same dtype, for inputs of several magnitudes."""

import math

import numpy
import pytest
import torch
from assertions import (
    ErrorRatio,
    assert_close,
    attend,
    exact,
    floating,
    fresh,
    leaves_of,
    rms,
    unfused,
)
from cases import BY_NAME, CASES, DTYPES

from attention_ext import scaled_dot_product_attention as attention

pytestmark = pytest.mark.parity

ROWS = 100  # samples are added until so many rows are compared: the error of one row is luck


# where large scores could do harm: several tiles, masks, caps and slopes, one row, wide heads
LARGE = [
    "several tiles, causal", "many keys", "one query, many keys", "width 257", "width 512",
    "bool mask and causal", "finite float mask (1, H, L, S)", "softcap", "slopes (H,)", "sinks",
    "window", "two queries share a key head", "negative scale",
]  # fmt: skip
SAMPLES = [(case, 1.0) for case in CASES if not case.dropout_p]
SAMPLES += [(BY_NAME[name], magnitude) for name in LARGE for magnitude in (5.0, 10.0)]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    ("case", "magnitude"), SAMPLES, ids=[f"{case.name} x {size:g}" for case, size in SAMPLES]
)
def test_errors_against_float64_are_within_twice_those_of_the_plain_formula(case, magnitude, dtype):
    names = list(floating(case.make()))
    ratios = [ErrorRatio("output", 2.0)]
    ratios += [ErrorRatio(f"gradient of {name}", 3.0) for name in names]
    samples = max(1, ROWS // math.prod(case.query[:-1]))
    if case.slopes or case.sinks:
        samples = max(samples, ROWS // (2 * case.query[-3]))  # a number per head is luck too
    for seed in range(samples):
        call = fresh(case.make(dtype, magnitude, seed=seed))
        reference, plain = fresh(call, torch.float64), fresh(call)
        outputs = attend(call)[0], unfused(plain), exact(reference)[0]
        ratios[0].add(*outputs)
        upstream = torch.randn_like(outputs[0])
        grads = [
            torch.autograd.grad(output, leaves_of(inputs), upstream.to(output.dtype))
            for output, inputs in zip(outputs, (call, plain, reference), strict=True)
        ]
        terms = score_gradient_terms(reference)
        for ratio, name, *samples in zip(ratios[1:], names, *grads, strict=True):
            ratio.add(*samples, terms.get(name, 0.0))
        assert all(grad.dtype == dtype for grad in (outputs[0], *grads[0]))
    for ratio in ratios:
        ratio.check()


@pytest.mark.parametrize(
    ("length", "width", "option"),
    [(64, 32, "causal"), (1024, 64, "causal"), (1024, 64, "mask"), (2048, 32, "slopes")],
)
def test_float32_errors_are_within_a_fifth_of_those_of_torchs_own_function(length, width, option):
    ratios = [ErrorRatio(name, 1.2) for name in ("output", "query", "key", "value")]
    slopes = 2.0 ** -torch.tensor([4.0, 8.0])
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    ours, torchs = {
        "causal": ({"is_causal": True}, {"is_causal": True}),
        "mask": (2 * ({"attn_mask": torch.randn(length, length)},)),
        "slopes": ({"alibi_slopes": slopes}, {"attn_mask": -slopes[:, None, None] * distance}),
    }[option]
    exactly = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in torchs.items()}
    for _ in range(max(1, 1024 // length)):
        inputs = [torch.randn(1, 2, length, width) for _ in range(4)]
        sides = []
        for attend_with, arguments, dtype in (
            (attention, ours, torch.float32),
            (torch.nn.functional.scaled_dot_product_attention, torchs, torch.float32),
            (torch.nn.functional.scaled_dot_product_attention, exactly, torch.float64),
        ):
            *leaves, upstream = (x.detach().to(dtype) for x in inputs)
            output = attend_with(*(x.requires_grad_() for x in leaves), **arguments)
            sides.append((output, *torch.autograd.grad(output, leaves, upstream)))
        for ratio, *samples in zip(ratios, *sides, strict=True):
            ratio.add(*samples)
    for ratio in ratios:
        ratio.check()


def score_gradient_terms(call):
    """How large the terms are that cancel in the gradients of the inputs."""
    query, key, value = (rms(tensor) for tensor in call[:3])
    scale = abs(call.scale) if call.scale is not None else call.query.shape[-1] ** -0.5
    grad_scores = value * call.value.shape[-1] ** 0.5
    queries, keys = (tensor[..., 0].numel() for tensor in call[:2])
    rows_per_key = max(1.0, queries / keys)  # whose errors add up in the gradient of a key
    return {
        "query": scale * grad_scores * key,
        "key": scale * grad_scores * query * rows_per_key**0.5,
        "attn_mask": grad_scores,
        "alibi_slopes": grad_scores * queries**0.5,
        "sinks": grad_scores * queries**0.5,
    }


@pytest.mark.parametrize("magnitude", [1.0, 5.0, 10.0])
@pytest.mark.parametrize("length", [17, 300])
def test_float64_is_within_1e_12_of_a_higher_precision(length, magnitude):
    inputs = [magnitude * torch.randn(length, 48, dtype=torch.float64) for _ in range(3)]
    output, lse, _ = attention(*inputs, is_causal=True, return_lse=True)
    query, key, value = (tensor.numpy().astype(numpy.longdouble) for tensor in inputs)
    scores = query @ key.T / numpy.sqrt(numpy.longdouble(48))
    scores[numpy.triu_indices(length, 1)] = -numpy.inf
    peak = scores.max(-1, keepdims=True)
    weights = numpy.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    assert_close(output, torch.from_numpy((weights / total @ value).astype(float)))
    assert_close(lse, torch.from_numpy((peak + numpy.log(total))[:, 0].astype(float)))


def test_float32_error_is_below_1e_5_for_inputs_of_unit_scale():
    inputs = [torch.randn(2, 4, 200, 64) for _ in range(3)]
    truth = attention(*(tensor.double() for tensor in inputs), is_causal=True)
    assert (attention(*inputs, is_causal=True) - truth).abs().max() < 1e-5


def test_float16_scores_beyond_65504_do_not_overflow():
    query = torch.full((1, 2, 5, 128), 100.0, dtype=torch.float16)
    key = torch.full((1, 2, 6, 128), 90.0, dtype=torch.float16)
    value = torch.randn(1, 2, 6, 128).half()
    query.requires_grad_()
    output = attention(query, key, value)  # each score is 1.15 million, before the scale
    assert_close(output.float(), value.float().mean(-2, keepdim=True).expand(1, 2, 5, 128), 2e-3)
    output.sum().backward()
    assert query.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_float32_mask_beside_other_inputs_is_added_in_the_precision_of_the_sums(dtype):
    inputs = [torch.randn(2, 9, 16).to(dtype) for _ in range(3)]
    mask = 256.0 + torch.randn(9, 9)  # in a half type the differences would be lost
    truth = attention(*(tensor.double() for tensor in inputs), mask.double())
    output = attention(*inputs, mask)
    assert output.dtype == dtype
    assert_close(output.double(), truth, 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_finite_mask_never_hides(dtype):
    query, key, value = (torch.randn(2, 9, 16).to(dtype) for _ in range(3))
    lowest = torch.zeros(9, 9, dtype=dtype).fill_(torch.finfo(dtype).min)
    output, lse, _ = attention(query * 1e-3, key, value, lowest, return_lse=True)
    mean = value.double().mean(-2, keepdim=True).expand(2, 9, 16)
    assert_close(output.double(), mean, max(1e-6, 4 * torch.finfo(dtype).eps))
    assert (lse > -math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lse_is_accurate(dtype):
    query, key = torch.randn(4, 20, 64).to(dtype), torch.randn(4, 300, 64).to(dtype)
    lse = attention(query, key, key, return_lse=True).lse
    truth = (query.double() @ key.double().mT / 8.0).logsumexp(-1)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(lse.double(), truth, 4 * torch.finfo(lse.dtype).eps)
