"""Ctrl-C and SIGTERM ask a run to stop: it finishes its step, saves, and leaves."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interruption:
    """Whether a signal has come, and which.

    Attributes:
        signal: the number of the signal, 0 before.
    """

    def __init__(self) -> None:
        self.signal = 0

    def __bool__(self) -> bool:
        return self.signal != 0

    @property
    def exit_code(self) -> int:
        """128 + the signal, as shells report it: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.signal

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.signal:  # the second one does not wait
            raise KeyboardInterrupt
        self.signal = number


@contextlib.contextmanager
def noting_signals() -> Iterator[Interruption]:
    """Notes SIGINT and SIGTERM instead of dying of them; a second one raises KeyboardInterrupt."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():  # only the main thread can
        yield interruption
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = [signal.signal(number, interruption._note) for number in numbers]
    try:
        yield interruption
    finally:
        for number, handler in zip(numbers, old, strict=True):
            signal.signal(number, handler)
