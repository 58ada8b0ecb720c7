"""``bench``: how fast the operator is here, and how exact, beside torch's own function."""

from .command import run

__all__ = ["run"]
