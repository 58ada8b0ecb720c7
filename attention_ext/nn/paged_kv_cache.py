"""A cache in pages: rows take memory as they grow, and rows that begin alike share it.

All rows draw pages of page_size positions from one pool. The host knows which pages a row has, and
keeps their numbers in ``block_table``, where the operator looks them up. A page that several rows
use is copied by the first of them that has to write to it; only the last page of a shared prefix
can be such a one, and only if the prefix ends inside of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention_ext.errors import ArgumentError

from .cache import DecoderCache, check_sizes
from .config import DecoderConfig

NO_PAGE = -1  # in the block table: the operator refuses it


class _NewPage(NamedTuple):
    """A page that a row needs: a free one, or its own copy of one that others use, too."""

    row: int
    place: int  # in the row's list of pages
    original: int  # the page to copy, or NO_PAGE


class PagedKVCache(DecoderCache):
    """A cache for `Decoder` whose rows share a pool of pages; used like `KVCache`.

    Rows take pages when a call of the decoder needs them, and give them back with
    ``rows([...]).reset()``. A decoder that torch.compile has compiled takes none: call `reserve`
    before its steps.

    Args:
        config: the configuration of the decoder that will use it.
        batch_size: number of rows; those without tokens take no memory.
        num_pages: pages of the pool.
        page_size: positions per page.
        dtype: of keys and values; default: torch's default dtype. It must be the decoder's.
        device: of keys and values; default: torch's default device.

    Attributes:
        keys: (layers, num_pages, num_key_value_heads, page_size, head_dim).
        values: (layers, num_pages, num_key_value_heads, page_size, value_dim).
        block_table: (batch, pages) int32, the pages of each row in order; -1: none yet.

    Raises:
        ArgumentError: a negative size, a page_size of 0, or the configuration of an encoder.
        ArgumentTypeError: sizes that are no integers.

    Example:
        Two texts that begin with the same seven tokens:

        >>> from attention_ext.nn import Decoder
        >>> decoder = Decoder(DecoderConfig(256, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> cache = PagedKVCache(decoder.config, batch_size=4, num_pages=6, page_size=4)
        >>> _ = decoder(torch.randint(256, (1, 7)), cache=cache.rows([0]))
        >>> cache.share(0, 2)
        >>> cache.pages_in_use, cache.seqlens
        (2, tensor([7, 0, 7, 0]))
        >>> _ = decoder(torch.tensor([[1], [2]]), cache=cache.rows([0, 2]))  # copies a page
        >>> cache.pages_in_use, cache.seqlens
        (3, tensor([8, 0, 8, 0]))
        >>> cache.rows([0]).reset()
        >>> cache.pages_in_use
        2
    """

    def __init__(
        self,
        config: DecoderConfig,
        batch_size: int,
        num_pages: int,
        page_size: int = 16,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {"batch_size": batch_size, "num_pages": num_pages, "page_size": page_size}
        check_sizes("PagedKVCache", config, **sizes)
        if page_size == 0:
            raise ArgumentError("PagedKVCache: expected page_size to be at least 1, got 0")
        super().__init__(config, batch_size, (num_pages, page_size), dtype, device)
        self.num_pages = num_pages
        self.page_size = page_size
        width = self._pages_for(config.max_position_embeddings)
        with torch.inference_mode(False):
            self.block_table = torch.full(
                (batch_size, width), NO_PAGE, dtype=torch.int32, device=device
            )
        self._free = list(range(num_pages - 1, -1, -1))  # the next one is the last
        self._users = [0] * num_pages  # rows that use each page
        self._pages: list[list[int]] = [[] for _ in range(batch_size)]
        # A compiled decoder changes lengths without the host: None until they are read back.
        self._lengths: list[int] | None = [0] * batch_size

    @property
    def pages_in_use(self) -> int:
        """Pages of the pool that at least one row uses."""
        return self.num_pages - len(self._free)

    def reserve(self, count: int, rows: Sequence[int] | None = None) -> None:
        """Take the pages for so many more positions of each row now.

        Args:
            count: positions per row, beyond those in use.
            rows: which rows; default: all.

        Raises:
            ArgumentError: the pool has too few pages, or the decoder too few positions; the cache
                is as it was then.
        """
        check_sizes("PagedKVCache.reserve", self.config, count=count)
        indices = self.rows(rows).indices
        self.make_room(indices, [count] * len(indices))

    def share(self, source: int, target: int, length: int | None = None) -> None:
        """Begin an empty row with what another one holds, without a copy.

        Args:
            source: the row that holds the prefix.
            target: the row that is to begin with it.
            length: positions of the prefix; default: all that the source has.

        Raises:
            ArgumentError: a row that there is not, a target that is not empty, or a length that
                the source does not have.
        """
        source, target = self.rows([source, target]).indices
        lengths = self._host_lengths()
        length = lengths[source] if length is None else length
        check_sizes("PagedKVCache.share", self.config, length=length)
        if length > lengths[source]:
            raise ArgumentError(
                f"PagedKVCache.share: expected length of at most {lengths[source]}, as many as "
                f"row {source} has, got {length}"
            )
        if lengths[target]:
            raise ArgumentError(
                f"PagedKVCache.share: expected row {target} to be empty, got one of "
                f"{lengths[target]} positions"
            )
        self.rows([target]).reset()  # of reserved pages
        shared = self._pages[source][: self._pages_for(length)]
        for page in shared:
            self._users[page] += 1
        self._pages[target] = shared
        self.block_table[target, : len(shared)] = self.block_table[source, : len(shared)]
        lengths[target] = length
        self._seqlens[target] = length

    def make_room(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Get ready to append so many positions to these rows, or raise and change nothing.

        Raises:
            ArgumentError: the pool has too few pages, or the decoder too few positions.
        """
        if torch.compiler.is_compiling():
            return  # the operator refuses a row without the pages
        lengths = self._host_lengths()
        for row, count in zip(rows, counts, strict=True):
            self.check_length(lengths[row], count)
        needed = self._missing_pages(rows, counts, lengths)
        if len(needed) > len(self._free):
            raise ArgumentError(
                f"PagedKVCache: expected at most {len(self._free)} new pages, as many as are free "
                f"of num_pages = {self.num_pages}, got a call that needs {len(needed)}"
            )
        if needed:
            self._take(needed)

    def address(self, index: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """``cache_batch_idx`` and ``block_table`` of some rows (rows,), or of all of them."""
        return None, self.block_table if index is None else self.block_table[index]

    def lengthen(self, rows: Sequence[int], index: Tensor | None, length: int) -> None:
        """Count new positions of some rows, named twice: for the host, and (rows,) or None: all."""
        super().lengthen(rows, index, length)
        if torch.compiler.is_compiling():
            self._lengths = None
        elif self._lengths is not None:
            for row in rows:
                self._lengths[row] += length

    def forget(self, rows: Sequence[int], index: Tensor | None) -> None:
        """Empty some rows, named twice as in `lengthen`."""
        super().forget(rows, index)
        if self._lengths is not None:
            for row in rows:
                self._lengths[row] = 0
        for row in rows:
            for page in reversed(self._pages[row]):
                self._give_back(page)
            self._pages[row] = []
        if index is None:
            self.block_table.fill_(NO_PAGE)
        else:
            self.block_table.index_fill_(0, index, NO_PAGE)

    def _host_lengths(self) -> list[int]:
        """Positions in use per row, read back only where a compiled decoder has changed them."""
        if self._lengths is None:
            self._lengths = self._seqlens.tolist()
        return self._lengths

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _missing_pages(
        self, rows: Sequence[int], counts: Sequence[int], lengths: Sequence[int]
    ) -> list[_NewPage]:
        """What rows need to append: copies of shared pages that they write to, and free ones."""
        missing: list[_NewPage] = []
        copied: Counter[int] = Counter()  # users that a page loses in this call
        for row, count in zip(rows, counts, strict=True):
            pages = self._pages[row]
            first, end = lengths[row] // self.page_size, self._pages_for(lengths[row] + count)
            for place in range(first, min(end, len(pages))):
                if self._users[pages[place]] - copied[pages[place]] > 1:
                    copied[pages[place]] += 1
                    missing.append(_NewPage(row, place, pages[place]))
            missing += [_NewPage(row, place, NO_PAGE) for place in range(len(pages), end)]
        return missing

    def _take(self, needed: Sequence[_NewPage]) -> None:
        """Hand out pages of the pool, which has enough."""
        new = [self._free.pop() for _ in needed]
        for page, (row, place, original) in zip(new, needed, strict=True):
            self._users[page] = 1
            if original == NO_PAGE:
                self._pages[row].append(page)
            else:
                self.keys[:, page] = self.keys[:, original]
                self.values[:, page] = self.values[:, original]
                self._pages[row][place] = page
                self._give_back(original)
            self.block_table[row, place] = page

    def _give_back(self, page: int) -> None:
        """One row less uses a page."""
        self._users[page] -= 1
        if self._users[page] == 0:
            self._free.append(page)
