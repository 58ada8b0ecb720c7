"""Rotary embedding: relative positions, both pairings, partial width, scaled frequencies."""

import math

import pytest
import torch
from decoders import make_config, make_decoder

from attention_ext.nn.rotary import RotaryEmbedding, rotary_frequencies, rotate

HALVES_OF_8 = [0, 4, 1, 5, 2, 6, 3, 7]  # component order that turns halves into neighbours


def rotated(x, first, **options):
    table = RotaryEmbedding(make_config(**options)).double()
    return rotate(x, table.lookup(slice(first, first + x.shape[1])))


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_difference_of_positions_only(interleaved):
    query, key = torch.randn(2, 1, 5, 1, 8, dtype=torch.float64).unbind()
    scores = []
    for first in (0, 11):
        q, k = (rotated(x, first, rope_interleaved=interleaved) for x in (query, key))
        scores.append(torch.einsum("bihd,bjhd->bhij", q, k))
    torch.testing.assert_close(*scores, rtol=0, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_lengths_are_kept_and_position_zero_turns_nothing(interleaved):
    x = torch.randn(2, 6, 3, 8, dtype=torch.float64)
    turned = rotated(x, 0, rope_interleaved=interleaved)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, 0], x[:, 0])
    assert not torch.allclose(turned[:, 1:], x[:, 1:])


def test_neighbours_are_a_permutation_of_halves():
    x = torch.randn(2, 6, 3, 8, dtype=torch.float64)
    halves = rotated(x, 3)
    neighbours = rotated(x[..., HALVES_OF_8], 3, rope_interleaved=True)
    torch.testing.assert_close(neighbours, halves[..., HALVES_OF_8], rtol=0, atol=1e-14)


def test_the_rotation_is_the_textbook_formula():
    x = torch.randn(1, 4, 2, 8, dtype=torch.float64)
    turned = rotated(x, 5, rope_theta=100.0)
    for position in range(4):
        for pair in range(4):
            angle = (5 + position) * 100.0 ** (-2 * pair / 8)
            a, b = x[0, position, :, pair], x[0, position, :, pair + 4]
            expected = a * math.cos(angle) - b * math.sin(angle)
            torch.testing.assert_close(turned[0, position, :, pair], expected)
            expected = b * math.cos(angle) + a * math.sin(angle)
            torch.testing.assert_close(turned[0, position, :, pair + 4], expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_components_beyond_the_fraction_are_untouched(interleaved):
    x = torch.randn(2, 6, 3, 8, dtype=torch.float64)
    options = {"rope_fraction": 0.5, "rope_interleaved": interleaved}
    turned = rotated(x, 2, **options)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    whole = rotated(x[..., :4], 2, head_dim=4, rope_interleaved=interleaved)
    torch.testing.assert_close(turned[..., :4], whole)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_is_the_rotation_backwards(interleaved):
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotated(x, 4, rope_interleaved=interleaved), x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_odd_strides_are_fine(interleaved):
    x = torch.randn(2, 3, 2, 9, dtype=torch.float64)[..., 1:]
    options = {"rope_interleaved": interleaved}
    assert torch.equal(rotated(x, 1, **options), rotated(x.contiguous(), 1, **options))


@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_may_differ_per_sequence(interleaved):
    table = RotaryEmbedding(make_config(rope_interleaved=interleaved))
    x = torch.randn(2, 3, 2, 8)
    turned = rotate(x, table.lookup(torch.tensor([[0, 1, 2], [7, 8, 9]])))
    assert torch.equal(turned[0], rotate(x[:1], table.lookup(slice(0, 3)))[0])
    assert torch.equal(turned[1], rotate(x[1:], table.lookup(slice(7, 10)))[0])


def test_linear_scaling_stretches_positions():
    scaled = make_config(rope_scaling={"rope_type": "linear", "factor": 4.0})
    plain = rotary_frequencies(make_config())
    torch.testing.assert_close(rotary_frequencies(scaled), plain / 4)


def test_llama3_scaling_slows_long_waves_and_keeps_short_ones():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    options = {"head_dim": 128, "rope_theta": 500000.0}
    plain = rotary_frequencies(make_config(**options))
    scaled = rotary_frequencies(make_config(**options, rope_scaling=scaling))
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            expected = before
        elif wavelength > 8192:
            expected = before / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * before / 8 + smooth * before
        assert after == pytest.approx(expected, rel=1e-12)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8


def test_angles_stay_exact_in_a_half_precision_model():
    decoder = make_decoder()
    table = decoder.rotary.table.clone()
    decoder.bfloat16()
    assert decoder.rotary.table.dtype == torch.float32
    assert torch.equal(decoder.rotary.table, table)
    decoder.double()
    assert decoder.rotary.table.dtype == torch.float64
    assert decoder.rotary.table[1, 0, 0] == math.cos(1)
    assert "rotary.table" not in decoder.state_dict()
