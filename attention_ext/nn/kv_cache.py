"""A cache with a fixed place for each row: the fastest to read, and as large as its longest row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_ext.errors import ArgumentError

from .cache import DecoderCache, check_sizes
from .config import DecoderConfig


class KVCache(DecoderCache):
    """A cache for `Decoder`: an argument of its calls, never state inside the model.

    Args:
        config: the configuration of the decoder that will use it.
        batch_size: number of rows, one for each sequence.
        capacity: positions per row that it can hold.
        dtype: of keys and values; default: torch's default dtype. It must be the decoder's.
        device: of keys and values; default: torch's default device.

    Attributes:
        keys: (layers, batch, num_key_value_heads, capacity, head_dim).
        values: (layers, batch, num_key_value_heads, capacity, value_dim).

    Raises:
        ArgumentError: a negative batch size or capacity, or the configuration of an encoder.
        ArgumentTypeError: sizes that are no integers.

    Example:
        >>> from attention_ext.nn import Decoder
        >>> decoder = Decoder(DecoderConfig(256, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> cache = KVCache(decoder.config, batch_size=3, capacity=10)
        >>> cache.keys.shape
        torch.Size([2, 3, 2, 10, 8])
        >>> ids = torch.randint(256, (3, 6))
        >>> logits = [decoder(part, cache=cache) for part in ids.split([4, 1, 1], dim=1)]
        >>> torch.testing.assert_close(torch.cat(logits, dim=1), decoder(ids).detach())
        >>> cache.seqlens
        tensor([6, 6, 6])
    """

    def __init__(
        self,
        config: DecoderConfig,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_sizes("KVCache", config, batch_size=batch_size, capacity=capacity)
        super().__init__(config, batch_size, (batch_size, capacity), dtype, device)
        self.capacity = capacity
        # The operator refuses what is beyond these slots.
        reach = slice(0, min(capacity, config.max_position_embeddings))
        self._reachable = self.keys[..., reach, :], self.values[..., reach, :]

    def layers(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values of each layer, as far as positions of the decoder reach."""
        keys, values = self._reachable
        return keys.unbind(0), values.unbind(0)

    def make_room(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Nothing: each row has its place, and the operator checks that it is large enough."""

    def address(self, index: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """``cache_batch_idx`` and ``block_table`` of some rows (rows,), or of all of them."""
        return index, None

    def check_length(self, used: int, new: int) -> None:
        """Reject so many new positions of a row behind those in use."""
        if used + new > self.capacity:
            raise ArgumentError(
                f"KVCache: expected at most capacity = {self.capacity} positions per sequence, "
                f"got {new} new ones after {used} in use"
            )
        super().check_length(used, new)
