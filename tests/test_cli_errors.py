"""Bad input: one clear sentence on stderr, exit code 2, nothing written."""

import importlib.util

import pytest
from cli_runner import SMALL, Cli

FILES = {
    "unknown_key.toml": b"stepz = 3\n",
    "wrong_type.toml": b'steps = "many"\n',
    "wrong_choice.toml": b'norm = "batch"\n',
    "broken.toml": b"steps = = 3\n",
    "binary.toml": b"steps = 3 # \xff\n",
    "empty.txt": b"",
    "latin.txt": b"caf\xe9 au lait",
    "short.txt": b"too short",
}

CASES = [
    ("trian", "unknown command 'trian'; the nearest is 'train'"),
    ("train --stepz 3", "unknown option '--stepz'; the nearest is '--steps'"),
    ("train --qqqqqqq", "unknown option '--qqqqqqq'; see python -m attention_ext train --help"),
    ("train --no-tye", "the nearest is '--no-tie'"),
    ("train a b", "unexpected argument 'b'"),
    ("train --steps many", "-s/--steps: expected an integer, got 'many'"),
    ("train --lr fast", "--lr/--learning-rate: expected a number, got 'fast'"),
    ("train --steps", "-s/--steps: expected a value"),
    ("train --steps -3", "expected steps of at least 1, got -3"),
    ("train --lr -1", "expected learning_rate to be positive, got -1.0"),
    ("train --lr nan", "expected learning_rate to be positive, got nan"),
    ("train --norm batch", "--norm: expected one of 'rms', 'layer', got 'batch'"),
    ("train --qk-norm=yes", "--qk-norm takes no value, got 'yes'"),
    ("train --time soon", "expected time to be a duration such as 150s, 2m30s or 1.5h, got 'soon'"),
    ("train --time 0s", "expected time to be a duration"),
    ("train --steps 3 --time 5s", "expected at most one of steps, time and epochs, got"),
    ("train --vocab 100", "expected vocab_size of at least 257 (256 bytes and one merge), got 100"),
    ("train --val-fraction 1", "expected val_fraction between 0 and 1, got 1.0"),
    ("train --heads 3", "hidden_size to be a multiple of num_attention_heads"),
    ("train --threads 0", "expected threads auto or at least 1, got '0'"),
    ("train --device gpu", "expected device auto, cpu or cuda[:n], got 'gpu'"),
    ("train --device cuda", "device cuda: "),
    ("train --dtype float16", "dtype float16: its gradients underflow"),
    ("train --data", "expected data to name at least one file or folder"),
    ("train --data missing.txt", "missing.txt: no such file or directory"),
    ("train --data empty.txt", "empty.txt is empty"),
    ("train --data latin.txt", "latin.txt is not UTF-8: wrong byte 0xe9 at position 3"),
    ("train --data folder", "no text in folder"),
    ("train --data short.txt", "tokens, fewer than context + 1 = 129"),
    ("train --data good.txt --val short.txt", "the validation text has"),
    (
        "train --config unknown_key.toml",
        "unknown key in unknown_key.toml: 'stepz'; the nearest is 'steps'",
    ),
    (
        "train --config wrong_type.toml",
        "wrong_type.toml: expected steps to be an integer, got 'many'",
    ),
    ("train --config wrong_choice.toml", "expected norm to be one of 'rms', 'layer', got 'batch'"),
    ("train --config broken.toml", "broken.toml is not TOML: "),
    ("train --config binary.toml", "binary.toml is not UTF-8: wrong byte 0xff at position 12"),
    ("train --config missing.toml", "cannot read missing.toml: no such file or directory"),
    ("train --tokenizer missing.json", "missing.json"),
    ("train short.txt/run", "cannot write to short.txt/run: "),
    ("train ./folder/../short.txt", "exists, and nothing is overwritten"),
    ("train --resume nothing", "no run at runs/nothing"),
    ("train --resume", "no run under runs/"),
    ("train one --resume two", "expected one run, got 'one' and --resume 'two'"),
    ("train --resume one --config broken.toml", "--resume and --config exclude each other"),
    ("generate", "no run under runs/"),
    ("generate nothing", "no run at runs/nothing"),
    ("generate ./folder", "folder holds no model.safetensors"),
    ("generate --temperature -1", "expected temperature of at least 0, got -1.0"),
    ("generate --top-p 0", "expected top_p above 0 and at most 1, got 0.0"),
    ("generate --min-p 2", "expected min_p between 0 and 1, got 2.0"),
    ("generate --top-k -1", "expected top_k of at least 0, got -1"),
    ("generate -m 0", "expected max_new_tokens of at least 1, got 0"),
    ("generate -n 0", "expected num_samples of at least 1, got 0"),
    ("generate -p a --prompt-file b", "expected at most one of prompt and prompt_file"),
    ("generate --tok-k 3", "unknown option '--tok-k'; the nearest is '--top-k'"),
    ("info nothing", "no run at runs/nothing"),
    ("info --jsn", "unknown option '--jsn'; the nearest is '--json'"),
]


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("A sentence of some words.\n" * 900)
    (tmp_path / "folder").mkdir()
    return Cli(capsys)


@pytest.mark.parametrize(("line", "sentence"), CASES, ids=[line for line, _ in CASES])
def test_bad_input_gets_one_sentence_and_exit_code_2(cli, tmp_path, line, sentence):
    before = sorted(tmp_path.rglob("*"))
    words = line.split()
    error = cli.bad(*words)
    assert sentence in error
    assert error.startswith(f"{words[0]}: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_similar_run_is_named(cli, tmp_path):
    (tmp_path / "runs" / "shakespeare").mkdir(parents=True)
    assert "the nearest is 'shakespeare'" in cli.bad("generate", "shakespear")


def test_a_checkpoint_that_does_not_fit_is_refused(cli, tmp_path):
    cli.good("train", "one", *SMALL, "--steps", "1")
    cli.good("train", "two", *SMALL, "--steps", "1", "--vocab", "280")
    one, two = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    for name in ("model.safetensors", "train_state.safetensors", "tokenizer.json"):
        content = (one / name).read_bytes()
        (one / name).write_bytes((two / name).read_bytes())
        if name == "train_state.safetensors":
            error = cli.bad("train", "one", "--resume", "--steps", "2")
            assert "its weights do not fit the decoder of config.toml" in error
        else:
            assert "one" in cli.bad("generate", "one", "--threads", "1")
        (one / name).write_bytes(content[: len(content) // 2])
        command = ("train", "--resume", "one", "--steps", "2") if "state" in name else ("generate",)
        assert "one" in cli.bad(*command)
        (one / name).write_bytes(content)


def test_a_resumed_run_keeps_its_model_and_its_text(cli, tmp_path):
    words = [word for word in SMALL if word not in ("--data",) and not word.endswith(".py")]
    cli.good("train", "one", *words, "--data", "good.txt", "--steps", "1")
    assert "its end at step 1" in cli.bad("train", "one", "--resume")
    error = cli.bad("train", "one", "--resume", "--steps", "2", "--layers", "3")
    assert "the saved num_hidden_layers = 1, got 3" in error
    (tmp_path / "good.txt").write_text("Other words in this one.\n" * 900)
    assert "its text has changed" in cli.bad("train", "one", "--resume", "--steps", "2")


def test_a_run_time_error_is_one_sentence_and_exit_code_1(cli, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left\non device")

    monkeypatch.setattr("attention_ext.cli.train.read_corpus", fail)
    code, _, err = cli("train")
    assert code == 1
    assert err == "train: OSError: [Errno 28] No space left on device (--debug shows where)\n"


def test_a_loss_that_is_not_finite_stops_the_run(cli):
    code, _, err = cli("train", *SMALL, "--steps", "60", "--lr", "1e30", "--clip", "0")
    assert code == 1
    assert "lower learning_rate, now 1e+30" in err


def test_a_missing_library_is_named_with_its_remedy(cli, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "tqdm" else find(name)
    )
    code, _, err = cli("train")
    assert code == 1
    assert err == "train: `train` needs tqdm: pip install attention_ext[decoder]\n"


def test_debug_shows_the_traceback(cli):
    _, _, err = cli("train", "--debug", "--data", "missing.txt")
    assert "Traceback" in err
    assert "missing.txt: no such file or directory" in err.splitlines()[-1]
