"""Options: preset < TOML file < flags, the same names everywhere, a file that can be given back."""

import dataclasses
import re

import pytest
from cli_runner import PACKAGE, Cli

from attention_ext.cli import config as configs
from attention_ext.cli.info import LIBRARIES
from attention_ext.cli.options import TrainConfig, TrainingOptions, seconds
from attention_ext.cli.train import decoder_config
from attention_ext.nn import Decoder, DecoderConfig


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Cli(capsys)


def table(*words):
    return configs.to_table(configs.resolve(words).settings)


def test_without_words_the_preset_is_tiny_on_the_docs_by_the_clock():
    settings = table()
    assert settings["preset"] == "tiny"
    assert settings["data"] == ["docs"]
    assert settings["time"] == "150s"
    decoder = Decoder(decoder_config(configs.resolve(()).settings.model, 1024))
    assert decoder.num_parameters() == 935_040


@pytest.mark.parametrize("preset", configs.PRESETS)
def test_every_preset_is_a_decoder(preset):
    settings = configs.resolve(["--preset", preset]).settings
    decoder_config(settings.model, settings.data.vocab_size)
    assert settings.training.time is not None


def test_a_file_overrides_the_preset_and_flags_override_the_file(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('preset = "small"\nhidden_size = 96\nbatch_size = 3\nlearning_rate = 1\n')
    settings = table("--config", str(file), "--batch", "5")
    assert settings["preset"] == "small"
    assert settings["num_hidden_layers"] == 6  # the preset
    assert settings["hidden_size"] == 96  # the file
    assert settings["learning_rate"] == 1.0
    assert settings["batch_size"] == 5  # the flag
    assert table("--config", str(file), "--preset", "tiny")["num_hidden_layers"] == 4


def test_a_horizon_replaces_the_horizon_below(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("steps = 7\n")
    assert "time" not in table("--steps", "3")
    assert "time" not in table("--config", str(file))
    assert table("--config", str(file))["steps"] == 7
    settings = table("--config", str(file), "--time", "5s")
    assert settings["time"] == "5s"
    assert "steps" not in settings


def test_another_width_has_a_feed_forward_width_of_its_own():
    assert table()["intermediate_size"] == 352
    assert "intermediate_size" not in table("--width", "256")
    assert table("--width", "256", "--ffn-width", "512")["intermediate_size"] == 512


def test_the_resolved_configuration_can_be_given_back(cli, tmp_path):
    words = ("--preset", "small", "--width", "64", "--kv-heads", "2", "--no-tie", "--epochs", "1.5")
    toml = cli.good("train", *words, "--dry-run", "--threads", "1", "--context", "16")
    (tmp_path / "resolved.toml").write_text(toml)
    again = cli.good("train", "--config", "resolved.toml", "--dry-run")
    assert again == toml
    assert not (tmp_path / "runs").exists()


def test_numbers_may_stand_for_their_texts(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("time = 90\nthreads = 2\n")
    settings = table("--config", str(file))
    assert (settings["time"], settings["threads"]) == ("90", "2")


def test_model_options_are_those_of_the_decoder():
    ours = set(configs.to_table(TrainConfig()))
    model = {f.name for f in dataclasses.fields(TrainConfig().model)}
    theirs = {f.name for f in dataclasses.fields(DecoderConfig)}
    # The tokenizer gives vocab_size; scaling is for contexts beyond those of training; an encoder
    # has no next token to predict.
    assert model - {"context"} == theirs - {
        "vocab_size",
        "max_position_embeddings",
        "rope_scaling",
        "causal",
    }
    assert {"data", "learning_rate", "seed"} <= ours


@pytest.mark.parametrize(
    ("text", "expected"), [("150s", 150), ("2m30s", 150), ("1.5h", 5400), ("7", 7), ("0.5m", 30)]
)
def test_durations(text, expected):
    assert seconds(text) == expected
    assert TrainingOptions(time=text).time == text


def test_help_shows_the_defaults_that_hold(cli, tmp_path):
    (tmp_path / "my.toml").write_text("batch_size = 77\n")
    help_text = cli.good("train", "--config", "my.toml", "--preset", "small", "--help")
    assert "77" in help_text
    assert "4096" in help_text
    assert "-b INT" in help_text


def test_without_words_the_commands_are_listed_with_an_example_each(cli):
    text = cli.good()
    for command in ("train", "generate", "info"):
        assert f"python -m attention_ext {command} my-run" in text


def test_each_library_is_imported_in_one_module_and_not_with_the_commands():
    places = {}
    for path in (*PACKAGE.glob("nn/*.py"), *PACKAGE.glob("cli/*.py")):
        for name in re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE):
            places.setdefault(name, set()).add(path.stem)
    for library in ("tyro", "tomli_w", "tqdm", "matplotlib", "safetensors", "tokenizers"):
        assert len(places[library]) == 1, library
    assert not any("main" in places[library] for library in LIBRARIES if library in places)
