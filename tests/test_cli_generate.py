"""Writing and describing: the same text for the same seed, text alone on stdout."""

import io
import json
import os

import pytest
from cli_runner import SMALL, TEXT, Cli

from attention_ext.cli.main import main
from attention_ext.nn import DecoderConfig

ONE = ("--threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one run, "one"."""
    place = tmp_path_factory.mktemp("place")
    before = os.getcwd()
    os.chdir(place)
    try:
        assert main(["train", "one", *SMALL, "--steps", "40", "--quiet"]) == 0
    finally:
        os.chdir(before)
    return place


@pytest.fixture
def cli(capsys, folder, monkeypatch, threads):
    monkeypatch.chdir(folder)
    return Cli(capsys)


def test_the_seed_decides_the_text(cli):
    texts = [cli.good("generate", "one", *ONE, "--seed", seed, "-p", "def ") for seed in "001"]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("def ")


def test_sample_i_is_that_of_seed_plus_i(cli):
    both = cli.good("generate", *ONE, "-n", "2", "-m", "30", "-p", "x", "--seed", "4", "--json")
    samples = json.loads(both.splitlines()[-1])["samples"]
    for seed, sample in zip("45", samples, strict=True):
        out = cli.good("generate", *ONE, "-m", "30", "-p", "x", "--seed", seed, "--json")
        assert json.loads(out.splitlines()[-1])["samples"] == [sample]
        assert sample["tokens"] == 30


def test_greedy_text_has_no_seed(cli):
    texts = [cli.good("generate", *ONE, "--greedy", "-p", "a", "--seed", seed) for seed in "12"]
    cold = cli.good("generate", *ONE, "-t", "0", "-p", "a")
    assert texts[0] == texts[1] == cold


def test_streamed_text_is_the_whole_text(cli):
    words = ("generate", *ONE, "-p", "é", "-m", "60", "--seed", "3")
    assert cli.good(*words) == cli.good(*words, "--no-stream")


def test_cached_and_uncached_text_are_the_same(cli):
    words = ("generate", *ONE, "-p", "def", "-m", "50", "--greedy")
    assert cli.good(*words) == cli.good(*words, "--no-cache")
    code, out, err = cli("generate", *ONE, "-p", "def", "-m", "50", "--check-cache", "--json")
    assert code == 0
    assert "same text with and without the cache" in err
    assert json.loads(out.splitlines()[-1])["same"] is True


def test_a_difference_between_the_caches_is_an_error(cli, monkeypatch):
    from attention_ext.cli.generate import Text, Writer

    def write(self, prompt, seed, use_cache, show=None, cache=None):
        return Text([1, 2 + (cache is not None), 3 + use_cache], "abc", 0.1, 0.2)

    monkeypatch.setattr(Writer, "write", write)
    code, _, err = cli("generate", *ONE, "--check-cache")
    assert code == 1
    assert "the texts with and without the cache differ from new token 2 on" in err
    assert "the texts with and without pages differ from new token 1 on" in err


def test_text_ends_before_a_stop_text(cli):
    words = ("generate", *ONE, "-p", "def ", "-m", "120", "--seed", "1")
    whole = cli.good(*words)
    stop = whole[20:23]
    cut = cli.good(*words, "--stop", stop)
    assert cut.rstrip("\n") == whole[: whole.index(stop, 4)].rstrip("\n")


def test_the_prompt_may_be_a_file_or_standard_input(cli, folder, monkeypatch):
    (folder / "prompt.txt").write_text("é def")
    from_file = cli.good("generate", *ONE, "--prompt-file", "prompt.txt", "-m", "9")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é def".encode())))
    assert cli.good("generate", *ONE, "--prompt-file", "-", "-m", "9") == from_file
    assert from_file.startswith("é def")
    (folder / "wrong.txt").write_bytes(b"\xff")
    error = cli.bad("generate", *ONE, "--prompt-file", "wrong.txt")
    assert "wrong.txt is not UTF-8: wrong byte 0xff at position 0" in error
    assert "no such file" in cli.bad("generate", *ONE, "--prompt-file", "missing.txt")
    assert "expected prompt to be a text" in cli.bad("generate", *ONE, "-p", "")


def test_a_prompt_longer_than_the_context_is_continued(cli):
    out = cli.good("generate", *ONE, "-p", TEXT.read_text()[:300], "-m", "5")
    assert len(out) > 300


def test_stats_are_said_beside_the_text(cli):
    code, out, err = cli("generate", *ONE, "-m", "20", "--stats", "--json", "-p", "abc")
    assert code == 0
    stats = json.loads(out.splitlines()[-1])["samples"][0]
    assert stats["tokens_per_second"] > 0
    assert 0 < stats["bandwidth_share"] < 2
    assert "tokens/s" in err
    assert "tokens/s" not in out


def test_quiet_leaves_the_text(cli):
    code, out, err = cli("generate", *ONE, "-q", "-m", "5", "-p", "abc")
    assert (code, err) == (0, "")
    assert out.startswith("abc")


def test_sample_is_another_name_of_generate(cli):
    words = (*ONE, "-m", "5", "-p", "abc")
    assert cli.good("sample", *words) == cli.good("generate", *words)


def test_without_a_name_the_newest_run_is_taken(cli, folder):
    _, _, err = cli("generate", "-m", "1")
    assert "run: runs/one, " in err
    assert "threads: " in err


def test_info_describes_the_machine_and_a_run(cli):
    code, out, _ = cli("info", "one", "--json")
    assert code == 0
    text, last = out[: out.rindex("{")], json.loads(out.splitlines()[-1])
    assert last["kernels"].startswith("CPU, ")
    assert last["dtype"].startswith("float32 (")
    run = last["run"]
    config = DecoderConfig.from_dict(run["decoder"])
    assert run["kv_bytes_per_token"] == 1 * 2 * (16 + 16) * 4
    assert config.max_position_embeddings == 16
    assert run["steps"] == 40
    assert run["corpus"].startswith("reference.py, ")
    assert run["files"]["tokenizer.json"] > 0
    for word in ("attention_ext", "torch", "threads", "parameters", "best_bits_per_byte"):
        assert word in text


def test_info_needs_no_run(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = cli.good("info", "--json")
    assert "run" not in json.loads(out.splitlines()[-1])
