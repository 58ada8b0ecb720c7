"""Dropout: which weights are kept, by which seed, and that every derivative agrees on it."""

import math

import pytest
import torch
import torch.func as tf
from assertions import assert_close, assert_same_bits
from cases import DTYPES
from torch.utils.checkpoint import checkpoint

from attention_ext import paths, reference
from attention_ext import scaled_dot_product_attention as attention
from attention_ext.reference import Call

pytestmark = pytest.mark.parity


def kept(p, shape=(2, 3, 40, 50), **options):
    """The kept weights, 1 or 0: with query 0 and an identity for the value they are the output."""
    *batch, seqlen_q, seqlen_kv = shape
    query, key = torch.zeros(*batch, seqlen_q, 4), torch.randn(*batch, seqlen_kv, 4)
    value = torch.eye(seqlen_kv).expand(*batch, seqlen_kv, seqlen_kv)
    output = attention(query, key, value, dropout_p=p, **options)
    weights = output * seqlen_kv * (1 - p)
    assert_close(weights, weights.round(), 1e-4)
    return weights.round()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_weights_are_dropped_with_probability_p_and_scaled(p):
    weights = kept(p)
    assert set(weights.unique().tolist()) == {0.0, 1.0}
    deviation = math.sqrt(p * (1 - p) / weights.numel())
    assert abs(weights.mean().item() - (1 - p)) < 5 * deviation
    for dim in range(4):  # in every row, column, head and batch element
        share = weights.mean([d for d in range(4) if d != dim])
        spread = math.sqrt(p * (1 - p) * share.numel() / weights.numel())
        assert (share - (1 - p)).abs().max() < 6 * spread


def test_places_do_not_depend_on_each_other():
    weights = kept(0.5).flatten(0, 1)
    flat = weights.flatten(1)
    assert not (flat[:, None] == flat[None]).all(-1).tril(-1).any()  # heads differ
    assert not (weights[:, 1:] == weights[:, :-1]).all(-1).any()  # rows differ
    for shift in (1, 2, 3, 4):
        agree = (weights[..., shift:] == weights[..., :-shift]).double().mean()
        assert abs(agree - 0.5) < 0.02


def test_the_pattern_is_reproducible_by_torchs_seed_and_new_at_every_call():
    torch.manual_seed(5)
    first, second = kept(0.5), kept(0.5)
    torch.manual_seed(5)
    assert_same_bits(kept(0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("p", "draws"), [(0.0, False), (0, False), (0.3, True), (1.0, True)])
def test_p_zero_leaves_the_generator_alone(p, draws):
    query = torch.randn(2, 3, 5, 4)
    before = torch.get_rng_state()
    attention(query, query, query, dropout_p=p, softcap=1.0)
    assert torch.equal(torch.get_rng_state(), before) != draws


@pytest.mark.parametrize("seqlen_q", [1, 9, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_p_one_drops_everything(dtype, seqlen_q):
    leaves = [torch.randn(2, 3, s, 4).to(dtype).requires_grad_() for s in (seqlen_q, 9, 9)]
    output, lse, weights = attention(*leaves, dropout_p=1.0, return_lse=True, return_weights=True)
    assert not output.any()
    assert lse.isfinite().all()
    assert_close(weights.float().sum(-1), torch.ones(2, 3, seqlen_q), 0.02)
    for grad in torch.autograd.grad(output.sum(), leaves):
        assert_same_bits(grad, torch.zeros_like(grad))


def test_lse_and_weights_are_those_without_dropout():
    inputs = [torch.randn(2, 3, 40, 8) for _ in range(3)]
    dropped = attention(*inputs, dropout_p=0.5, return_lse=True, return_weights=True)
    plain = attention(*inputs, return_lse=True, return_weights=True)
    assert_same_bits(dropped[1:], plain[1:])


def test_the_pattern_is_philox_of_the_place():
    seed = torch.tensor(-(2**62) + 12345)
    query, key = torch.zeros(2, 3, 5, 1), torch.zeros(2, 3, 9, 1)
    call = Call(query, key, torch.eye(9).expand(2, 3, 9, 9), dropout_p=0.5, seed=seed)
    output, *_ = paths.attention(call)
    for batch, head, i, j in ((0, 0, 0, 0), (1, 2, 4, 8), (0, 1, 3, 5), (1, 0, 2, 7)):
        place = batch * 3 + head
        counter = [torch.tensor(x) for x in (j // 4, i, place, 0)]
        word = reference.philox(seed, counter)[j % 4]
        assert (output[batch, head, i, j] > 0) == (word >= 2**31)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_pattern_does_not_depend_on_tiles_types_or_what_is_visible(dtype):
    seed = torch.tensor(77)

    def pattern(seqlen_q, seqlen_kv, dtype=dtype, **options):
        query, key = (torch.zeros(1, 2, s, 4, dtype=dtype) for s in (seqlen_q, seqlen_kv))
        value = torch.eye(seqlen_kv, dtype=dtype).expand(1, 2, seqlen_kv, seqlen_kv)
        call = Call(query, key, value, dropout_p=0.5, seed=seed, **options)
        return paths.attention(call)[0] > 0

    whole = pattern(150, 210)
    assert_same_bits(pattern(1, 210), whole[:, :, :1])  # another kernel
    assert_same_bits(pattern(40, 100), whole[:, :, :40, :100])
    assert_same_bits(pattern(150, 210, torch.bfloat16), whole)
    assert_same_bits(pattern(150, 210, is_causal=True), whole.tril())
    shown = torch.rand(150, 210) < 0.5
    assert_same_bits(pattern(150, 210, attn_mask=shown), whole & shown)
    windowed = pattern(150, 210, window_left=50, window_right=3)
    assert_same_bits(windowed, whole.tril(3).triu(-50))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_the_same_pattern(reentrant):
    leaves = [torch.randn(2, 2, 40, 8, requires_grad=True) for _ in range(3)]

    def run(*inputs):
        return attention(*inputs, dropout_p=0.4, is_causal=True).pow(3)

    torch.manual_seed(1)
    expected = torch.autograd.grad(run(*leaves).sum(), leaves)
    torch.manual_seed(1)
    checkpoint(run, *leaves, use_reentrant=reentrant).sum().backward()
    assert_same_bits([leaf.grad for leaf in leaves], expected)


# ---- under vmap ----


def dropping(query, key, value):
    return attention(query, key, value, dropout_p=0.5)


def identities(samples, batch=(2, 3), length=16):
    query = torch.zeros(samples, *batch, length, 4)
    return query, torch.zeros_like(query), torch.eye(length).expand(*query.shape[:-1], length)


@pytest.mark.parametrize("batch", [(2, 3), (3,), ()], ids=str)
def test_same_means_one_pattern_for_all_samples_and_different_one_each(batch):
    inputs = identities(5, batch)
    same = tf.vmap(dropping, randomness="same")(*inputs)
    assert_same_bits(same, same[:1].expand_as(same))
    different = tf.vmap(dropping, randomness="different")(*inputs)
    assert not any(torch.equal(different[0], x) for x in different[1:])
    with pytest.raises(RuntimeError, match="randomness"):
        tf.vmap(dropping)(*inputs)


def test_same_is_the_pattern_of_the_call_alone():
    inputs = identities(5)
    torch.manual_seed(2)
    mapped = tf.vmap(dropping, randomness="same")(*inputs)
    torch.manual_seed(2)
    assert_same_bits(mapped[3], dropping(*(x[0] for x in inputs)))


def test_a_mapped_seed_and_nested_maps():
    inputs = identities(4)
    nested = tf.vmap(tf.vmap(dropping, randomness="same"), randomness="different")(
        *(torch.stack([x] * 3) for x in inputs)
    )
    assert_same_bits(nested, nested[:, :1].expand_as(nested))
    assert not torch.equal(nested[0], nested[1])
    shared = tf.vmap(dropping, (0, None, None), randomness="different")(
        inputs[0], *(x[0] for x in inputs[1:])
    )
    assert not torch.equal(shared[0], shared[1])


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_per_sample_gradients_have_the_pattern_of_the_forward(randomness):
    query, key, value = (torch.randn(5, 3, 16, 4, dtype=torch.float64) for _ in range(3))

    def both(query, key, value):
        def run(value):
            output = attention(query, key, value, dropout_p=0.5)
            return output.sum(), output

        return tf.grad(run, has_aux=True)(value)

    grads, outputs = tf.vmap(both, randomness=randomness)(query, key, value)
    # the output is linear in the value, and its gradient the same for each column
    assert_close((grads * value).sum((1, 2, 3)), outputs.sum((1, 2, 3)))
    drawn = [torch.equal(grads[0], x) for x in grads[1:]]
    assert not any(drawn)
