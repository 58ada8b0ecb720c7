"""Where words go: results to stdout, everything else to stderr, so that pipes work.

``--quiet`` silences stderr except for errors; ``--json`` makes the last line of stdout one JSON
object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


class Output:
    """The two streams of a command.

    Args:
        quiet: say nothing on stderr.
        json_line: end stdout with the result as one JSON object.
    """

    def __init__(self, quiet: bool = False, json_line: bool = False) -> None:
        self.quiet = quiet
        self.json_line = json_line

    def say(self, sentence: str) -> None:
        """One line for the person in front of the terminal (stderr)."""
        if not self.quiet:
            print(sentence, file=sys.stderr, flush=True)

    def text(self, piece: str, end: str = "\n") -> None:
        """A part of the result (stdout)."""
        print(piece, end=end, flush=True)

    def result(self, values: Mapping[str, Any]) -> None:
        """The result as one line of JSON on stdout, where ``--json`` asks for it."""
        if self.json_line:
            print(json.dumps(values), flush=True)


def format_count(number: float) -> str:
    """A count in at most four characters of digits.

    Example:
        >>> [format_count(n) for n in (950, 10_420, 1_849_256, 29_500_000)]
        ['950', '10.4k', '1.85M', '29.5M']
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def format_bytes(number: float) -> str:
    """A size in bytes.

    Example:
        >>> format_bytes(8), format_bytes(1_849_256)
        ('8 B', '1.85 MB')
    """
    text = format_count(number)
    return f"{text} B" if text[-1].isdigit() else f"{text[:-1]} {text[-1]}B"


def format_time(seconds: float) -> str:
    """Seconds as a clock.

    Example:
        >>> format_time(41.3), format_time(3725)
        ('0:41', '1:02:05')
    """
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
