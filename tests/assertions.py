"""What the tests assert more than once, and the formulas they compare with."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attention_ext import paths, reference
from attention_ext.derivatives import inputs_of
from attention_ext.reference import Call


def rms(tensor: Tensor) -> float:
    """Root mean square, in float64."""
    return tensor.double().square().mean().sqrt().item() if tensor.numel() else 0.0


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Our output and lse; unlike the public function it takes the call's seed of dropout."""
    return paths.attention(call)[:2]


def exact(call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse of the definition."""
    return reference.attention(call)[:2]


def floating(call: Call) -> dict[str, Tensor]:
    """The differentiable inputs of a call, by name."""
    pairs = inputs_of(call)._asdict().items()
    return {name: x for name, x in pairs if x is not None and x.is_floating_point()}


def leaves_of(call: Call) -> list[Tensor]:
    """The same, as a list."""
    return list(floating(call).values())


def fresh(call: Call, dtype: torch.dtype | None = None) -> Call:
    """The same call with new leaves that require grad, perhaps in another dtype."""
    return call._replace(
        **{
            name: x.detach().to(x.dtype if dtype is None else dtype).requires_grad_()
            for name, x in floating(call).items()
        }
    )


def replaced(call: Call, tensors: Sequence[Tensor]) -> Call:
    """The call with others in the place of its differentiable inputs."""
    return call._replace(**dict(zip(floating(call), tensors, strict=True)))


def unfused(call: Call) -> Tensor:
    """The plain formula in the dtype of the inputs, as a user would write it; no dropout."""
    query, key, value = call[:3]
    dtype = query.dtype
    if call.enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = query @ key.transpose(-1, -2) * scale
    if call.softcap:
        scores = call.softcap * (scores / call.softcap).tanh()
    hidden, distance = ~shown(call), distances(call)
    mask = call.attn_mask
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.masked_fill(mask == -math.inf, 0.0)
    if call.alibi_slopes is not None:
        scores = scores - call.alibi_slopes[..., None, None] * distance.abs().to(dtype)
    scores = scores.masked_fill(hidden, -math.inf)
    if call.sinks is not None:
        sink = call.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.masked_fill(hidden, 0.0) @ value


def distances(call: Call) -> Tensor:
    """The position of the key less that of the query, (L, S) or (*B, 1, L, S)."""
    seqlen_q, seqlen_kv = call.query.shape[-2], call.key.shape[-2]
    used = (
        torch.tensor(seqlen_kv) if call.seqused_k is None else call.seqused_k[..., None, None, None]
    )
    offset = used - seqlen_q if call.lower_right else 0
    return torch.arange(seqlen_kv) - (torch.arange(seqlen_q).unsqueeze(-1) + offset)


def shown(call: Call) -> Tensor:
    """Which pairs may attend, (L, S) or with leading dimensions."""
    distance = distances(call)
    pairs = torch.ones_like(distance, dtype=torch.bool)
    if call.seqused_k is not None:
        pairs = pairs & (torch.arange(call.key.shape[-2]) < call.seqused_k[..., None, None, None])
    if call.is_causal:
        pairs = pairs & (distance <= 0)
    if call.window_left >= 0:
        pairs = pairs & (distance >= -call.window_left)
    if call.window_right >= 0:
        pairs = pairs & (distance <= call.window_right)
    if call.attn_mask is not None:
        mask = call.attn_mask
        pairs = pairs & (mask if mask.dtype == torch.bool else mask != -math.inf)
    return pairs


def finite_lse(lse: Tensor) -> Tensor:
    """lse with 0 in empty rows, whose -inf has no derivative."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def assert_close(actual: object, expected: object, tolerance: float = 1e-12) -> None:
    """Equal within a tolerance, absolute and relative; NaN equals NaN."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same_bits(
    actual: Sequence[Tensor] | Tensor, expected: Sequence[Tensor] | Tensor
) -> None:
    """Equal bit for bit; NaN equals NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


class ErrorRatio:
    """The error-ratio rule, over as many samples as are added.

    The root mean square error is at most `factor` times that of the plain formula in the same
    dtype, both against float64. Errors below the dtype's resolution of the terms that were summed
    always pass: where those cancel, the plain formula can be exact by luck.
    """

    def __init__(self, what: str, factor: float) -> None:
        self.what, self.factor = what, factor
        self.own = self.plain = self.floor = 0.0

    def add(self, actual: Tensor, baseline: Tensor, truth: Tensor, terms: float = 0.0) -> None:
        """Add a sample; `terms` is the size of what cancels in it, if larger than truth."""
        assert actual.isfinite().all(), f"{self.what}: not finite"
        resolution = torch.finfo(actual.dtype).eps * max(rms(truth), terms)
        self.own += _squares(actual.double() - truth)
        self.plain += _squares(baseline.double() - truth)  # NaN or inf where that overflows
        self.floor += resolution**2 * truth.numel()

    def check(self) -> None:
        """Assert the rule."""
        own, plain, floor = math.sqrt(self.own), math.sqrt(self.plain), math.sqrt(self.floor)
        within = own <= max(self.factor * plain, floor) or not math.isfinite(plain)
        assert within, (
            f"{self.what}: error {own:.3g}, of the plain formula {plain:.3g}, "
            f"allowed {self.factor} times that or {floor:.3g}"
        )


def _squares(tensor: Tensor) -> float:
    return tensor.square().sum().item()
