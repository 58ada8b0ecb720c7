"""Tokens of a corpus: batches for training, windows for validation.

The text stays in memory as one tensor of token ids. An epoch cuts it into windows of ``context``
tokens, from an offset of its own, and visits each once in random order; both come from a seeded
generator, whose state is saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .corpus import Corpus
from .errors import UsageError
from .options import DataOptions

if TYPE_CHECKING:
    from attention_ext.nn import BpeTokenizer, ByteTokenizer, Decoder

EVALUATION_TOKENS = 4096  # of one forward pass


def make_tokenizer(options: DataOptions, corpus: Corpus) -> BpeTokenizer | ByteTokenizer:
    """The tokenizer of ``--tokenizer``: learned from the training text, bytes, or a file."""
    from attention_ext.nn import BpeTokenizer, ByteTokenizer, load_tokenizer

    if options.tokenizer == "byte":
        return ByteTokenizer()
    if options.tokenizer == "bpe":
        return BpeTokenizer.train(corpus.train, options.vocab_size)
    return load_tokenizer(options.tokenizer)


def encode(tokenizer: BpeTokenizer | ByteTokenizer, documents: Sequence[str]) -> Tensor:
    """The tokens of documents one behind the other, (tokens,) int32."""
    pieces = [torch.tensor(ids, dtype=torch.int32) for ids in tokenizer.encode_batch(documents)]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int32)


def check_length(tokens: Tensor, context: int, name: str, remedy: str) -> None:
    """Refuses a text that does not hold one window and the token behind it.

    Raises:
        UsageError: with both numbers.
    """
    if len(tokens) < context + 1:
        raise UsageError(
            f"the {name} text has {len(tokens)} tokens, fewer than "
            f"context + 1 = {context + 1}: {remedy}"
        )


class Batches:
    """An endless sequence of batches.

    Args:
        tokens: the training text, (tokens,) int32.
        context: tokens of a window.
        batch_size: windows of a batch.
        seed: of the generator.

    Example:
        >>> batches = Batches(torch.arange(100, dtype=torch.int32), context=4, batch_size=2, seed=0)
        >>> ids, targets = batches.next()
        >>> ids.shape, bool((targets == ids + 1).all())
        (torch.Size([2, 4]), True)
    """

    def __init__(self, tokens: Tensor, context: int, batch_size: int, seed: int) -> None:
        self.tokens = tokens
        self.context = context
        self.batch_size = batch_size
        self.epoch = -1
        self._generator = torch.Generator().manual_seed(seed)
        self._begin_epoch()

    def next(self) -> tuple[Tensor, Tensor]:
        """Ids and the tokens behind them, both (batch_size, context) int64."""
        starts: list[int] = []
        while len(starts) < self.batch_size:
            if self.position == len(self._order):
                self._begin_epoch()
            taken = self._order[self.position : self.position + self.batch_size - len(starts)]
            self.position += len(taken)
            starts += taken
        windows = torch.stack(
            [self.tokens[start : start + self.context + 1] for start in starts]
        ).long()
        return windows[:, :-1], windows[:, 1:]

    def state(self) -> tuple[dict[str, int], Tensor]:
        """The place in the text: numbers, and the generator's state before the epoch."""
        return {"epoch": self.epoch, "position": self.position}, self._epoch_state

    def load_state(self, numbers: dict[str, int], generator: Tensor) -> None:
        """Goes to the place that :meth:`state` gave."""
        self._generator.set_state(generator)
        self._begin_epoch()
        self.epoch, self.position = numbers["epoch"], numbers["position"]

    def _begin_epoch(self) -> None:
        self._epoch_state = self._generator.get_state()
        room = (
            len(self.tokens) - 1 - self.context
        )  # last place where a window and its next token fit
        offset = int(torch.randint(min(self.context, room + 1), (), generator=self._generator))
        count = (room - offset) // self.context + 1
        order = torch.randperm(count, generator=self._generator)
        self._order: list[int] = (order * self.context + offset).tolist()
        self.epoch += 1
        self.position = 0


@dataclass(frozen=True)
class Evaluation:
    """How well a decoder predicts the validation text.

    Attributes:
        loss: mean cross-entropy of a token, in nats.
        bits_per_byte: loss x tokens / bytes / ln 2, comparable between tokenizers.
        tokens: how many were predicted.
    """

    loss: float
    bits_per_byte: float
    tokens: int


class Validation:
    """The validation text, cut into windows that do not overlap.

    Args:
        tokens: (tokens,) int32.
        context: tokens of a window.
        tokenizer: tells how many bytes a token stands for.
    """

    def __init__(
        self, tokens: Tensor, context: int, tokenizer: BpeTokenizer | ByteTokenizer
    ) -> None:
        count = (len(tokens) - 1) // context
        self.ids = tokens[: count * context].view(count, context)  # (windows, context) int32
        self.targets = tokens[1 : count * context + 1].view(count, context)
        used, places = torch.unique(self.targets, return_inverse=True)
        self.bytes = torch.tensor([len(tokenizer.token_bytes(token)) for token in used.tolist()])[
            places
        ]

    def evaluate(self, decoder: Decoder, max_tokens: int, autocast: Any) -> Evaluation:
        """Predicts the first ``max_tokens`` tokens, whole windows, at least one."""
        context = self.ids.shape[1]
        count = min(len(self.ids), max(1, max_tokens // context))
        rows = max(1, EVALUATION_TOKENS // context)
        total = 0.0
        was_training = decoder.training
        decoder.eval()
        with torch.inference_mode(), autocast:
            for start in range(0, count, rows):
                ids = self.ids[start : min(start + rows, count)].long().to(decoder.device)
                targets = self.targets[start : min(start + rows, count)].long().to(decoder.device)
                total += decoder.loss(ids, targets).item() * ids.numel()
        decoder.train(was_training)
        tokens = count * context
        bits = total / math.log(2) / int(self.bytes[:count].sum())
        return Evaluation(total / tokens, bits, tokens)
