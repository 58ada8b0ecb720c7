"""The picture of a run: training loss and validation bits per byte against time."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from attention_ext.nn.checkpoint import write_atomically

SMOOTHING = 20  # points of the moving mean, at most; a tenth of the run, at most
BLUE, ORANGE = "#1f6fb4", "#d95f02"  # told apart also without colour vision


def plot_losses(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draws a log as a PNG file.

    Args:
        rows: of log.jsonl: all hold ``elapsed``, those of training ``loss``, those of evaluations
            ``val_bits_per_byte``.
        path: of the picture.
        title: above it.
    """
    train = [(row["elapsed"], row["loss"]) for row in rows if "loss" in row]
    val = [(row["elapsed"], row["val_bits_per_byte"]) for row in rows if "val_bits_per_byte" in row]
    figure = Figure(figsize=(6.9, 3.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    losses = figure.add_subplot(xlabel="training time (s)")
    losses.set_ylabel("training loss (nats per token)", color=BLUE)
    bits = losses.twinx()
    bits.set_ylabel("validation (bits per byte)", color=ORANGE)
    if train:
        times, values = zip(*train, strict=True)
        losses.plot(times, values, color=BLUE, alpha=0.25, linewidth=0.7)
        losses.plot(
            times, moving_mean(values, max(1, min(SMOOTHING, len(values) // 10))), color=BLUE
        )
    if val:
        bits.plot(*zip(*val, strict=True), color=ORANGE, marker="o", markersize=4)
        bits.annotate(
            f"{val[-1][1]:.3f}",
            val[-1],
            textcoords="offset points",
            xytext=(0, 7),
            ha="right",
            color=ORANGE,
        )
    losses.set_title(title, fontsize=10)
    losses.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    write_atomically(path, buffer.getvalue())


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean around each place of ``width`` values (even: one more), of fewer at the ends.

    Example:
        >>> moving_mean([1.0, 3.0, 5.0, 10.0], 3)
        [2.0, 3.0, 6.0, 7.5]
    """
    sums = [0.0, *itertools.accumulate(values)]
    half = width // 2
    means = []
    for place in range(len(values)):
        start, end = max(0, place - half), min(len(values), place + half + 1)
        means.append((sums[end] - sums[start]) / (end - start))
    return means
