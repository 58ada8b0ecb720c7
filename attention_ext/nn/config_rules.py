"""What the values of a `DecoderConfig` must be: one sentence for each that is not.

Each ``checked_`` function returns the value in the form in which a configuration keeps it.
"""

from __future__ import annotations

import math
from typing import Any

from attention_ext.errors import ArgumentError, ArgumentTypeError

_ROPE_SCALING_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}

Windows = tuple[tuple[int, int] | None, ...]


def wrong_value(name: str, rule: str, value: object) -> ArgumentError:
    """The error for a field with a value that does not fit."""
    return ArgumentError(f"DecoderConfig: expected {name} to be {rule}, got {value!r}")


def wrong_type(name: str, rule: str, value: object) -> ArgumentTypeError:
    """The error for a field with a value of another type."""
    return ArgumentTypeError(
        f"DecoderConfig: expected {name} to be {rule}, got {value!r} of type {type(value).__name__}"
    )


def check_size(name: str, value: object) -> None:
    """Reject what is no integer of at least 1."""
    if not _is_integer(value):
        raise wrong_type(name, "an integer", value)
    if value < 1:  # type: ignore[operator]
        raise wrong_value(name, "at least 1", value)


def checked_number(name: str, value: object) -> float:
    """A finite number as float."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise wrong_type(name, "a number", value)
    if not math.isfinite(value):
        raise wrong_value(name, "finite", value)
    return float(value)


def checked_softcap(softcap: object) -> float | None:
    """None or a positive number; 0 means off, as in the operator."""
    if softcap is None:
        return None
    number = checked_number("softcap", softcap)
    if number < 0:
        raise wrong_value("softcap", "None or at least 0", softcap)
    return number or None


def checked_window_sizes(windows: object, num_layers: int) -> Windows | None:
    """None or a tuple with one (left, right) or None per layer; (-1, -1) becomes None."""
    if windows is None:
        return None
    rule = "None or one (left, right) or None per layer"
    if not isinstance(windows, (tuple, list)):
        raise wrong_type("window_sizes", rule, windows)
    if len(windows) != num_layers:
        raise wrong_value("window_sizes", f"{rule}, for num_hidden_layers = {num_layers}", windows)
    return tuple(
        _checked_window(f"window_sizes[{layer}]", window) for layer, window in enumerate(windows)
    )


def _checked_window(name: str, window: object) -> tuple[int, int] | None:
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or not all(map(_is_integer, window)):
        raise wrong_type(name, "None or (left, right), two integers", window)
    if len(window) != 2 or min(window) < -1:
        raise wrong_value(name, "two integers of at least -1 (-1: unlimited)", window)
    left, right = window
    return None if left == right == -1 else (left, right)


def checked_rope_scaling(scaling: object) -> dict[str, Any] | None:
    """The dictionary with ``rope_type`` first and exactly the numbers that this type needs."""
    if scaling is None:
        return None
    if not isinstance(scaling, dict):
        raise wrong_type("rope_scaling", "None or a dictionary", scaling)
    given = dict(scaling)
    old_name = given.pop("type", None)
    kind = given.pop("rope_type", old_name)
    if kind not in _ROPE_SCALING_KEYS:
        rule = "of rope_type " + ", ".join(map(repr, _ROPE_SCALING_KEYS))
        raise wrong_value("rope_scaling", rule, scaling)
    needed = _ROPE_SCALING_KEYS[kind]
    if set(given) != set(needed):
        keys = ", ".join(("rope_type", *needed))
        raise wrong_value("rope_scaling", f"a dictionary with the keys {keys}", scaling)
    numbers = {key: checked_number(f"rope_scaling[{key!r}]", given[key]) for key in needed}
    for key, number in numbers.items():
        if number <= 0:
            raise wrong_value(f"rope_scaling[{key!r}]", "positive", number)
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise wrong_value("rope_scaling", "with low_freq_factor < high_freq_factor", scaling)
    return {"rope_type": kind, **numbers}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
