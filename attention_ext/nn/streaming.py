"""Text that grows token by token: whole characters only, and nothing of a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence

from attention_ext.errors import ArgumentError

from .tokenizer import Tokenizer


class StreamDecoder:
    """Turns tokens into text one by one, never showing half a character.

    Example:
        >>> from attention_ext.nn import ByteTokenizer
        >>> stream = StreamDecoder(ByteTokenizer())
        >>> [stream.push(token) for token in "né".encode()] + [stream.finish()]
        ['n', '', 'é', '']
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; bytes of an open character wait."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left at the end: "" or U+FFFD for a character that never was completed."""
        return self._decoder.decode(b"", final=True)


def stream_decoder(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Decode tokens as they come.

    Args:
        tokenizer: gives the bytes of each token.
        ids: tokens, possibly a generator that is still producing.

    Yields:
        Pieces of text, cut only between characters; joined they are ``tokenizer.decode(ids)``.

    Example:
        >>> from attention_ext.nn import ByteTokenizer
        >>> list(stream_decoder(ByteTokenizer(), "né!".encode()))
        ['n', 'é', '!']
    """
    stream = StreamDecoder(tokenizer)
    for token_id in ids:
        text = stream.push(token_id)
        if text:
            yield text
    rest = stream.finish()
    if rest:
        yield rest


class TextStream:
    """New text of one row, cut at the first stop text, for printing while it grows.

    Text that might be the beginning of a stop text is held back until it is clear.

    Args:
        tokenizer: gives the bytes of each token.
        stop: texts that end the row; they are not part of the text.

    Attributes:
        stopped: a stop text has appeared; further tokens are ignored.

    Example:
        >>> from attention_ext.nn import ByteTokenizer
        >>> stream = TextStream(ByteTokenizer(), stop=["END"])
        >>> [stream.push(token) for token in b"aEbEND!"], stream.stopped
        (['a', '', 'Eb', '', '', '', ''], True)
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] = ()) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stop = checked_stop(stop)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token."""
        return "" if self.stopped else self._release(self._decoder.push(token_id))

    def finish(self) -> str:
        """What was still held back when no more tokens come."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.finish())
        text += self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        self._held += text
        found = [place for place in map(self._held.find, self._stop) if place >= 0]
        if found:
            self.stopped = True
            certain, self._held = self._held[: min(found)], ""
            return certain
        held = max((_open_prefix(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - held
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain


def _open_prefix(text: str, stop: str) -> int:
    """Length of the longest end of text with which stop begins."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def checked_stop(stop: str | Sequence[str]) -> list[str]:
    """The stop texts as a list; a plain string is one text.

    Raises:
        ArgumentError: an empty text, or something that is no text.
    """
    texts = [stop] if isinstance(stop, str) else list(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise ArgumentError(f"generate: expected stop to hold non-empty texts, got {texts}")
    return texts
