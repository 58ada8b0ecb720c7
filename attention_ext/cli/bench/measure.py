"""Timing by turns, and what the numbers are held against: peaks, errors, memory.

On a machine with other work, and on every virtual one, the speed of a core changes by a quarter
from one second to the next. So contestants take turns in one process, forwards and backwards
(A B C C B A), each pair of neighbours gives a ratio, and the median of the ratios is reported with
an interval.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

SLICE_SECONDS = 2e-3  # a slice of a shorter call repeats it
FEWEST_TURNS = 6  # with fewer, no pair of values encloses the median with 95 % confidence
CONFIDENCE = 0.95
_MAX_REPEATS = 2000

Meter = Callable[[], float]


def timer(call: Callable[[], object]) -> Meter:
    """A meter of the seconds that a call takes, on average over one slice.

    The number of repetitions is fixed here, by calling it: that also warms up.
    """
    call()
    seconds = min(_seconds(call, 1) for _ in range(3))
    repeats = min(max(math.ceil(SLICE_SECONDS / max(seconds, 1e-9)), 1), _MAX_REPEATS)
    return lambda: _seconds(call, repeats)


def _seconds(call: Callable[[], object], repeats: int) -> float:
    turns = range(repeats)
    start = time.perf_counter()
    for _ in turns:
        call()
    return (time.perf_counter() - start) / repeats


def fma_meter() -> Meter:
    """A meter of the float32 multiply-adds that never leave the registers, in GFLOP/s.

    All of torch's threads together, on the instruction set that the kernels use.
    """
    peak: Callable[[float], float] = torch.ops.attention_ext.fma_peak.default
    return functools.partial(peak, SLICE_SECONDS)


def by_turns(meters: Mapping[str, Meter], seconds: float) -> dict[str, list[float]]:
    """What the meters show, read by turns: in their order, then backwards, and so on.

    Args:
        meters: by name.
        seconds: how long to go on; at least `FEWEST_TURNS` readings of each are taken.

    Returns:
        As many readings of each; those with the same index are neighbours in time.

    Example:
        >>> import itertools
        >>> count = itertools.count(1)
        >>> by_turns({"ours": lambda: next(count), "torch": lambda: next(count)}, seconds=0)
        {'ours': [1, 4, 5, 8, 9, 12], 'torch': [2, 3, 6, 7, 10, 11]}
    """
    readings: dict[str, list[float]] = {name: [] for name in meters}
    order, turns = list(meters.items()), 0
    with _no_garbage_collection():
        stop = time.perf_counter() + seconds
        while turns < FEWEST_TURNS or turns % 2 or time.perf_counter() < stop:
            for name, meter in order:
                readings[name].append(meter())
            order.reverse()
            turns += 1
    return readings


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratios of neighbours."""
    return [a / b for a, b in zip(above, below, strict=True)]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Two of the values that enclose the median of their distribution with 95 % confidence.

    Whatever the distribution: each value lies below its median with probability 1/2, so the number
    of those below is binomial. Of fewer than six values the least and the greatest.

    Example:
        >>> median_interval([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]), median_interval(range(100))
        ((1.0, 6.0), (39, 60))
    """
    count = len(values)
    outside, below = 0.5**count, 0  # the probability that at most `below` lie below the median
    while True:
        more = outside + math.comb(count, below + 1) * 0.5**count
        if 2 * more > 1 - CONFIDENCE or 2 * (below + 2) > count:
            break
        outside, below = more, below + 1
    ordered = sorted(values)
    return ordered[below], ordered[count - 1 - below]


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def high_decile(values: Sequence[float]) -> float:
    """What one value in ten exceeds, of few values the greatest: the calm moments.

    Example:
        >>> high_decile(range(1, 101)), high_decile([3.0, 1.0])
        (90, 3.0)
    """
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def relative_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The root mean square of the error over that of the expected values; the worst of the pairs.

    Example:
        >>> relative_error([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.5])])
        0.18569533...
    """
    errors = [0.0]
    for a, b in zip(got, expected, strict=True):
        size, error = b.double().square().mean(), (a.double() - b.double()).square().mean()
        errors.append(float((error / size).sqrt()) if size > 0 else float(error.sqrt()))
    return max(errors)


def peak_memory(call: Callable[[], object]) -> int | None:
    """By how many bytes the process grows at most while a call runs, its results included.

    Linux only: the kernel keeps the peak of the resident memory and lets it be reset. Memory that a
    library keeps from one call to the next does not count.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else freed memory is used again, and nothing grows
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        before = _status("VmRSS")
        call()
        return max(_status("VmHWM") - before, 0)
    except (OSError, AttributeError):
        return None


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no line {name}")
