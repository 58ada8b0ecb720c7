"""DecoderConfig: derived sizes, JSON, and one sentence for each wrong value."""

import dataclasses
import json

import pytest
from decoders import ENCODERS, OPTIONS, make_config

from attention_ext import ArgumentError, ArgumentTypeError
from attention_ext.nn import DecoderConfig


def test_sizes_that_are_not_given_are_derived():
    config = DecoderConfig(100, 48, 2, 6)
    assert config.heads == (6, 6, 8, 8)
    assert config.intermediate_size == 128
    assert DecoderConfig(100, 50, 2, 5).intermediate_size == 136  # 133.3, up to a multiple of 8
    assert DecoderConfig(100, 48, 2, 6, mlp="gelu").intermediate_size == 192
    assert DecoderConfig(100, 48, 2, 6, head_dim=10, value_dim=3).heads == (6, 6, 10, 3)
    assert DecoderConfig(100, 50, 2, 6, head_dim=10).heads == (6, 6, 10, 10)


EVERY = {**OPTIONS, **ENCODERS}


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_json_round_trip_keeps_every_field(options):
    config = make_config(**options)
    again = DecoderConfig.from_json(config.to_json())
    assert again == config
    assert hash(again) == hash(config)
    assert set(json.loads(config.to_json())) == {f.name for f in dataclasses.fields(config)}


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_config().hidden_size = 64


def test_replace_checks_again():
    with pytest.raises(ArgumentError, match="expected vocab_size to be at least 1, got 0"):
        dataclasses.replace(make_config(), vocab_size=0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"vocab_size": 0}, "expected vocab_size to be at least 1, got 0"),
        ({"num_hidden_layers": -1}, "expected num_hidden_layers to be at least 1, got -1"),
        ({"num_attention_heads": 5}, "hidden_size to be a multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads to be a multiple of num_key_value_heads"),
        ({"head_dim": 0}, "expected head_dim to be at least 1, got 0"),
        ({"value_dim": -2}, "expected value_dim to be at least 1, got -2"),
        ({"norm": "batch"}, "expected norm to be one of 'rms', 'layer', got 'batch'"),
        ({"mlp": "relu"}, "expected mlp to be one of 'swiglu', 'gelu', got 'relu'"),
        ({"position": "rotary"}, "position to be one of 'rope', 'learned', 'alibi', 'none'"),
        ({"rope_theta": 0}, "expected rope_theta to be positive, got 0.0"),
        ({"rope_theta": float("nan")}, "expected rope_theta to be finite, got nan"),
        ({"rope_fraction": 1.5}, r"expected rope_fraction to be in \(0, 1\], got 1.5"),
        ({"head_dim": 7}, "even rotary width, got 7 from head_dim 7 and rope_fraction 1.0"),
        ({"rope_fraction": 0.1}, "positive even rotary width, got 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_type 'default', 'linear'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "with the keys rope_type, factor, got"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "to be positive, got -1.0"),
        (
            {"window_sizes": [(3, 0)]},
            r"window_sizes to be None or one \(left, right\) or None per layer, for "
            r"num_hidden_layers = 2, got \[\(3, 0\)\]",
        ),
        ({"window_sizes": [None, (3, -2)]}, r"window_sizes\[1\] to be two integers of at least -1"),
        ({"window_sizes": [(3,), None]}, r"window_sizes\[0\] to be two integers .*, got \(3,\)"),
        ({"softcap": -1.0}, "expected softcap to be None or at least 0, got -1.0"),
        ({"softcap": float("inf")}, "expected softcap to be finite, got inf"),
        ({"dropout": 1.0}, r"expected dropout to be in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, r"expected dropout to be in \[0, 1\), got -0.1"),
    ],
)
def test_wrong_values_are_named(options, sentence):
    with pytest.raises(ArgumentError, match=f"^DecoderConfig: .*{sentence}"):
        make_config(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hidden_size": 32.0}, "expected hidden_size to be an integer, got 32.0 of type float"),
        ({"num_hidden_layers": True}, "expected num_hidden_layers to be an integer, got True"),
        ({"qk_norm": 1}, "expected qk_norm to be True or False, got 1 of type int"),
        ({"rope_theta": "big"}, "expected rope_theta to be a number, got 'big' of type str"),
        ({"rope_scaling": 2.0}, "expected rope_scaling to be None or a dictionary, got 2.0"),
        ({"window_sizes": 3}, r"expected window_sizes to be None or one \(left, right\) .*, got 3"),
        ({"window_sizes": [3, None]}, r"expected window_sizes\[0\] to be None or \(left, right\)"),
        (
            {"window_sizes": [(1.5, 0), None]},
            r"expected window_sizes\[0\] .* got \(1.5, 0\) of type tuple",
        ),
        ({"softcap": "high"}, "expected softcap to be a number, got 'high' of type str"),
        ({"sinks": 4}, "expected sinks to be True or False, got 4 of type int"),
        ({"dropout": None}, "expected dropout to be a number, got None"),
        ({"causal": "no"}, "expected causal to be True or False, got 'no'"),
    ],
)
def test_wrong_types_are_named(options, sentence):
    with pytest.raises(ArgumentTypeError, match=f"^DecoderConfig: {sentence}"):
        make_config(**options)


def test_an_odd_head_is_fine_without_rotation():
    assert make_config(head_dim=7, position="learned").rotary_dim == 0


def test_one_meaning_has_one_form():
    lists = make_config(window_sizes=[[3, 0], [-1, -1]], softcap=0, dropout=0)
    assert lists.window_sizes == ((3, 0), None)
    assert lists.softcap is None
    assert lists == make_config(window_sizes=((3, 0), None))
    assert [lists.window(layer) for layer in (0, 1)] == [(3, 0), (-1, -1)]
    assert make_config().window(1) == (-1, -1)


def test_unknown_keys_name_the_nearest():
    with pytest.raises(ArgumentError, match=r"got 'num_heads'; did you mean 'num_.*heads'"):
        DecoderConfig.from_dict({**make_config().to_dict(), "num_heads": 4})


def test_missing_keys_are_named():
    with pytest.raises(ArgumentError, match="got none for num_hidden_layers, num_attention_heads"):
        DecoderConfig.from_dict({"vocab_size": 10, "hidden_size": 8})


def test_another_models_config_is_refused():
    with pytest.raises(ArgumentError, match="expected model_type 'attention_ext', got 'llama'"):
        DecoderConfig.from_dict({**make_config().to_dict(), "model_type": "llama"})


@pytest.mark.parametrize("text", ["{", "[1]", "null"])
def test_text_that_is_no_json_object_is_refused(text):
    with pytest.raises(ArgumentError, match=r"^DecoderConfig: expected"):
        DecoderConfig.from_json(text)


def test_rope_scaling_accepts_the_old_key_and_is_copied():
    scaling = {"type": "linear", "factor": 4}
    config = make_config(rope_scaling=scaling)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    scaling["factor"] = 8
    assert config.rope_scaling["factor"] == 4.0
