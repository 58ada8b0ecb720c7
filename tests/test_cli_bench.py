"""The command `bench`: rows, numbers, output, bad input. No test looks at a time."""

import importlib.util
import json
import math
import signal

import pytest
import torch
from cli_runner import Cli

from attention_ext.cli.bench import command, measure
from attention_ext.cli.bench.calls import Calls
from attention_ext.cli.bench.cases import Case, Sizes, preset_cases
from attention_ext.cli.bench.rivals import formula, formula_by_rows

FAST = ("--time", "0.001s", "--threads", "1")
TINY = ("--sizes", "2x4/2x6x8")


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "SLICE_SECONDS", 1e-5)
    return Cli(capsys)


def result(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


def table(out: str) -> list[str]:
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("call"))
    return lines[first : lines.index("", first)]


def test_a_size_becomes_a_row_for_people_and_one_for_machines(cli):
    out = cli.good("bench", "--sizes", "1x2x5x8", "1x4/2x1:9x8/4", "--json", *FAST)
    for word in ("processor", "kernels", "versions", torch.__version__, "1 thread\n", "ratio"):
        assert word in out, word
    head, *lines = table(out)
    assert len(lines) == 2
    assert lines[0].startswith("fwd 1x2x5x8 float32")
    assert "GB/s" in lines[1]
    assert "cost" not in head
    values = result(out)
    assert values["machine"]["threads"] == 1
    assert [row["sizes"] for row in values["rows"]] == ["1x2x5x8", "1x4/2x1:9x8/4"]
    for row in values["rows"]:
        assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
        assert row["pairs"] >= measure.FEWEST_TURNS
        assert row["ours"]["error"] < 1e-5
        assert row["torchs"]["error"] < 1e-5
    plain, decode = values["rows"]
    assert plain["ours"]["gflops"] > 0
    assert plain["ours"]["gbytes"] is None
    assert decode["ours"]["gbytes"] > 0
    assert decode["ours"]["gflops"] is None


def test_every_option_and_derivative_is_as_exact_as_torchs(cli):
    out = cli.good("bench", "--preset", "options", *TINY, "--json", *FAST)
    rows = result(out)["rows"]
    assert {row["option"] for row in rows} >= {"plain", "softcap", "sinks", "dropout", "window"}
    assert {row["direction"] for row in rows} == {"fwd", "fwd+bwd", "double", "jvp"}
    for row in rows:
        assert row["ours"]["error"] < 1e-5, row["call"]
        assert row["torchs"]["error"] < 1e-5, row["call"]
    assert "cost" in table(out)[0]


def test_flags_choose_rows_of_a_preset(cli):
    out = cli.good("bench", "--preset", "options", *TINY, "--backward", "--json", *FAST)
    assert {row["direction"] for row in result(out)["rows"]} == {"fwd+bwd"}
    words = ("--dtype", "bfloat16", "float64", "--causal", "--backward")
    out = cli.good("bench", "--sizes", "1x2x6x8", *words, "--json", *FAST)
    assert [row["call"] for row in result(out)["rows"]] == [
        "fwd+bwd 1x2x6x8 causal bfloat16",
        "fwd+bwd 1x2x6x8 causal float64",
    ]
    assert result(out)["rows"][1]["ours"]["error"] < 1e-12


def test_a_call_of_one_key_shows_its_overhead_without_rates(cli):
    out = cli.good("bench", "--sizes", "1x1x1x8", "--json", *FAST)
    (row,) = result(out)["rows"]
    assert row["limit"] is None
    assert row["ours"]["gflops"] is None
    assert row["ours"]["seconds"] > 0


@pytest.mark.parametrize("name", ["chart.png", "chart.svg"])
def test_the_chart_is_drawn(cli, tmp_path, name):
    words = ("--sizes", "1x2x5x8", "1x1x1x8", "1x2x1:9x8")
    cli.good("bench", *words, *FAST, "--plot", name)
    start = (tmp_path / name).read_bytes()[:100]
    assert start.startswith(b"\x89PNG") or b"<?xml" in start


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--sizes 8x64", "expected sizes as BxHxLxD, positive numbers"),
        ("--sizes 1x0x4x4", "got '1x0x4x4'"),
        ("--sizes 1x3/2x4x4", "a multiple of the key heads, got 3/2"),
        (
            "--sizes 1x2x4x4 --preset train",
            "expected sizes alone or with the preset options, got 'train'",
        ),
        ("--sizes 1x2x1:9x4 --causal", "as many keys as queries for --causal, got '1x2x1:9x4'"),
        ("--preset quik", "-p/--preset: expected one of 'quick', 'train', 'decode'"),
        ("--preset decode --causal", "the preset decode has no call that is causal"),
        ("--dtype int8", "expected one of 'float64', 'float32', 'bfloat16', 'float16'"),
        ("--threads none", "expected threads auto or at least 1, got 'none'"),
        ("--time soon", "expected time to be a duration"),
        ("--plot chart.txt", "expected plot to end in .png, .svg, .pdf, got 'chart.txt'"),
        ("--plot missing/chart.png", "there is no folder missing"),
        ("--sises 1x2x3x4", "unknown option '--sises'; the nearest is '--sizes'"),
        ("quick", "unexpected argument 'quick'"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(cli, line, sentence):
    error = cli.bad("bench", *line.split())
    assert sentence in error
    assert error.startswith("bench: ")


def test_without_matplotlib_only_the_chart_is_missing(cli, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    code, out, err = cli("bench", "--sizes", "1x1x2x4", "--plot", "a.png", *FAST)
    assert (code, out) == (1, "")
    assert err == "bench: `bench --plot` needs matplotlib: pip install attention_ext[decoder]\n"


def test_a_signal_ends_the_table_after_its_row(cli, monkeypatch):
    whole = command.measure

    def interrupted(case, seconds):
        signal.raise_signal(signal.SIGINT)
        return whole(case, seconds)

    monkeypatch.setattr(command, "measure", interrupted)
    code, out, _ = cli("bench", "--sizes", "1x1x2x4", "1x1x3x4", "--json", *FAST)
    assert code == 130
    assert len(result(out)["rows"]) == 1


def test_presets_name_each_call_once_and_full_holds_them_all():
    full = preset_cases("full")
    assert len({case.name for case in full}) == len(full)
    for preset in ("quick", "train", "decode", "options"):
        cases = preset_cases(preset)
        assert set(cases) <= set(full)
        for case in cases:
            assert Case.parse(case.name) == case


def test_the_interval_encloses_the_median_nineteen_times_in_twenty():
    hits = 0
    for _ in range(400):
        low, high = measure.median_interval(torch.randn(15).exp().tolist())
        hits += low <= 1.0 <= high
    assert hits >= 0.93 * 400


def test_the_formula_by_rows_is_the_formula(monkeypatch):
    monkeypatch.setattr("attention_ext.cli.bench.rivals._CHUNK_SCORES", 60)
    for option in ("plain", "bool-random", "float-mask", "sinks", "alibi", "lengths"):
        case = Case(Sizes.parse("2x4/2x7:9x4"), option=option, dtype="float64")
        calls = Calls(case)
        query = calls.inputs[0].requires_grad_()
        outputs = [
            call(query, *calls.inputs[1:], calls.rival.score) for call in (formula_by_rows, formula)
        ]
        torch.testing.assert_close(*outputs)
        grads = [torch.autograd.grad(output.sum(), query)[0] for output in outputs]
        torch.testing.assert_close(*grads)


def test_useful_operations_count_visible_pairs_only():
    sizes = Sizes.parse("2x3x4x8/16")
    assert Calls(Case(sizes)).flops == 2 * 3 * 4 * 4 * 2 * (8 + 16)
    assert Calls(Case(sizes, causal=True)).flops == 2 * 3 * 10 * 2 * (8 + 16)
    assert Calls(Case(sizes, "fwd+bwd")).flops == 2 * 3 * 16 * (8 * 8 + 6 * 16)
    assert Calls(Case(sizes, option="lengths")).visible_pairs == 3 * 4 * (2 + 4)
    assert Calls(Case(sizes, option="bool-blocks")).visible_pairs == 2 * 3 * 4


def test_the_peak_and_the_memory_of_a_call_are_positive_or_unknown():
    assert math.isfinite(measure.fma_meter()())
    assert measure.fma_meter()() > 0
    memory = measure.peak_memory(lambda: torch.ones(1 << 22))
    assert memory is None or memory >= 15 << 20
