"""The attention calls that the tests share, chosen by hand at the boundaries: at most 60."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_ext.reference import Call

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INPUTS = ("query", "key", "value")


@dataclass(frozen=True)
class AttentionCase:
    """One call: shapes and options. Tensors come from `make`."""

    name: str
    query: tuple[int, ...]  # (*B, Hq, L, D)
    key: tuple[int, ...]  # (*B, Hkv, S, D)
    value: tuple[int, ...]  # (*B, Hkv, S, Dv)
    mask: str | None = None  # "bool", "float" (with some -inf), "padding" (bool, by key), "finite"
    mask_shape: tuple[int, ...] | None = None
    is_causal: bool = False
    lower_right: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    layout: str = "contiguous"  # of query, key and value: see `_laid_out`
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    slopes: tuple[int, ...] | None = None  # the shape of alibi_slopes
    sinks: bool = False
    used: tuple[int, ...] | None = None  # the numbers of seqused_k, one for each batch element
    dropout_p: float = 0.0

    def make(
        self,
        dtype: torch.dtype = torch.float64,
        magnitude: float = 1.0,
        requires_grad: bool = False,
        seed: int = 1,
    ) -> Call:
        """The tensors and options of this call; the same for the same arguments."""
        generator = torch.Generator().manual_seed(seed)

        def tensor(shape: tuple[int, ...]) -> Tensor:
            data = torch.randn(shape, generator=generator, dtype=torch.float64) * magnitude
            return _laid_out(data.to(dtype), self.layout).requires_grad_(requires_grad)

        query, key, value = (tensor(shape) for shape in (self.query, self.key, self.value))
        mask = self._make_mask(generator, dtype)
        if mask is not None and mask.is_floating_point():
            mask.requires_grad_(requires_grad)
        slopes = sinks = None
        if self.slopes is not None:
            slopes = (torch.rand(self.slopes, generator=generator) * 0.3).to(dtype)
            slopes.requires_grad_(requires_grad)
        if self.sinks:
            heads = self.query[-3]
            sinks = torch.randn(heads, generator=generator).to(dtype).requires_grad_(requires_grad)
        return Call(
            query,
            key,
            value,
            mask,
            self.is_causal,
            self.scale,
            self.enable_gqa,
            self.lower_right,
            *self.window,
            self.softcap,
            self.dropout_p,
            slopes,
            sinks,
            None if self.used is None else torch.tensor(self.used),
            torch.tensor(1000 + seed) if self.dropout_p else None,
        )

    def _make_mask(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor | None:
        if self.mask is None:
            return None
        assert self.mask_shape is not None
        shown = torch.rand(self.mask_shape, generator=generator) < 0.7
        if self.mask == "bool":
            return shown
        if self.mask == "padding":
            length = shown.shape[-1] - shown.shape[-1] // 3
            return (torch.arange(shown.shape[-1]) < length).expand(self.mask_shape)
        bias = torch.randn(self.mask_shape, generator=generator, dtype=torch.float64).to(dtype)
        return bias if self.mask == "finite" else bias.masked_fill(~shown, -torch.inf)


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another memory order."""
    if layout == "projection":  # (B, L, H, D) in memory, as a linear layer leaves it
        return tensor.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "transposed":  # last stride not 1
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced":  # gaps between rows and heads, as in a fused projection or a cache
        rows, columns = tensor.shape[-2:]
        buffer = tensor.new_full((*tensor.shape[:-2], rows + 3, columns + 5), torch.nan)
        buffer[..., 2 : rows + 2, 1 : columns + 1] = tensor
        return buffer[..., 2 : rows + 2, 1 : columns + 1]
    if layout == "expanded":  # stride 0 over the leading dimensions
        return tensor[(slice(0, 1),) * (tensor.dim() - 2)].expand(tensor.shape)
    assert layout == "contiguous"
    return tensor


def keywords(call: Call) -> dict[str, Any]:
    """The arguments of a call as the public function takes them; it draws a seed of its own."""
    arguments = call._asdict()
    for name in ("seed", "shared_batch_dims", "cu_seq_q", "cu_seq_k", "max_q", "max_k"):
        del arguments[name]
    variant = "lower_right" if arguments.pop("lower_right") else "upper_left"
    window = arguments.pop("window_left"), arguments.pop("window_right")
    return arguments | {"causal_variant": variant, "window_size": window}


def _square(
    name: str, length: int, width: int = 16, heads: int = 2, **options: Any
) -> AttentionCase:
    shape = (2, heads, length, width)
    return AttentionCase(name, shape, shape, shape, **options)


def _cross(
    name: str, seqlen_q: int, seqlen_kv: int, width: int = 16, value_dim: int = 0, **options: Any
) -> AttentionCase:
    key = (2, 2, seqlen_kv, width)
    value = (*key[:3], value_dim or width)
    return AttentionCase(name, (2, 2, seqlen_q, width), key, value, **options)


CASES = [
    # lengths: around lanes, tiles and super-blocks
    _square("one position", 1),
    _square("a lane short of a tile", 15, is_causal=True),
    _square("just a lane tile", 16),
    _square("one more than a lane tile", 17, is_causal=True),
    _square("65 positions", 65),
    _square("several tiles, causal", 130, is_causal=True),
    _cross("one query, many keys", 1, 200),
    _cross("many queries, one key", 100, 1),
    _cross("many keys", 5, 300, is_causal=True),
    _cross("many queries", 150, 7, is_causal=True),
    _cross("lower right, more keys", 7, 75, is_causal=True, lower_right=True),
    _cross("lower right, more queries: empty rows", 75, 7, is_causal=True, lower_right=True),
    _cross("lower right, one query", 1, 33, is_causal=True, lower_right=True),
    # widths
    _square("width 1", 9, width=1),
    _square("width 3", 9, width=3, is_causal=True),
    _square("width 33", 20, width=33, is_causal=True),
    _square("width 64", 40, width=64, is_causal=True),
    _square("width 96", 20, width=96, is_causal=True),
    _square("width 257", 10, width=257, is_causal=True),
    _square("width 512", 10, width=512),
    _cross("wider value", 9, 12, width=8, value_dim=40, is_causal=True),
    _cross("narrower value", 9, 12, width=40, value_dim=1),
    # scales
    _square("scale 0", 9, scale=0.0),
    _square("negative scale", 9, scale=-0.5, is_causal=True),
    # masks
    _square("bool mask (L, S)", 37, mask="bool", mask_shape=(37, 37)),
    _square("bool mask (B, 1, L, S)", 37, mask="bool", mask_shape=(2, 1, 37, 37)),
    _cross("padding mask (B, 1, 1, S)", 9, 250, mask="padding", mask_shape=(2, 1, 1, 250)),
    _cross("mask (S,)", 9, 40, mask="bool", mask_shape=(40,)),
    _square("float mask (B, H, L, S)", 21, mask="float", mask_shape=(2, 2, 21, 21)),
    _square("finite float mask (1, H, L, S)", 21, mask="finite", mask_shape=(1, 2, 21, 21)),
    _square("bool mask and causal", 130, mask="bool", mask_shape=(130, 130), is_causal=True),
    _square("float mask and causal", 37, mask="float", mask_shape=(2, 1, 37, 37), is_causal=True),
    _cross(
        "padding and lower right", 9, 40, mask="padding", mask_shape=(2, 1, 1, 40),
        is_causal=True, lower_right=True,
    ),
    # score options
    _square("window", 130, window=(20, 5)),
    _cross(
        "causal window, lower right", 40, 150, window=(16, -1), is_causal=True, lower_right=True
    ),
    _square("softcap", 37, softcap=1.5),
    _square("slopes (H,)", 70, slopes=(2,), is_causal=True),
    _cross("slopes (B, H), lower right", 9, 60, slopes=(2, 2), lower_right=True),
    _square("sinks", 37, sinks=True),
    _cross("sinks and empty rows", 40, 9, sinks=True, is_causal=True, lower_right=True),
    _cross("keys in use", 9, 130, used=(0, 77)),
    _cross("keys in use, lower right", 9, 60, used=(5, 43), is_causal=True, lower_right=True),
    _square("dropout", 37, dropout_p=0.3, is_causal=True),
    _square(
        "everything", 100, mask="float", mask_shape=(2, 1, 1, 100), is_causal=True, window=(40, -1),
        softcap=2.0, slopes=(2,), sinks=True, used=(90, 55), dropout_p=0.2, lower_right=True,
    ),
    AttentionCase(
        "everything for one position", (2, 4, 1, 16), (2, 2, 90, 16), (2, 2, 90, 16),
        mask="float", mask_shape=(4, 1, 90), window=(60, -1), softcap=2.0, slopes=(2, 4),
        sinks=True, used=(90, 55), dropout_p=0.2, lower_right=True, enable_gqa=True,
    ),
    # heads
    AttentionCase(
        "two queries share a key head", (2, 4, 19, 16), (2, 2, 19, 16), (2, 2, 19, 16),
        enable_gqa=True, is_causal=True,
    ),
    AttentionCase(
        "all queries share one key head", (2, 6, 5, 8), (2, 1, 40, 8), (2, 1, 40, 8),
        enable_gqa=True,
    ),
    AttentionCase(
        "three queries share a key head, one position", (1, 9, 1, 64), (1, 3, 50, 64),
        (1, 3, 50, 64), enable_gqa=True, is_causal=True, lower_right=True,
    ),
    AttentionCase(
        "key and value differ in heads", (1, 12, 7, 8), (1, 4, 9, 8), (1, 6, 9, 8),
        enable_gqa=True, mask="bool", mask_shape=(12, 7, 9),
    ),
    AttentionCase("one key head broadcast", (2, 3, 7, 8), (2, 1, 9, 8), (2, 3, 9, 8)),
    AttentionCase("one query head broadcast", (2, 1, 7, 8), (2, 3, 9, 8), (2, 3, 9, 8)),
    # ranks
    AttentionCase("rank 2", (7, 8), (9, 8), (9, 5), is_causal=True),
    AttentionCase("rank 3", (3, 7, 8), (3, 9, 8), (3, 9, 8), mask="bool", mask_shape=(3, 7, 9)),
    AttentionCase("rank 5", (2, 2, 3, 7, 8), (2, 2, 3, 9, 8), (2, 2, 3, 9, 8), is_causal=True),
    AttentionCase("rank 3 query, rank 4 key", (3, 7, 8), (2, 3, 9, 8), (2, 3, 9, 8)),
    AttentionCase("batch broadcast", (4, 1, 2, 7, 8), (1, 3, 2, 9, 8), (3, 1, 9, 8)),
    # memory order
    _square("projection layout", 19, layout="projection", is_causal=True),
    _square("last stride not 1", 19, layout="transposed", is_causal=True),
    _square("expanded inputs", 19, layout="expanded", mask="bool", mask_shape=(19, 19)),
]  # fmt: skip

assert len(CASES) <= 60
assert len({case.name for case in CASES}) == len(CASES)

BY_NAME = {case.name: case for case in CASES}
