"""Runs: folders under ``runs/``, found by name, by path or as the newest; written atomically."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from attention_ext.nn.checkpoint import WEIGHTS_FILE, write_atomically

from .errors import UsageError, explain_os_error, nearest

RUNS = Path("runs")
STATE_FILE = "train_state.safetensors"


def run_path(name: str) -> Path:
    """The folder that a name means: ``runs/NAME``, or the path itself where it holds a separator.

    Example:
        >>> [run_path(name).as_posix() for name in ("demo", "./demo", "/tmp/demo")]
        ['runs/demo', 'demo', '/tmp/demo']
    """
    return Path(name) if os.sep in name or name in (".", "..") else RUNS / name


def new_run(name: str | None) -> Path:
    """The folder of a new run, not yet made.

    Raises:
        UsageError: it exists and is not empty, or it could not be made.
    """
    folder = (
        run_path(name) if name else RUNS / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        hint = "; go on with it by --resume" if (folder / STATE_FILE).exists() else ""
        raise UsageError(f"{folder} exists, and nothing is overwritten: choose another name{hint}")
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UsageError(f"cannot write to {folder}: {parent} is not a writable folder")
    return folder


def make_run(folder: Path) -> None:
    """Makes the folder of a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {explain_os_error(error)}") from None


def any_run() -> bool:
    """Whether there is a run under ``runs/``."""
    return any(RUNS.glob(f"*/{WEIGHTS_FILE}"))


def existing_run(name: str | None) -> Path:
    """The folder of a run with a model: the named one, or the newest.

    Raises:
        UsageError: there is none.
    """
    return _named(name, WEIGHTS_FILE) if name is not None else _newest(WEIGHTS_FILE)


def resumed_run(run: str | None, resume: str) -> Path:
    """The folder of the run that ``train [RUN] --resume [RUN]`` goes on with.

    Raises:
        UsageError: two different runs are named, or there is none with a saved state.
    """
    if run and resume and run_path(run) != run_path(resume):
        raise UsageError(f"expected one run, got {run!r} and --resume {resume!r}")
    name = run or resume
    return _named(name, STATE_FILE) if name else _newest(STATE_FILE)


def write_text(path: Path, text: str) -> None:
    """Replaces a file by UTF-8 text, atomically."""
    write_atomically(path, text.encode("utf-8"))


def _named(name: str, file: str) -> Path:
    """The folder that a name means, if it holds ``file``; the error gives the nearest name."""
    folder = run_path(name)
    if not folder.is_dir():
        match = nearest(folder.name, [path.name for path in RUNS.glob("*/")])
        raise UsageError(f"no run at {folder}" + (f"; the nearest is {match!r}" if match else ""))
    if not (folder / file).is_file():
        raise UsageError(f"{folder} holds no {file}")
    return folder


def _newest(file: str) -> Path:
    files = list(RUNS.glob(f"*/{file}"))
    if not files:
        raise UsageError(
            f"no run under {RUNS}{os.sep}: name one, or train one by python -m attention_ext train"
        )
    return max(files, key=lambda path: path.stat().st_mtime).parent
