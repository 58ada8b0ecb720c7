"""The progress line: a line that changes in place on a terminal, plain lines in a pipe."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from tqdm import tqdm

from .output import format_count, format_time

TERMINAL_SECONDS = 0.2
PIPE_SECONDS = 10.0
FIRST_SECONDS = 1.0


@dataclass(frozen=True)
class Report:
    """What the line says.

    Attributes:
        step: steps done.
        fraction: part of the horizon done.
        loss: of the training text, smoothed.
        bits_per_byte: of the last evaluation, or None before the first.
        rate: learning rate.
        step_seconds: time of a step.
        tokens_per_second: of training.
        attention: part of a step's time that attention takes.
        elapsed: seconds of training.
    """

    step: int
    fraction: float
    loss: float
    bits_per_byte: float | None
    rate: float
    step_seconds: float
    tokens_per_second: float
    attention: float
    elapsed: float

    def line(self, width: int | None = None) -> str:
        """All of it on one line; where it is wider than ``width``, less of it.

        Example:
            >>> report = Report(420, 0.25, 2.9141, 1.92, 2.3e-3, 0.098, 10_449, 0.14, 41.2)
            >>> report.line(80)
            'step 420/1680 25% | loss 2.914 | val 1.92 bpb | 0:41 elapsed, 2:04 left'
        """
        part = max(self.fraction, 1e-9)
        left = format_time(self.elapsed / part - self.elapsed)
        fields = {
            "step": f"step {self.step}/{self.step / part:.0f} {100 * self.fraction:.0f}%",
            "loss": f"loss {self.loss:.3f}",
            "val": f"val {self.bits_per_byte:.2f} bpb" if self.bits_per_byte is not None else "",
            "rate": f"lr {self.rate:.1e}",
            "ms": f"{1000 * self.step_seconds:.0f} ms",
            "speed": f"{format_count(self.tokens_per_second)} tok/s",
            "attention": f"attention {100 * self.attention:.0f}%",
            "time": f"{format_time(self.elapsed)} elapsed, {left} left",
        }
        line = " | ".join(filter(None, fields.values()))
        for name in ("attention", "ms", "rate", "speed", "val", "loss"):
            if width is None or len(line) < width:
                break
            del fields[name]
            line = " | ".join(filter(None, fields.values()))
        return line


class Progress:
    """Shows reports on stderr; use it as a context.

    Args:
        quiet: show nothing.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._width = _terminal_width()
        self._bar = tqdm(
            bar_format="{desc}", file=sys.stderr, disable=quiet or self._width is None, leave=False
        )
        self._next = time.perf_counter() + FIRST_SECONDS

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @property
    def due(self) -> bool:
        """Whether the line is old enough for a new one."""
        return not self.quiet and time.perf_counter() >= self._next

    def show(self, report: Report) -> None:
        """Shows a report: in place of the last one on a terminal, else below it."""
        self._width = _terminal_width()
        self._next = time.perf_counter() + (
            PIPE_SECONDS if self._width is None else TERMINAL_SECONDS
        )
        if self._width is None:
            self.say(report.line())
        else:
            self._bar.set_description_str(report.line(self._width))

    def say(self, sentence: str) -> None:
        """A line that stays."""
        if not self.quiet:
            tqdm.write(sentence, file=sys.stderr)
            sys.stderr.flush()


def _terminal_width() -> int | None:
    """Columns of the terminal on stderr, or None where it is none."""
    if not sys.stderr.isatty():
        return None
    return os.get_terminal_size(sys.stderr.fileno()).columns or None
