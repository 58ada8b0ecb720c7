"""What the caches of a decoder have in common: rows, and where the new tokens of a call go.

A cache holds a number of rows, each the past keys and values of one sequence of its own length. A
call of the decoder plans where its tokens go, which writes none of them; then the operator of each
layer appends keys and values to the rows and attends to them; then the lengths advance:

    writes = rows.plan(length)
    attention_with_kv_cache(query, keys[layer], values[layer], write.seqlens, key, value, ...)
    rows.advance(writes)

Lengths are a tensor that only the operator reads, so a step reads nothing back from the device and
compiles once for all lengths. Padding is never stored: rows with equally many real tokens in a call
share one call of the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention_ext.errors import ArgumentError, ArgumentTypeError

from .config import DecoderConfig
from .inputs import check_causal


class CacheWrite(NamedTuple):
    """Where equally many new tokens of some rows go, as `attention_with_kv_cache` wants it.

    Attributes:
        rows: (rows,) int64, which rows of the call these are, or None: all of them.
        indices: (rows,) int64, which rows of the cache these are, or None: all of them, in order.
        numbers: the same on the host.
        length: new tokens of each.
        seqlens: (rows,) int64, positions in use before the call.
        cache_batch_idx: (rows,) int64, or None where pages or the order say it.
        block_table: (rows, pages) int32, or None where the rows do not lie in pages.
    """

    rows: Tensor | None
    indices: Tensor | None
    numbers: Sequence[int]
    length: int
    seqlens: Tensor
    cache_batch_idx: Tensor | None
    block_table: Tensor | None


class DecoderCache:
    """Keys and values of past positions: the base of `KVCache` and `PagedKVCache`.

    Args:
        config: the configuration of the decoder that will use it.
        batch_size: number of rows.
        blocks: how keys and values are divided after the layer, (blocks, positions in each).
        dtype: of keys and values; default: torch's default dtype.
        device: of keys and values; default: torch's default device.
    """

    def __init__(
        self,
        config: DecoderConfig,
        batch_size: int,
        blocks: tuple[int, int],
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        self.config = config
        self.batch_size = batch_size
        sizes = config.heads
        count, positions = blocks
        shape = (config.num_hidden_layers, count, sizes.num_kv_heads, positions)
        with torch.inference_mode(False):  # usable inside and outside inference mode
            self.keys = torch.zeros(*shape, sizes.head_dim, dtype=dtype, device=device)
            self.values = torch.zeros(*shape, sizes.value_dim, dtype=dtype, device=device)
            self._seqlens = torch.zeros(batch_size, dtype=torch.int64, device=device)

    @property
    def seqlens(self) -> Tensor:
        """Positions in use per row, (batch,) int64; to be read only."""
        return self._seqlens

    @property
    def nbytes(self) -> int:
        """Memory of keys and values in bytes."""
        return self.keys.nbytes + self.values.nbytes

    def rows(self, indices: Sequence[int] | None = None) -> CacheRows:
        """Some of the rows, to be given to a decoder in place of the cache.

        So sequences join and leave between steps: each has a row of the cache as long as it is
        written, and a call names the rows of its ids.

        Args:
            indices: distinct rows, in the order of the ids; default: all.

        Raises:
            ArgumentError: a row that there is not, or one twice.
            ArgumentTypeError: no sequence of integers.

        Example:
            >>> from attention_ext.nn import Decoder, DecoderConfig, KVCache
            >>> decoder = Decoder(DecoderConfig(256, 16, 2, 2)).eval()
            >>> cache = KVCache(decoder.config, batch_size=3, capacity=10)
            >>> _ = decoder(torch.tensor([[1, 2, 3]]), cache=cache.rows([0]))
            >>> _ = decoder(torch.tensor([[4, 5]]), cache=cache.rows([2]))  # another joins
            >>> _ = decoder(torch.tensor([[6], [7]]), cache=cache.rows([2, 0]))
            >>> cache.rows([0]).reset()  # the first has ended
            >>> cache.seqlens
            tensor([0, 0, 3])
        """
        return CacheRows(self, indices)

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.rows().reset()

    def layers(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values of each layer, as far as positions of the decoder reach."""
        return self.keys.unbind(0), self.values.unbind(0)

    def make_room(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Get ready to append so many positions to these rows, or raise and change nothing."""
        raise NotImplementedError

    def address(self, index: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """``cache_batch_idx`` and ``block_table`` of some rows (rows,), or of all of them."""
        raise NotImplementedError

    def check_length(self, used: int, new: int) -> None:
        """Reject so many new positions of a row behind those in use."""
        if used + new > self.config.max_position_embeddings:
            raise ArgumentError(
                "Decoder: expected at most max_position_embeddings = "
                f"{self.config.max_position_embeddings} positions, got {used + new}"
            )

    def lengthen(self, rows: Sequence[int], index: Tensor | None, length: int) -> None:
        """Count new positions of some rows, named twice: for the host, and (rows,) or None: all."""
        if index is None:
            self._seqlens += length
        else:
            self._seqlens.index_add_(0, index, torch.full_like(index, length))

    def forget(self, rows: Sequence[int], index: Tensor | None) -> None:
        """Empty some rows, named twice as in `lengthen`."""
        if index is None:
            self._seqlens.zero_()
        else:
            self._seqlens.index_fill_(0, index, 0)


class CacheRows:
    """Rows of a cache in the order of a call's ids; made by `DecoderCache.rows`.

    Args:
        cache: where the rows lie.
        indices: which ones, or None: all.

    Attributes:
        indices: the rows of the cache, on the host. A compiled step reads their number alone, so
            that it serves any rows.
        count: how many there are.
    """

    def __init__(self, cache: DecoderCache, indices: Sequence[int] | None = None) -> None:
        self.cache = cache
        self.indices: Sequence[int] = range(cache.batch_size)
        self.count = cache.batch_size
        self._index: Tensor | None = None
        if indices is not None:
            function = f"{type(cache).__name__}.rows"
            self.indices = _checked_rows(function, cache.batch_size, indices)
            self.count = len(self.indices)
            with torch.inference_mode(False):
                self._index = torch.tensor(
                    self.indices, dtype=torch.int64, device=cache.seqlens.device
                )

    @property
    def seqlens(self) -> Tensor:
        """Positions in use per row, (rows,) int64; to be read only."""
        return self.cache.seqlens if self._index is None else self.cache.seqlens[self._index]

    def reset(self) -> None:
        """Forget the sequences of these rows."""
        self.cache.forget(self.indices, self._index)

    def check_use(
        self, config: DecoderConfig, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Reject a decoder, or a batch, that the rows were not made for.

        Raises:
            ArgumentError: another configuration, batch size or device.
            ArgumentTypeError: another dtype.
        """
        cache = self.cache
        if cache.config is not config and cache.config != config:
            raise ArgumentError(
                "Decoder: expected a cache made for its configuration, got one for another: "
                + _differences(cache.config, config)
            )
        for name, own, other, error in (
            ("batch size of ids", self.count, batch_size, ArgumentError),
            ("dtype of the weights", cache.keys.dtype, dtype, ArgumentTypeError),
            ("device of the weights", cache.keys.device, device, ArgumentError),
        ):
            if own != other:
                raise error(f"Decoder: expected a cache of the {name}, {other}, got {own}")

    def plan(self, length: int, counts: Sequence[int] | None = None) -> tuple[CacheWrite, ...]:
        """Choose where a call's new tokens go; none is written.

        Args:
            length: tokens per row of the call.
            counts: how many of them are real, from the first on, where not all of them are.

        Returns:
            The plan, for the operator and `advance`; rows without a new token are not in it.

        Raises:
            ArgumentError: a row would grow beyond the cache or the decoder's positions. With equal
                counts the operator may be the one that finds out, before it writes.
        """
        if counts is None or set(counts) == {length}:
            if length and self.count:
                self.cache.make_room(self.indices, [length] * self.count)
                return (self._write(length, None, self.indices, self._index),)
            return ()
        self.check_room(counts)
        self.cache.make_room(self.indices, counts)
        writes = []
        for count in sorted(set(counts) - {0}):
            chosen = [row for row, own in enumerate(counts) if own == count]
            rows = torch.tensor(chosen, device=self.cache.seqlens.device)
            index = rows if self._index is None else self._index[rows]
            writes.append(self._write(count, rows, [self.indices[row] for row in chosen], index))
        return tuple(writes)

    def _write(
        self, length: int, rows: Tensor | None, numbers: Sequence[int], index: Tensor | None
    ) -> CacheWrite:
        seqlens = self.cache.seqlens if index is None else self.cache.seqlens[index]
        return CacheWrite(rows, index, numbers, length, seqlens, *self.cache.address(index))

    def advance(self, writes: tuple[CacheWrite, ...]) -> None:
        """Count the appended tokens; until then a call leaves the rows as they were."""
        for write in writes:
            self.cache.lengthen(write.numbers, write.indices, write.length)

    def check_room(self, counts: Sequence[int]) -> None:
        """Read the lengths back and reject new tokens that do not fit.

        Raises:
            ArgumentError: a row would grow beyond the cache or the decoder's positions.
        """
        for used, new in zip(self.seqlens.tolist(), counts, strict=True):
            self.cache.check_length(used, new)


AnyCache = DecoderCache | CacheRows
"""What a decoder takes as its cache."""


def rows_of(cache: AnyCache) -> CacheRows:
    """The rows that a decoder's call with this cache is about.

    Raises:
        ArgumentTypeError: it is no cache.
    """
    if isinstance(cache, CacheRows):
        return cache
    if isinstance(cache, DecoderCache):
        return cache.rows()
    raise ArgumentTypeError(
        "Decoder: expected cache to be a KVCache, a PagedKVCache or rows of one, got "
        f"{type(cache).__name__}"
    )


def check_sizes(function: str, config: DecoderConfig, **sizes: object) -> None:
    """Reject an encoder and sizes that are no integers of at least 0."""
    check_causal(function, config)
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArgumentTypeError(f"{function}: expected {name} to be an integer, got {value!r}")
        if value < 0:
            raise ArgumentError(f"{function}: expected {name} to be at least 0, got {value}")


def _checked_rows(function: str, batch_size: int, indices: Sequence[int]) -> tuple[int, ...]:
    try:
        rows = tuple(range(batch_size).index(row) for row in indices)
    except ValueError:
        raise ArgumentError(
            f"{function}: expected rows from 0 to {batch_size - 1}, got {list(indices)}"
        ) from None
    except TypeError:
        raise ArgumentTypeError(
            f"{function}: expected a sequence of rows, got {indices!r}"
        ) from None
    if len(set(rows)) != len(rows):
        raise ArgumentError(f"{function}: expected distinct rows, got {list(indices)}")
    return rows


def _differences(cache: DecoderConfig, decoder: DecoderConfig) -> str:
    ours, theirs = cache.to_dict(), decoder.to_dict()
    return ", ".join(
        f"{name} {ours[name]!r} for {theirs[name]!r}" for name in ours if ours[name] != theirs[name]
    )
