"""Two processes over gloo: DDP, FSDP2 and DTensor give what one process gives."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from assertions import assert_close
from torch import nn

from attention_ext import scaled_dot_product_attention as attention
from attention_ext import varlen_attn

pytestmark = pytest.mark.slow

WORLD = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(16, 48)
        self.output = nn.Linear(16, 16)
        self.sinks = nn.Parameter(torch.randn(4))
        self.slopes = nn.Parameter(torch.rand(4))

    def forward(self, x):
        heads = self.projection(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        options = {"alibi_slopes": self.slopes, "sinks": self.sinks, "is_causal": True}
        return self.output(attention(*heads.unbind(0), **options).transpose(1, 2).flatten(2))


def model_and_batch():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    return model, torch.randn(4, 9, 16, dtype=torch.float64)


def expected_gradients():
    model, batch = model_and_batch()
    model(batch).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distributed_data_parallel(rank):
    model, batch = model_and_batch()
    wrapped = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(batch.chunk(WORLD)[rank]).square().mean().backward()
    assert_close([p.grad for p in model.parameters()], expected_gradients())


def fully_sharded(rank):
    from torch.distributed.fsdp import fully_shard

    model, batch = model_and_batch()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model(batch.chunk(WORLD)[rank]).square().mean().backward()
    assert_close([full(p.grad) for p in model.parameters()], expected_gradients())


def dtensors(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    shapes = (2, 4, 6, 8), (2, 2, 7, 8), (2, 2, 7, 8), (1, 4, 1, 7), (4,), (4,)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def derivatives(leaves):
        query, key, value, mask, slopes, sinks = leaves
        options = {"is_causal": True, "enable_gqa": True, "alibi_slopes": slopes, "sinks": sinks}
        result = attention(query, key, value, mask, **options, return_lse=True, return_weights=True)
        first = result.output.sin().sum() + result.lse.sum() + result.weights.sin().sum()
        grads = torch.autograd.grad(first, leaves)
        output = attention(query, key, value, mask, **options)
        again = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in again), leaves)
        return [*result, *grads, *second]

    expected = derivatives([x.clone().requires_grad_() for x in inputs])
    for name, dims in (
        ("heads", (1, 1, 1, 1, 0, 0)),
        ("batch", (0, 0, 0, None, None, None)),
        ("replicated", (None,) * 6),
    ):
        places = [[Replicate() if dim is None else Shard(dim)] for dim in dims]
        leaves = [
            distribute_tensor(x, mesh, place).requires_grad_()
            for x, place in zip(inputs, places, strict=True)
        ]
        actual = derivatives(leaves)
        shard = {"heads": Shard(1), "batch": Shard(0), "replicated": Replicate()}[name]
        assert all(x.placements == (shard,) for x in actual[:3]), name
        assert_close([full(x) for x in actual], expected)


def packed_dtensors(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    inputs = [torch.randn(9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    offsets = torch.tensor([0, 4, 9])
    expected = varlen_attn(*inputs, offsets, offsets, 5, 5, enable_gqa=True)
    sharded = [distribute_tensor(x, mesh, [Shard(1)]) for x in inputs]
    where = distribute_tensor(offsets, mesh, [Replicate()])
    actual = varlen_attn(*sharded, where, where, 5, 5, enable_gqa=True)
    assert actual.placements == (Shard(1),)
    assert_close(actual.full_tensor(), expected)


def process(rank, port, function):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        function(rank)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "function",
    [distributed_data_parallel, fully_sharded, dtensors, packed_dtensors],
    ids=lambda function: function.__name__,
)
def test_two_processes_give_what_one_gives(function):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(process, args=(port, function), nprocs=WORLD)
