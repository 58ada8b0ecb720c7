"""Peak memory beyond inputs and outputs, measured by the system in a process of its own."""

import subprocess
import sys

import pytest

# Each prints the peak in KiB beyond what was there before; the input tensors are written first, and
# a small call has brought in code and thread pools.
SETUP = """
import resource, sys, torch
import torch.autograd.forward_ad as forward_ad
from attention_ext import scaled_dot_product_attention as attention
torch.set_num_threads(2)
heads, length, width = {heads}, {length}, {width}

def make(length):
    return [torch.randn(1, heads, length, width, requires_grad=True) for _ in range(3)]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def measured(run, *inputs):
    run(*(x[..., :40, :].detach().requires_grad_() for x in inputs))
    before = peak()
    results = run(*inputs)
    print(peak() - before)
    return results

def forward(*leaves):
    return attention(*leaves, is_causal=True)

def backward(*leaves):
    output = attention(*leaves, is_causal=True)
    return output, *torch.autograd.grad(output.sum(), leaves)

def forward_mode(*leaves):
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), x.detach()) for x in leaves]
        return forward_ad.unpack_dual(attention(*duals, is_causal=True))

def double_backward(*leaves):
    output = attention(*leaves, is_causal=True)
    grads = torch.autograd.grad(output.sum(), leaves, create_graph=True)
    return output, *grads, *torch.autograd.grad(sum(x.sum() for x in grads), leaves)

def masked(*leaves):
    length = leaves[0].shape[-2]
    shown = torch.ones(1, 1, 1, length, dtype=torch.bool).expand(1, heads, length, length)
    bias = torch.zeros(heads, 1, length, requires_grad=True)
    output = attention(*leaves, shown) + attention(*leaves, bias)
    return output, *torch.autograd.grad(output.sum(), [*leaves, bias])

def options(*leaves):
    learned = [torch.rand(heads, requires_grad=True) for _ in range(2)]
    output = attention(
        *leaves, window_size=(3000, 0), softcap=5.0, alibi_slopes=learned[0], sinks=learned[1],
        seqused_k=torch.tensor([leaves[1].shape[-2] - 5]), dropout_p=0.1,
    )
    return output, *torch.autograd.grad(output.sum(), [*leaves, *learned])
"""


def extra(function, heads, length, width):
    """MiB at the peak of a call beyond its inputs."""
    source = SETUP.format(heads=heads, length=length, width=width)
    source += f"measured({function}, *make(length))\n"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 1024


# how many tensors of the size of the query are outputs, saved, or given by the caller meanwhile
TENSORS = {"forward": 1, "backward": 5, "forward_mode": 2, "double_backward": 12}


@pytest.mark.slow
@pytest.mark.parametrize("function", TENSORS)
def test_64_mib_beyond_outputs_are_enough_at_a_length_of_16384(function):
    one = 4 * 16384 * 64 * 4 / 2**20  # MiB of a tensor; the scores alone would take 4,096
    found = extra(function, 4, 16384, 64)
    print(f"{function}: {found:.0f} MiB, {found - TENSORS[function] * one:.0f} beyond tensors")
    assert found < 64 + TENSORS[function] * one


@pytest.mark.parametrize("function", ["backward", "double_backward", "masked", "options"])
def test_memory_grows_with_the_length_and_not_with_its_square(function):
    assert extra(function, 1, 8192, 16) < 48, "the scores alone would take 256"
