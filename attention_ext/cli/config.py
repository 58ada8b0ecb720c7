"""Where the options of a training run come from: preset < TOML file < flags; and their TOML file.

The file holds the same names as the flags, flat: ``batch_size = 8``. A resolved one is saved with
each run and can be given back by ``--config`` as it is.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from . import flags
from .corpus import read_text
from .errors import UsageError, unknown
from .options import HORIZONS, DataOptions, TrainArguments, TrainConfig, TrainingOptions
from .runs import resumed_run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What differs from the defaults of options.py. tiny: 0.94 M parameters, for minutes on two cores;
# small: 5.8 M, for half an hour; base: 29.4 M, for a night. Rotated neighbours
# learn as well as halves.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"time": "150s", "intermediate_size": 352, "rope_interleaved": True},
    "small": {
        "time": "30m",
        "rope_interleaved": True,
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "intermediate_size": 688,
        "context": 256,
        "learning_rate": 2e-3,
        "warmup_steps": 100,
    },
    "base": {
        "time": "8h",
        "rope_interleaved": True,
        "vocab_size": 8192,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "intermediate_size": 1368,
        "context": 512,
        "learning_rate": 1e-3,
        "warmup_steps": 200,
    },
}

# What may differ when a run goes on; any other key would make it another run.
RESUMABLE = frozenset(
    (
        *HORIZONS,
        "learning_rate",
        "eval_every",
        "sample_every",
        "save_every",
        "device",
        "threads",
        "data",
        "val",
    )
)


def resolve(words: Sequence[str]) -> TrainArguments:
    """The arguments of ``train``, every option filled in.

    Args:
        words: the command line after ``train``.

    Raises:
        UsageError: an unknown or wrong option or key, an unreadable file, a run that cannot go on.
    """
    quiet_words = [word for word in words if word not in ("-h", "--help")]
    given = flags.parse(TrainArguments, quiet_words, "train", TrainArguments())
    if given.resume is not None:
        if given.config is not None:
            raise UsageError(
                "--resume and --config exclude each other: a resumed run has its own configuration"
            )
        base = load_config(resumed_run(given.run, given.resume) / "config.toml")
    else:
        table = read_toml(Path(given.config)) if given.config is not None else {}
        named = any(word.partition("=")[0] == "--preset" for word in words)
        preset = given.preset if named else None
        base = from_table(table, source=given.config or "", preset=preset)
    if any(getattr(given.training, name) is not None for name in HORIZONS):
        base = dataclasses.replace(base, training=_without_horizon(base.training))
    defaults = TrainArguments(**{f.name: getattr(base, f.name) for f in dataclasses.fields(base)})
    arguments = flags.parse(TrainArguments, words, "train", defaults)
    if given.resume is not None:
        _check_resumable(base, arguments.settings)
    model = arguments.model
    if model.hidden_size != base.model.hidden_size and given.model.intermediate_size is None:
        model = dataclasses.replace(model, intermediate_size=None)  # derived from the new width
    return dataclasses.replace(arguments, model=model, data=_with_absolute_paths(arguments.data))


def load_config(path: Path) -> TrainConfig:
    """The configuration in a file that `to_toml` made."""
    return from_table(read_toml(path), source=str(path), preset=None)


def from_table(table: Mapping[str, Any], source: str, preset: str | None) -> TrainConfig:
    """A configuration from the keys of a TOML file, over a preset.

    Args:
        table: keys and values.
        source: the file's name, for errors.
        preset: its name; None: the one that the table names, else tiny.

    Raises:
        UsageError: an unknown key or a wrong value.
    """
    hints = _hints(TrainConfig)
    for key in table:
        if key not in hints:
            raise unknown(
                f"key in {source}:", key, hints, "see python -m attention_ext train --help"
            )
    values = {key: _convert(key, value, hints[key], source) for key, value in table.items()}
    chosen = preset or values.get("preset", "tiny")
    start = dict(PRESETS[chosen])
    if any(name in values for name in HORIZONS):
        start.pop("time")
    if "hidden_size" in values:
        start.pop("intermediate_size")
    return _fill(TrainConfig(), {**start, **values, "preset": chosen})


def to_table(config: TrainConfig) -> dict[str, Any]:
    """All keys of a configuration, flat; without a value they are left out: TOML has no null.

    Example:
        >>> to_table(TrainConfig())["batch_size"]
        8
    """
    table: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        table |= value if isinstance(value, dict) else {name: value}
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in table.items()
        if value is not None
    }


def to_toml(config: TrainConfig) -> str:
    """The text of a configuration's TOML file."""
    import tomli_w

    return tomli_w.dumps(to_table(config))


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file.

    Raises:
        UsageError: the file cannot be read, is empty, or is not TOML.
    """
    try:
        table: dict[str, Any] = tomllib.loads(read_text(path))
        return table
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {str(error)[:1].lower()}{str(error)[1:]}") from None


def _hints(kind: type[Any]) -> dict[str, Any]:
    """Every key with its type."""
    hints: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        hints |= _hints(hint) if dataclasses.is_dataclass(hint) else {name: hint}  # type: ignore[arg-type]
    return hints


def _fill(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        old = getattr(config, field.name)
        if dataclasses.is_dataclass(old):
            own = {f.name: values[f.name] for f in dataclasses.fields(old) if f.name in values}
            changes[field.name] = dataclasses.replace(old, **own)  # type: ignore[type-var]
        elif field.name in values:
            changes[field.name] = values[field.name]
    return dataclasses.replace(config, **changes)


def _convert(key: str, value: Any, hint: Any, source: str) -> Any:
    """A TOML value as its option's type."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (choice for choice in get_args(hint) if choice is not types.NoneType)
    if get_origin(hint) is Literal:
        expected, fits = "one of " + ", ".join(map(repr, get_args(hint))), value in get_args(hint)
    elif get_origin(hint) is tuple:
        value = [_text(item) for item in (value if isinstance(value, list) else [value])]
        expected, fits = "a list of texts", all(isinstance(item, str) for item in value)
    elif hint is bool:
        expected, fits = "true or false", isinstance(value, bool)
    elif hint is str:
        value = _text(value)
        expected, fits = "a text", isinstance(value, str)
    else:
        kinds = (int,) if hint is int else (int, float)
        expected = "an integer" if hint is int else "a number"
        fits = isinstance(value, kinds) and not isinstance(value, bool)
    if not fits:
        raise UsageError(f"{source}: expected {key} to be {expected}, got {value!r}")
    return value if get_origin(hint) is Literal else (get_origin(hint) or hint)(value)


def _text(value: Any) -> Any:
    """A number as its text (threads = 2, time = 150), two of them likewise ([64, 0] as "64,0")."""
    if isinstance(value, list) and all(type(item) is int for item in value):
        return ",".join(map(str, value))
    return str(value) if type(value) in (int, float) else value


def _without_horizon(training: TrainingOptions) -> TrainingOptions:
    return dataclasses.replace(training, steps=None, time=None, epochs=None)


def _with_absolute_paths(data: DataOptions) -> DataOptions:
    """Paths that still mean the same when the run goes on from another folder."""

    def absolute(path: str, *names: str) -> str:
        return path if path in names else str(Path(path).absolute())

    return dataclasses.replace(
        data,
        data=tuple(absolute(path, "docs", "-") for path in data.data),
        val=data.val and absolute(data.val),
        tokenizer=absolute(data.tokenizer, "bpe", "byte"),
    )


def _check_resumable(saved: TrainConfig, wanted: TrainConfig) -> None:
    old, new = to_table(saved), to_table(wanted)
    for key in old.keys() | new.keys():
        if key not in RESUMABLE and old.get(key) != new.get(key):
            raise UsageError(
                f"--resume goes on with the saved {key} = {old.get(key)!r}, "
                f"got {new.get(key)!r}; start a new run for another"
            )
