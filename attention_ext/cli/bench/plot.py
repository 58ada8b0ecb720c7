"""The chart: how many times faster, and how near to the limit."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from attention_ext.nn.checkpoint import write_atomically

from .row import Row

BLUE, ORANGE, GREY = "#1f6fb4", "#d95f02", "#777777"  # told apart also without colour vision


def plot_rows(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draws the rows, the first on top.

    Args:
        rows: at least one.
        path: of the picture; its ending says which kind: .png, .svg or .pdf.
        title: above it.
    """
    places = range(len(rows), 0, -1)
    figure = Figure(figsize=(11, 1.6 + 0.24 * len(rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    ratios, limits = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))

    middle = [row.ratio for row in rows]
    below = [row.ratio - row.interval[0] for row in rows]
    above = [row.interval[1] - row.ratio for row in rows]
    ratios.barh(places, [ratio - 1 for ratio in middle], left=1, color=BLUE, height=0.65)
    ratios.errorbar(
        middle, places, xerr=(below, above), fmt="none", ecolor="black", elinewidth=0.8, capsize=2
    )
    ends = [row.interval[1] for row in rows]
    for place, end, ratio in zip(places, ends, middle, strict=True):
        ratios.annotate(
            f"{ratio:.2f}",
            (max(end, 1), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    ratios.axvline(1, color="black", linewidth=0.8)
    ratios.set_xscale("log", base=2)
    ratios.set_xlim(min(0.9, *(row.interval[0] / 1.1 for row in rows)), 1.35 * max(1.2, *ends))
    ratios.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ratios.set_yticks(places, [row.case.name for row in rows], fontsize=7, family="monospace")
    ratios.set_ylim(0.2, len(rows) + 0.8)
    ratios.set_xlabel("time of torch / time of ours (95 % interval of the median)")

    drawn = [(place, row) for place, row in zip(places, rows, strict=True) if row.limit]
    for name, color, marker in (("torchs", ORANGE, "s"), ("ours", BLUE, "o")):
        limits.plot(
            [100 * getattr(row, name).fraction for _, row in drawn],
            [place for place, _ in drawn],
            color=color,
            marker=marker,
            markersize=4,
            linestyle="none",
            label={"torchs": "torch", "ours": "ours"}[name],
        )
    for place, row in drawn:
        ends_of_line = (100 * (row.torchs.fraction or 0), 100 * (row.ours.fraction or 0))
        limits.plot(ends_of_line, (place, place), color=GREY, linewidth=0.8, zorder=0)
    limits.set_xlim(left=0)
    limits.set_xlabel("% of the FMA peak (few queries: of plain reading)")
    limits.tick_params(left=False)
    if drawn:
        limits.legend(
            fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False
        )
    for axes in (ratios, limits):
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(title, fontsize=9)

    buffer, kind = io.BytesIO(), path.suffix.lower().lstrip(".")
    figure.savefig(buffer, format=kind)
    write_atomically(path, buffer.getvalue())
