"""Finds the command, runs it, and turns what goes wrong into one sentence and an exit code.

0  done          1  run-time error          2  bad input          130  Ctrl-C          143  SIGTERM
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from attention_ext.errors import ArgumentError, ArgumentTypeError

from .errors import MissingExtraError, UsageError, unknown

EXTRA = "attention_ext[decoder]"


@dataclass(frozen=True)
class Command:
    """A command: the module with its ``run``, what it does, an example, the libraries it needs."""

    module: str
    summary: str
    example: str
    libraries: tuple[str, ...]


_CONFIGURATION = (
    ("tyro", "tomli_w") if sys.version_info >= (3, 11) else ("tyro", "tomli_w", "tomli")
)
COMMANDS = {
    "train": Command(
        "train",
        "learns a decoder from text (Python's own documentation, unless --data names another)",
        "python -m attention_ext train my-run --time 150s",
        (*_CONFIGURATION, "tqdm", "safetensors", "tokenizers", "matplotlib"),
    ),
    "generate": Command(
        "generate",
        "writes text with it",
        'python -m attention_ext generate my-run --prompt "The class"',
        ("tyro", "safetensors", "tokenizers"),
    ),
    "info": Command(
        "info",
        "says what is installed, what runs here and why, and what a run holds",
        "python -m attention_ext info my-run",
        ("tyro",),
    ),
    "bench": Command(
        "bench",
        "says how fast the operator is here, and how exact, beside torch's own function",
        "python -m attention_ext bench",
        ("tyro", "tqdm"),
    ),
}
ALIASES = {"sample": "generate"}


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        words: the words after the program's name; default: those of this process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if words is None else words)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, debug = ALIASES.get(words[0], words[0]), "--debug" in words
    try:
        return _run(name, words[1:])
    except UsageError as error:
        return _fail(name, str(error), 2, debug)
    except (ArgumentError, ArgumentTypeError, NotImplementedError) as error:
        return _fail(name, str(error), 2, debug)
    except (MissingExtraError, ImportError) as error:
        return _fail(name, str(error), 1, debug)
    except BrokenPipeError:  # the reader of a pipe has left: nothing to say, and nowhere to say it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail(name, "interrupted", 130, debug)
    except SystemExit as exit_:  # --help
        return int(exit_.code or 0)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return _fail(name, f"{text} (--debug shows where)", 1, debug)


def overview() -> str:
    """The commands, with one example each."""
    lines = ["usage: python -m attention_ext COMMAND [RUN] [OPTIONS]", ""]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<9} {command.summary}", f"            {command.example}", ""]
    return "\n".join([*lines, "COMMAND --help shows the options of a command."])


def _run(name: str, words: Sequence[str]) -> int:
    if name not in COMMANDS:
        raise unknown("command", name, [*COMMANDS, *ALIASES], f"there are {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    for library in command.libraries:
        if importlib.util.find_spec(library) is None:
            raise MissingExtraError(f"`{name}` needs {library}: pip install {EXTRA}")
    code: int = importlib.import_module(f"{__package__}.{command.module}").run(words)
    return code


def _fail(name: str, sentence: str, code: int, debug: bool) -> int:
    """Says what went wrong on one line; with ``--debug`` also where."""
    if debug:
        traceback.print_exc()
    print(f"{name}: {sentence}", file=sys.stderr, flush=True)
    return code
