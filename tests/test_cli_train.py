"""Training: the files of a run, the same bits after a stop, nothing overwritten."""

import itertools
import json
import math
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from cli_runner import SMALL, Cli, start
from safetensors.torch import load_file

from attention_ext.cli import machine
from attention_ext.cli.dataset import Evaluation
from attention_ext.cli.options import TrainingOptions
from attention_ext.cli.progress import Report
from attention_ext.cli.schedule import Horizon, learning_rate, make_horizon
from attention_ext.cli.trainer import make_optimizer
from attention_ext.nn import Decoder, DecoderConfig, load_tokenizer

FILES = {
    "config.json",
    "config.toml",
    "log.jsonl",
    "loss.png",
    "model.safetensors",
    "samples.txt",
    "tokenizer.json",
    "train_state.json",
    "train_state.safetensors",
}
EVERY = ("--eval-every", "20", "--save-every", "10", "--sample-every", "15", "--warmup", "5")


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Cli(capsys)


def rows(folder):
    """The log without what the clock writes into it."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "elapsed"} for line in lines]


def assert_same_run(folder, other):
    for name in ("train_state.safetensors", "model.safetensors"):
        ours, theirs = load_file(folder / name), load_file(other / name)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert torch.equal(tensor, theirs[key]), (name, key)
    assert rows(folder) == rows(other)


def test_a_run_holds_its_files_and_they_work(cli, tmp_path):
    out = cli.good("train", "one", *SMALL, *EVERY, "--steps", "60", "--json")
    result = json.loads(out.splitlines()[-1])
    folder = tmp_path / "runs" / "one"
    assert {path.name for path in folder.iterdir()} == FILES
    assert result["run"] == "runs/one"
    assert (result["steps"], result["tokens"], result["finished"]) == (60, 60 * 2 * 16, True)
    assert not Decoder.from_pretrained(folder).training
    assert load_tokenizer(folder).decode(load_tokenizer(folder).encode("naïve")) == "naïve"
    log = rows(folder)
    losses = [row["loss"] for row in log if "loss" in row]
    assert len(losses) == 60
    assert losses[-1] < losses[0] - 0.5
    evaluated = [row["step"] for row in log if "val_bits_per_byte" in row]
    assert evaluated == [20, 40, 60]
    assert [row["step"] for row in log if "sample" in row] == [15, 30, 45, 60]
    assert (folder / "samples.txt").read_text().count("--- step ") == 4
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert result["val_bits_per_byte"] < 8


def test_a_saved_configuration_gives_the_same_run(cli, tmp_path):
    cli.good("train", "one", *SMALL, *EVERY, "--steps", "20")
    cli.good("train", "two", "--config", "runs/one/config.toml", "--quiet")
    assert_same_run(tmp_path / "runs" / "one", tmp_path / "runs" / "two")
    names = [tmp_path / "runs" / run / "config.toml" for run in ("one", "two")]
    assert names[0].read_text() == names[1].read_text()


def test_ctrl_c_saves_and_a_resumed_run_has_the_same_bits(cli, tmp_path):
    seldom = ("--eval-every", "90", "--save-every", "70", "--sample-every", "80")
    words = (*SMALL, *seldom, "--steps", "300", "--accumulate", "2")
    process = start("train", "stopped", *words, folder=tmp_path)
    log = tmp_path / "runs" / "stopped" / "log.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if log.exists() and log.read_bytes().count(b"\n") > 30:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    step = int(re.search(r"stopped and saved at step (\d+)", err)[1])
    assert 0 < step < 300
    assert "go on with: python -m attention_ext train --resume runs/stopped" in err
    assert {path.name for path in (tmp_path / "runs" / "stopped").iterdir()} <= FILES
    assert json.loads((log.parent / "train_state.json").read_text())["counters"]["step"] == step

    cli.good("train", "--resume", "runs/stopped")
    cli.good("train", "straight", *words)
    assert_same_run(tmp_path / "runs" / "stopped", tmp_path / "runs" / "straight")


def test_sigterm_saves_and_exits_with_143(cli, tmp_path):
    process = start("train", "one", *SMALL, "--time", "100s", folder=tmp_path)
    log = tmp_path / "runs" / "one" / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_bytes()):
        time.sleep(0.02)
    process.terminate()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    out = cli.good("generate", "one", "-m", "5", "--threads", "1", "--quiet")
    assert out.strip()


def test_a_longer_horizon_goes_on_from_the_end(cli, tmp_path):
    cli.good("train", "one", *SMALL, "--steps", "20", "--schedule", "constant", "--warmup", "0")
    cli.good("train", "one", "--resume", "--steps", "40")
    cli.good("train", "two", *SMALL, "--steps", "40", "--schedule", "constant", "--warmup", "0")
    ours, theirs = (load_file(f"runs/{run}/train_state.safetensors") for run in ("one", "two"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert 'time = "' not in (tmp_path / "runs" / "one" / "config.toml").read_text()


def test_rows_behind_the_last_checkpoint_are_dropped_on_resume(cli, tmp_path):
    cli.good("train", "one", *SMALL, *EVERY, "--steps", "20")
    folder = tmp_path / "runs" / "one"
    with open(folder / "log.jsonl", "a") as file:
        file.write('{"step": 21, "elapsed": 9.0, "loss": 1.0}\n{"step": 22, "ela')
    cli.good("train", "one", "--resume", "--steps", "25")
    assert [row["step"] for row in rows(folder) if "loss" in row] == list(range(1, 26))


def test_an_existing_run_is_not_overwritten(cli, tmp_path):
    cli.good("train", "one", *SMALL, "--steps", "1")
    before = {path: path.read_bytes() for path in (tmp_path / "runs" / "one").iterdir()}
    error = cli.bad("train", "one", *SMALL, "--steps", "1")
    assert "runs/one exists, and nothing is overwritten" in error
    assert "--resume" in error
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs" / "one").iterdir()}


def test_without_a_name_the_run_has_the_date_as_name(cli, tmp_path):
    cli.good("train", *SMALL, "--steps", "1")
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folder.name)


def test_the_schedule_follows_the_clock(cli):
    out = cli.good("train", "one", *SMALL, "--time", "1.5s", "--eval-every", "1000", "--json")
    result = json.loads(out.splitlines()[-1])
    assert result["finished"]
    assert result["seconds"] >= 1.5
    log = rows(Path("runs/one"))
    rates = [row["learning_rate"] for row in log if "loss" in row]
    assert rates[-1] < 0.2 * max(rates)


def test_what_is_saved_is_the_best_by_validation(cli, tmp_path, monkeypatch):
    values = iter([3.0, 2.0, 2.5])
    seen = []

    def evaluate(self, decoder, max_tokens, autocast):
        seen.append(decoder.embed_tokens.weight.detach().clone())
        return Evaluation(1.0, next(values, 9.0), 5)

    monkeypatch.setattr("attention_ext.cli.dataset.Validation.evaluate", evaluate)
    cli.good("train", "one", *SMALL, "--steps", "15", "--eval-every", "5")
    weights = load_file(tmp_path / "runs" / "one" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(weights, seen[1])
    assert torch.equal(seen[3], seen[1])  # the closing evaluation is that of the saved weights


def test_quiet_says_nothing(cli):
    assert cli("train", "one", *SMALL, "--steps", "2", "--quiet") == (0, "", "")


def test_plain_lines_in_a_pipe(cli):
    code, out, err = cli("train", "one", *SMALL, *EVERY, "--steps", "20")
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert lines[0].startswith("corpus: reference.py, ")
    assert "threads: 1 (asked for)" in lines[2]
    assert re.match(r"step 20/20 100% \| loss \d\.\d+ \| val \d\.\d\d bpb \| lr ", lines[4])
    assert lines[-1] == "write text with: python -m attention_ext generate runs/one"
    assert "\r" not in err


def test_a_dry_run_costs_nothing_and_says_what_a_run_would(cli, tmp_path):
    code, out, err = cli("train", *SMALL, "--steps", "100", "--dry-run", "--json")
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    result = json.loads(out.splitlines()[-1])
    assert result["tokens_per_step"] == 32
    assert result["config"]["steps"] == 100
    assert "for 100 steps" in err


def test_a_line_fits_its_terminal():
    report = Report(420, 0.25, 2.9141, 1.92, 2.3e-3, 0.098, 10_449, 0.14, 41.2)
    assert len(report.line(60)) < 60
    assert report.line(60).endswith("0:41 elapsed, 2:04 left")
    assert report.line() == (
        "step 420/1680 25% | loss 2.914 | val 1.92 bpb | lr 2.3e-03 | 98 ms | 10.4k tok/s | "
        "attention 14% | 0:41 elapsed, 2:04 left"
    )


def test_decay_is_on_matrices_only():
    decoder = Decoder(DecoderConfig(64, 16, 1, 2, qk_norm=True, norm="layer"))
    matrices, rest = make_optimizer(decoder, TrainingOptions()).param_groups
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in rest["params"]} == {1}
    assert (matrices["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_schedules_begin_with_warm_up_and_end_where_they_should(schedule):
    options = TrainingOptions(learning_rate=1.0, warmup_steps=10, schedule=schedule)
    rates = [learning_rate(options, step, step / 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) <= 1.0
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.02)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_epochs_become_steps():
    options = TrainingOptions(epochs=1.5)
    assert make_horizon(options, train_tokens=1000, step_tokens=128) == Horizon(steps=12)


def test_threads_are_the_fastest_of_all_half_and_one(monkeypatch, threads):
    threads(1)
    used = []
    monkeypatch.setattr(machine, "num_cores", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    clock = iter(range(10_000))
    monkeypatch.setattr(
        machine, "_time", lambda step: {1: 3.0, 2: 2.0, 4: 50.0}[used[-1]] + 0 * next(clock)
    )
    choice = machine.calibrate_threads(lambda: None)
    assert used == [1, 2, 4, 2]
    assert choice.value == "2"
    assert "2000 ms with 2" in choice.reason
    assert next(clock) == 2 * (1 + machine.CALIBRATION_STEPS) + 1  # 4 was given up at once


def test_attention_has_a_share_of_the_step():
    config = DecoderConfig(64, 16, 1, 2, num_key_value_heads=1, max_position_embeddings=16)
    share = machine.attention_share(lambda: time.sleep(0.05), Decoder(config), 2, 16)
    assert 0 < share < 1
    assert not math.isnan(share)
