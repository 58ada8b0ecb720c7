"""The command line for the tests, in this process or in one of its own; a small text and run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attention_ext
from attention_ext.cli.main import main

PACKAGE = Path(attention_ext.__file__).parent
TEXT = PACKAGE / "reference.py"  # a few kilobytes that every checkout has

# A run of less than a second; one thread, so that every process computes the same bits.
SMALL = (
    *("--data", str(TEXT), "--vocab", "300", "--threads", "1"),
    *("--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--batch", "2"),
)


class Cli:
    """Runs command lines in this process, and gives their code, stdout and stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        threads = torch.get_num_threads()
        self._capsys.readouterr()
        try:
            code = main(words)
        finally:
            torch.set_num_threads(threads)
        out, err = self._capsys.readouterr()
        return code, out, err

    def good(self, *words: str) -> str:
        """The stdout of a command that has to succeed."""
        code, out, err = self(*words)
        assert code == 0, err
        return out

    def bad(self, *words: str) -> str:
        """The one sentence of a command that has to refuse its input."""
        code, _, err = self(*words)
        assert code == 2, (code, err)
        assert "Traceback" not in err
        return err.splitlines()[-1]


def start(*words: str, folder: Path) -> subprocess.Popen[str]:
    """Starts the command line in a process of its own."""
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "attention_ext", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
