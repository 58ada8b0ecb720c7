"""Exact attention for PyTorch by tiles: a fused operator, and a decoder that trains on it.

    import torch
    import attention_ext

    output = attention_ext.scaled_dot_product_attention(query, key, value, is_causal=True)

`functional.py` documents the operator, `reference.py` defines it. The decoder is
`attention_ext.nn`, imported apart.
"""

import torch as _torch

from . import library as _library
from . import reference
from .decode import attention_with_kv_cache
from .errors import ArgumentError, ArgumentTypeError
from .explain import explain
from .functional import AttentionResult, scaled_dot_product_attention
from .merge import merge_attention
from .replace_sdpa import replace_sdpa
from .rotary import apply_rotary
from .textbook import causal_attention
from .varlen import varlen_attn

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AttentionResult",
    "__version__",
    "apply_rotary",
    "attention_with_kv_cache",
    "build_info",
    "causal_attention",
    "explain",
    "merge_attention",
    "reference",
    "replace_sdpa",
    "scaled_dot_product_attention",
    "varlen_attn",
]


def build_info() -> dict[str, str]:
    """Return what is installed and what runs here.

    Returns:
        version: Of this package.
        torch: Version of torch.
        library: Path of the compiled library.
        cpu_capability: The instruction set in use, "baseline", "avx2" or "avx512"; the environment
            variable ATTENTION_EXT_CPU_CAPABILITY chooses a lower one before the first import.

    Example:
        >>> build_info()["version"] == __version__
        True
    """
    return {
        "version": __version__,
        "torch": _torch.__version__,
        "library": str(_library.LIBRARY_PATH),
        "cpu_capability": _library.cpu_capability(),
    }
