"""``generate``: writes text with a run's decoder."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from attention_ext.nn import Decoder, PagedKVCache, TextStream, Tokenizer, load_tokenizer
from attention_ext.nn.cache import AnyCache
from attention_ext.nn.generate import window_start

from . import flags, machine
from .corpus import read_stdin, read_text
from .costs import bytes_per_step
from .errors import UsageError
from .flags import POSITIONAL, SWITCH, flag
from .options import MachineOptions, OutputOptions, expect
from .output import Output, format_count
from .runs import existing_run

DEFAULT_PROMPT = "\n"
CALIBRATION_TOKENS = 4
BANDWIDTH_BYTES = 2**28  # read to measure the memory
BANDWIDTH_PASSES = 3
CHECKED_PAGE_SIZE = 3  # small, so that a text of a few tokens crosses pages


@dataclasses.dataclass(frozen=True)
class PromptOptions:
    """What is continued."""

    prompt: Annotated[str | None, flag("-p", help="text to continue; without it a line end")] = None
    prompt_file: Annotated[
        str | None, flag(metavar="PATH", help="file with the text to continue; - is standard input")
    ] = None
    num_samples: Annotated[int, flag("-n", help="texts to write; the i-th uses seed + i")] = 1
    max_new_tokens: Annotated[int, flag("-m", help="tokens of each text")] = 200
    stop: Annotated[
        tuple[str, ...], flag(metavar="TEXT ...", help="end before the first of these texts")
    ] = ()

    def __post_init__(self) -> None:
        expect(
            self.prompt is None or self.prompt_file is None,
            "at most one of",
            "prompt and prompt_file",
            "both",
        )
        for name in ("num_samples", "max_new_tokens"):
            expect(getattr(self, name) >= 1, name, "of at least 1", getattr(self, name))
        expect(all(self.stop), "stop", "texts not to be empty", "")

    def read(self) -> str:
        """The text to continue.

        Raises:
            UsageError: the file is missing, empty or not UTF-8, or the text is empty.
        """
        if self.prompt_file is not None:
            return read_stdin() if self.prompt_file == "-" else read_text(Path(self.prompt_file))
        if self.prompt is None:
            return DEFAULT_PROMPT
        expect(self.prompt != "", "prompt", "to be a text (leave it out to begin anew)", "")
        return self.prompt

    @property
    def given(self) -> bool:
        """Whether there is a text of the user's, to be shown before what continues it."""
        return self.prompt is not None or self.prompt_file is not None


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen."""

    temperature: Annotated[
        float, flag("-t", help="divides the logits; 0 takes the likeliest token")
    ] = 0.8
    top_k: Annotated[int, flag("-k", help="only the k likeliest tokens; 0: all")] = 0
    top_p: Annotated[
        float, flag(help="only the likeliest tokens that together have this probability")
    ] = 1.0
    min_p: Annotated[
        float, flag(help="only tokens of at least this part of the likeliest one's probability")
    ] = 0.0
    repetition_penalty: Annotated[
        float, flag(help="above 1: makes tokens that were seen less likely")
    ] = 1.0
    greedy: Annotated[bool, SWITCH, flag(help="always the likeliest token")] = False

    def __post_init__(self) -> None:
        expect(self.temperature >= 0, "temperature", "of at least 0", self.temperature)
        expect(self.top_k >= 0, "top_k", "of at least 0", self.top_k)
        expect(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        expect(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        expect(
            self.repetition_penalty > 0,
            "repetition_penalty",
            "to be positive",
            self.repetition_penalty,
        )


@dataclasses.dataclass(frozen=True)
class GenerateArguments:
    """Writes text with a run's decoder: the text to stdout, everything else to stderr."""

    run: Annotated[
        str | None,
        POSITIONAL,
        flag(metavar="[RUN]", help="name or path of the run; without it the newest"),
    ] = None
    prompt: PromptOptions = dataclasses.field(default_factory=PromptOptions)
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    no_cache: Annotated[bool, SWITCH, flag(help="compute every token from the whole text")] = False
    check_cache: Annotated[
        bool,
        SWITCH,
        flag(help="write greedily with the cache, in pages and without it, and compare"),
    ] = False
    no_stream: Annotated[bool, SWITCH, flag(help="print each text when it is complete")] = False
    stats: Annotated[
        bool,
        SWITCH,
        flag(help="print tokens per second and the part of the memory bandwidth that they use"),
    ] = False
    machine: MachineOptions = dataclasses.field(default_factory=MachineOptions)
    output: OutputOptions = dataclasses.field(default_factory=OutputOptions)


@dataclasses.dataclass(frozen=True)
class Text:
    """A written text.

    Attributes:
        ids: of the new tokens.
        text: the new text, without a stop text.
        first: seconds until the first token.
        seconds: for all of them.
    """

    ids: list[int]
    text: str
    first: float
    seconds: float


def run(words: Sequence[str]) -> int:
    """Runs the command.

    Args:
        words: the command line behind ``generate``.

    Returns:
        The exit code: 1 if ``--check-cache`` found a difference.
    """
    arguments = flags.parse(GenerateArguments, words, "generate", GenerateArguments())
    output = Output(arguments.output.quiet, arguments.output.json)
    options = arguments.machine
    machine.choose_device(options.device)
    dtype = machine.choose_dtype(options.dtype)
    folder = existing_run(arguments.run)
    decoder = Decoder.from_pretrained(folder, dtype=getattr(torch, dtype.value))
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size != decoder.config.vocab_size:
        raise UsageError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, "
            f"its decoder {decoder.config.vocab_size}"
        )
    prompt = arguments.prompt.read()
    shown = prompt if arguments.prompt.given else ""
    threads = choose_threads(options.threads, decoder)
    writer = Writer(decoder, tokenizer, arguments.prompt, arguments.sampling)
    size = format_count(decoder.num_parameters())
    output.say(f"run: {folder}, {size} parameters, {dtype.value}; threads: {threads}")
    if arguments.check_cache:
        return _check_cache(writer, prompt, shown, output)
    result: dict[str, Any] = {"run": str(folder), "prompt": prompt, "samples": []}
    for index in range(arguments.prompt.num_samples):
        if index:
            output.text("\n---")
        stream = not arguments.no_stream
        output.text(shown, end="")
        show = (lambda piece: output.text(piece, end="")) if stream else None
        text = writer.write(prompt, options.seed + index, not arguments.no_cache, show)
        output.text("" if stream else text.text)
        result["samples"].append({"text": text.text, "tokens": len(text.ids)})
        if arguments.stats:
            stats = _statistics(decoder, len(tokenizer.encode(prompt)), text)
            result["samples"][-1] |= stats
            output.say(_describe(stats))
    output.result(result)
    return 0


def choose_threads(requested: str, decoder: Decoder) -> machine.Choice:
    """The threads that ``--threads`` names; auto measures a few tokens with each candidate."""
    if requested != "auto":
        return machine.set_threads(requested)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    return machine.calibrate_threads(lambda: decoder.generate(ids, CALIBRATION_TOKENS))


class Writer:
    """Continues prompts.

    Args:
        decoder: the model.
        tokenizer: its tokenizer.
        prompt: how much to write, and where to stop.
        sampling: how to choose tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        prompt: PromptOptions,
        sampling: SamplingOptions,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.max_new_tokens = prompt.max_new_tokens
        self.stop = prompt.stop
        self.sampling = dataclasses.asdict(sampling)
        if self.sampling.pop("greedy"):
            self.sampling["temperature"] = 0.0

    def write(
        self,
        prompt: str,
        seed: int,
        use_cache: bool,
        show: Callable[[str], object] | None = None,
        cache: AnyCache | None = None,
    ) -> Text:
        """One text; ``show`` is called with each piece of it as soon as it is certain."""
        stream = TextStream(self.tokenizer, self.stop)
        pieces: list[str] = []
        times: list[float] = []

        def emit(piece: str) -> None:
            if piece:
                pieces.append(piece)
                if show is not None:
                    show(piece)

        def on_token(step: Tensor) -> None:
            times.append(time.perf_counter())
            emit(stream.push(int(step[0])))

        ids = torch.tensor([self.tokenizer.encode(prompt)])
        begin = time.perf_counter()
        written = self.decoder.generate(
            ids,
            self.max_new_tokens,
            seed=seed,
            stop=self.stop,
            tokenizer=self.tokenizer,
            use_cache=use_cache,
            cache=cache,
            on_token=on_token,
            **self.sampling,
        )
        emit(stream.finish())
        new = written[0, ids.shape[1] :].tolist()
        return Text(new, "".join(pieces), times[0] - begin, times[-1] - begin)


def _check_cache(writer: Writer, prompt: str, shown: str, output: Output) -> int:
    """Writes the same greedy text with the cache, with one in pages and without."""
    writer.sampling["temperature"] = 0.0
    config, dtype = writer.decoder.config, writer.decoder.dtype
    pages = -(-config.max_position_embeddings // CHECKED_PAGE_SIZE)
    cache = PagedKVCache(config, 1, pages, CHECKED_PAGE_SIZE, dtype, writer.decoder.device)
    cached = writer.write(prompt, 0, True)
    paged = writer.write(prompt, 0, True, cache=cache)
    plain = writer.write(prompt, 0, False)
    output.text(shown + cached.text)
    texts = {
        "with and without the cache": (cached, plain),
        "with and without pages": (cached, paged),
    }
    same = True
    for which, (one, other) in texts.items():
        if one.ids != other.ids:
            same = False
            place = _first_difference(one.ids, other.ids)
            output.say(f"the texts {which} differ from new token {place} on")
    if same:
        ratio = plain.seconds / cached.seconds
        output.say(
            f"same text with and without the cache, {ratio:.1f} times as fast with it; "
            "the same in pages"
        )
    output.result(
        {
            "same": same,
            "tokens": len(cached.ids),
            "cached_seconds": cached.seconds,
            "paged_seconds": paged.seconds,
            "uncached_seconds": plain.seconds,
        }
    )
    return 0 if same else 1


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _statistics(decoder: Decoder, prompt_tokens: int, text: Text) -> dict[str, float]:
    """Speed, and how near it is to reading weights and cache once per token."""
    rest = len(text.ids) - 1
    rate = rest / (text.seconds - text.first) if rest else 1 / text.first
    context = decoder.config.max_position_embeddings
    steps = range(prompt_tokens + min(rest, 1), prompt_tokens + rest + 1)  # lengths after each
    lengths = [length - window_start(length, context) for length in steps]
    read = bytes_per_step(decoder, round(statistics.mean(lengths)))
    return {
        "prompt_tokens": prompt_tokens,
        "seconds_to_first_token": text.first,
        "tokens_per_second": rate,
        "bandwidth_share": rate * read / memory_bandwidth(),
    }


def memory_bandwidth() -> float:
    """Bytes per second that this process reads from memory, measured now, the best of a few."""
    block = torch.zeros(BANDWIDTH_BYTES // 8, dtype=torch.int64)
    times = []
    for _ in range(BANDWIDTH_PASSES):
        before = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - before)
    return BANDWIDTH_BYTES / min(times)


def _describe(stats: dict[str, float]) -> str:
    return (
        f"prompt: {stats['prompt_tokens']} tokens, first token after "
        f"{1000 * stats['seconds_to_first_token']:.0f} ms; "
        f"then {stats['tokens_per_second']:.0f} tokens/s, "
        f"{100 * stats['bandwidth_share']:.0f}% of the memory bandwidth's limit"
    )
