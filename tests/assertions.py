"""What the tests assert more than once, and the formulas they compare with."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attention_ext import reference
from attention_ext.reference import Call


def rms(tensor: Tensor) -> float:
    """Root mean square, in float64."""
    return tensor.double().square().mean().sqrt().item() if tensor.numel() else 0.0


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """The same call with its floating tensors in another dtype; new leaves that require grad."""
    tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in call[:3]]
    mask = call.attn_mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    return Call(*tensors, mask, *call[4:])


def unfused(call: Call) -> Tensor:
    """The plain formula in the dtype of the inputs, as a user would write it."""
    query, key, value, mask, _, scale, enable_gqa, _ = call
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    hidden = ~shown(call)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.masked_fill(mask == -math.inf, 0.0)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0)
    return weights @ value


def shown(call: Call) -> Tensor:
    """Which pairs may attend, (L, S) or with leading dimensions."""
    seqlen_q, seqlen_kv = call.query.shape[-2], call.key.shape[-2]
    pairs = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
    if call.is_causal:
        pairs = pairs.tril(seqlen_kv - seqlen_q if call.lower_right else 0)
    if call.attn_mask is not None:
        mask = call.attn_mask
        pairs = pairs & (mask if mask.dtype == torch.bool else mask != -math.inf)
    return pairs


def exact(call: Call) -> tuple[Tensor, ...]:
    """Output and lse of the definition in float64, with the graph to the call's own leaves."""
    return reference.attention(*call)


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
