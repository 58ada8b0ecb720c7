"""How the operators work on DTensors: each process computes some batch elements or heads.

Registered when a DTensor first arrives: importing DTensor takes a second. One rule serves every
operator, since all of their tensors belong to batch elements and heads in the same way: along a
dimension in which query, key and value are sharded alike, everything that has this dimension is
sharded, everything else replicated, and a gradient of what is replicated is a partial sum. Dropout
is not sharded: its pattern belongs to the place in the whole tensor.
"""

from typing import Any

import torch

from .reference import Call

# How many dimensions tensors lack at the end that the query has.
_FEWER_DIMS = {"lse": 1, "alibi_slopes": 2, "sinks": 2, "seqused_k": 3, "seed": 3}
_FEWER_DIMS_PACKED = {"lse": 1, "alibi_slopes": 1, "sinks": 1}
_registered = False


def register(error: Exception) -> bool:
    """Register the rules if that is what an error asks for; return whether to try again."""
    global _registered
    if _registered or "does not have a sharding strategy registered" not in str(error):
        return False
    from torch.distributed.tensor.experimental import register_sharding

    ops = torch.ops.attention_ext
    for op in (
        ops.forward,
        ops.weights,
        ops.backward,
        ops.mask_gradient,
        ops.tangent,
        ops.backward_tangent,
        ops.mask_gradient_tangent,
    ):
        register_sharding(op.default)(_rule_of(op.default._schema))
    _registered = True
    return True


def _rule_of(schema: torch._C.FunctionSchema) -> Any:
    names = [argument.name for argument in schema.arguments]
    results = [result.name or schema.name.split("::")[1] for result in schema.returns]

    def rule(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        """Acceptable placements of results and arguments (None for what is no tensor)."""
        from torch.distributed.tensor import Replicate

        given = dict(zip(names, arguments, strict=False))
        call = Call(**{name: given[name] for name in Call._fields if name in given})
        found = [([Replicate()] * len(results), [_if_tensor(x, Replicate()) for x in arguments])]
        for dim in _shardable(call):
            inputs = [_if_tensor(x, _placement(n, x, call, dim)) for n, x in given.items()]
            found.append(([_result_placement(n, call, dim) for n in results], inputs))
        return found

    return rule


def _if_tensor(argument: Any, placement: Any) -> Any:
    return placement if hasattr(argument, "tensor_meta") else None


def _shardable(call: Call) -> list[int]:
    """Dimensions, from the end of the query's, along which the call falls apart evenly."""
    query, key, value = (tuple(x.shape) for x in call[:3])
    if not len(query) == len(key) == len(value) or call.dropout_p > 0.0:
        return []
    packed = call.cu_seq_q is not None
    heads = 2 if packed else 3
    processes = call.query.mesh.size()  # type: ignore[attr-defined]
    found = []
    for dim in range(heads, heads + 1 if packed else len(query) + 1):
        sizes = query[-dim], key[-dim], value[-dim]
        alike = len(set(sizes)) == 1 or (call.enable_gqa and dim == heads)
        if alike and all(size > 0 and size % processes == 0 for size in sizes):
            found.append(dim)
    return found


def _placement(name: str, tensor: Any, call: Call, dim: int) -> Any:
    """Of an argument, if the query is sharded along its dimension `dim` from the end."""
    from torch.distributed.tensor import Replicate, Shard

    shape = tuple(getattr(tensor, "shape", ()))
    fewer = _FEWER_DIMS if call.cu_seq_q is None else _FEWER_DIMS_PACKED
    place = len(shape) + fewer.get(_plain(name), 0) - dim
    if 0 <= place < len(shape) and shape[place] != 1:
        return Shard(place)
    return Replicate()


def _result_placement(name: str, call: Call, dim: int) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    name = _plain(name)
    if name not in ("attn_mask", "alibi_slopes", "sinks"):
        return Shard(len(call.query.shape) - dim)
    tensor = getattr(call, name)
    if tensor is None:
        return Replicate()  # an empty tensor
    placement = _placement(name, tensor, call, dim)
    return Partial() if placement == Replicate() else placement


def _plain(name: str) -> str:
    """What an argument or result belongs to: an argument of the call, output, lse, …."""
    name = name.removeprefix("grad_").removesuffix("_tangent")
    synonyms = {"mask": "attn_mask", "mask_gradient": "attn_mask", "slopes": "alibi_slopes"}
    return synonyms.get(name, name)
