"""The small function of the textbook, on the same kernels."""

import torch
from torch import Tensor

from . import paths
from .errors import TRANSLATED, ArgumentError, translate


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The causal attention of the textbook: one head, one sequence, and the weights beside it.

    With `s_ij = <query_i, key_j> / sqrt(D)` for j <= i:

        weights_ij = exp(s_ij) / sum_{j' <= i} exp(s_ij')
        output_i   = sum_{j <= i} weights_ij value_j

    The same as `scaled_dot_product_attention(query, key, value, is_causal=True,
    return_weights=True)`, to the bit. The weights take T x T numbers.

    Args:
        query: (T, D), float64, float32, bfloat16 or float16.
        key: (T, D).
        value: (T, Dv).

    Returns:
        The output, (T, Dv), and the weights, (T, T), both in the query's dtype and differentiable.
        Row i of the weights is 0 beyond column i and sums to 1; a sequence of T has T(T + 1)/2
        visible pairs.

    Raises:
        ArgumentError: A wrong shape.
        ArgumentTypeError: A wrong type or dtype.

    Equivalent to:
        ```
        scores = query @ key.T / math.sqrt(D)
        visible = torch.ones(T, T, dtype=torch.bool).tril()
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        output = weights @ value
        ```

    Example:
        >>> query = torch.tensor([[1.0, 0.0], [2.0, 1.0]])
        >>> key = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
        >>> value = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
        >>> output, weights = causal_attention(query, key, value)
        >>> weights
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
        >>> output
        tensor([[2., 0.],
                [1., 1.]])
    """
    try:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != 2:
                raise ArgumentError(
                    f"causal_attention: expected {name} of 2 dimensions, a row for each position, "
                    f"got shape {tuple(tensor.shape)}"
                )
        if query.shape[0] != key.shape[0]:
            raise ArgumentError(
                "causal_attention: expected query and key of the same length T, got shapes "
                f"{tuple(query.shape)} and {tuple(key.shape)}"
            )
        output, _, weights = paths.attention((query, key, value, None, True), True)
    except TRANSLATED as error:
        if torch.compiler.is_compiling():
            raise
        arguments = {"query": query, "key": key, "value": value}
        raise translate(error, "causal_attention", arguments) from None
    assert weights is not None
    return output, weights
