"""The table for people: what runs here, a line for each row, and what the columns mean."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import attention_ext

from ..output import format_bytes
from .cases import Case
from .row import Row, Side

NOTHING = "–"

LEGEND = """\
fwd: a call; fwd+bwd: and its gradients; double: and the gradients of those; jvp: forward mode.
ratio: torch's time / ours, median of {pairs} pairs measured by turns [95 % interval of the median].
cost: our time / that of our call without the option (and not causal).
rate: ours; useful operations, on visible pairs (forward 2 products, backward 5), or bytes of keys
  and values.
of limit: torch → ours (ours in the calmest tenth of the time); the limit is what register-only
  multiply-adds on {kernels} reach between the calls, for up to four queries plain reading.
error: root mean square against float64, relative; of gradients the worst.
memory: by how much the process grew during a call, at most.
torch: its fused kernel, its composite (math), the formula in plain torch; + mask: made before.
"""


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    build = attention_ext.build_info()
    return {
        "processor": processor_name(),
        "kernels": build["cpu_capability"],
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "attention_ext": build["version"],
        "torch": build["torch"],
        "python": platform.python_version(),
    }


def processor_name() -> str:
    """The processor's name as the system knows it, else the architecture."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def header(values: dict[str, Any]) -> str:
    """`machine` in three lines."""
    return (
        f"processor  {values['processor']}, {_count(values['threads'], 'thread')}\n"
        f"kernels    ours {values['kernels']}, torch's {values['torch_kernels']}\n"
        f"versions   attention_ext {values['attention_ext']}, torch {values['torch']}, "
        f"Python {values['python']}"
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + "s" * (number != 1)


@dataclass(frozen=True)
class Table:
    """The layout: columns that no row of a table needs are left out.

    Attributes:
        cases: all rows to come.
    """

    cases: Sequence[Case]

    @property
    def head(self) -> str:
        """The line above."""
        return self._join(self._titles())

    def line(self, row: Row) -> str:
        """A row."""
        ours, torchs = row.ours, row.torchs
        low, high = row.interval
        cells = {
            "call": row.case.name,
            "torch": format_duration(torchs.seconds),
            "ours": format_duration(ours.seconds),
            "ratio": f"{row.ratio:.2f} [{low:.2f}, {high:.2f}]",
            "cost": NOTHING if row.cost is None else f"{row.cost:.2f}",
            "rate": format_rate(ours),
            "of limit": format_fractions(torchs, ours),
            "error": f"{format_error(torchs.error)} → {format_error(ours.error)}",
            "memory": f"{format_memory(torchs.memory)} → {format_memory(ours.memory)}",
            "torch's": row.torch_path,
        }
        return self._join({name: cells[name] for name in self._titles()})

    def _titles(self) -> dict[str, str]:
        titles = {
            "call": "call",
            "torch": "torch",
            "ours": "ours",
            "ratio": "ratio",
            "cost": "cost",
            "rate": "rate",
            "of limit": "of limit",
            "error": "error torch → ours",
            "memory": "memory torch → ours",
            "torch's": "torch",
        }
        if all(case.option == "plain" for case in self.cases):
            del titles["cost"]
        return titles

    def _join(self, cells: dict[str, str]) -> str:
        widths = {
            "call": max(len(case.name) for case in self.cases),
            "torch": 7,
            "ours": 7,
            "ratio": 19,
            "cost": 5,
            "rate": 12,
            "of limit": 16,
            "error": 18,
            "memory": 19,
        }
        line = ""
        for name, cell in cells.items():
            width = widths.get(name, 0)
            left = name in ("call", "ratio", "torch's")
            line += f"{cell:<{width}}  " if left else f"{cell:>{width}}  "
        return line.rstrip()


def format_duration(seconds: float) -> str:
    """Three digits and a unit.

    Example:
        >>> [format_duration(s) for s in (5.118e-6, 3.2e-3, 0.9996, 12.345)]
        ['5.12 µs', '3.20 ms', '1.00 s', '12.3 s']
    """
    for unit, size in (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        digits = _three_digits(seconds / size)
        if float(digits) < 1000 or unit == "s":
            return f"{digits} {unit}"
    raise AssertionError("unreachable")


def _three_digits(number: float) -> str:
    for decimals, below in ((2, 9.995), (1, 99.95)):
        if number < below:
            return f"{number:.{decimals}f}"
    return f"{number:.0f}"


def format_rate(side: Side) -> str:
    """Operations or bytes per second."""
    if side.gbytes is not None:
        return f"{_three_digits(side.gbytes)} GB/s"
    return NOTHING if side.gflops is None else f"{_three_digits(side.gflops)} GFLOP/s"


def format_fractions(torchs: Side, ours: Side) -> str:
    """Fractions of the limit, in per cent."""
    if torchs.fraction is None or ours.fraction is None or ours.best is None:
        return NOTHING
    return f"{100 * torchs.fraction:.0f} → {100 * ours.fraction:.0f} % ({100 * ours.best:.0f})"


def format_error(error: float | None) -> str:
    """Two digits."""
    return NOTHING if error is None else f"{error:.1e}"


def format_memory(memory: int | None) -> str:
    """Bytes."""
    return NOTHING if memory is None else format_bytes(memory)
