"""Every option of the three commands: frozen dataclasses, checked when they are made.

The names are those of the flags (``batch_size``: ``--batch-size``), of the keys in a TOML file,
and, for the model, of `attention_ext.nn.DecoderConfig`; its ``max_position_embeddings`` is
``context`` here, and its ``vocab_size`` that of the tokenizer. Training predicts the next token, so
``causal`` is no option.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from .errors import UsageError
from .flags import POSITIONAL, SWITCH, flag, optional_value

Preset = Literal["tiny", "small", "base"]


def expect(condition: bool, name: str, rule: str, value: object) -> None:
    """Raises the sentence for an option with a wrong value."""
    if not condition:
        raise UsageError(f"expected {name} {rule}, got {value!r}")


def seconds(duration: str) -> float:
    """A duration in seconds: numbers with h, m or s behind them; without a letter, seconds.

    Raises:
        UsageError: the text is no positive duration.

    Example:
        >>> seconds("150s"), seconds("2m30s"), seconds("1.5h"), seconds("90")
        (150.0, 150.0, 5400.0, 90.0)
    """
    number = r"(\d+(?:\.\d+)?)"
    parts = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s?)?", duration.strip())
    total = (
        sum(
            float(part or 0) * unit
            for part, unit in zip(parts.groups(), (3600, 60, 1), strict=True)
        )
        if parts
        else 0.0
    )
    expect(total > 0, "time", "to be a duration such as 150s, 2m30s or 1.5h", duration)
    return total


@dataclass(frozen=True)
class DataOptions:
    """What is learned from."""

    data: Annotated[
        tuple[str, ...],
        flag(
            "-d",
            metavar="PATH ...",
            help="text files, folders (their *.txt *.md *.py *.rst), - for standard input, "
            "or docs: Python's own documentation",
        ),
    ] = ("docs",)
    val: Annotated[
        str | None,
        flag(
            metavar="PATH",
            help="file or folder for validation; without it a part of the data is held out",
        ),
    ] = None
    val_fraction: Annotated[float, flag(help="part of the data held out for validation")] = 0.1
    tokenizer: Annotated[
        str,
        flag(
            metavar="{bpe,byte}|FILE",
            help="bpe learns its vocabulary from the data; or a tokenizer.json",
        ),
    ] = "bpe"
    vocab_size: Annotated[int, flag("--vocab", help="tokens of the bpe vocabulary")] = 1024

    def __post_init__(self) -> None:
        expect(len(self.data) > 0, "data", "to name at least one file or folder", "nothing")
        expect(0 < self.val_fraction < 1, "val_fraction", "between 0 and 1", self.val_fraction)
        expect(
            self.vocab_size >= 257,
            "vocab_size",
            "of at least 257 (256 bytes and one merge)",
            self.vocab_size,
        )


@dataclass(frozen=True)
class ModelOptions:
    """The decoder."""

    hidden_size: Annotated[int, flag("--width", help="width of the residual stream")] = 128
    num_hidden_layers: Annotated[int, flag("--layers", help="blocks")] = 4
    num_attention_heads: Annotated[int, flag("--heads", help="query heads")] = 4
    num_key_value_heads: Annotated[
        int | None,
        flag("--kv-heads", help="key and value heads; without it as many as query heads"),
    ] = None
    head_dim: Annotated[
        int | None, flag(help="width of a head; without it hidden_size / num_attention_heads")
    ] = None
    value_dim: Annotated[int | None, flag(help="width of a value head; without it head_dim")] = None
    intermediate_size: Annotated[
        int | None,
        flag(
            "--ffn-width",
            help="width of the feed-forward layer; without it about 8/3 (gelu: 4) hidden_size",
        ),
    ] = None
    context: Annotated[
        int,
        flag(
            "-c",
            "--max-position-embeddings",
            help="tokens that the decoder sees (max_position_embeddings)",
        ),
    ] = 128
    norm: Annotated[Literal["rms", "layer"], flag(help="normalisation")] = "rms"
    mlp: Annotated[Literal["swiglu", "gelu"], flag("--ffn", help="feed-forward layer")] = "swiglu"
    position: Annotated[
        Literal["rope", "learned", "alibi", "none"], flag(help="how positions enter")
    ] = "rope"
    rope_theta: Annotated[float, flag(help="base of the rotary frequencies")] = 10000.0
    rope_fraction: Annotated[float, flag(help="part of a head that is rotated")] = 1.0
    rope_interleaved: Annotated[
        bool, flag(help="rotate neighbouring components instead of halves")
    ] = False
    attention_bias: Annotated[bool, flag(help="biases in the attention projections")] = False
    qk_norm: Annotated[bool, flag(help="normalise queries and keys")] = False
    window_sizes: Annotated[
        tuple[str, ...],
        flag(
            "--window",
            metavar="LEFT|none ...",
            help="earlier tokens that a layer sees, one value for each layer or one for all",
        ),
    ] = ()
    softcap: Annotated[
        float | None, flag(help="bound of the scores, approached by tanh; 0: none")
    ] = None
    sinks: Annotated[bool, flag(help="a learned logit per head for looking at nothing")] = False
    dropout: Annotated[
        float, flag(help="part of weights and residual updates that is dropped while training")
    ] = 0.0
    tie_word_embeddings: Annotated[
        bool, flag("--tie", help="one matrix for embedding and output")
    ] = True

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "context"):
            expect(getattr(self, name) >= 1, name, "of at least 1", getattr(self, name))
        self.windows()

    def windows(self) -> list[tuple[int, int] | None] | None:
        """What `DecoderConfig.window_sizes` holds: (left, right) or None for each layer.

        A value is "LEFT", "LEFT,RIGHT" or "none". RIGHT is 0 unless given, and beyond it causality
        hides everything anyway.
        """
        windows = [_window(text) for text in self.window_sizes]
        return windows * (self.num_hidden_layers if len(windows) == 1 else 1) or None


def _window(text: str) -> tuple[int, int] | None:
    if text == "none":
        return None
    match = re.fullmatch(r"(-1|\d+)(?:,(-1|\d+))?", text)
    if match is None:
        raise UsageError(f"expected window_sizes to be LEFT, LEFT,RIGHT or none, got {text!r}")
    return int(match[1]), int(match[2] or 0)


@dataclass(frozen=True)
class TrainingOptions:
    """How it is learned: until a number of steps, a time or a number of epochs."""

    steps: Annotated[int | None, flag("-s", help="stop after so many steps")] = None
    time: Annotated[
        str | None,
        flag(
            "-t",
            metavar="150s",
            help="stop after so long, the schedule following the clock",
        ),
    ] = None
    epochs: Annotated[
        float | None, flag(help="stop after so many passes over the training text")
    ] = None
    batch_size: Annotated[
        int, flag("-b", "--batch", help="sequences of `context` tokens in a batch")
    ] = 8
    accumulate: Annotated[int, flag(help="batches whose gradients are summed into one step")] = 1
    learning_rate: Annotated[float, flag("--lr", help="peak of AdamW's learning rate")] = 3e-3
    warmup_steps: Annotated[int, flag("--warmup", help="steps of linear warm-up")] = 50
    schedule: Annotated[
        Literal["linear", "cosine", "constant"], flag(help="the way down, to 2 % of the peak")
    ] = "linear"
    weight_decay: Annotated[float, flag("--wd", help="AdamW's decay, on matrices only")] = 0.1
    clip: Annotated[float, flag(help="bound of the gradient's norm; 0 switches it off")] = 1.0
    eval_every: Annotated[
        int | None,
        flag(
            metavar="STEPS",
            help="steps between evaluations; without it ten in all, at most 5 % of the time",
        ),
    ] = None
    sample_every: Annotated[
        int | None,
        flag(
            metavar="STEPS", help="steps between samples; without it at every evaluation, 0: never"
        ),
    ] = None
    save_every: Annotated[
        int | None,
        flag(metavar="STEPS", help="steps between checkpoints; without it at every evaluation"),
    ] = None

    def __post_init__(self) -> None:
        given = [name for name in HORIZONS if getattr(self, name) is not None]
        expect(len(given) <= 1, "at most one of", "steps, time and epochs", " and ".join(given))
        for name in ("steps", "batch_size", "accumulate", "eval_every", "save_every"):
            value = getattr(self, name)
            expect(value is None or value >= 1, name, "of at least 1", value)
        for name in ("warmup_steps", "weight_decay", "clip", "sample_every"):
            value = getattr(self, name)
            expect(value is None or value >= 0, name, "of at least 0", value)
        for name in ("learning_rate", "epochs"):
            value = getattr(self, name)
            expect(
                value is None or (value > 0 and math.isfinite(value)), name, "to be positive", value
            )
        if self.time is not None:
            seconds(self.time)


HORIZONS = ("steps", "time", "epochs")


@dataclass(frozen=True)
class MachineOptions:
    """Where and how it is computed."""

    device: Annotated[str, flag(metavar="auto|cpu|cuda[:n]", help="where to compute")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        flag(help="number type of the matrix products"),
    ] = "auto"
    threads: Annotated[
        str,
        flag(metavar="auto|N", help="CPU threads; auto measures: the fastest of all, half and one"),
    ] = "auto"
    seed: Annotated[int, flag(help="seed of every random number")] = 0

    def __post_init__(self) -> None:
        expect(
            re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None,
            "device",
            "auto, cpu or cuda[:n]",
            self.device,
        )
        expect(
            self.threads == "auto" or (self.threads.isdigit() and int(self.threads) >= 1),
            "threads",
            "auto or at least 1",
            self.threads,
        )
        expect(0 <= self.seed < 2**63, "seed", "between 0 and 2^63 - 1", self.seed)


@dataclass(frozen=True)
class OutputOptions:
    """What is said."""

    quiet: Annotated[bool, SWITCH, flag("-q", help="say nothing on stderr but errors")] = False
    json: Annotated[bool, SWITCH, flag(help="end stdout with one JSON object")] = False
    debug: Annotated[bool, SWITCH, flag(help="show the traceback of an error")] = False


@dataclass(frozen=True)
class TrainConfig:
    """What a run depends on: all that its config.toml holds."""

    preset: Annotated[Preset, flag(help="sizes and schedule to start from")] = "tiny"
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)


@dataclass(frozen=True)
class TrainArguments(TrainConfig):
    """Learns a decoder from text and saves it as a run.

    A run is a folder with the model, its tokenizer, the configuration, a log, samples, a picture of
    the losses, and the state from which --resume goes on.
    """

    run: Annotated[
        str | None,
        POSITIONAL,
        flag(metavar="[RUN]", help="name of the run: runs/RUN, or a path; without it the date"),
    ] = None
    config: Annotated[
        str | None,
        flag(
            metavar="FILE.toml",
            help="keys as the flags, with _ for -; overrides the preset, is overridden by flags",
        ),
    ] = None
    resume: Annotated[
        str | None,
        optional_value("[RUN]"),
        flag(help="go on with a run that was stopped: RUN, or the newest"),
    ] = None
    dry_run: Annotated[
        bool, SWITCH, flag(help="print the resolved configuration and its cost, then stop")
    ] = False
    output: OutputOptions = field(default_factory=OutputOptions)

    @property
    def settings(self) -> TrainConfig:
        """The part that a run's config.toml holds."""
        return TrainConfig(**{f.name: getattr(self, f.name) for f in fields(TrainConfig)})
