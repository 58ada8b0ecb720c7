"""The training loop: steps, and between them evaluations, samples and checkpoints.

With a number of steps as horizon every decision depends on the step alone, so that a run which was
stopped and resumed does the same as one without a stop, bit for bit. With a time as horizon the
clock decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from attention_ext.nn import Decoder, Tokenizer
from attention_ext.nn.checkpoint import WEIGHTS_FILE

from .dataset import Batches, Evaluation, Validation
from .interrupt import Interruption
from .log import RunLog
from .options import TrainingOptions
from .output import format_time
from .progress import Progress, Report
from .runs import write_text
from .schedule import Horizon, learning_rate
from .state import save_state

BETAS = (0.9, 0.99)
EVALUATIONS = 10  # of a run, where eval_every does not say otherwise
EVALUATION_SHARE = 0.05  # of the time, at most
TOKENS_ON_THE_WAY = 20_000  # predicted by an evaluation
TOKENS_AT_END = 65_000
SAMPLE_PROMPT = "\n"
SAMPLE_TOKENS = 64
SAMPLE_TEMPERATURE = 0.8
SMOOTHING = 0.95  # of the numbers that are shown


@dataclass
class Counters:
    """What a run counts, kept in its state.

    Attributes:
        step: steps done.
        elapsed: seconds of training, evaluations and checkpoints included.
        loss: of training, smoothed, or None before the first step.
        best: the lowest validation bits per byte so far: those of the saved weights.
        last: those of the last evaluation.
        evaluated_at: the second at which that ended.
        evaluation_seconds: how long it took.
    """

    step: int = 0
    elapsed: float = 0.0
    loss: float | None = None
    best: float | None = None
    last: float | None = None
    evaluated_at: float = 0.0
    evaluation_seconds: float = 0.0


@dataclass(frozen=True)
class Parts:
    """What a trainer works with; ``autocast`` makes the context of a forward pass."""

    decoder: Decoder
    optimizer: torch.optim.AdamW
    batches: Batches
    validation: Validation
    tokenizer: Tokenizer
    autocast: Callable[[], AbstractContextManager[object]]


def make_optimizer(decoder: Decoder, options: TrainingOptions) -> torch.optim.AdamW:
    """AdamW with decay on matrices only."""
    parameters = list(decoder.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=BETAS, fused=True)


class Trainer:
    """Trains a decoder and keeps its run's folder up to date.

    Args:
        parts: model, data and what belongs to them.
        options: of training.
        horizon: when it ends.
        folder: of the run.
        counters: where it stands; a resumed run brings its own.
        extra: what else the state keeps.

    Attributes:
        attention: part of a step's time that attention takes, for the progress line.
    """

    def __init__(
        self,
        parts: Parts,
        options: TrainingOptions,
        horizon: Horizon,
        folder: Path,
        counters: Counters,
        extra: dict[str, str],
    ) -> None:
        self.parts = parts
        self.options = options
        self.horizon = horizon
        self.folder = folder
        self.counters = counters
        self.extra = extra
        self.log = RunLog(folder, counters.step)
        self.attention = math.nan
        self._rate = 0.0
        self._step_seconds: float | None = None
        self._clock = time.perf_counter

    @property
    def fraction(self) -> float:
        """Part of the horizon that is done."""
        return self.horizon.fraction(self.counters.step, self.counters.elapsed)

    def run(self, progress: Progress, interruption: Interruption) -> None:
        """Trains until the horizon or an interruption, and saves the state.

        Raises:
            FloatingPointError: the loss is not finite any more; the last checkpoint stays.
        """
        counters = self.counters
        begin = self._clock() - counters.elapsed
        while self.fraction < 1 and not interruption:
            before = self._clock()
            loss = self._step()
            self._step_seconds = _smooth(self._step_seconds, self._clock() - before)
            counters.loss = _smooth(counters.loss, loss)
            counters.elapsed = self._clock() - begin
            self._add_row(loss=loss, learning_rate=self._rate)
            if self.fraction < 1:
                self._do_what_is_due(progress)
                counters.elapsed = self._clock() - begin
            if progress.due:
                progress.show(self.report())
        self.save()
        if not (self.folder / WEIGHTS_FILE).exists():
            self.parts.decoder.save_pretrained(self.folder)

    def finish(self, progress: Progress) -> Evaluation:
        """Evaluates the end, keeps the best weights, and measures them on more of the text."""
        self.evaluate(progress)
        self._sample()
        self.save()
        if self.counters.last != self.counters.best:
            best = Decoder.from_pretrained(self.folder)
            self.parts.decoder.load_state_dict(best.state_dict())
        return self._evaluation(TOKENS_AT_END)

    def evaluate(self, progress: Progress) -> None:
        """Evaluates, and saves the weights if they are the best so far."""
        counters = self.counters
        before = self._clock()
        evaluation = self._evaluation(TOKENS_ON_THE_WAY)
        counters.last = evaluation.bits_per_byte
        if counters.best is None or counters.last < counters.best:
            counters.best = counters.last
            self.parts.decoder.save_pretrained(self.folder)
        counters.evaluation_seconds = self._clock() - before
        counters.evaluated_at = counters.elapsed + counters.evaluation_seconds
        self._add_row(val_loss=evaluation.loss, val_bits_per_byte=evaluation.bits_per_byte)
        progress.show(self.report())

    def save(self) -> None:
        """Writes the state from which the run can go on."""
        parts = self.parts
        numbers = {"counters": asdict(self.counters), **self.extra}
        save_state(self.folder, parts.decoder, parts.optimizer, parts.batches, numbers)

    def report(self) -> Report:
        """The numbers of the progress line."""
        counters, seconds = self.counters, self._step_seconds or math.nan
        return Report(
            step=counters.step,
            fraction=self.fraction,
            loss=math.nan if counters.loss is None else counters.loss,
            bits_per_byte=counters.last,
            rate=self._rate,
            step_seconds=seconds,
            tokens_per_second=self.step_tokens / seconds,
            attention=self.attention,
            elapsed=counters.elapsed,
        )

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        batches = self.parts.batches
        return batches.batch_size * batches.context * self.options.accumulate

    def _step(self) -> float:
        """One step of the optimizer; returns the loss before it."""
        parts, options, counters = self.parts, self.options, self.counters
        self._rate = learning_rate(options, counters.step, self.fraction)
        for group in parts.optimizer.param_groups:
            group["lr"] = self._rate
        total = 0.0
        for _ in range(options.accumulate):
            ids, targets = parts.batches.next()
            with parts.autocast():
                loss = parts.decoder.loss(ids, targets) / options.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        if not math.isfinite(total):
            raise FloatingPointError(
                f"the loss is {total} at step {counters.step}: "
                f"lower learning_rate, now {options.learning_rate}"
            )
        if options.clip:
            torch.nn.utils.clip_grad_norm_(parts.decoder.parameters(), options.clip)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        counters.step += 1
        return total

    def _do_what_is_due(self, progress: Progress) -> None:
        step, options = self.counters.step, self.options
        evaluation = self._evaluation_due()
        if evaluation:
            self.evaluate(progress)
        every = options.sample_every
        if evaluation if every is None else every and step % every == 0:
            self._sample()
        every = options.save_every
        if evaluation if every is None else step % every == 0:
            self.save()

    def _evaluation_due(self) -> bool:
        step, counters = self.counters.step, self.counters
        if self.options.eval_every is not None:
            return step % self.options.eval_every == 0
        if self.horizon.steps is not None:
            # A step costs three forward passes.
            cost = TOKENS_ON_THE_WAY / (3 * self.step_tokens * EVALUATION_SHARE)
            return step % math.ceil(max(self.horizon.steps / EVALUATIONS, cost)) == 0
        end = self.horizon.seconds or math.inf
        pause = max(end / EVALUATIONS, counters.evaluation_seconds / EVALUATION_SHARE)
        # The end has an evaluation of its own.
        return (
            counters.elapsed >= counters.evaluated_at + pause and counters.elapsed < end - pause / 2
        )

    def _evaluation(self, tokens: int) -> Evaluation:
        parts = self.parts
        return parts.validation.evaluate(parts.decoder, tokens, parts.autocast())

    def _sample(self) -> None:
        """Writes a short text; all of them are in the log and in samples.txt."""
        parts = self.parts
        prompt = torch.tensor([parts.tokenizer.encode(SAMPLE_PROMPT)])
        ids = parts.decoder.generate(
            prompt, SAMPLE_TOKENS, temperature=SAMPLE_TEMPERATURE, seed=self.counters.step
        )
        self._add_row(sample=parts.tokenizer.decode(ids[0, prompt.shape[1] :].tolist()))
        samples = [
            f"--- step {row['step']}, {format_time(row['elapsed'])}\n{row['sample']}\n"
            for row in self.log.rows
            if "sample" in row
        ]
        write_text(self.folder / "samples.txt", "\n".join(samples))

    def _add_row(self, **values: float | str) -> None:
        elapsed = round(self.counters.elapsed, 3)
        self.log.add(step=self.counters.step, elapsed=elapsed, **values)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else SMOOTHING * old + (1 - SMOOTHING) * new
