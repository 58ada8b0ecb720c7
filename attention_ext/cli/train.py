"""``train``: learns a decoder from text and saves it as a run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attention_ext.nn import Decoder, DecoderConfig, Tokenizer, load_tokenizer

from . import config as configs
from . import machine
from .corpus import read_corpus
from .costs import flops_per_token
from .dataset import Batches, Evaluation, Validation, check_length, encode, make_tokenizer
from .errors import UsageError
from .interrupt import noting_signals
from .options import MachineOptions, ModelOptions, TrainConfig, seconds
from .output import Output, format_count, format_time
from .progress import Progress
from .runs import make_run, new_run, resumed_run, write_text
from .schedule import make_horizon
from .state import load_state
from .trainer import Counters, Parts, Trainer, make_optimizer


def run(words: Sequence[str]) -> int:
    """Runs the command.

    Args:
        words: the command line behind ``train``.

    Returns:
        The exit code: 0, or 128 + the signal after a stop.
    """
    started = time.perf_counter()
    arguments = configs.resolve(words)
    settings, output = arguments.settings, Output(arguments.output.quiet, arguments.output.json)
    resuming = arguments.resume is not None
    folder = (
        resumed_run(arguments.run, arguments.resume or "") if resuming else new_run(arguments.run)
    )
    dtype = _number_type(settings.machine)
    machine.keep_freed_memory()
    decoder_config(settings.model, settings.data.vocab_size)  # refuses wrong sizes at once
    if arguments.dry_run:
        return _dry_run(settings, output)
    trainer = _prepare(settings, folder, resuming, dtype, output)
    with Progress(output.quiet) as progress, noting_signals() as interruption:
        trainer.run(progress, interruption)
        evaluation = trainer.finish(progress) if trainer.fraction == 1 else None
    _draw(trainer, settings)
    _report(trainer, evaluation, output, time.perf_counter() - started)
    return interruption.exit_code if evaluation is None else 0


def decoder_config(model: ModelOptions, vocab_size: int) -> DecoderConfig:
    """The decoder's configuration.

    Raises:
        ArgumentError: sizes that do not fit together.
    """
    fields = {**dataclasses.asdict(model), "window_sizes": model.windows()}
    context = fields.pop("context")
    return DecoderConfig(vocab_size=vocab_size, max_position_embeddings=context, **fields)


def _prepare(
    settings: TrainConfig, folder: Path, resuming: bool, dtype: str, output: Output
) -> Trainer:
    """Everything before the first step: text, tokenizer, decoder, threads, and the folder."""
    corpus = read_corpus(settings.data)
    output.say(corpus.summary())
    tokenizer = load_tokenizer(folder) if resuming else make_tokenizer(settings.data, corpus)
    context, batch_size = settings.model.context, settings.training.batch_size
    train, val = encode(tokenizer, corpus.train), encode(tokenizer, corpus.val)
    check_length(train, context, "training", "give more text, or a smaller --context")
    check_length(val, context, "validation", "give more text, a larger --val-fraction, or --val")
    output.say(_describe_tokens(tokenizer, corpus.train, len(train), len(val)))

    torch.manual_seed(settings.machine.seed)
    decoder = Decoder(decoder_config(settings.model, tokenizer.vocab_size))
    parts = Parts(
        decoder,
        make_optimizer(decoder, settings.training),
        Batches(train, context, batch_size, settings.machine.seed),
        Validation(val, context, tokenizer),
        tokenizer,
        partial(machine.autocast, dtype),
    )
    counters, extra = Counters(), {"corpus": corpus.digest, "corpus_name": corpus.description}
    if resuming:
        counters, extra = _restore(parts, folder, corpus.digest)
    step = _probe(decoder, batch_size, context, parts.autocast)
    threads = _choose_threads(settings.machine, extra.get("threads"), step)
    extra["threads"] = threads.value
    horizon = make_horizon(
        settings.training, len(train), batch_size * context * settings.training.accumulate
    )
    if horizon.fraction(counters.step, counters.elapsed) >= 1:
        raise UsageError(
            f"{folder} has reached its end at step {counters.step}, "
            f"{format_time(counters.elapsed)}: give a larger --steps or --time to go on"
        )
    output.say(f"decoder: {_describe_decoder(decoder)}, {dtype}; threads: {threads}")
    make_run(folder)
    write_text(folder / "config.toml", configs.to_toml(settings))
    if not resuming:
        tokenizer.save(folder)
    output.say(f"run: {folder} (Ctrl-C saves and stops)")
    trainer = Trainer(parts, settings.training, horizon, folder, counters, extra)
    trainer.attention = machine.attention_share(step, decoder, batch_size, context)
    return trainer


def _restore(parts: Parts, folder: Path, digest: str) -> tuple[Counters, dict[str, str]]:
    numbers = load_state(folder, parts.decoder, parts.optimizer, parts.batches)
    if numbers["corpus"] != digest:
        raise UsageError(
            f"cannot resume {folder}: its text has changed "
            f"(sha256 {numbers['corpus'][:12]}… then, {digest[:12]}… now)"
        )
    return Counters(**numbers.pop("counters")), numbers


def _choose_threads(
    options: MachineOptions, saved: str | None, step: Callable[[], object]
) -> machine.Choice:
    """The threads of this run; a resumed one keeps its own, since they decide the last bits."""
    if options.threads != "auto":
        return machine.set_threads(options.threads)
    if saved is not None and int(saved) <= machine.num_cores():
        return dataclasses.replace(machine.set_threads(saved), reason="as before")
    return machine.calibrate_threads(step)


def _number_type(options: MachineOptions) -> str:
    """Checks where and with which numbers to compute.

    Raises:
        UsageError: a device or a dtype that cannot train.
    """
    machine.choose_device(options.device)
    if options.dtype == "float16":
        raise UsageError("dtype float16: its gradients underflow; train in float32 or bfloat16")
    return machine.choose_dtype(options.dtype).value


def _probe(
    decoder: Decoder, batch_size: int, context: int, autocast: Callable[[], Any]
) -> Callable[[], None]:
    """A training step without consequences, to be measured; random numbers are put back."""
    ids = torch.arange(batch_size * context).view(batch_size, context) % decoder.config.vocab_size

    def step() -> None:
        with torch.random.fork_rng(devices=[]), autocast():
            loss = decoder.loss(ids, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        decoder.zero_grad()

    return step


def _describe_tokens(tokenizer: Tokenizer, texts: Sequence[str], train: int, val: int) -> str:
    size = sum(len(text.encode()) for text in texts)
    return (
        f"tokenizer: {tokenizer.vocab_size} tokens, {size / train:.2f} bytes per token; "
        f"{format_count(train)} tokens for training, {format_count(val)} for validation"
    )


def _describe_decoder(decoder: Decoder) -> str:
    config = decoder.config
    return (
        f"{format_count(decoder.num_parameters())} parameters "
        f"({config.num_hidden_layers} layers, width {config.hidden_size}, "
        f"{config.num_attention_heads} heads, context {config.max_position_embeddings})"
    )


def _draw(trainer: Trainer, settings: TrainConfig) -> None:
    from .plot import plot_losses  # matplotlib takes a second

    title = f"{trainer.folder.name}: preset {settings.preset}, {trainer.counters.step} steps"
    plot_losses(trainer.log.rows, trainer.folder / "loss.png", title)


def _report(trainer: Trainer, evaluation: Evaluation | None, output: Output, wall: float) -> None:
    """The closing lines, and the result as data."""
    counters, folder = trainer.counters, trainer.folder
    result = {
        "run": str(folder),
        "steps": counters.step,
        "tokens": counters.step * trainer.step_tokens,
        "seconds": round(counters.elapsed, 3),
        "wall_seconds": round(wall, 3),
        "tokens_per_second": round(counters.step * trainer.step_tokens / counters.elapsed, 1),
        "finished": evaluation is not None,
    }
    if evaluation is None:
        output.say(
            f"stopped and saved at step {counters.step}; "
            f"go on with: python -m attention_ext train --resume {folder}"
        )
    else:
        result["val_loss"] = evaluation.loss
        result["val_bits_per_byte"] = evaluation.bits_per_byte
        result["val_tokens"] = evaluation.tokens
        output.say(
            f"done: validation {evaluation.bits_per_byte:.3f} bits per byte (loss "
            f"{evaluation.loss:.3f} on {format_count(evaluation.tokens)} tokens) after "
            f"{counters.step} steps, {format_time(counters.elapsed)} of training, "
            f"{format_time(wall)} in all\n"
            f"write text with: python -m attention_ext generate {folder}"
        )
    output.result(result)


def _dry_run(settings: TrainConfig, output: Output) -> int:
    """Prints the resolved configuration (stdout, usable as ``--config``) and what it costs."""
    model, training = settings.model, settings.training
    decoder = Decoder(decoder_config(model, settings.data.vocab_size))
    step = _probe(decoder, training.batch_size, model.context, lambda: machine.autocast("float32"))
    _choose_threads(settings.machine, None, step)
    step()
    before = time.perf_counter()
    step()
    step_seconds = (time.perf_counter() - before) * training.accumulate
    tokens = training.batch_size * model.context * training.accumulate
    flops = tokens * flops_per_token(decoder)
    memory = 16 * decoder.num_parameters()  # weights, gradients and AdamW's two means in float32
    costs = {
        "parameters": decoder.num_parameters(),
        "tokens_per_step": tokens,
        "flops_per_step": flops,
        "state_bytes": memory,
        "seconds_per_step": round(step_seconds, 4),
    }
    if training.steps is not None:
        costs["seconds"] = round(step_seconds * training.steps, 1)
    output.say(
        f"decoder: {_describe_decoder(decoder)}\n"
        f"step: {tokens} tokens, {format_count(flops)}FLOP, here {1000 * step_seconds:.0f} ms\n"
        f"memory: {memory / 1e6:.0f} MB for weights, gradients and optimizer, activations apart\n"
        f"time: {_expected_time(settings, step_seconds)}"
    )
    output.text(configs.to_toml(settings), end="")
    output.result({"config": configs.to_table(settings), **costs})
    return 0


def _expected_time(settings: TrainConfig, step_seconds: float) -> str:
    training = settings.training
    if training.steps is not None:
        return f"about {format_time(step_seconds * training.steps)} for {training.steps} steps"
    if training.epochs is not None:
        return f"{training.epochs:g} passes over the text"
    return f"{training.time}, about {seconds(training.time or '') / step_seconds:.0f} steps"
