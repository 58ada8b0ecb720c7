"""A case as tensors and callables: our call, torch's, the plain one, and what they are held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

import attention_ext

from .cases import Case
from .rivals import formula, formula_by_rows, make_rival

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

SEED = 0
_MOST_REFERENCE_WORK = 1 << 35  # multiply-adds beyond which errors are not looked at


class Calls:
    """The tensors of a case and what is timed on them.

    Args:
        case: the row.
    """

    def __init__(self, case: Case) -> None:
        torch.manual_seed(SEED)
        self.case, sizes, dtype = case, case.sizes, getattr(torch, case.dtype)

        def draw(heads: int, rows: int, width: int) -> Tensor:
            return torch.randn(sizes.batch, heads, rows, width).to(dtype)

        def draw_inputs() -> tuple[Tensor, Tensor, Tensor]:
            query = draw(sizes.heads, sizes.queries, sizes.head_dim)
            key = draw(sizes.kv_heads, sizes.keys, sizes.head_dim)
            return query, key, draw(sizes.kv_heads, sizes.keys, sizes.value_dim)

        self.inputs = draw_inputs()
        self.direction = draw_inputs()  # of the tangent, or the cotangents of the gradients
        self.grad_output = draw(sizes.heads, sizes.queries, sizes.value_dim)
        self.rival = make_rival(case)

    def ours(self) -> Callable[[], Sequence[Tensor]]:
        """Our call, as it is timed."""
        return self._runner(self._our_attend(self.rival.ours))

    def plain(self) -> Callable[[], Sequence[Tensor]]:
        """Our call without the option, and not causal."""
        grouped = self.case.sizes.heads != self.case.sizes.kv_heads
        attend = self._our_attend({"enable_gqa": grouped})
        return self._runner(attend, with_mask=False)

    def torchs(self) -> Callable[[], Sequence[Tensor]]:
        """Torch's, as it is timed."""
        return self._runner(self._torch_attend())

    def read(self) -> Callable[[], object]:
        """Reads every key and value once, and does next to nothing else."""
        key, value = (x.reshape(-1).view(torch.uint8) for x in self.inputs[1:])
        key, value = (x[: x.numel() // 4 * 4].view(torch.float32) for x in (key, value))
        if key.numel() == value.numel():
            return lambda: torch.dot(key, value)
        return lambda: (key.sum(), value.sum())

    def torch_path(self) -> str:
        """What torch runs: its fused kernel, its composite ("math"), or the formula."""
        if self.rival.torchs is None:
            return "formula"
        arguments = dict(self.rival.torchs)
        needs_grad = self.case.direction != "fwd"
        tensors = [x.detach().requires_grad_(needs_grad) for x in self.inputs]
        query, key, value = tensors
        choice = torch._fused_sdp_choice(query, key, value, **arguments)
        path = "math" if choice == torch.nn.attention.SDPBackend.MATH.value else "fused"
        return path + " + mask" * ("attn_mask" in arguments and "attn_mask" not in self.rival.ours)

    @property
    def bytes_stored(self) -> int:
        """Size of the keys and values."""
        return sum(x.numel() * x.element_size() for x in self.inputs[1:])

    @property
    def bytes_visible(self) -> int:
        """The part of it that a query sees, where there is one query."""
        sizes = self.case.sizes
        pairs = sizes.batch * sizes.heads * sizes.queries * sizes.keys
        return self.bytes_stored * self.visible_pairs // pairs

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, over all batch elements and heads."""
        sizes, visible = self.case.sizes, self.rival.score.visible
        leading = sizes.batch * sizes.heads
        if visible is None and not self.case.causal:
            return leading * sizes.queries * sizes.keys
        pairs = torch.ones(sizes.queries, sizes.keys, dtype=torch.bool)
        pairs = pairs.tril() if self.case.causal else pairs
        if visible is not None:
            pairs = pairs & visible
        return int(pairs.sum()) * leading // (pairs.numel() // (sizes.queries * sizes.keys))

    @property
    def flops(self) -> int | None:
        """Useful operations: two for each multiply-add of the products on visible pairs.

        A forward has two products, a backward five (the scores are computed again). None for other
        derivatives, of which no count is agreed upon.
        """
        head, value = self.case.sizes.head_dim, self.case.sizes.value_dim
        per_pair = {"fwd": 2 * (head + value), "fwd+bwd": 8 * head + 6 * value}
        count = per_pair.get(self.case.direction)
        return None if count is None else count * self.visible_pairs

    def errors(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]] | None:
        """Our results, what they should be, torch's results, and what those should be.

        What they should be is the formula in float64, for the first batch element and the query
        heads of its first key head. Patterns of dropout differ: there each side is held against
        itself in float64 with the same seed. None where that would take too long.
        """
        sizes = self.case.sizes
        group = sizes.heads // sizes.kv_heads
        work = self.visible_pairs * (sizes.head_dim + sizes.value_dim)
        if self.case.option == "dropout":
            if work > _MOST_REFERENCE_WORK:
                return None
            sides = []
            for attend in (self._our_attend(self.rival.ours), self._torch_attend()):
                for dtype in (None, torch.float64):
                    torch.manual_seed(SEED)
                    sides.append(list(self._runner(attend, dtype=dtype)()))
            return sides[0], sides[1], sides[2], sides[3]
        if work // (sizes.batch * sizes.kv_heads) > _MOST_REFERENCE_WORK:
            return None

        def sample(results: Sequence[Tensor]) -> list[Tensor]:
            return [x[:1, : group if x.shape[1] == sizes.heads else 1] for x in results[:3]]

        def attend64(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            score = self.rival.score.to(torch.float64).of_first_heads(group)
            by_rows = self.case.direction in ("fwd", "fwd+bwd")
            return (formula_by_rows if by_rows else formula)(query, key, value, score)

        expected = list(self._runner(attend64, torch.float64, sample, with_mask=False)())
        return sample(self.ours()()), expected, sample(self.torchs()()), expected

    def _our_attend(self, arguments: dict[str, Any]) -> Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output: Tensor = attention_ext.scaled_dot_product_attention(
                query, key, value, **arguments
            )
            return output

        return attend

    def _torch_attend(self) -> Attend:
        arguments, score = self.rival.torchs, self.rival.score
        if arguments is None:
            if self.rival.mask is None:
                score = score.to(self.inputs[0].dtype)
            return lambda query, key, value: formula(query, key, value, score)
        return lambda query, key, value: F.scaled_dot_product_attention(
            query, key, value, **arguments
        )

    def _runner(
        self,
        attend: Attend,
        dtype: torch.dtype | None = None,
        sample: Callable[[Sequence[Tensor]], list[Tensor]] = list,
        with_mask: bool = True,
    ) -> Callable[[], Sequence[Tensor]]:
        """What is timed: a call, with the derivatives that the case asks for.

        Args:
            attend: the call.
            dtype: of all tensors; without it the case's.
            sample: chooses a part of the inputs.
            with_mask: whether the gradient of the mask belongs to it.
        """

        def prepare(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [x.detach().to(dtype or x.dtype) for x in sample(tensors)]

        query, key, value = prepare(self.inputs)
        (grad_output,), direction = prepare([self.grad_output]), prepare(self.direction)
        if self.case.direction == "fwd":
            return lambda: (attend(query, key, value),)
        if self.case.direction == "jvp":
            return lambda: _tangent(attend, (query, key, value), direction)
        wanted = [x.requires_grad_() for x in (query, key, value)]
        if with_mask and self.rival.mask is not None:
            wanted = [*wanted, self.rival.mask]

        def gradients() -> Sequence[Tensor]:
            return torch.autograd.grad(attend(query, key, value), wanted, grad_output)

        def second() -> Sequence[Tensor]:
            output = attend(query, key, value)
            grads = torch.autograd.grad(output, wanted, grad_output, create_graph=True)
            return torch.autograd.grad(grads, wanted, direction)

        return second if self.case.direction == "double" else gradients


def _tangent(attend: Attend, inputs: Sequence[Tensor], direction: Sequence[Tensor]) -> list[Tensor]:
    make_dual: Callable[[Tensor, Tensor], Tensor] = forward_ad.make_dual
    unpack_dual: Callable[[Tensor], tuple[Tensor, Tensor | None]] = forward_ad.unpack_dual
    with forward_ad.dual_level():
        output = attend(*map(make_dual, inputs, direction))
        tangent = unpack_dual(output)[1]
    if tangent is None:
        raise RuntimeError("forward mode: the output has no tangent")
    return [tangent]
