"""Text to learn from: read, named by a digest, and split into training and validation.

A corpus is a list of documents. They are split by a hash of each, so that neither the order of the
files nor their names decide what is held out: sorted by hash, the first ones, up to the wanted part
of the text, are validation.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import docs_corpus
from .errors import UsageError, explain_os_error
from .options import DataOptions
from .output import format_bytes

SUFFIXES = (".txt", ".md", ".py", ".rst")
BLOCK = 4096  # characters of a block, where a text has too few documents to hold some out
FEW_DOCUMENTS = 20
SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Corpus:
    """Text for training and for validation.

    Attributes:
        train: the training documents, each with the separator behind it.
        val: the validation documents, likewise.
        description: what it is, for people: "Python 3.11.7 documentation, 1.8 MB".
        digest: SHA-256 of both texts.
    """

    train: list[str]
    val: list[str]
    description: str
    digest: str

    def summary(self) -> str:
        """The line that names the corpus."""
        return f"corpus: {self.description}, sha256 {self.digest[:12]}…"


def read_corpus(options: DataOptions) -> Corpus:
    """Reads and splits what ``--data`` and ``--val`` name.

    Raises:
        UsageError: a missing, empty or non-UTF-8 file, a folder without text.
    """
    documents, description = _read(options.data)
    if options.val is None:
        if len(documents) < FEW_DOCUMENTS:
            documents = [block for document in documents for block in _blocks(document)]
        train, val = split(documents, options.val_fraction)
    else:
        train, (val, _) = documents, _read((options.val,))
    texts = ["".join(documents).encode() for documents in (train, val)]
    digest = hashlib.sha256(b"\0".join(texts)).hexdigest()
    return Corpus(train, val, f"{description}, {format_bytes(sum(map(len, texts)))}", digest)


def split(documents: Sequence[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Splits documents by their hashes: training as given, validation in the order of the hashes.

    At least one document is held out, and the last one stays in any case.

    Example:
        >>> train, val = split([f"document {i}" for i in range(10)], 0.3)
        >>> len(train), len(val), set(train) & set(val)
        (7, 3, set())
    """
    order = sorted(range(len(documents)), key=lambda index: _hash(documents[index]))
    wanted = val_fraction * sum(map(len, documents))
    held_out: list[int] = []
    for index in order[:-1]:
        if held_out and wanted < len(documents[index]) / 2:
            break
        held_out.append(index)
        wanted -= len(documents[index])
    chosen = set(held_out)
    return [text for index, text in enumerate(documents) if index not in chosen], [
        documents[i] for i in held_out
    ]


def read_text(path: Path) -> str:
    """A UTF-8 file as it is, line ends included.

    Raises:
        UsageError: it is missing, unreadable, empty or not UTF-8 (with the first wrong byte).
    """
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {explain_os_error(error)}") from None


def read_stdin() -> str:
    """Standard input as UTF-8 text.

    Raises:
        UsageError: it is empty or not UTF-8.
    """
    return _decode(sys.stdin.buffer.read(), "standard input")


def _read(entries: Sequence[str]) -> tuple[list[str], str]:
    """The documents that the entries name, each with a separator at its end, and what they are."""
    documents: list[str] = []
    descriptions: list[str] = []
    for entry in entries:
        if entry == "docs":
            found, description = docs_corpus.read_docs(), docs_corpus.name()
        elif entry == "-":
            found, description = [read_stdin()], "standard input"
        elif Path(entry).is_dir():
            found, description = _read_folder(Path(entry))
        else:
            found, description = [read_text(Path(entry))], Path(entry).name
        documents += [text + SEPARATOR for text in found]
        descriptions.append(description)
    return documents, " + ".join(descriptions)


def _read_folder(folder: Path) -> tuple[list[str], str]:
    files, skipped = [], 0
    for path in _walk(folder):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or path.suffix not in SUFFIXES or _is_binary(path):
            skipped += 1
        elif path.stat().st_size:
            files.append(path)
    if not files:
        raise UsageError(
            f"no text in folder {folder}: expected {', '.join('*' + suffix for suffix in SUFFIXES)}"
        )
    note = f" ({skipped} other{'s' if skipped != 1 else ''} skipped)" if skipped else ""
    return [read_text(path) for path in files], f"{folder.name or folder}: {len(files)} files{note}"


def _walk(folder: Path) -> Iterator[Path]:
    """All files below a folder in the order of their paths."""

    def fail(error: OSError) -> None:
        raise UsageError(f"cannot read {error.filename}: {explain_os_error(error)}")

    for root, folders, names in os.walk(folder, onerror=fail):
        folders.sort()
        yield from (Path(root, name) for name in sorted(names))


def _is_binary(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return b"\0" in file.read(8192)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {explain_os_error(error)}") from None


def _decode(data: bytes, name: str) -> str:
    if not data:
        raise UsageError(f"{name} is empty")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8: wrong byte 0x{data[error.start]:02x} at position {error.start}"
        ) from None


def _blocks(document: str) -> Iterator[str]:
    """A document in blocks of at most BLOCK characters, cut behind line ends where it has any."""
    start = 0
    while start < len(document):
        end = min(start + BLOCK, len(document))
        if end < len(document):
            end = document.rfind("\n", start + 1, end) + 1 or end
        yield document[start:end]
        start = end


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
