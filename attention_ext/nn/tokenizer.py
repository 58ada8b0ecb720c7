"""Text to token ids and back, exactly: every token is a piece of UTF-8 bytes.

`ByteTokenizer` has one token per byte and needs nothing else. `BpeTokenizer` merges frequent byte
pairs and wraps the `tokenizers` library. Both are saved as a Hugging Face ``tokenizer.json``, where
each byte is written as one printable character (GPT-2's table).
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from attention_ext.errors import ArgumentError

from .checkpoint import write_atomically

TOKENIZER_FILE = "tokenizer.json"
NUM_BYTES = 256


def _byte_characters() -> list[str]:
    """The character that stands for each byte: itself where printable, else one beyond 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


_BYTE_CHARACTERS = _byte_characters()
_CHARACTER_BYTES = {character: byte for byte, character in enumerate(_BYTE_CHARACTERS)}


class Tokenizer(Protocol):
    """What the decoder's helpers ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that one token stands for."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write ``tokenizer.json``."""


class _BytePieces:
    """What both tokenizers share: ids are pieces of bytes."""

    _pieces: Sequence[bytes | None]

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._pieces)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that one token stands for.

        Raises:
            ArgumentError: an id outside the vocabulary.
        """
        index = operator.index(token_id)
        piece = self._pieces[index] if 0 <= index < len(self._pieces) else None
        if piece is None:
            raise ArgumentError(
                f"{type(self).__name__}: expected token ids of the vocabulary (0 to "
                f"{self.vocab_size - 1}), got {index}"
            )
        return piece

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            ArgumentError: an id outside the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")


class ByteTokenizer(_BytePieces):
    """One token per UTF-8 byte.

    Example:
        >>> ByteTokenizer().encode("Maya")
        [77, 97, 121, 97]
        >>> ByteTokenizer().decode([195, 169])
        'é'
    """

    _pieces = tuple(bytes([byte]) for byte in range(NUM_BYTES))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises:
            ArgumentError: a lone surrogate, which UTF-8 cannot hold.
        """
        return list(_utf8(text))

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of several texts."""
        return [self.encode(text) for text in texts]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write ``tokenizer.json``: a byte-level BPE without merges.

        Args:
            path: the file, named ``*.json``, or the folder for ``tokenizer.json``.

        Returns:
            The file.
        """
        level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        vocab = {character: byte for byte, character in enumerate(_BYTE_CHARACTERS)}
        content: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", **level},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", **level},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
        return _write(path, json.dumps(content, ensure_ascii=False, indent=2))


class BpeTokenizer(_BytePieces):
    """Byte-level byte-pair encoding by the `tokenizers` library.

    Args:
        backend: a ``tokenizers.Tokenizer`` whose decoder is byte-level.

    Raises:
        ArgumentError: a tokenizer of another kind.

    Example:
        >>> tokenizer = BpeTokenizer.train(["low lower lowest"] * 9, vocab_size=260)
        >>> len(tokenizer.encode("lowest")), tokenizer.decode(tokenizer.encode("naïve ☃"))
        (4, 'naïve ☃')
    """

    def __init__(self, backend: Any) -> None:
        description = json.loads(backend.to_str())
        if not _is_byte_level(description.get("decoder")):
            kind = (description.get("decoder") or {}).get("type")
            raise ArgumentError(
                f"BpeTokenizer: expected a tokenizer with a ByteLevel decoder, got {kind}"
            )
        self.backend = backend
        added = {token["id"]: token["content"] for token in description.get("added_tokens", ())}
        vocab = backend.get_vocab(with_added_tokens=True)
        self._pieces = [None] * (1 + max(vocab.values(), default=-1))
        for token, index in vocab.items():
            if index in added:
                self._pieces[index] = added[index].encode()
            else:
                self._pieces[index] = bytes(_CHARACTER_BYTES[character] for character in token)

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
    ) -> BpeTokenizer:
        """Learn merges from texts.

        Args:
            texts: documents; no merge crosses from one to the next.
            vocab_size: wanted number of tokens, bytes and special tokens included. A short text
                gives fewer: `vocab_size` of the result tells.
            special_tokens: tokens that stand for themselves, with the first ids.

        Returns:
            The tokenizer.

        Raises:
            ArgumentError: no room for the 256 bytes and the special tokens.
            ImportError: tokenizers is not installed.
        """
        tokenizers = _import_tokenizers()
        smallest = NUM_BYTES + len(special_tokens)
        if vocab_size < smallest:
            raise ArgumentError(
                f"BpeTokenizer.train: expected vocab_size of at least {smallest} (every byte and "
                f"{len(special_tokens)} special tokens), got {vocab_size}"
            )
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            special_tokens=list(special_tokens),
            initial_alphabet=sorted(_BYTE_CHARACTERS),
        )
        backend.train_from_iterator(map(_checked_text, texts), trainer=trainer)
        return cls(backend)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without added start or end tokens.

        Raises:
            ArgumentError: a lone surrogate, which UTF-8 cannot hold.
        """
        ids: list[int] = self.backend.encode(_checked_text(text), add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of several texts, shared among threads."""
        checked = [_checked_text(text) for text in texts]
        return [
            encoding.ids
            for encoding in self.backend.encode_batch(checked, add_special_tokens=False)
        ]

    def token_id(self, token: str) -> int | None:
        """The id of a special token, or None."""
        index: int | None = self.backend.token_to_id(token)
        return index

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write ``tokenizer.json``.

        Args:
            path: the file, named ``*.json``, or the folder for ``tokenizer.json``.

        Returns:
            The file.
        """
        return _write(path, self.backend.to_str(pretty=True))


def load_tokenizer(path: str | os.PathLike[str]) -> ByteTokenizer | BpeTokenizer:
    """Read a ``tokenizer.json``.

    Args:
        path: the file, or the folder that holds it.

    Returns:
        A `ByteTokenizer` where the file describes one (needs no library), else a `BpeTokenizer`.

    Raises:
        ArgumentError: a missing file, one that is no tokenizer, or one that is not byte-level.
        ImportError: tokenizers is needed and not installed.
    """
    file = Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ArgumentError(f"load_tokenizer: expected a {TOKENIZER_FILE}, got no file {file}")
    try:
        text = file.read_text(encoding="utf-8")
        model = json.loads(text)["model"]
        if model["vocab"] == _CHARACTER_BYTES and not model.get("merges"):
            return ByteTokenizer()
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            f"load_tokenizer: expected a Hugging Face tokenizer in {file}, got: {error!r}"
        ) from None
    tokenizers = _import_tokenizers()
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises Exception itself
        raise ArgumentError(
            f"load_tokenizer: expected a Hugging Face tokenizer in {file}, got: {error}"
        ) from None
    return BpeTokenizer(backend)


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return any(map(_is_byte_level, decoder.get("decoders", ())))
    return decoder.get("type") == "ByteLevel"


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ArgumentError(
            "encode: expected text that UTF-8 can hold, got a lone surrogate "
            f"{text[error.start]!r} at character {error.start}"
        ) from None


def _checked_text(text: str) -> str:
    _utf8(text)
    return text


def _write(path: str | os.PathLike[str], content: str) -> Path:
    target = Path(path)
    if target.suffix != ".json":
        target = target / TOKENIZER_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, content.encode())
    return target


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "byte-pair encoding needs tokenizers: pip install attention_ext[decoder]"
        ) from error
    return tokenizers
