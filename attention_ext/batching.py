"""vmap: one more leading dimension, which the operators broadcast; nothing is folded or copied.

A mapped dimension moves to the front, and ones behind it fill the tensor up to the rank that the
mapped function sees. What is not mapped stays as it is, except where every sample must have a
result of its own: gradients and tangents are those of expanded (stride 0) inputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .derivatives import Direction
from .reference import Call

Optional = Tensor | None

# how many dimensions a field of a call has less than query, key and value have at most
_FEWER_DIMS = {"alibi_slopes": 2, "sinks": 2, "seqused_k": 3, "seed": 3}


class Batch:
    """A mapped call: what its tensors become, and what becomes of the results."""

    def __init__(self, samples: int, call: Call, in_dims: Sequence[int | None]) -> None:
        """Take the call of the mapped function and the mapped dimension of each of its fields."""
        self.samples = samples
        self.call = call
        self.dims = Call(*in_dims)  # type: ignore[arg-type]
        rank = max(x.dim() - (dim is not None) for x, dim in zip(call[:3], in_dims, strict=False))
        self.headless = rank == 2
        self.rank = max(rank, 3)  # a two-dimensional call gets its one head here

    @property
    def loops(self) -> bool:
        """Whether the operators have no batch dimension to put the samples in."""
        return self.call.cu_seq_q is not None

    def sample(self) -> Call:
        """The call that the mapped function sees, of the first sample."""
        pairs: Any = zip(self.call, self.dims, strict=True)
        return Call(*(x if dim is None else x.select(dim, 0) for x, dim in pairs))

    def leading(self, own_gradients: bool = False) -> Call:
        """The call with a leading dimension; `own_gradients`: for every differentiable input."""
        fields: dict[str, Any] = {}
        inputs = {name for name in Direction._fields if own_gradients}
        if all(dim is None for dim in self.dims[:3]):
            inputs.add("query")  # the output has a leading dimension of its own
        for name, tensor in self.call._asdict().items():
            if isinstance(tensor, Tensor):
                rank = self.rank - _FEWER_DIMS.get(name, 0)
                fields[name] = self._lead(tensor, getattr(self.dims, name), rank, name in inputs)
        shared = self.call.shared_batch_dims + 1
        return self.call._replace(**fields, shared_batch_dims=shared)

    def like_inputs(self, tensors: Sequence[Optional], dims: Sequence[int | None]) -> Direction:
        """A direction, in the shapes of the inputs of `leading(own_gradients=True)`."""
        names = zip(Direction._fields, tensors, dims, strict=True)
        ranks = ((self.rank - _FEWER_DIMS.get(name, 0), x, dim) for name, x, dim in names)
        return Direction(*(self._lead(x, dim, rank, True) for rank, x, dim in ranks))

    def rows(self, tensor: Optional, dim: int | None) -> Optional:
        """An output, state or weights, or what has its shape."""
        return self._lead(tensor, dim, self.rank, True)

    def lse(self, tensor: Optional, dim: int | None) -> Optional:
        """An lse, or what has its shape."""
        return self._lead(tensor, dim, self.rank - 1, True)

    def results(self, tensors: Sequence[Optional]) -> tuple[Any, Any]:
        """Outputs of a Function that have the output's leading dimensions, and where."""
        squeezed = (x.squeeze(1) if x is not None and self.headless else x for x in tensors)
        return tuple(squeezed), tuple(None if x is None else 0 for x in tensors)

    def gradients(self, tensors: Sequence[Optional]) -> tuple[Any, Any]:
        """Outputs of a Function that are like the differentiable inputs, and where."""
        shaped = []
        for name, tensor in zip(Direction._fields, tensors, strict=True):
            if tensor is not None:  # without the ones that were inserted
                shape = _logical_shape(getattr(self.call, name), getattr(self.dims, name))
                tensor = tensor.reshape(self.samples, *shape)
            shaped.append(tensor)
        return tuple(shaped), tuple(None if x is None else 0 for x in shaped)

    def _lead(self, tensor: Optional, dim: int | None, rank: int, own: bool) -> Optional:
        """Put the mapped dimension in front and `rank` dimensions behind it."""
        if tensor is None or (dim is None and not own):
            return tensor
        if dim is None:
            tensor = tensor.expand(self.samples, *tensor.shape)
        else:
            tensor = tensor.movedim(dim, 0)
        while tensor.dim() > rank + 1:  # a mask may have more leading ones than the output has
            tensor = tensor.squeeze(1)
        for _ in range(rank + 1 - tensor.dim()):
            tensor = tensor.unsqueeze(1)
        return tensor


def loop(
    function: Any, samples: int, in_dims: Sequence[int | None], arguments: Sequence[Any]
) -> tuple[Any, Any]:
    """Call a Function once for every sample."""
    pairs = list(zip(arguments, in_dims, strict=True))
    runs = [
        function.apply(*(x if dim is None else x.select(dim, i) for x, dim in pairs))
        for i in range(samples)
    ]
    stacked = [None if x[0] is None else torch.stack(x) for x in zip(*runs, strict=True)]
    return tuple(stacked), tuple(None if x is None else 0 for x in stacked)


def _logical_shape(tensor: Tensor, dim: int | None) -> tuple[int, ...]:
    """The shape that the mapped function sees."""
    return tuple(size for i, size in enumerate(tensor.shape) if i != dim)
