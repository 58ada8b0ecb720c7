"""A decoder on disk: ``config.json`` and ``model.safetensors``, no pickle.

Files appear whole or not at all: each is written beside its place, flushed to the disk, and
renamed. Weight names are the module paths, e.g. ``layers.0.attention.qkv_proj.weight``; with tied
embeddings the vocabulary matrix is stored once, as ``embed_tokens.weight``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attention_ext.errors import ArgumentError

from .config import MODEL_TYPE, DecoderConfig

if TYPE_CHECKING:
    from .decoder import Decoder

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_LISTED_NAMES = 3


def save_pretrained(decoder: Decoder, folder: str | os.PathLike[str]) -> None:
    """Write a decoder's weights and configuration.

    Args:
        decoder: the decoder; neither moved nor changed.
        folder: created if need be; files of the same names are replaced.

    Raises:
        ArgumentError: the folder's path names a file.
        ImportError: safetensors is not installed.
    """
    safetensors_torch = _import_safetensors()
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"save_pretrained: expected a folder, got the file {path}")
    path.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().cpu().contiguous() for name, weight in decoder.state_dict().items()
    }
    config = {"model_type": MODEL_TYPE, **decoder.config.to_dict()}
    write_atomically(
        path / WEIGHTS_FILE, safetensors_torch.save(weights, metadata={"format": "pt"})
    )
    write_atomically(path / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())


def read_pretrained(folder: str | os.PathLike[str]) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Read configuration and weights of a folder, on the CPU.

    Raises:
        ArgumentError: a missing or unreadable file.
        ImportError: safetensors is not installed.
    """
    safetensors_torch = _import_safetensors()
    path = Path(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (path / name).is_file():
            raise ArgumentError(
                f"from_pretrained: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, "
                f"got {path} without {name}"
            )
    try:
        config = DecoderConfig.from_json((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArgumentError(
            f"from_pretrained: expected a decoder's configuration in {path / CONFIG_FILE}, "
            f"got: {error}"
        ) from None
    try:
        weights = safetensors_torch.load_file(path / WEIGHTS_FILE)
    except Exception as error:  # the library's own error class derives from Exception alone
        raise ArgumentError(
            f"from_pretrained: expected safetensors in {path / WEIGHTS_FILE}, got: {error}"
        ) from None
    return config, weights


def check_weights(
    decoder: Decoder, weights: dict[str, Tensor], folder: str | os.PathLike[str]
) -> None:
    """Compare names, shapes and kinds of stored weights with those of a decoder.

    Raises:
        ArgumentError: they differ; the sentence names the first differences.
    """
    needed = decoder.state_dict()
    place = f"the weights of {Path(folder) / CONFIG_FILE} in {WEIGHTS_FILE}"
    for names, problem in (
        (needed.keys() - weights.keys(), "none for"),
        (weights.keys() - needed.keys(), "unknown names"),
    ):
        if names:
            raise ArgumentError(f"from_pretrained: expected {place}, got {problem} {_list(names)}")
    for name, weight in needed.items():
        if weights[name].shape != weight.shape:
            raise ArgumentError(
                f"from_pretrained: expected {place}, where {name} has shape "
                f"{tuple(weight.shape)}, got shape {tuple(weights[name].shape)}"
            )
        if not weights[name].is_floating_point():
            raise ArgumentError(
                f"from_pretrained: expected {place}, got {name} of {weights[name].dtype}"
            )


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file's content so that a reader, also after a crash, sees the old or the new.

    Args:
        path: the file, in an existing folder.
        data: its new content.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where folders can be opened (not on Windows)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _list(names: set[str]) -> str:
    shown = sorted(names)[:_LISTED_NAMES]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _import_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "saving and loading a decoder needs safetensors: pip install attention_ext[decoder]"
        ) from error
    return safetensors.torch
