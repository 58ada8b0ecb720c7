"""Any strides, ranks and sizes; how results are laid out in memory; zero, many, and far apart."""

import math

import pytest
import torch
from assertions import assert_close, assert_same_bits
from cases import DTYPES

from attention_ext import scaled_dot_product_attention as attention


def gradients(output, leaves, upstream=None):
    return torch.autograd.grad(
        output, leaves, torch.ones_like(output) if upstream is None else upstream
    )


def views(tensor):
    """The values of a (2, 3, L, D) tensor in other memory orders."""
    batch, heads, rows, columns = tensor.shape
    padded = tensor.new_full((batch, heads + 1, rows + 2, columns + 3), math.nan)
    padded[:, 1:, 1:-1, 2:-1] = tensor
    return {
        "(B, L, H, D)": tensor.transpose(1, 2).contiguous().transpose(1, 2),
        "(L, B, H, D)": tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "(H, B, L, D)": tensor.transpose(0, 1).contiguous().transpose(0, 1),
        "(B, H, D, L)": tensor.mT.contiguous().mT,
        "(D, L, H, B)": tensor.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        "with gaps": padded[:, 1:, 1:-1, 2:-1],
        "every second": tensor.repeat_interleave(2, 3).repeat_interleave(2, 2)[..., ::2, ::2],
        "negated twice": torch._neg_view(-tensor),
    }


LAYOUTS = list(views(torch.zeros(2, 3, 4, 5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["query", "key", "value", "all", "upstream"])
def test_strides_change_no_bit(which, layout, dtype):
    inputs = {name: torch.randn(2, 3, 21, 20).to(dtype) for name in ("query", "key", "value")}
    upstream = torch.randn(2, 3, 21, 20).to(dtype)
    viewed = {name: views(x)[layout] if which in (name, "all") else x for name, x in inputs.items()}
    viewed_upstream = views(upstream)[layout] if which == "upstream" else upstream
    results = []
    for tensors, gradient in ((inputs, upstream), (viewed, viewed_upstream)):
        leaves = [x.detach().requires_grad_() for x in tensors.values()]
        output = attention(*leaves, is_causal=True)
        results.append([output.detach(), *gradients(output, leaves, gradient)])
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stride_zero_in_inputs_masks_and_upstream_gradients(dtype):
    query = torch.randn(2, 4, 9, 16).to(dtype).requires_grad_()
    one_head = torch.randn(2, 1, 11, 16).to(dtype)
    one_row = torch.randn(2, 4, 1, 16).to(dtype)
    mask = (torch.rand(2, 1, 1, 11) < 0.7).expand(2, 4, 9, 11)
    results = []
    for copy in (lambda x: x, torch.Tensor.contiguous):
        key, value = copy(one_head.expand(2, 4, 11, 16)), copy(one_row.expand(2, 4, 11, 16))
        key, value = key.detach().requires_grad_(), value.detach().requires_grad_()
        output = attention(query, key, value, copy(mask))
        upstream = copy(torch.ones((), dtype=dtype).expand(output.shape))
        results.append([output.detach(), *gradients(output, (query, key, value), upstream)])
    assert_same_bits(results[0], results[1])


@pytest.mark.parametrize("value_dim", [20, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_output_and_gradients_lie_in_memory_like_the_query_and_inputs(layout, value_dim):
    query, key = (views(torch.randn(2, 3, 21, 20))[layout].detach() for _ in range(2))
    value = views(torch.randn(2, 3, 21, value_dim))[layout].detach()
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = attention(*leaves)
    expected = torch.empty_like(query)
    if value_dim == 20:
        assert output.stride() == expected.stride()
    order = sorted(range(4), key=expected.stride().__getitem__)
    assert order == sorted(range(4), key=output.stride().__getitem__)
    for leaf, grad in zip(leaves, gradients(output, leaves), strict=True):
        assert grad.stride() == torch.empty_like(leaf).stride()


def test_the_projection_layout_goes_in_and_out_without_a_copy():
    query, key, value = torch.randn(2, 9, 3 * 4 * 8).chunk(3, dim=-1)
    heads = [tensor.view(2, 9, 4, 8).transpose(1, 2) for tensor in (query, key, value)]
    output = attention(*heads, is_causal=True)
    assert output.transpose(1, 2).is_contiguous()


def test_a_broadcast_query_gives_a_contiguous_output():
    key = torch.randn(2, 3, 9, 8)
    for query in (torch.randn(3, 5, 8), torch.randn(1, 3, 5, 8).expand(2, 3, 5, 8)):
        assert attention(query, key, key).is_contiguous()
    query = torch.randn(5, 1, 8).transpose(0, 1)  # one head for three
    assert attention(query, key, key).is_contiguous()


def test_dimensions_of_size_one_do_not_disturb_the_order_in_memory():
    query = torch.randn(10, 3, 4, 6)[:1].permute(2, 0, 1, 3)  # (4, 1, 3, 6), strides 6, 72, 24, 1
    strides = attention(query, query, query).stride()
    assert [strides[dim] for dim in (0, 2, 3)] == [6, 24, 1]


# ---- ranks ----


@pytest.mark.parametrize("rank", [2, 3, 4, 5, 6, 7, 8])
def test_leading_dimensions_are_batch_dimensions(rank):
    leading = (2, 1, 2, 1, 3, 2)[8 - rank :]
    shapes = (*leading, 5, 8), (*leading, 9, 8), (*leading, 9, 4)
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    output = attention(*leaves, is_causal=True)
    flat = [x.detach().reshape(-1, *x.shape[-2:]).requires_grad_() for x in leaves]
    expected = attention(*flat, is_causal=True)
    assert output.shape == (*leading, 5, 4)
    assert_same_bits(output.reshape(-1, 5, 4), expected)
    for grad, other in zip(gradients(output, leaves), gradients(expected, flat), strict=True):
        assert_same_bits(grad, other.reshape(grad.shape))


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((3, 5, 8), (2, 3, 9, 8), (2, 3, 9, 8)),
        ((5, 8), (2, 3, 9, 8), (9, 8)),
        ((2, 3, 5, 8), (9, 8), (3, 9, 8)),
        ((4, 1, 3, 5, 8), (2, 1, 9, 8), (3, 9, 8)),
        ((1, 3, 5, 8), (4, 1, 9, 8), (1, 1, 9, 8)),
        ((2, 1, 5, 8), (1, 3, 9, 8), (9, 8)),
    ],
    ids=str,
)
def test_inputs_of_different_rank_broadcast(query, key, value):
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (query, key, value)]
    leading = torch.broadcast_shapes(*(s[:-2] for s in (query, key, value)))
    expanded = [x.expand(*leading, *x.shape[-2:]) for x in leaves]
    output = attention(*leaves)
    expected = attention(*(x.contiguous() for x in expanded))
    assert_close(output, expected)
    upstream = torch.randn_like(output)
    assert_close(gradients(output, leaves, upstream), gradients(expected, leaves, upstream))


# ---- zero, many, far apart ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((0, 4, 10, 64), (0, 4, 10, 64), (0, 4, 10, 32)),
        ((2, 0, 10, 64), (2, 0, 10, 64), (2, 0, 10, 32)),
        ((2, 4, 0, 64), (2, 4, 10, 64), (2, 4, 10, 32)),
        ((2, 4, 10, 64), (2, 4, 0, 64), (2, 4, 0, 32)),
        ((2, 4, 10, 0), (2, 4, 10, 0), (2, 4, 10, 32)),
        ((2, 4, 10, 64), (2, 4, 10, 64), (2, 4, 10, 0)),
        ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
        ((2, 4, 0, 64), (2, 4, 0, 64), (2, 4, 0, 64)),
        ((1, 4, 10, 8), (0, 4, 10, 8), (0, 4, 10, 8)),
        ((0, 8), (0, 8), (0, 8)),
        ((4, 10, 0), (2, 4, 10, 0), (2, 4, 10, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_zero_sizes_give_tensors_of_the_right_shape(query, key, value, causal, dtype):
    leaves = [torch.randn(s).to(dtype).requires_grad_() for s in (query, key, value)]
    output, lse, _ = attention(*leaves, is_causal=causal, return_lse=True)
    leading = torch.broadcast_shapes(*(s[:-2] for s in (query, key, value)))
    assert output.shape == (*leading, query[-2], value[-1])
    assert lse.shape == (*leading, query[-2])
    assert not output.isnan().any()
    for leaf, grad in zip(leaves, gradients(output, leaves), strict=True):
        assert grad.shape == leaf.shape
        assert grad.isfinite().all()


def test_more_than_65535_heads_and_batches():
    for shape in ((1, 70_000, 2, 4), (70_000, 1, 2, 4)):
        leaves = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        output = attention(*leaves, is_causal=True)
        few = [x[-1:, -1:].detach().requires_grad_() for x in leaves]
        expected = attention(*few, is_causal=True)
        assert_same_bits(output[-1:, -1:], expected)
        for grad, other in zip(gradients(output, leaves), gradients(expected, few), strict=True):
            assert_same_bits(grad[-1:, -1:], other)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1, 2, 3], ids=["batch", "head", "row", "column"])
@pytest.mark.parametrize("name", ["query", "key", "value", "upstream"])
def test_offsets_beyond_2_to_the_31_elements(name, dim):
    shape = (2, 2, 3, 4)
    far = 2**31 // (shape[dim] - 1) + 8  # the last index of dim lies beyond 2^31
    strides = [64, 32, 8, 1]
    strides[dim] = far
    buffer = torch.empty(far * (shape[dim] - 1) + 256, dtype=torch.bfloat16)  # mostly untouched
    inputs = {key: torch.randn(shape).bfloat16() for key in ("query", "key", "value", "upstream")}
    results = []
    for tensors in (inputs, inputs | {name: buffer.as_strided(shape, strides)}):
        if tensors is not inputs:
            tensors[name].copy_(inputs[name])
        *leaves, upstream = tensors.values()
        leaves = [x.detach().requires_grad_() for x in leaves]
        output = attention(*leaves, is_causal=True)
        results.append([output.detach(), *gradients(output, leaves, upstream)])
    assert_same_bits(results[1], results[0])
