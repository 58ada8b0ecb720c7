"""Put our operator in the place of torch's, for code that calls that."""

import threading
from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor

from .functional import scaled_dot_product_attention as _ours

_torchs = torch._C._nn.scaled_dot_product_attention  # TorchScript knows it by this object

_lock = threading.Lock()
_depth = 0  # how many replacements are in force
_original = F.scaled_dot_product_attention  # what the first of them found


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`attention_ext.scaled_dot_product_attention`, in a form that TorchScript can compile.

    A scripted caller keeps torch's own function.
    """
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        return _torchs(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return _ours(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


class replace_sdpa:
    """Put our operator in the place of `torch.nn.functional.scaled_dot_product_attention`.

    As a context manager for a while (it may be nested, and torch's function comes back after an
    exception too), or with `permanent=True` for the rest of the process. Compiled functions notice
    and compile again. Importing the package alone never changes torch.

    What it cannot reach:

    * names that were imported earlier: `from torch.nn.functional import
      scaled_dot_product_attention`;
    * torch's C++ fast paths of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` (eval mode
      without gradients);
    * `nn.MultiheadAttention` with `need_weights=True`, its default, which computes the weights by
      itself;
    * code that TorchScript compiles meanwhile: it keeps torch's function, with its gradients.

    What our operator does not support raises; nothing falls back to torch's function silently.

    Args:
        permanent: Replace now, and for good.

    Example:
        >>> import torch.nn.functional as F
        >>> x = torch.randn(2, 4, 8, 16)
        >>> with replace_sdpa():
        ...     output = F.scaled_dot_product_attention(x, x, x)
        >>> torch.testing.assert_close(output, F.scaled_dot_product_attention(x, x, x))
    """

    def __init__(self, permanent: bool = False) -> None:
        if permanent:
            _install()

    def __enter__(self) -> None:
        _install()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _remove()


def _install() -> None:
    global _depth, _original
    with _lock:
        if _depth == 0:
            _original = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = scaled_dot_product_attention
        _depth += 1


def _remove() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            F.scaled_dot_product_attention = _original
