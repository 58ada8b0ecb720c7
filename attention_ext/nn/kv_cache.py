"""Keys and values of past positions, kept between the calls of a decoder.

Every sequence has its own length. A call first reserves its slots, which checks that they fit and
writes nothing; then each layer appends its new keys and values; then the lengths advance:

    write = cache.reserve(length, attention_mask)
    keys, values = cache.append(write, layer, new_keys, new_values)     # once per layer
    cache.advance(write)

The host keeps a copy of the lengths, so that a decode step reads nothing back from the device.
Padding is never stored: the real tokens of a row are packed behind the row's past ones. So the
queries of a call, packed to the right, are the last positions in use of their row, and lengths say
all that attention has to know.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attention_ext.errors import ArgumentError, ArgumentTypeError

from .config import DecoderConfig
from .inputs import check_causal
from .packing import Packing, make_packing


@dataclasses.dataclass(frozen=True)
class CacheWrite:
    """Where one call's new tokens go.

    Attributes:
        lengths: the length of each sequence after the call.
        end: how many slots the longest one uses then.
        keys, values: per layer, the slots in use after the call, views of the cache
            (batch, num_key_value_heads, end, width).
        start: first slot of the call where all sequences agree, else None.
        ragged: what belongs to each sequence where they do not agree, else None.
    """

    lengths: tuple[int, ...]
    end: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    start: int | None = None
    ragged: RaggedWrite | None = None


@dataclasses.dataclass(frozen=True)
class RaggedWrite:
    """Where new tokens go when sequences differ: the newest of each are in the last column.

    Attributes:
        packing: how the call's columns get there, or None: all of them are real.
        seqlens: (batch,) int64, the lengths after the call.
        positions: (batch, width) int64, the position of each column's token; 0 for padding.
        rows, columns, slots: (tokens,) int64, batch index, column and slot of each real token.
    """

    packing: Packing | None
    seqlens: Tensor
    positions: Tensor
    rows: Tensor
    columns: Tensor
    slots: Tensor


class KVCache:
    """A cache for `Decoder`: an argument of its calls, never state inside the model.

    Args:
        config: the configuration of the decoder that will use it.
        batch_size: number of sequences.
        capacity: positions per sequence that it can hold.
        dtype: of keys and values; default: torch's default dtype. It must be the decoder's.
        device: of keys and values; default: torch's default device.

    Attributes:
        keys: (layers, batch, num_key_value_heads, capacity, head_dim).
        values: (layers, batch, num_key_value_heads, capacity, value_dim).

    Raises:
        ArgumentError: a negative batch size or capacity, or the configuration of an encoder.

    Example:
        >>> config = DecoderConfig(256, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> cache = KVCache(config, batch_size=3, capacity=10)
        >>> cache.keys.shape, cache.seqlens
        (torch.Size([2, 3, 2, 10, 8]), tensor([0, 0, 0]))
    """

    def __init__(
        self,
        config: DecoderConfig,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_causal("KVCache", config)
        for name, value in (("batch_size", batch_size), ("capacity", capacity)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ArgumentTypeError(f"KVCache: expected {name} to be an integer, got {value!r}")
            if value < 0:
                raise ArgumentError(f"KVCache: expected {name} to be at least 0, got {value}")
        self.config = config
        self.batch_size = batch_size
        self.capacity = capacity
        sizes = config.heads
        shape = (config.num_hidden_layers, batch_size, sizes.num_kv_heads, capacity)
        with torch.inference_mode(False):  # usable inside and outside inference mode
            self.keys = torch.zeros(*shape, sizes.head_dim, dtype=dtype, device=device)
            self.values = torch.zeros(*shape, sizes.value_dim, dtype=dtype, device=device)
            self._seqlens = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._lengths = (0,) * batch_size

    @property
    def seqlens(self) -> Tensor:
        """Positions in use per sequence, (batch,) int64; to be read only."""
        return self._seqlens

    @property
    def nbytes(self) -> int:
        """Memory of keys and values in bytes."""
        return self.keys.nbytes + self.values.nbytes

    def check_use(
        self, config: DecoderConfig, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Reject a decoder, or a batch, that the cache was not made for.

        Raises:
            ArgumentError: another configuration, batch size or device.
            ArgumentTypeError: another dtype.
        """
        if self.config is not config and self.config != config:
            raise ArgumentError(
                "Decoder: expected a cache made for its configuration, got one for another: "
                + _differences(self.config, config)
            )
        for name, own, other, error in (
            ("batch size of ids", self.batch_size, batch_size, ArgumentError),
            ("dtype of the weights", self.keys.dtype, dtype, ArgumentTypeError),
            ("device of the weights", self.keys.device, device, ArgumentError),
        ):
            if own != other:
                raise error(f"Decoder: expected a cache of the {name}, {other}, got {own}")

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self._lengths = (0,) * self.batch_size
        self._seqlens.zero_()

    def reserve(self, length: int, attention_mask: Tensor | None = None) -> CacheWrite:
        """Choose the slots of a call's new tokens; nothing is written.

        Args:
            length: tokens per sequence in the call.
            attention_mask: (batch, length) bool, True = a real token; default: all are.

        Returns:
            The plan for `append` and `advance`.

        Raises:
            ArgumentError: a sequence would grow beyond the capacity.
        """
        counts = [length] * self.batch_size
        if attention_mask is not None:
            counts = attention_mask.sum(dim=-1).tolist()
        lengths = tuple(used + new for used, new in zip(self._lengths, counts, strict=True))
        for used, new in zip(self._lengths, counts, strict=True):
            if used + new > self.capacity:
                raise ArgumentError(
                    f"KVCache: expected at most capacity = {self.capacity} positions per "
                    f"sequence, got {new} new ones after {used} in use"
                )
        end = max(lengths, default=length)
        in_use = self.keys[..., :end, :].unbind(0), self.values[..., :end, :].unbind(0)
        all_real = all(count == length for count in counts)
        if len(set(self._lengths)) <= 1 and all_real:
            start = max(self._lengths, default=0)
            return CacheWrite(lengths, end, *in_use, start=start)
        packing = None
        if attention_mask is not None and not all_real:
            packing = make_packing(attention_mask, "right", width=max(1, *counts))
        width = length if packing is None else packing.width
        return CacheWrite(lengths, end, *in_use, ragged=self._ragged(packing, lengths, width))

    def _ragged(self, packing: Packing | None, lengths: tuple[int, ...], width: int) -> RaggedWrite:
        device = self.keys.device
        seqlens = torch.tensor(lengths, device=device)
        columns = torch.arange(-width, 0, device=device)  # counted from the newest token
        positions = seqlens[:, None] + columns  # (batch, width)
        rows, columns = (positions >= self._seqlens[:, None]).nonzero(as_tuple=True)
        return RaggedWrite(
            packing, seqlens, positions.clamp_min(0), rows, columns, positions[rows, columns]
        )

    def append(
        self, write: CacheWrite, layer: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values.

        Args:
            write: what `reserve` returned for this call.
            layer: index of the layer.
            key: (batch, num_key_value_heads, columns, head_dim), packed as the plan says.
            value: (batch, num_key_value_heads, columns, value_dim).

        Returns:
            Views of all keys and values in use, (batch, num_key_value_heads, write.end, ...).
        """
        keys, values = write.keys[layer], write.values[layer]
        if write.start is not None:
            keys[:, :, write.start :] = key
            values[:, :, write.start :] = value
        elif write.ragged is not None:
            # Indices on both sides of a slice put the tokens first: (tokens, heads, width).
            source = (write.ragged.rows, slice(None), write.ragged.columns)
            target = (write.ragged.rows, slice(None), write.ragged.slots)
            keys[target] = key[source].to(keys.dtype)
            values[target] = value[source].to(values.dtype)
        return keys, values

    def advance(self, write: CacheWrite) -> None:
        """Count the appended tokens; until then a call leaves the cache as it was."""
        if write.start is not None:
            self._seqlens += write.end - write.start
        elif write.ragged is not None:
            self._seqlens.copy_(write.ragged.seqlens)
        self._lengths = write.lengths


def _differences(cache: DecoderConfig, decoder: DecoderConfig) -> str:
    ours, theirs = cache.to_dict(), decoder.to_dict()
    return ", ".join(
        f"{name} {ours[name]!r} for {theirs[name]!r}" for name in ours if ours[name] != theirs[name]
    )
