"""Checks of what a decoder is called with."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_ext.errors import ArgumentError, ArgumentTypeError

from .config import DecoderConfig

IGNORED_TARGET = -100


def check_inputs(ids: Tensor, attention_mask: Tensor | None) -> None:
    """Reject ids and masks that a decoder cannot take.

    Raises:
        ArgumentError: wrong shapes.
        ArgumentTypeError: no tensors, or tensors of another kind of number.
    """
    check_ids("ids", ids)
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor) or attention_mask.dtype != torch.bool:
        kind = getattr(attention_mask, "dtype", type(attention_mask).__name__)
        raise ArgumentTypeError(
            f"Decoder: expected attention_mask to be bool, True for a real token, got {kind}"
        )
    if attention_mask.shape != ids.shape:
        raise ArgumentError(
            "Decoder: expected attention_mask in the shape of ids, got "
            f"{tuple(attention_mask.shape)} and {tuple(ids.shape)}"
        )


def check_ids(name: str, ids: Tensor) -> None:
    """Reject what is no (batch, length) tensor of integers."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        kind = getattr(ids, "dtype", type(ids).__name__)
        raise ArgumentTypeError(f"Decoder: expected {name} to be int64 or int32, got {kind}")
    if ids.dim() != 2:
        raise ArgumentError(
            f"Decoder: expected {name} of shape (batch, length), got {tuple(ids.shape)}"
        )


def outside_vocabulary(name: str, ids: Tensor, vocab_size: int) -> ArgumentError:
    """The error for ids beyond the vocabulary."""
    real = ids[ids != IGNORED_TARGET]
    return ArgumentError(
        f"Decoder: expected {name} from 0 to {vocab_size - 1}, got values from "
        f"{int(real.min())} to {int(real.max())}"
    )


def check_causal(function: str, config: DecoderConfig) -> None:
    """Reject an encoder where only a causal decoder makes sense.

    Raises:
        ArgumentError: ``config.causal`` is False.
    """
    if not config.causal:
        raise ArgumentError(
            f"{function}: expected a causal decoder, got one with causal=False: an encoder sees "
            "the tokens that it would have to predict"
        )
