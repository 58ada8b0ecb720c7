"""decoder.attention_weights: whose weights, of which layers, what they leave alone."""

import pytest
import torch
from decoders import ENCODERS, OPTIONS, VOCAB, make_decoder, pad, random_ids

from attention_ext import ArgumentError, ArgumentTypeError

EVERY = {**OPTIONS, **ENCODERS}
every_option = pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)


@every_option
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_looks_as_it_does_alone(options, side):
    decoder = make_decoder(**options)
    rows = [random_ids(1, length)[0] for length in (3, 7, 5)]
    ids, mask = pad(rows, side, filler=-100)
    weights = decoder.attention_weights(ids, attention_mask=mask)
    assert weights.shape == (2, 3, 4, 7, 7)
    for own, row, real in zip(weights.unbind(1), rows, mask, strict=True):
        alone = decoder.attention_weights(row[None])[:, 0]
        torch.testing.assert_close(own[:, :, real][..., real], alone, rtol=1e-4, atol=1e-5)
        assert not own[:, :, ~real].any()
        assert not own[..., ~real].any()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nobody_looks_ahead(options):
    decoder = make_decoder(**options)
    weights = decoder.attention_weights(random_ids(2, 9))
    assert not weights.triu(1).any()
    assert (weights.diagonal(dim1=-2, dim2=-1) > 0).all()
    sums = weights.sum(-1)
    if decoder.config.sinks:
        assert ((sums > 0) & (sums < 1)).all()
    else:
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_a_window_bounds_how_far_back_a_layer_looks():
    decoder = make_decoder(window_sizes=[(2, 0), None])
    weights = decoder.attention_weights(random_ids(1, 9))
    assert not weights[0].tril(-3).any()
    assert (weights[0].diagonal(-2, dim1=-2, dim2=-1) > 0).all()
    assert (weights[1].diagonal(-8, dim1=-2, dim2=-1) > 0).all()


def test_an_encoder_looks_ahead():
    weights = make_decoder(causal=False).attention_weights(random_ids(1, 9))
    assert (weights > 0).all()


def test_chosen_layers_come_in_the_order_of_the_choice():
    decoder = make_decoder(num_hidden_layers=3)
    ids = random_ids(2, 6)
    every = decoder.attention_weights(ids)
    assert every.shape == (3, 2, 4, 6, 6)
    for layers in ([0], [2, 0], [-1, 1, -1], range(3)):
        assert torch.equal(decoder.attention_weights(ids, layers), every[list(layers)])


def test_only_the_chosen_layers_compute_weights(monkeypatch):
    from attention_ext.nn import attention

    asked = []

    def spy(*args, return_weights, **options):
        asked.append(return_weights)
        return real(*args, return_weights=return_weights, **options)

    real = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    decoder = make_decoder(num_hidden_layers=4)
    decoder.attention_weights(random_ids(1, 5), [2])
    assert asked == [False, False, True]  # the fourth layer is not needed
    asked.clear()
    decoder(random_ids(1, 5))
    assert not any(asked)


def test_weights_are_those_before_dropout():
    decoder = make_decoder(dropout=0.5, num_hidden_layers=1)
    ids = random_ids(2, 6)
    assert torch.equal(decoder.attention_weights(ids), decoder.train().attention_weights(ids))


def test_weights_have_gradients():
    decoder = make_decoder()
    decoder.attention_weights(random_ids(1, 5))[1, 0, 0, 4, 0].backward()
    assert decoder.layers[0].mlp.down_proj.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_have_the_models_type(dtype):
    assert make_decoder().to(dtype).attention_weights(random_ids(1, 4)).dtype == dtype


def test_no_tokens_have_no_weights():
    decoder = make_decoder()
    assert decoder.attention_weights(random_ids(0, 3)).shape == (2, 0, 4, 3, 3)
    assert decoder.attention_weights(random_ids(2, 0)).shape == (2, 2, 4, 0, 0)


@pytest.mark.parametrize("layers", [[2], [0, -3], []])
def test_layers_that_there_are_not_are_named(layers):
    with pytest.raises(ArgumentError, match=r"at least one layer, from -2 to 1, got \["):
        make_decoder().attention_weights(random_ids(1, 3), layers)


@pytest.mark.parametrize("layers", [1, [0.5], ["last"]])
def test_layers_are_integers(layers):
    with pytest.raises(ArgumentTypeError, match="layers to be a sequence of integers, got"):
        make_decoder().attention_weights(random_ids(1, 3), layers)


def test_tokens_are_checked_as_in_a_call():
    decoder = make_decoder()
    with pytest.raises(ArgumentError, match="expected ids from 0 to 63"):
        decoder.attention_weights(torch.tensor([[VOCAB]]))
    with pytest.raises(ArgumentError, match="max_position_embeddings = 24 positions, got 25"):
        decoder.attention_weights(random_ids(1, 25))
    with pytest.raises(ArgumentTypeError, match="expected ids to be int64 or int32, got list"):
        decoder.attention_weights([[1]])
