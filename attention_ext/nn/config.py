"""The description of a decoder: sizes and options, checked once, stored as JSON.

Field names are those of the Hugging Face configurations. ``None`` in an optional size means "derive
it"; after construction every size is a number, so a saved configuration states them all.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from typing import Any, NamedTuple

from attention_ext.errors import ArgumentError

from .config_rules import (
    Windows,
    check_size,
    checked_number,
    checked_rope_scaling,
    checked_softcap,
    checked_window_sizes,
    wrong_type,
    wrong_value,
)

MODEL_TYPE = "attention_ext"

_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_CHOICES = {
    "norm": ("rms", "layer"),
    "mlp": ("swiglu", "gelu"),
    "position": ("rope", "learned", "alibi", "none"),
}
_SWITCHES = (
    "attention_bias",
    "causal",
    "qk_norm",
    "rope_interleaved",
    "sinks",
    "tie_word_embeddings",
)


class HeadSizes(NamedTuple):
    """Numbers and widths of the attention heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a `Decoder`.

    Args:
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: query heads per layer.
        num_key_value_heads: key-value heads, a divisor of the query heads; default: as many.
        head_dim: width of a query and of a key; default: ``hidden_size / num_attention_heads``.
        value_dim: width of a value; default: ``head_dim``.
        intermediate_size: width inside the feed-forward part; default: 8/3 of the hidden size for
            "swiglu", rounded up to a multiple of 8, and 4 times the hidden size for "gelu".
        max_position_embeddings: the longest context in tokens.
        norm: "rms" (a weight) or "layer" (a weight and a bias).
        mlp: "swiglu" (no biases) or "gelu" (tanh form, with biases, as in GPT-2).
        position: "rope" (rotary), "learned" (added to the embeddings), "alibi" (scores fall with
            the distance, in each head by a slope of its own) or "none".
        rope_theta: base of the rotary wavelengths.
        rope_fraction: share of each head that is rotated: its first
            ``int(head_dim * rope_fraction)`` components.
        rope_interleaved: rotate neighbours (2i, 2i + 1) instead of halves (i, i + R/2). The two
            differ by a fixed order of the query and key weights; neighbours train faster.
        rope_scaling: None, or a dictionary as in Hugging Face configurations with ``rope_type``
            "default", "linear" or "llama3".
        attention_bias: biases in the query, key, value and output projections.
        qk_norm: RMS-normalise every query and key head before the rotation.
        window_sizes: None, or for each layer None or (left, right): a query sees so many keys
            before and behind its own position; -1 is unlimited.
        softcap: None, or c > 0: scores become ``c * tanh(score / c)``; 0 is None.
        sinks: a learned logit per head and layer that takes part in the softmax and adds nothing to
            the output, so that a head may look at nothing.
        dropout: probability, in training mode, with which an attention weight and a component of
            what attention and feed-forward add to the residual stream are dropped.
        causal: hide later tokens. False makes an encoder: every token sees all others, and there is
            no loss, no generation and no cache.
        tie_word_embeddings: use the embedding as vocabulary projection.

    Raises:
        ArgumentError: a value that does not fit; the sentence names field, rule and value.
        ArgumentTypeError: a value of the wrong type.

    Example:
        >>> config = DecoderConfig(1024, 128, num_hidden_layers=4, num_attention_heads=4)
        >>> config.head_dim, config.intermediate_size
        (32, 344)
        >>> DecoderConfig.from_json(config.to_json()) == config
        True
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 2048
    norm: str = "rms"
    mlp: str = "swiglu"
    position: str = "rope"
    rope_theta: float = 10000.0
    rope_fraction: float = 1.0
    rope_interleaved: bool = False
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    window_sizes: Windows | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    causal: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        self._check_choices()
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise wrong_type(name, "True or False", getattr(self, name))
        for name in (*_REQUIRED, "max_position_embeddings"):
            check_size(name, getattr(self, name))
        self._derive_sizes()
        self._check_heads()
        self._check_rotary()
        self._check_scores()

    @property
    def heads(self) -> HeadSizes:
        """Numbers and widths of the heads as plain integers."""
        sizes = (self.num_key_value_heads, self.head_dim, self.value_dim)
        return HeadSizes(self.num_attention_heads, *(size or 0 for size in sizes))

    def window(self, layer: int) -> tuple[int, int]:
        """How far back and ahead of its own position a query of a layer sees; -1 is unlimited."""
        return (self.window_sizes and self.window_sizes[layer]) or (-1, -1)

    @property
    def rotary_dim(self) -> int:
        """How many components of each query and key head are rotated; 0 without "rope"."""
        return int(self.heads.head_dim * self.rope_fraction) if self.position == "rope" else 0

    def to_dict(self) -> dict[str, Any]:
        """All fields as a dictionary of plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DecoderConfig:
        """Build a configuration from a dictionary of fields.

        Raises:
            ArgumentError: unknown keys (the sentence names the nearest field), missing ones, or
                a ``model_type`` that says that the dictionary describes another kind of model.
        """
        values = dict(values)
        model_type = values.pop("model_type", MODEL_TYPE)
        if model_type != MODEL_TYPE:
            raise ArgumentError(
                f"DecoderConfig: expected model_type {MODEL_TYPE!r}, got {model_type!r}"
            )
        names = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                nearest = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)[0]
                raise ArgumentError(
                    f"DecoderConfig: expected known keys, got {key!r}; did you mean {nearest!r}?"
                )
        missing = [name for name in _REQUIRED if name not in values]
        if missing:
            raise ArgumentError(
                f"DecoderConfig: expected the keys {', '.join(_REQUIRED)}, "
                f"got none for {', '.join(missing)}"
            )
        return cls(**values)

    def to_json(self) -> str:
        """All fields as indented JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DecoderConfig:
        """Read what `to_json` wrote.

        Raises:
            ArgumentError: text that is no JSON object, or whatever `from_dict` rejects.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ArgumentError(f"DecoderConfig: expected JSON, got {error}") from None
        if not isinstance(values, dict):
            raise ArgumentError(
                f"DecoderConfig: expected a JSON object, got {type(values).__name__}"
            )
        return cls.from_dict(values)

    def __hash__(self) -> int:
        return hash(self.to_json())

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise wrong_value(
                    name, "one of " + ", ".join(map(repr, choices)), getattr(self, name)
                )

    def _derive_sizes(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ArgumentError(
                "DecoderConfig: expected hidden_size to be a multiple of num_attention_heads "
                f"where head_dim is not given, got {self.hidden_size} and "
                f"{self.num_attention_heads}"
            )
        wide = math.ceil(self.hidden_size / 3) * 8 if self.mlp == "swiglu" else 4 * self.hidden_size
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        derived = {
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": head_dim,
            "value_dim": head_dim,
            "intermediate_size": wide,
        }
        for name, default in derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            check_size(name, getattr(self, name))

    def _check_heads(self) -> None:
        sizes = self.heads
        if sizes.num_heads % sizes.num_kv_heads:
            raise ArgumentError(
                "DecoderConfig: expected num_attention_heads to be a multiple of "
                f"num_key_value_heads, got {sizes.num_heads} and {sizes.num_kv_heads}"
            )

    def _check_rotary(self) -> None:
        for name in ("rope_theta", "rope_fraction"):
            object.__setattr__(self, name, checked_number(name, getattr(self, name)))
        if self.rope_theta <= 0:
            raise wrong_value("rope_theta", "positive", self.rope_theta)
        if not 0 < self.rope_fraction <= 1:
            raise wrong_value("rope_fraction", "in (0, 1]", self.rope_fraction)
        if self.position == "rope" and (self.rotary_dim % 2 or not self.rotary_dim):
            raise ArgumentError(
                "DecoderConfig: expected head_dim * rope_fraction to give a positive even "
                f"rotary width, got {self.rotary_dim} from head_dim {self.head_dim} and "
                f"rope_fraction {self.rope_fraction}"
            )
        object.__setattr__(self, "rope_scaling", checked_rope_scaling(self.rope_scaling))

    def _check_scores(self) -> None:
        windows = checked_window_sizes(self.window_sizes, self.num_hidden_layers)
        object.__setattr__(self, "window_sizes", windows)
        object.__setattr__(self, "softcap", checked_softcap(self.softcap))
        object.__setattr__(self, "dropout", checked_number("dropout", self.dropout))
        if not 0 <= self.dropout < 1:
            raise wrong_value("dropout", "in [0, 1)", self.dropout)
