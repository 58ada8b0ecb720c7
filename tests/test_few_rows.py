"""What decoding loops send to scaled_dot_product_attention: few queries against a long cache."""

import pytest
import torch
from assertions import assert_close, assert_same_bits
from cases import DTYPES

from attention_ext import explain, reference
from attention_ext import scaled_dot_product_attention as attention
from attention_ext.reference import Call

pytestmark = pytest.mark.parity

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


def cache(length, dtype, capacity=1500, heads=2, width=64):
    """Keys and values: slices of a longer buffer that holds NaN elsewhere."""
    pair = []
    for _ in range(2):
        buffer = torch.full((2, heads, capacity, width), torch.nan, dtype=dtype)
        buffer[:, :, :length] = torch.randn(2, heads, length, width).to(dtype)
        pair.append(buffer[:, :, :length])
    return pair


def masked_to(length, *lengths):
    """(B, 1, 1, S): True for the keys in use."""
    return (torch.arange(length) < torch.tensor(lengths).unsqueeze(-1))[:, None, None]


def expected(query, key, value, mask=None, **options):
    return reference.attention(Call(query, key, value, mask, **options)).output


@pytest.mark.parametrize("length", [1, 31, 600, 1400])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_query_per_head_of_a_grouped_cache(dtype, length):
    key, value = cache(length, dtype)
    query = torch.randn(2, 4, 1, 64).to(dtype)  # two heads for each of the cache's
    assert "few-rows kernel" in explain(query, key, value, enable_gqa=True)
    output = attention(query, key, value, enable_gqa=True)
    assert_close(output, expected(query, key, value, enable_gqa=True), TOLERANCE[dtype])


@pytest.mark.parametrize("length", [31, 600, 1400])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_packed_into_the_length_with_a_mask_over_keys(dtype, length):
    key, value = cache(length, dtype)
    grouped = torch.randn(2, 4, 1, 64).to(dtype)
    packed = grouped.reshape(2, 2, 2, 64)  # (B, Hkv, heads of the group, D)
    for mask in (
        masked_to(length, length, length // 2),
        torch.where(masked_to(length, 7, length), 0.0, -torch.inf),
    ):
        assert "few-rows kernel" in explain(packed, key, value, mask)
        output = attention(packed, key, value, mask)
        assert_close(output, expected(packed, key, value, mask), TOLERANCE[dtype])
        apart = attention(grouped, key, value, mask, enable_gqa=True)
        assert_same_bits(output.reshape(2, 4, 1, 64), apart)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_slice_of_a_longer_buffer_gives_the_bits_of_a_copy(dtype):
    key, value = cache(1100, dtype)
    query = torch.randn(2, 4, 1, 64).to(dtype)
    copies = key.contiguous(), value.contiguous()
    actual = attention(query, key, value, enable_gqa=True)
    assert_same_bits(actual, attention(query, *copies, enable_gqa=True))


def test_a_mask_over_keys_equals_lengths():
    key, value = cache(1100, torch.float32)
    query, used = torch.randn(2, 4, 1, 64), torch.tensor([1100, 530])
    by_mask = attention(query, key, value, masked_to(1100, 1100, 530), enable_gqa=True)
    by_length = attention(query, key, value, seqused_k=used, enable_gqa=True)
    assert_close(by_mask, by_length, 2e-6)
