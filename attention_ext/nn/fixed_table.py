"""Numbers that follow from a configuration, kept beside the weights and as exact as float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from .config import DecoderConfig

Table = TypeVar("Table", bound="FixedTable")


class FixedTable(nn.Module):
    """A table of constants: no parameter, not saved, on the device of the module.

    It is float32 (float64 in a float64 module), also when the module is converted to a half type,
    and rounded once.

    Args:
        config: the decoder's configuration.
    """

    table: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("table", torch.empty(0), persistent=False)
        self._fill()

    def compute(self) -> Tensor:
        """The table in float64, on the CPU."""
        raise NotImplementedError

    def _fill(self) -> None:
        dtype = torch.float64 if self.table.dtype == torch.float64 else torch.float32
        self.table = self.compute().to(device=self.table.device, dtype=dtype)

    def _apply(self: Table, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Table:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._fill()  # a conversion would have rounded the table
        return self
