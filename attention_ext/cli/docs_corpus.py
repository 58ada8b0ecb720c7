"""The default corpus: Python's own documentation, which every machine that runs this has already.

The topics of ``help()`` (pydoc_data.topics) and the docstrings of the standard library, found by
parsing it: 1.6 s for 580 files (Python 3.11, one Xeon core, 2026-11), once, then cached. Sister
modules repeat each other, so a paragraph that was seen before anywhere is dropped: without that,
5.2 % of the 64-character pieces of a held-out tenth occur word for word in the rest, with it 2.9 %.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import json
import os
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import UsageError
from .runs import write_text

SHORTEST_DOCSTRING = 60  # characters
SHORTEST_REPEATED = 40  # characters of a paragraph that may stand only once
SKIPPED = frozenset(
    (
        "test",
        "tests",
        "idlelib",
        "idle_test",
        "turtledemo",
        "lib2to3",
        "site-packages",
        "dist-packages",
    )
)
FORM = 1  # counts up when the same Python would give another text


def name() -> str:
    """What the corpus is."""
    return f"Python {platform.python_version()} documentation"


def read_docs() -> list[str]:
    """The documents, from a cache in the user's folder where they were read before.

    Raises:
        UsageError: this Python was built without its documentation.
    """
    cache = cache_folder() / f"docs-{_python_digest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(cache.read_text("utf-8"))
        if stored["sha256"] == _digest(stored["documents"]):
            return list(stored["documents"])
    documents = drop_repeated_paragraphs(
        [*_topics(), *_docstrings(Path(sysconfig.get_paths()["stdlib"]))]
    )
    with contextlib.suppress(OSError):  # a cache that cannot be written costs seconds, not the run
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_text(cache, json.dumps({"sha256": _digest(documents), "documents": documents}))
    return documents


def cache_folder() -> Path:
    """Where results that can be made again are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attention_ext"


def drop_repeated_paragraphs(documents: Iterable[str]) -> list[str]:
    r"""Leaves out each longer paragraph that was there before, and documents that become empty.

    Example:
        >>> long = "This sentence is longer than forty characters."
        >>> drop_repeated_paragraphs([long, f"Other.\n\n{long}", long])
        ['This sentence is longer than forty characters.', 'Other.']
    """
    seen: set[str] = set()
    kept = []
    for document in documents:
        paragraphs = []
        for paragraph in document.split("\n\n"):
            text = paragraph.strip()
            if len(text) > SHORTEST_REPEATED:
                if text in seen:
                    continue
                seen.add(text)
            paragraphs.append(paragraph)
        rest = "\n\n".join(paragraphs).strip("\n")
        if rest:
            kept.append(rest)
    return kept


def _topics() -> list[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        raise UsageError(
            "this Python was built without its documentation (pydoc_data): name a text by --data"
        ) from None
    return [topics[key] for key in sorted(topics)]


def _docstrings(library: Path) -> list[str]:
    """The docstrings of modules, classes and functions, each once, in the order of the files."""
    found: dict[str, None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the parser, about other people's escape sequences
        for source in _sources(library):
            with contextlib.suppress(SyntaxError, ValueError):  # a template
                found |= dict.fromkeys(_docstrings_below(ast.parse(source)))
    return list(found)


def _sources(library: Path) -> Iterator[str]:
    """The texts of the library's modules that may hold a docstring."""
    for root, folders, names in os.walk(library):
        folders[:] = sorted(folder for folder in folders if folder not in SKIPPED)
        for name in sorted(name for name in names if name.endswith(".py")):
            with contextlib.suppress(OSError, UnicodeDecodeError):  # a file in another encoding
                source = Path(root, name).read_text("utf-8")
                if '"""' in source or "'''" in source:
                    yield source


def _docstrings_below(node: ast.AST) -> Iterator[str]:
    """Visits statements only: docstrings stand nowhere else, and expressions are most of a tree."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node)
        if docstring and len(docstring) >= SHORTEST_DOCSTRING:
            yield docstring
    for part in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, part, ()):
            if isinstance(child, (ast.stmt, ast.ExceptHandler)):
                yield from _docstrings_below(child)


def _digest(documents: list[str]) -> str:
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


def _python_digest() -> str:
    """Names this very Python: its version and where its library lies."""
    return hashlib.sha256(
        f"{FORM} {sys.version} {sysconfig.get_paths()['stdlib']}".encode()
    ).hexdigest()
