"""When training ends, and the learning rate on the way there.

With ``--time`` the schedule follows the clock: a slow machine gets a finished, shorter run instead
of an unfinished one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .options import TrainingOptions, seconds

FINAL_RATE = 0.02  # of the peak


@dataclass(frozen=True)
class Horizon:
    """The end of training: a number of steps or of seconds.

    Example:
        >>> Horizon(steps=10).fraction(step=5, elapsed=99.0), Horizon(seconds=150).fraction(5, 30.0)
        (0.5, 0.2)
    """

    steps: int | None = None
    seconds: float | None = None

    def fraction(self, step: int, elapsed: float) -> float:
        """The part that is done after ``step`` steps and ``elapsed`` seconds, 1 at the end."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        return min(1.0, elapsed / (self.seconds or math.inf))


def make_horizon(options: TrainingOptions, train_tokens: int, step_tokens: int) -> Horizon:
    """The horizon of the options; epochs become steps."""
    if options.epochs is not None:
        return Horizon(steps=max(1, math.ceil(options.epochs * train_tokens / step_tokens)))
    if options.steps is not None:
        return Horizon(steps=options.steps)
    return Horizon(seconds=seconds(options.time or ""))


def learning_rate(options: TrainingOptions, step: int, fraction: float) -> float:
    """The rate of a step: warm-up over the first steps, times the way down to FINAL_RATE.

    Args:
        options: peak, warm-up and form.
        step: steps done before.
        fraction: part of the horizon that is done.

    Example:
        >>> options = TrainingOptions(learning_rate=1.0, warmup_steps=10)
        >>> [round(learning_rate(options, step, step / 100), 3) for step in (0, 9, 50, 100)]
        [0.1, 0.912, 0.51, 0.02]
    """
    warmup = min(1.0, (step + 1) / options.warmup_steps) if options.warmup_steps else 1.0
    way = {
        "constant": 1.0,
        "linear": 1.0 - fraction,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * fraction)),
    }[options.schedule]
    return options.learning_rate * warmup * (FINAL_RATE + (1.0 - FINAL_RATE) * way)
