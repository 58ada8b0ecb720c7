"""The state from which a run goes on: weights, optimizer, random numbers, place in the text.

``train_state.safetensors`` holds all of it, its numbers as JSON in the header, so that a crash
between two files cannot leave halves of different steps. ``train_state.json`` shows the same
numbers to people. There is no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_ext.nn import Decoder
from attention_ext.nn.checkpoint import load_tensors, save_tensors

from .dataset import Batches
from .errors import UsageError
from .runs import STATE_FILE, write_text

NUMBERS_KEY = "numbers"


def save_state(
    folder: Path,
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    numbers: Mapping[str, Any],
) -> None:
    """Writes the state of a run, atomically.

    Args:
        folder: of the run.
        decoder: its weights are saved as ``model.NAME``.
        optimizer: its tensors are saved as ``optimizer.NAME.KEY``, NAME being the weight's.
        batches: the place in the training text.
        numbers: step, time and whatever else JSON can hold.
    """
    tensors: dict[str, Tensor] = {
        f"model.{name}": weight for name, weight in decoder.state_dict().items()
    }
    for name, parameter in decoder.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    places, tensors["random.batches"] = batches.state()
    tensors["random.torch"] = torch.get_rng_state()
    text = json.dumps({**numbers, "batches": places}, indent=2)
    save_tensors(folder / STATE_FILE, tensors, {NUMBERS_KEY: text})
    write_text(folder / "train_state.json", text + "\n")


def load_state(
    folder: Path, decoder: Decoder, optimizer: torch.optim.Optimizer, batches: Batches
) -> dict[str, Any]:
    """Puts a saved state back.

    Returns:
        The numbers that were given to :func:`save_state`.

    Raises:
        UsageError: the file is damaged, or holds the state of another decoder.
    """
    path = folder / STATE_FILE
    try:
        tensors, metadata = load_tensors(path)
        numbers: dict[str, Any] = json.loads(metadata[NUMBERS_KEY])
        batches.load_state(numbers.pop("batches"), tensors.pop("random.batches"))
        torch.set_rng_state(tensors.pop("random.torch"))
    except Exception as error:  # safetensors' own error class derives from Exception alone
        raise UsageError(f"cannot resume from {path}: {error}") from None
    weights = {name: tensors.pop(f"model.{name}", None) for name in decoder.state_dict()}
    wanted = {name: weight.shape for name, weight in decoder.state_dict().items()}
    if {name: weight is not None and weight.shape for name, weight in weights.items()} != wanted:
        raise UsageError(
            f"cannot resume from {path}: its weights do not fit the decoder of config.toml"
        )
    decoder.load_state_dict(weights)
    parameters = dict(decoder.named_parameters())
    for name, tensor in tensors.items():
        _, _, rest = name.partition("optimizer.")
        parameter, _, key = rest.rpartition(".")
        optimizer.state[parameters[parameter]][key] = tensor
    return numbers
