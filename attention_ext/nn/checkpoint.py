"""A decoder on disk: ``config.json`` and ``model.safetensors``, no pickle.

The one module that knows safetensors: `save_tensors` and `load_tensors` serve any named tensors.
Files appear whole or not at all: each is written beside its place, flushed to the disk, and
renamed. Weight names are the module paths, e.g. ``layers.0.attention.qkv_proj.weight``; with tied
embeddings the vocabulary matrix is stored once, as ``embed_tokens.weight``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"save_pretrained: expected a folder, got the file {path}")
    path.mkdir(parents=True, exist_ok=True)
    config = {"model_type": MODEL_TYPE, **decoder.config.to_dict()}
    save_tensors(path / WEIGHTS_FILE, decoder.state_dict(), {"format": "pt"})
    write_atomically(path / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())


def read_pretrained(folder: str | os.PathLike[str]) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Read configuration and weights of a folder, on the CPU.

    Raises:
        ArgumentError: a missing or unreadable file.
        ImportError: safetensors is not installed.
    """
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
    weights, _ = load_tensors(path / WEIGHTS_FILE, caller="from_pretrained")
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


def save_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write named tensors to a safetensors file, atomically.

    Args:
        path: the file, in an existing folder.
        tensors: of any shapes, types and devices; no two may share memory.
        metadata: texts that the file's header holds beside them.

    Raises:
        ImportError: safetensors is not installed.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_tensors(f"{folder}/some.safetensors", {"x": torch.eye(2)}, {"step": "7"})
        ...     load_tensors(f"{folder}/some.safetensors")
        ({'x': tensor([[1., 0.],
                [0., 1.]])}, {'step': '7'})
    """
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    texts = dict(metadata) if metadata else None  # the library writes rubbish for an empty one
    data = _import_safetensors().torch.save(ready, metadata=texts)
    write_atomically(path, data)


def load_tensors(
    path: str | os.PathLike[str], *, caller: str = "load_tensors"
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file.

    Args:
        path: the file.
        caller: the function that an error names.

    Returns:
        The tensors by name, on the CPU, and the header's metadata.

    Raises:
        ArgumentError: the file is missing, damaged or of another format.
        ImportError: safetensors is not installed.
    """
    safetensors = _import_safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            return tensors, file.metadata() or {}
    except Exception as error:  # the library's own error class derives from Exception alone
        raise ArgumentError(f"{caller}: expected safetensors in {path}, got: {error}") from None


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
    return safetensors
