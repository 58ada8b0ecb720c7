"""Writing text with a decoder: prefill, then one token at a time.

The context of a row is its real tokens. As long as they fit into ``max_position_embeddings``, each
step feeds the newest token and reads the rest from the cache. When they no longer fit, the window
moves forward by a quarter of the maximum and is prefilled anew, so that a long text costs one
prefill per quarter. The window depends on the row's length alone, so cached and uncached
generation, and a row alone or in a batch, see the same tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attention_ext.errors import ArgumentError

from .cache import AnyCache, CacheRows, rows_of
from .inputs import check_causal, check_inputs, outside_vocabulary
from .kv_cache import KVCache
from .sampling import check_sampling, sample_next
from .streaming import TextStream, checked_stop
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .decoder import Decoder

OnToken = Callable[[Tensor], object]


def generate(
    decoder: Decoder,
    ids: Tensor,
    max_new_tokens: int,
    *,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    use_cache: bool = True,
    cache: AnyCache | None = None,
    on_token: OnToken | None = None,
) -> Tensor:
    """Continue each row of ids; reachable as `Decoder.generate`.

    Runs in evaluation and inference mode; every module's training flag is restored.

    Args:
        decoder: the model.
        ids: prompts (batch, L), int64 or int32, at least one real token in each row.
        max_new_tokens: how many tokens to append at most.
        attention_mask: (batch, L) bool, True = a real token, for prompts of unequal length, padded
            on the left or on the right. Each row gets the text that it gets alone (greedily).
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: how many of the likeliest tokens stay; 0: all. See `sample_next`.
        top_p: probability that the likeliest tokens that stay must reach; 1: all.
        min_p: least probability, relative to the likeliest token's; 0: all.
        repetition_penalty: divides positive and multiplies negative logits of the row's tokens.
        seed: of an own random generator; default: torch's global one.
        stop: texts that end a row where they appear in its new text, wherever token borders lie.
        tokenizer: turns tokens into text; needed for ``stop`` only.
        eos_token_id: a token that ends a row.
        pad_token_id: fills ended rows while others go on; default: eos_token_id, else 0.
        use_cache: False recomputes the window at every step; the greedy text is the same.
        cache: rows for keys and values, as a decoder takes them; default: a `KVCache` as large as
            it must be. What they hold is taken for the first tokens of each prompt and not
            computed again, so that a talk goes on and texts share a prefix. Afterwards they hold
            the text, or the window of it, but for the last token.
        on_token: called with each step's tokens (batch,), padding in ended rows, for streaming.

    Returns:
        int64 (batch, L + new): ids as given, then the new tokens, the ones that ended the row
        included. new < max_new_tokens if every row has ended.

    Raises:
        ArgumentError: an option outside its range, an empty prompt, stop without tokenizer, an
            encoder, or a cache of another configuration, batch size, dtype or device, beside
            ``use_cache=False``, as long as a prompt, or (while writing) without room.

    Example:
        >>> from attention_ext.nn import ByteTokenizer, Decoder, DecoderConfig
        >>> decoder = Decoder(DecoderConfig(256, 32, num_hidden_layers=1, num_attention_heads=2))
        >>> prompt = torch.tensor([ByteTokenizer().encode("her notebook")])
        >>> text = decoder.generate(prompt, 5, temperature=0.8, top_k=20, seed=0)
        >>> text.shape
        torch.Size([1, 17])
        >>> torch.equal(text, decoder.generate(prompt, 5, temperature=0.8, top_k=20, seed=0))
        True
    """
    check_causal("Decoder.generate", decoder.config)
    _check_prompt(decoder, ids, attention_mask, max_new_tokens)
    check_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    for name, token_id in (("eos_token_id", eos_token_id), ("pad_token_id", pad_token_id)):
        if token_id is not None and not 0 <= token_id < decoder.config.vocab_size:
            raise ArgumentError(
                f"Decoder.generate: expected {name} from 0 to {decoder.config.vocab_size - 1}, "
                f"got {token_id}"
            )
    rows_of_cache = None
    if use_cache:
        rows_of_cache = _cache_rows(decoder, ids, attention_mask, max_new_tokens, cache)
    elif cache is not None:
        raise ArgumentError("Decoder.generate: expected use_cache=True beside a cache, got False")
    endings = _Endings(len(ids), stop, tokenizer, eos_token_id)
    pad = pad_token_id if pad_token_id is not None else (eos_token_id or 0)
    generator = None
    if seed is not None:
        generator = torch.Generator(device=decoder.device).manual_seed(seed)

    with torch.inference_mode(), _evaluating(decoder):
        rows = _Rows(decoder, ids, attention_mask, max_new_tokens, rows_of_cache)
        seen = rows.seen_tokens() if repetition_penalty != 1.0 else None
        steps: list[Tensor] = []
        while len(steps) < max_new_tokens and not endings.all_ended:
            token = sample_next(
                rows.next_logits(),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                seen=seen,
                generator=generator,
            )  # (batch,)
            token = endings.replace_ended(token, pad)
            rows.append(token)
            if seen is not None:
                seen.scatter_(1, token[:, None], True)
            steps.append(token)
            endings.update(token)
            if on_token is not None:
                on_token(token)
        new = torch.stack(steps, dim=1) if steps else ids[:, :0]
    # Joined outside inference mode, so that the result may be trained on.
    return torch.cat([ids.long().to(decoder.device), new], dim=1)


def _cache_rows(
    decoder: Decoder,
    ids: Tensor,
    attention_mask: Tensor | None,
    max_new_tokens: int,
    cache: AnyCache | None,
) -> CacheRows:
    """The caller's cache, or one that is large enough."""
    batch, length = ids.shape
    lengths = [length] * batch
    if attention_mask is not None:
        lengths = attention_mask.sum(dim=-1).tolist()
    if cache is None:
        longest = max(lengths, default=0) + max_new_tokens
        capacity = min(decoder.config.max_position_embeddings, longest)
        return KVCache(decoder.config, batch, capacity, decoder.dtype, decoder.device).rows()
    rows = rows_of(cache)
    rows.check_use(decoder.config, batch, decoder.dtype, decoder.device)
    for held, given in zip(rows.seqlens.tolist(), lengths, strict=True):
        if held >= given:
            raise ArgumentError(
                "Decoder.generate: expected a cache that holds less than each prompt, got one of "
                f"{held} positions for {given} tokens"
            )
    return rows


def window_start(length: int, window: int) -> int:
    """Where the context of a row of `length` tokens begins, for a longest context of `window`.

    Example:
        >>> [window_start(length, window=8) for length in (8, 9, 10, 11)]
        [0, 2, 2, 4]
    """
    hop = max(1, window // 4)
    return max(0, -(-(length - window) // hop) * hop)


class _Rows:
    """The tokens of each row, packed to the left, and the way from them to the next logits."""

    def __init__(
        self,
        decoder: Decoder,
        ids: Tensor,
        attention_mask: Tensor | None,
        max_new_tokens: int,
        cache: CacheRows | None,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        ids = ids.to(decoder.device)
        batch, length = ids.shape
        self.lengths = [length] * batch
        self.tokens = ids.new_zeros((batch, length + max_new_tokens), dtype=torch.int64)
        if attention_mask is None:
            self.tokens[:, :length] = ids
        else:
            self.lengths = attention_mask.sum(dim=-1).tolist()
            for row, used in enumerate(self.lengths):
                self.tokens[row, :used] = ids[row, attention_mask[row].to(ids.device)]
        self.ragged = len(set(self.lengths)) > 1
        self.places = torch.tensor(self.lengths, device=ids.device)[:, None]  # (batch, 1): the next
        self.window = decoder.config.max_position_embeddings
        self.cached_steps = 0  # for so many the cache holds all but the newest token
        self.newest = self.tokens[:, :0]  # (batch, 1)

    def seen_tokens(self) -> Tensor:
        """Which tokens each row holds, (batch, vocab) bool."""
        shape = (len(self.lengths), self.decoder.config.vocab_size)
        seen = torch.zeros(shape, dtype=torch.bool, device=self.tokens.device)
        for row, used in enumerate(self.lengths):
            seen[row, self.tokens[row, :used]] = True
        return seen

    def append(self, token: Tensor) -> None:
        """Add one token (batch,) to the rows."""
        self.newest = token[:, None]
        if self.ragged:
            self.tokens.scatter_(1, self.places, self.newest)
            self.places += 1
        else:
            self.tokens[:, self.lengths[0]] = token
        self.lengths = [used + 1 for used in self.lengths]

    def next_logits(self) -> Tensor:
        """Logits (batch, vocab) of the token after each row's last."""
        if self.cached_steps > 0:
            self.cached_steps -= 1
            hidden = self.decoder.hidden_states(self.newest, cache=self.cache)[:, -1]
        else:
            hidden = self._prefill()
        return self.decoder.project(hidden)

    def _prefill(self) -> Tensor:
        """Last hidden state (batch, hidden) of each row's whole window, padded on the right."""
        starts = [window_start(used, self.window) for used in self.lengths]
        if self.cache is not None:
            spare = (s + self.window - used for s, used in zip(starts, self.lengths, strict=True))
            self.cached_steps = min(spare)
            if any(starts):
                self.cache.reset()
            else:
                starts = self.cache.seqlens.tolist()  # behind a prefix that it holds already
        sizes = [used - start for used, start in zip(self.lengths, starts, strict=True)]
        longest = max(sizes)
        ids = self._columns(starts, longest)
        if len(set(sizes)) == 1:
            return self.decoder.hidden_states(ids, cache=self.cache)[:, -1]
        ends = torch.tensor(sizes, device=ids.device)
        mask = torch.arange(longest, device=ids.device) < ends[:, None]  # (batch, longest)
        hidden = self.decoder.hidden_states(ids, cache=self.cache, attention_mask=mask)
        return hidden[torch.arange(len(sizes), device=ids.device), ends - 1]

    def _columns(self, starts: list[int], width: int) -> Tensor:
        """Tokens [start, start + width) of each row, (batch, width)."""
        if len(set(starts)) == 1:
            return self.tokens[:, starts[0] : starts[0] + width]
        places = torch.tensor(starts)[:, None] + torch.arange(width)
        places = places.clamp_max(self.tokens.shape[1] - 1).to(self.tokens.device)
        return self.tokens.gather(1, places)


class _Endings:
    """Which rows have ended, by token or by text."""

    def __init__(
        self,
        batch: int,
        stop: str | Sequence[str],
        tokenizer: Tokenizer | None,
        eos_token_id: int | None,
    ) -> None:
        texts = checked_stop(stop)
        if texts and tokenizer is None:
            raise ArgumentError(
                f"Decoder.generate: expected a tokenizer to find the stop texts {texts}, got None"
            )
        self.eos_token_id = eos_token_id
        self.streams: list[TextStream] = []
        if texts and tokenizer is not None:
            self.streams = [TextStream(tokenizer, texts) for _ in range(batch)]
        self.ended = [False] * batch

    @property
    def all_ended(self) -> bool:
        """Whether nothing is left to write; also for an empty batch."""
        return all(self.ended)

    def replace_ended(self, token: Tensor, pad: int) -> Tensor:
        """The step's tokens with padding in ended rows."""
        if not any(self.ended):
            return token
        return token.masked_fill(torch.tensor(self.ended, device=token.device), pad)

    def update(self, token: Tensor) -> None:
        """Look at the step's tokens (batch,); reads them back only if something can end a row."""
        if self.eos_token_id is None and not self.streams:
            return
        for row, index in enumerate(token.tolist()):
            if self.ended[row]:
                continue
            self.ended[row] = index == self.eos_token_id
            if self.streams and not self.ended[row]:
                self.streams[row].push(index)
                self.ended[row] = self.streams[row].stopped


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every submodule gets its own flag back."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _check_prompt(
    decoder: Decoder, ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int
) -> None:
    check_inputs(ids, attention_mask)
    if max_new_tokens < 0:
        raise ArgumentError(
            f"Decoder.generate: expected max_new_tokens of at least 0, got {max_new_tokens}"
        )
    counts = [ids.shape[1]] * len(ids)
    real = ids.flatten()
    if attention_mask is not None:
        counts = attention_mask.sum(dim=-1).tolist()
        real = ids[attention_mask]
    if bool(((real < 0) | (real >= decoder.config.vocab_size)).any()):
        raise outside_vocabulary("ids", real, decoder.config.vocab_size)
    if not all(counts):
        raise ArgumentError(
            "Decoder.generate: expected at least one token in each prompt, got "
            f"{counts.index(0)} as the first row without any"
        )
