"""The decoder's score options on the command line: flags, TOML keys, runs that have them."""

import json
import os
import re

import pytest
import torch
from cli_runner import SMALL, Cli
from safetensors.torch import load_file

from attention_ext.cli import config as configs
from attention_ext.cli import machine
from attention_ext.cli.costs import bytes_per_step, kv_bytes_per_step, visible_keys
from attention_ext.cli.main import main
from attention_ext.cli.options import ModelOptions
from attention_ext.cli.train import decoder_config
from attention_ext.nn import Decoder, DecoderConfig

OPTIONS = (
    *("--position", "alibi", "--window", "7", "--softcap", "20", "--sinks", "--dropout", "0.2"),
    *("--schedule", "constant", "--warmup", "0", "--eval-every", "10"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one run, "one", of 20 steps."""
    place = tmp_path_factory.mktemp("place")
    before = os.getcwd()
    os.chdir(place)
    try:
        assert main(["train", "one", *SMALL, *OPTIONS, "--steps", "20", "--quiet"]) == 0
    finally:
        os.chdir(before)
    return place


@pytest.fixture
def cli(capsys, folder, monkeypatch, threads):
    monkeypatch.chdir(folder)
    return Cli(capsys)


def config_of(*words):
    return decoder_config(configs.resolve(words).settings.model, 300)


def test_flags_name_the_options_of_the_decoder():
    config = config_of(*OPTIONS[:-6], "--layers", "2")
    assert config.position == "alibi"
    assert config.window_sizes == ((7, 0), (7, 0))
    assert (config.softcap, config.sinks, config.dropout) == (20.0, True, 0.2)
    assert config_of("--window", "7,3", "none", "0", "none").window_sizes == (
        *((7, 3), None),
        *((0, 0), None),
    )
    plain = config_of()
    assert (plain.window_sizes, plain.softcap, plain.sinks, plain.dropout) == (None, None, False, 0)


@pytest.mark.parametrize(
    ("text", "windows"),
    [
        ('window_sizes = ["7", "none"]', ((7, 0), None)),
        ("window_sizes = [7, 3]", ((7, 0), (3, 0))),
        ("window_sizes = [[7, 2], [-1, -1]]", ((7, 2), None)),
        ("window_sizes = 5", ((5, 0), (5, 0))),
        ("window_sizes = []", None),
    ],
)
def test_windows_in_a_file(tmp_path, text, windows):
    (tmp_path / "my.toml").write_text(text)
    words = ("--config", str(tmp_path / "my.toml"), "--layers", "2")
    assert config_of(*words).window_sizes == windows
    (tmp_path / "again.toml").write_text(configs.to_toml(configs.resolve(words).settings))
    assert config_of("--config", str(tmp_path / "again.toml")).window_sizes == windows


@pytest.mark.parametrize("preset", configs.PRESETS)
def test_presets_rotate_neighbours(preset):
    assert config_of("--preset", preset).rope_interleaved
    assert not config_of("--preset", preset, "--no-rope-interleaved").rope_interleaved


def test_a_run_with_every_option_learns_and_is_described(cli, folder):
    losses = [
        json.loads(line)["loss"]
        for line in (folder / "runs" / "one" / "log.jsonl").read_text().splitlines()
        if "loss" in json.loads(line)
    ]
    assert losses[-1] < losses[0] - 0.3
    config = Decoder.from_pretrained(folder / "runs" / "one").config
    assert config.window_sizes == ((7, 0),)
    assert config.sinks
    run = json.loads(cli.good("info", "one", "--json").splitlines()[-1])["run"]
    assert run["decoder"] == json.loads(config.to_json())
    assert run["kv_bytes_per_token"] == 2 * (16 + 16) * 4
    assert run["kv_bytes_at_full_context"] == 16 * run["kv_bytes_per_token"]
    assert run["kv_bytes_read_per_step"] == 8 * run["kv_bytes_per_token"]  # the window and itself


def test_a_run_with_every_option_writes_the_same_with_and_without_a_cache(cli):
    words = ("generate", "one", "--threads", "1", "-p", "def", "-m", "40", "--check-cache")
    code, out, err = cli(*words, "--json")
    assert (code, json.loads(out.splitlines()[-1])["same"]) == (0, True), err


def test_a_resumed_run_drops_what_the_run_without_a_stop_drops(cli, folder):
    cli.good("train", "two", *SMALL, *OPTIONS, "--steps", "10")
    cli.good("train", "two", "--resume", "--steps", "20")
    ours, theirs = (load_file(f"runs/{run}/train_state.safetensors") for run in ("one", "two"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_measuring_leaves_the_random_numbers_of_the_run_alone():
    config = DecoderConfig(64, 16, 2, 2, max_position_embeddings=16, dropout=0.5)
    decoder = Decoder(config)
    state = torch.get_rng_state()
    share = machine.attention_share(lambda: decoder(torch.zeros(2, 16).long()), decoder, 2, 16)
    assert 0 < share <= 1
    assert torch.equal(torch.get_rng_state(), state)


def test_an_encoder_writes_no_text(cli, folder):
    run = folder / "runs" / "encoder"
    encoder = Decoder(DecoderConfig(300, 16, 1, 2, causal=False))
    encoder.save_pretrained(run)
    (run / "tokenizer.json").write_bytes((folder / "runs/one/tokenizer.json").read_bytes())
    assert "expected a causal decoder, got one with causal=False" in cli.bad("generate", "encoder")
    assert "kv_bytes" not in cli.good("info", "encoder")


@pytest.mark.parametrize("window", [None, (0, 0), (3, 0), (3, 9), (9, 0), (-1, 2)])
def test_costs_count_the_visible_keys(window):
    config = DecoderConfig(64, 8, 1, 2, max_position_embeddings=7, window_sizes=[window])
    left = 7 if window is None or window[0] < 0 else window[0]
    counts = [min(query, left) + 1 for query in range(7)]
    assert visible_keys(config, 0) == sum(counts) / 7
    assert kv_bytes_per_step(config) == counts[-1] * 2 * (4 + 4) * 4


def test_a_step_reads_weights_of_products_and_the_keys_in_use():
    sizes = {"max_position_embeddings": 7, "window_sizes": [(2, 0), None]}
    tied = Decoder(DecoderConfig(64, 8, 2, 2, **sizes))
    weights = 4 * tied.num_parameters()
    for length, keys in ((1, 1 + 1), (3, 3 + 3), (5, 3 + 5)):
        assert bytes_per_step(tied, length) == weights + keys * 2 * (4 + 4) * 4
    half = bytes_per_step(tied.to(torch.bfloat16), 5)
    assert half == (weights + 8 * 2 * (4 + 4) * 4) / 2
    untied = Decoder(DecoderConfig(64, 8, 2, 2, tie_word_embeddings=False, **sizes))
    assert bytes_per_step(untied, 0) == weights  # one row of the embedding is nothing
    learned = Decoder(DecoderConfig(64, 8, 2, 2, position="learned", **sizes))
    assert bytes_per_step(learned, 0) == weights


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="no glibc")
def test_freed_memory_is_kept():
    import resource

    machine.keep_freed_memory()
    torch.ones(2**24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(6):
        torch.ones(2**24)  # 16384 pages, more than glibc would ever keep by itself
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 3 * 16384


def test_a_library_without_the_call_is_no_error(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    machine.keep_freed_memory()


BAD = [
    ("--window 3 4", "None per layer, for num_hidden_layers = 4, got [(3, 0), (4, 0)]"),
    ("--window far", "expected window_sizes to be LEFT, LEFT,RIGHT or none, got 'far'"),
    ("--window 3,4,5", "expected window_sizes to be LEFT, LEFT,RIGHT or none, got '3,4,5'"),
    ("--softcap -2", "expected softcap to be None or at least 0, got -2.0"),
    ("--softcap soft", "--softcap: expected a number, got 'soft'"),
    ("--dropout 1", "expected dropout to be in [0, 1), got 1.0"),
    ("--sinks=4", "--sinks takes no value, got '4'"),
    ("--no-causal", "unknown option '--no-causal'"),
    ("--position rotary", "--position: expected one of 'rope', 'learned', 'alibi', 'none'"),
]


@pytest.mark.parametrize(("line", "sentence"), BAD, ids=[line for line, _ in BAD])
def test_wrong_options_get_one_sentence(cli, line, sentence):
    assert sentence in cli.bad("train", *line.split())


def test_a_wrong_window_in_a_file_gets_one_sentence(cli, tmp_path):
    for value in ("[true]", '[["a", 3]]', "1.5"):
        (tmp_path / "my.toml").write_text(f"window_sizes = {value}\n")
        error = cli.bad("train", "--config", str(tmp_path / "my.toml"))
        assert re.search("expected window_sizes to be (a list of texts|LEFT, LEFT,RIGHT)", error)


def test_windows_without_a_value_are_the_same_everywhere():
    assert ModelOptions().windows() is None
    assert ModelOptions(window_sizes=("none",)).windows() == [None] * 4
