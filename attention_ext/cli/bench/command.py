"""The command: which rows, then one after the other."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from tqdm import tqdm

from .. import flags, machine
from ..errors import MissingExtraError, UsageError, explain_os_error
from ..flags import SWITCH, flag
from ..interrupt import noting_signals
from ..options import OutputOptions, expect, seconds
from ..output import Output
from . import report
from .cases import SIZES, Case, DType, Pass, Preset, Sizes, preset_cases
from .row import Row, measure

QUICK_SECONDS = 1.2
PLOT_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class BenchArguments:
    """Measures the operator beside torch's own function, call by call in one process.

    A row is a call. Both sides, and what bounds them, take turns; the table tells the median of the
    ratios with its interval, the rate, the error against float64 and the memory.
    """

    preset: Annotated[Preset, flag("-p", help="the calls; quick takes less than a minute")] = (
        "quick"
    )
    sizes: Annotated[
        tuple[str, ...],
        flag(
            "-s",
            metavar=f"{SIZES} ...",
            help="calls of these sizes instead; H/Hkv, L:S and D/Dv where keys or values differ; "
            "with the preset options, its rows at these sizes",
        ),
    ] = ()
    causal: Annotated[bool, SWITCH, flag(help="causal calls; of a preset only those")] = False
    backward: Annotated[
        bool, SWITCH, flag(help="calls with their gradients; of a preset only those")
    ] = False
    dtype: Annotated[
        tuple[DType, ...], flag(help="number types, in place of the preset's; float32 with --sizes")
    ] = ()
    threads: Annotated[
        str, flag(metavar="auto|N", help="CPU threads; auto leaves torch's own number")
    ] = "auto"
    time: Annotated[
        str | None,
        flag("-t", metavar="4s", help="for timing a row; without it 4s, 1.2s for the preset quick"),
    ] = None
    plot: Annotated[
        Path | None, flag(metavar="FILE", help="draw the table as a .png, .svg or .pdf")
    ] = None
    output: OutputOptions = field(default_factory=OutputOptions)

    def __post_init__(self) -> None:
        expect(
            not self.sizes or self.preset in ("quick", "options"),
            "sizes",
            "alone or with the preset options",
            self.preset,
        )
        expect(
            self.threads == "auto" or (self.threads.isdigit() and int(self.threads) >= 1),
            "threads",
            "auto or at least 1",
            self.threads,
        )
        if self.time is not None:
            seconds(self.time)
        if self.plot is not None:
            _check_plot(self.plot)

    @property
    def seconds(self) -> float:
        """For timing a row."""
        if self.time is not None:
            return seconds(self.time)
        return QUICK_SECONDS if self.preset == "quick" and not self.sizes else 4.0


def run(words: Sequence[str]) -> int:
    """Runs the command.

    Args:
        words: the command line behind ``bench``.

    Returns:
        The exit code.
    """
    arguments = flags.parse(BenchArguments, words, "bench", BenchArguments())
    output = Output(arguments.output.quiet, arguments.output.json)
    cases = select_cases(arguments)
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(
            "`bench --plot` needs matplotlib: pip install attention_ext[decoder]"
        )
    machine.set_threads(arguments.threads)
    here, table = report.machine(), report.Table(cases)
    output.text(report.header(here) + "\n\n" + table.head)
    rows: list[Row] = []
    with noting_signals() as interruption:
        for case in _progress(cases, output.quiet):
            row = measure(case, arguments.seconds)
            rows.append(row)
            tqdm.write(table.line(row), file=sys.stdout)
            sys.stdout.flush()
            if interruption:
                break
    pairs = sorted({row.pairs for row in rows})
    count = f"{pairs[0]} to {pairs[-1]}" if len(pairs) > 1 else str(pairs[0])
    output.text("\n" + report.LEGEND.format(pairs=count, kernels=here["kernels"]))
    if arguments.plot is not None:
        from .plot import plot_rows

        title = f"{here['processor']}, {here['kernels']}, threads: {here['threads']}"
        plot_rows(rows, arguments.plot, title)
        output.say(f"drew {arguments.plot}")
    output.result({"machine": here, "rows": [row.values() for row in rows]})
    return interruption.exit_code if interruption else 0


def select_cases(arguments: BenchArguments) -> list[Case]:
    """The rows that the command line asks for.

    Raises:
        UsageError: there are none, or causal calls have fewer queries than keys.
    """
    sizes = [Sizes.parse(text) for text in arguments.sizes]
    if sizes and arguments.preset == "quick":
        direction: Pass = "fwd+bwd" if arguments.backward else "fwd"
        cases = [Case(size, direction, arguments.causal) for size in sizes]
    else:
        cases = [
            case
            for case in preset_cases(arguments.preset, sizes)
            if case.causal >= arguments.causal
            and (case.direction == "fwd+bwd" or not arguments.backward)
        ]
        if not cases:
            wanted = "causal " * arguments.causal + "with gradients" * arguments.backward
            raise UsageError(f"the preset {arguments.preset} has no call that is {wanted.strip()}")
    if arguments.dtype:
        cases = list(
            dict.fromkeys(replace(case, dtype=dtype) for case in cases for dtype in arguments.dtype)
        )
    for case in cases:
        expect(
            not case.causal or case.sizes.queries == case.sizes.keys,
            "sizes",
            "with as many keys as queries for --causal",
            str(case.sizes),
        )
    return cases


def _progress(cases: Sequence[Case], quiet: bool) -> Iterator[Case]:
    """Shows on a terminal which row is measured, and how long the rest will take."""
    bar = tqdm(cases, file=sys.stderr, disable=quiet or not sys.stderr.isatty(), leave=False)
    for case in bar:
        bar.set_postfix_str(case.name)
        yield case


def _check_plot(path: Path) -> None:
    """Says now what would otherwise fail after minutes."""
    expect(
        path.suffix.lower() in PLOT_FORMATS,
        "plot",
        f"to end in {', '.join(PLOT_FORMATS)}",
        str(path),
    )
    folder = path.parent
    try:
        if not folder.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {folder}")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise UsageError(f"cannot write {path}: permission denied, or a folder")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {explain_os_error(error)}") from None
