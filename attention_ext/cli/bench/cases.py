"""The calls that ``bench`` measures: their sizes, what is asked of them, and the presets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..errors import UsageError

Preset = Literal["quick", "train", "decode", "options", "full"]
DType = Literal["float64", "float32", "bfloat16", "float16"]
Pass = Literal["fwd", "fwd+bwd", "double", "jvp"]
Option = Literal[
    "plain",
    "bool-causal",
    "bool-padding",
    "bool-blocks",
    "bool-random",
    "float-mask",
    "mask-grad",
    "alibi",
    "softcap",
    "sinks",
    "dropout",
    "window",
    "lengths",
]

SIZES = "BxHxLxD"
_NUMBER = r"([1-9]\d*)"
_SIZES = re.compile(
    rf"{_NUMBER}x{_NUMBER}(?:/{_NUMBER})?x{_NUMBER}(?::{_NUMBER})?x{_NUMBER}(?:/{_NUMBER})?"
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call: query (batch, heads, queries, head_dim) and so on."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int

    @classmethod
    def parse(cls, text: str) -> Sizes:
        """Reads BxHxLxD, in which H/Hkv, L:S and D/Dv say what differs for keys and values.

        Raises:
            UsageError: the text is no such thing, or Hkv does not divide H.

        Example:
            >>> Sizes.parse("1x32/8x1:4096x128")
            Sizes(batch=1, heads=32, kv_heads=8, queries=1, keys=4096, head_dim=128, value_dim=128)
            >>> str(Sizes.parse("1x16/16x1024:1024x96/64"))
            '1x16x1024x96/64'
        """
        match = _SIZES.fullmatch(text.strip())
        if not match:
            raise UsageError(
                f"expected sizes as {SIZES}, positive numbers, with H/Hkv, L:S or D/Dv where keys "
                f"or values differ (1x8x512x64, 1x32/8x1:4096x128, 1x16x1024x96/64), got {text!r}"
            )
        batch, heads, kv_heads, queries, keys, head_dim, value_dim = match.groups()
        sizes = cls(
            batch=int(batch),
            heads=int(heads),
            kv_heads=int(kv_heads or heads),
            queries=int(queries),
            keys=int(keys or queries),
            head_dim=int(head_dim),
            value_dim=int(value_dim or head_dim),
        )
        if sizes.heads % sizes.kv_heads:
            raise UsageError(
                "expected sizes whose number of query heads is a multiple of the key heads, "
                f"got {sizes.heads}/{sizes.kv_heads} in {text!r}"
            )
        return sizes

    def __str__(self) -> str:
        heads = f"{self.heads}" + f"/{self.kv_heads}" * (self.kv_heads != self.heads)
        length = f"{self.queries}" + f":{self.keys}" * (self.keys != self.queries)
        width = f"{self.head_dim}" + f"/{self.value_dim}" * (self.value_dim != self.head_dim)
        return f"{self.batch}x{heads}x{length}x{width}"


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        sizes: of the call.
        direction: what is timed: "fwd" a call without gradients; "fwd+bwd" a call and the gradients
            of query, key and value; "double" also the gradients of those; "jvp" a call in forward
            mode.
        causal: with ``is_causal``.
        option: one of `Option`; "plain" is none.
        dtype: of query, key and value.
    """

    sizes: Sizes
    direction: Pass = "fwd"
    causal: bool = False
    option: Option = "plain"
    dtype: DType = "float32"

    @classmethod
    def parse(cls, line: str) -> Case:
        """The case that `name` names.

        Example:
            >>> Case.parse("fwd+bwd 2x8x1024x64 causal bfloat16").name
            'fwd+bwd 2x8x1024x64 causal bfloat16'
        """
        case = cls(Sizes.parse(line.split()[1]))
        for word in line.split():
            if word in get_args(Pass):
                case = replace(case, direction=word)  # type: ignore[arg-type]
            elif word in get_args(DType):
                case = replace(case, dtype=word)  # type: ignore[arg-type]
            elif word in get_args(Option):
                case = replace(case, option=word)  # type: ignore[arg-type]
            elif word == "causal":
                case = replace(case, causal=True)
            elif word != str(case.sizes):
                raise ValueError(f"no part of a case: {word}")
        return case

    @property
    def name(self) -> str:
        """The case in words."""
        extras = ["causal"] * self.causal + [self.option] * (self.option != "plain")
        return " ".join([self.direction, str(self.sizes), *extras, self.dtype])

    @property
    def is_overhead(self) -> bool:
        """Whether the call is so small that only its overhead is timed."""
        return self.sizes.queries == self.sizes.keys == 1

    @property
    def is_decode(self) -> bool:
        """Whether reading the keys and values is what takes the time."""
        return self.sizes.queries < self.sizes.keys and self.sizes.queries <= 4


QUICK = """
    fwd      1x1x1x64
    fwd+bwd  1x1x1x64
    fwd      1x8x512x64
    fwd      1x8x512x64          causal
    fwd      1x4x1024x128
    fwd      1x4x1024x128        causal
    fwd      1x8x512x64          bfloat16
    fwd      32x4x64x32          causal
    fwd+bwd  1x8x512x64
    fwd+bwd  1x8x512x64          causal
    fwd+bwd  1x2x1024x128        causal
    fwd+bwd  8x6x256x64          causal
    fwd+bwd  32x4x64x32          causal
    fwd+bwd  1x4x256x64          causal bfloat16
    fwd      1x32/8x1:4096x128
    fwd      1x32/8x1:4096x128   bfloat16
    fwd      1x8x1:4096x128
"""

# Sizes of training steps, and the types and directions that each is measured with.
TRAIN = (
    ("32x4x64x32", "fwd fwd+bwd", "float32"),
    ("8x6x256x64", "fwd fwd+bwd", "float32"),
    ("1x4x256x64", "fwd+bwd", "bfloat16 float16"),
    ("1x8x512x64", "fwd", "bfloat16 float16"),
    ("1x8x512x64", "fwd fwd+bwd", "float32"),
    ("1x4x1024x64", "fwd+bwd", "bfloat16 float16"),
    ("1x4x1024x64", "fwd fwd+bwd", "float32"),
    ("1x4x1024x128", "fwd fwd+bwd", "float32"),
    ("4x12x1024x64", "fwd", "bfloat16 float16"),
    ("4x12x1024x64", "fwd fwd+bwd", "float32"),
    ("1x16x1024x96/64", "fwd fwd+bwd", "float32"),
    ("1x16x2048x64", "fwd fwd+bwd", "float32"),
    ("1x32x2048x128", "fwd", "float32"),
    ("1x8x4096x64", "fwd fwd+bwd", "float32"),
    ("1x8x512x64", "fwd fwd+bwd", "float64"),
)

DECODE = (
    ("1x32/8x1:1024x128", "plain", "float32 bfloat16 float16"),
    ("1x32/8x1:4096x128", "plain", "float32 bfloat16 float16"),
    ("1x32/8x1:16384x128", "plain", "float32 bfloat16 float16"),
    ("1x8x1:4096x128", "plain", "float32 bfloat16"),
    ("1x32/8x4:4096x128", "plain", "float32 bfloat16"),
    ("8x32/8x1:1024x128", "plain", "float32 bfloat16"),
    ("8x32/8x1:4096x128", "plain lengths", "float32"),
)

OPTION_SIZES = "2x8x1024x64"
# Beside every option forward and backward: what else is told apart from the formula in torch.
DERIVATIVES = (("double", "plain"), ("double", "float-mask"), ("jvp", "plain"), ("jvp", "alibi"))


def preset_cases(preset: Preset, sizes: Iterable[Sizes] = ()) -> list[Case]:
    """The rows of a preset.

    Args:
        preset: its name.
        sizes: of the calls of the preset "options", in place of its own.
    """
    if preset == "quick":
        return [Case.parse(line) for line in QUICK.strip().splitlines()]
    if preset == "train":
        return list(_train_cases())
    if preset == "decode":
        return [
            Case(Sizes.parse(text), option=option, dtype=dtype)  # type: ignore[arg-type]
            for text, options, dtypes in DECODE
            for option in options.split()
            for dtype in dtypes.split()
        ]
    if preset == "options":
        return list(_option_cases(list(sizes) or [Sizes.parse(OPTION_SIZES)]))
    parts: tuple[Preset, ...] = ("quick", "train", "decode", "options")
    return list(dict.fromkeys(case for part in parts for case in preset_cases(part)))


def _train_cases() -> Iterator[Case]:
    for text, directions, dtypes in TRAIN:
        for dtype in dtypes.split():
            for direction in directions.split():
                for causal in (False, True):
                    yield Case(
                        Sizes.parse(text),
                        direction,  # type: ignore[arg-type]
                        causal,
                        dtype=dtype,  # type: ignore[arg-type]
                    )


def _option_cases(sizes: Iterable[Sizes]) -> Iterator[Case]:
    for size in sizes:
        for option in get_args(Option)[1:]:
            if option != "mask-grad":
                yield Case(size, option=option)
            yield Case(size, "fwd+bwd", option=option)
        for direction, option in DERIVATIVES:
            yield Case(size, direction, option=option)  # type: ignore[arg-type]
