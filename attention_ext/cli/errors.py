"""What a user did wrong, in one sentence, and the nearest name to what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """Bad input, an option, a file or a folder: the command ends with exit code 2."""


class MissingExtraError(Exception):
    """A library of the ``decoder`` extra is missing: the command ends with exit code 1."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like ``name``, or None where none is close.

    Example:
        >>> nearest("--learning-rat", ["--learning-rate", "--clip"])
        '--learning-rate'
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    return matches[0] if matches else None


def unknown(kind: str, name: str, known: Iterable[str], remedy: str) -> UsageError:
    """The error for a name that does not exist: it names the nearest one, else where to find them.

    Example:
        >>> str(unknown("option", "--stepz", ["--steps"], "see --help"))
        "unknown option '--stepz'; the nearest is '--steps'"
        >>> str(unknown("option", "--zebra", ["--steps"], "see --help"))
        "unknown option '--zebra'; see --help"
    """
    match = nearest(name, known)
    return UsageError(
        f"unknown {kind} {name!r}; " + (f"the nearest is {match!r}" if match else remedy)
    )


def explain_os_error(error: OSError) -> str:
    """The system's reason in lower case words, without number and path ("permission denied").

    Example:
        >>> explain_os_error(FileNotFoundError(2, "No such file or directory"))
        'no such file or directory'
    """
    return (error.strerror or str(error)).lower()
