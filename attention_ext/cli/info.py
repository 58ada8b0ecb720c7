"""``info``: what is installed, what runs here and why, and what a run holds."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch

import attention_ext
from attention_ext.nn import Decoder, DecoderConfig
from attention_ext.nn.checkpoint import CONFIG_FILE

from . import flags, machine
from .corpus import read_text
from .costs import kv_bytes_per_step, kv_bytes_per_token
from .flags import POSITIONAL, flag
from .options import MachineOptions, OutputOptions
from .output import Output
from .runs import any_run, existing_run

LIBRARIES = ("safetensors", "tokenizers", "tqdm", "matplotlib", "tyro", "tomli_w")


@dataclass(frozen=True)
class InfoArguments:
    """Says what is installed, which kernels run here and why, and what a run holds."""

    run: Annotated[
        str | None,
        POSITIONAL,
        flag(metavar="[RUN]", help="name or path of the run; without it the newest"),
    ] = None
    machine: MachineOptions = field(default_factory=MachineOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


def run(words: Sequence[str]) -> int:
    """Runs the command.

    Args:
        words: the command line behind ``info``.

    Returns:
        The exit code.
    """
    arguments = flags.parse(InfoArguments, words, "info", InfoArguments())
    output = Output(arguments.output.quiet, arguments.output.json)
    folder = existing_run(arguments.run) if arguments.run is not None or any_run() else None
    result: dict[str, Any] = environment(arguments.machine)
    _print_table(output, result)
    if folder is not None:
        result["run"] = describe_run(folder)
        output.text("")
        _print_table(output, result["run"])
    output.result(result)
    return 0


def environment(options: MachineOptions) -> dict[str, Any]:
    """Versions, kernels and what the machine options mean here."""
    build = attention_ext.build_info()
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing: pip install attention_ext[decoder]"
    return {
        "attention_ext": build["version"],
        "python": platform.python_version(),
        "torch": build["torch"],
        "library": build["library"],
        "kernels": f"CPU, {build['cpu_capability']}; torch itself uses "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "cores": machine.num_cores(),
        "device": str(machine.choose_device(options.device)),
        "dtype": str(machine.choose_dtype(options.dtype)),
        "threads": str(machine.set_threads(options.threads)),
        **versions,
    }


def describe_run(folder: Path) -> dict[str, Any]:
    """What a run holds: model, text, losses and files."""
    config = DecoderConfig.from_json(read_text(folder / CONFIG_FILE))
    with torch.device("meta"):
        decoder = Decoder(config)
    values: dict[str, Any] = {
        "run": str(folder),
        "decoder": config.to_dict(),
        "parameters": decoder.num_parameters(),
    }
    if config.causal:
        values |= {
            "kv_bytes_per_token": kv_bytes_per_token(config),
            "kv_bytes_at_full_context": kv_bytes_per_token(config) * config.max_position_embeddings,
            "kv_bytes_read_per_step": kv_bytes_per_step(config),
        }
    state = folder / "train_state.json"
    if state.is_file():
        numbers = json.loads(state.read_text("utf-8"))
        counters = numbers["counters"]
        values |= {
            "corpus": f"{numbers['corpus_name']}, sha256 {numbers['corpus'][:12]}…",
            "steps": counters["step"],
            "seconds": counters["elapsed"],
            "train_loss": counters["loss"],
            "best_bits_per_byte": counters["best"],
        }
    values["files"] = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return values


def _print_table(output: Output, values: Mapping[str, Any]) -> None:
    """One line for each value; nested ones follow on the same line."""
    width = max(map(len, values))
    for name, value in values.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        elif isinstance(value, float):
            value = f"{value:.4g}"
        output.text(f"{name:{width}}  {value}")
