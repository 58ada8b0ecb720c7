"""One row of the table: a case measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .calls import Calls
from .cases import Case
from .measure import (
    by_turns,
    fma_meter,
    high_decile,
    median,
    median_interval,
    peak_memory,
    ratios,
    relative_error,
    timer,
)


@dataclass(frozen=True)
class Side:
    """What one side of a case reached.

    Attributes:
        seconds: of a call, median.
        gflops: useful operations per second, in 10^9, median.
        gbytes: keys and values read per second, in 10^9 bytes, median; of decoding calls.
        fraction: of the row's limit.
        best: the same of the rate that one reading in ten exceeds.
        error: root mean square against float64, relative.
        memory: bytes by which the process grew at most during a call.
    """

    seconds: float
    gflops: float | None
    gbytes: float | None
    fraction: float | None
    best: float | None
    error: float | None
    memory: int | None


@dataclass(frozen=True)
class Row:
    """What both sides reached.

    Attributes:
        case: what was called.
        torch_path: which way torch took.
        ours: our side.
        torchs: torch's side.
        ratio: torch's time over ours, median of neighbours.
        interval: encloses the ratio's median with 95 % confidence.
        pairs: how many neighbours there were.
        limit: what bounds the rate: GFLOP/s of multiply-adds, for decoding calls GB/s of plain
            reading, measured between the calls, again what one reading in ten exceeds.
        cost: our time over that of our call without the option, median of neighbours.
    """

    case: Case
    torch_path: str
    ours: Side
    torchs: Side
    ratio: float
    interval: tuple[float, float]
    pairs: int
    limit: float | None
    cost: float | None

    def values(self) -> dict[str, Any]:
        """The row for JSON."""
        case = {
            "call": self.case.name,
            "direction": self.case.direction,
            "sizes": str(self.case.sizes),
            "causal": self.case.causal,
            "option": self.case.option,
            "dtype": self.case.dtype,
        }
        return case | {name: value for name, value in asdict(self).items() if name != "case"}


def measure(case: Case, seconds: float) -> Row:
    """Measures a case.

    Args:
        case: the row.
        seconds: that timing takes; tensors, warming up and errors come on top.
    """
    calls = Calls(case)
    ours, torchs = calls.ours(), calls.torchs()
    meters = {"ours": timer(ours), "torch": timer(torchs)}
    if case.option != "plain" and case.direction in ("fwd", "fwd+bwd"):
        meters["plain"] = timer(calls.plain())
    work, bound = _work_and_bound(case, calls)
    if bound == "read":
        meters["limit"] = timer(calls.read())
    elif bound == "peak":
        meters["limit"] = fma_meter()
    errors = calls.errors()
    memory = [None, None] if case.is_overhead else [peak_memory(ours), peak_memory(torchs)]

    readings = by_turns(meters, seconds)
    limit = _limit_rate(case, calls, bound, readings)

    def side(name: str, index: int) -> Side:
        taken = readings[name]
        error = None if errors is None else relative_error(*errors[2 * index : 2 * index + 2])
        if work is None:
            return Side(median(taken), None, None, None, None, error, memory[index])
        rates = [work / each / 1e9 for each in taken]
        rate, best = median(rates), high_decile(rates)
        return Side(
            seconds=median(taken),
            gflops=rate if bound == "peak" else None,
            gbytes=rate if bound == "read" else None,
            fraction=None if limit is None else rate / limit,
            best=None if limit is None else best / limit,
            error=error,
            memory=memory[index],
        )

    faster = ratios(readings["torch"], readings["ours"])
    return Row(
        case=case,
        torch_path=calls.torch_path(),
        ours=side("ours", 0),
        torchs=side("torch", 1),
        ratio=median(faster),
        interval=median_interval(faster),
        pairs=len(faster),
        limit=limit,
        cost=_cost(readings),
    )


def _work_and_bound(case: Case, calls: Calls) -> tuple[int | None, str | None]:
    """What a call does, in bytes or operations, and what bounds its rate."""
    if case.is_overhead:
        return None, None
    if case.is_decode and case.direction == "fwd":
        return calls.bytes_visible, "read"
    return (calls.flops, "peak") if calls.flops is not None else (None, None)


def _limit_rate(
    case: Case, calls: Calls, bound: str | None, readings: Mapping[str, Sequence[float]]
) -> float | None:
    """10^9 operations or bytes per second, where nothing disturbs."""
    if bound is None:
        return None
    if bound == "read":
        return high_decile([calls.bytes_stored / taken / 1e9 for taken in readings["limit"]])
    # A core multiplies half as many float64 numbers at a time.
    return high_decile(readings["limit"]) / (2 if case.dtype == "float64" else 1)


def _cost(readings: Mapping[str, Sequence[float]]) -> float | None:
    if "plain" not in readings:
        return None
    return median(ratios(readings["ours"], readings["plain"]))
