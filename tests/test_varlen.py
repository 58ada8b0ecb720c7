"""Packed sequences: a packed row of documents equals the documents run apart."""

import inspect
import math

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.func as tf
from assertions import assert_close, assert_same_bits
from cases import DTYPES
from torch.nn.attention.varlen import AuxRequest
from torch.nn.attention.varlen import varlen_attn as torchs

from attention_ext import ArgumentError, varlen_attn
from attention_ext import scaled_dot_product_attention as attention

pytestmark = pytest.mark.parity

LSE = AuxRequest(lse=True)
LENGTHS = {
    "equal": ([5, 5], [5, 5]),
    "ragged": ([1, 40, 7, 130], [9, 40, 70, 130]),
    "empty sequences": ([0, 4, 0, 3, 0], [3, 4, 0, 0, 2]),
    "one": ([17], [33]),
    "none": ([], []),
}
OPTIONS = {
    "plain": {},
    "causal": {"window_size": (-1, 0)},
    "window": {"window_size": (6, 3)},
    "scale": {"scale": -0.3},
    "score options": {
        "softcap": 2.0, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]).double(),
        "sinks": torch.tensor([0.0, 1.0, -1.0, -math.inf]).double(), "window_size": (20, 0),
    },
}  # fmt: skip


def offsets(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def make(lengths_q, lengths_k, heads=(4, 2, 2), slack=3, dtype=torch.float64):
    """Query, key, value with slack behind, and the four arguments that say where sequences are."""
    totals = (sum(lengths_q) + slack, sum(lengths_k) + slack, sum(lengths_k) + slack)
    shapes = zip(totals, heads, (8, 8, 5), strict=True)
    inputs = [torch.randn(t, h, d, dtype=torch.float64).to(dtype) for t, h, d in shapes]
    longest = [max(lengths, default=0) for lengths in (lengths_q, lengths_k)]
    return inputs, (offsets(lengths_q), offsets(lengths_k), *longest)


def apart(inputs, lengths_q, lengths_k, **options):
    """Each sequence by a call of its own; output (T, H, Dv) and lse (H, T) without slack."""
    options = dict(options)
    outputs, lses = [], []
    starts = [0, 0]
    for length_q, length_k in zip(lengths_q, lengths_k, strict=True):
        query = inputs[0][starts[0] : starts[0] + length_q].transpose(0, 1)
        key, value = (x[starts[1] : starts[1] + length_k].transpose(0, 1) for x in inputs[1:])
        result = attention(
            query, key, value, enable_gqa=True, causal_variant="lower_right", return_lse=True,
            **options,
        )  # fmt: skip
        outputs.append(result.output.transpose(0, 1))
        lses.append(result.lse)
        starts = [starts[0] + length_q, starts[1] + length_k]
    return torch.cat(outputs), torch.cat(lses, dim=1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LENGTHS)
def test_packed_sequences_equal_calls_of_their_own_with_gradients(name, options):
    lengths, options = LENGTHS[name], OPTIONS[options]
    inputs, where = make(*lengths)
    leaves = [x.requires_grad_() for x in inputs]
    output, lse = varlen_attn(*leaves, *where, **options, enable_gqa=True, return_aux=LSE)
    used = sum(lengths[0])
    assert output.shape == (used + 3, 4, 5)
    assert lse.shape == (4, used + 3)
    assert not output[used:].any()
    upstream = torch.randn_like(output)
    grads = torch.autograd.grad(output, leaves, upstream)
    for grad, length in zip(grads, (used, *(sum(lengths[1]),) * 2), strict=True):
        assert not grad[length:].any()
    if not lengths[0]:
        return
    expected, expected_lse = apart(leaves, *lengths, **options)
    assert_close((output[:used], lse[:, :used]), (expected, expected_lse))
    assert_close(grads, torch.autograd.grad(expected, leaves, upstream[:used]))


def test_first_and_second_derivatives_and_forward_mode():
    inputs, where = make([2, 0, 3], [1, 2, 3], heads=(2, 1, 1), slack=1)
    learned = [torch.rand(2).double(), torch.randn(2).double()]
    leaves = [x.requires_grad_() for x in (*inputs, *learned)]

    def run(query, key, value, slopes, sinks):
        options = {"alibi_slopes": slopes, "sinks": sinks, "softcap": 2.0, "window_size": (-1, 0)}
        packed = query, key, value, *where
        return varlen_attn(*packed, **options, enable_gqa=True, return_aux=LSE)

    assert torch.autograd.gradcheck(run, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, leaves, check_fwd_over_rev=True, fast_mode=True)


def test_transforms_of_torch_func():
    inputs, where = make([2, 3], [4, 1], heads=(2, 2, 2))

    def run(*x):
        return varlen_attn(*x, *where, window_size=(-1, 0))

    def loss(*x):
        return run(*x).sin().sum()

    many = [torch.stack([x, -x, 2 * x]) for x in inputs]
    single = torch.stack([run(*(x[i] for x in many)) for i in range(3)])
    assert_same_bits(tf.vmap(run)(*many), single)
    grads = tf.vmap(tf.grad(loss, (0, 1, 2)))(*many)
    for i in range(3):
        alone = tf.grad(loss, (0, 1, 2))(*(x[i] for x in many))
        assert_same_bits([x[i] for x in grads], list(alone))
    shared = tf.vmap(run, (0, None, None))(many[0], *inputs[1:])
    assert_same_bits(shared[1], run(-inputs[0], *inputs[1:]))
    assert_close(tf.jacfwd(loss)(*inputs), tf.jacrev(loss)(*inputs))
    hessian = tf.hessian(loss)(*inputs)
    assert_close(hessian, tf.jacrev(tf.jacrev(loss))(*inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_changes_no_bit(dtype):
    lengths = LENGTHS["ragged"]
    inputs, where = make(*lengths, dtype=dtype)
    together = varlen_attn(*inputs, *where, enable_gqa=True, window_size=(-1, 0), return_aux=LSE)
    starts = [0, 0]
    for i, (length_q, length_k) in enumerate(zip(*lengths, strict=True)):
        rows = slice(starts[0], starts[0] + length_q)
        keys = slice(starts[1], starts[1] + length_k)
        alone = varlen_attn(
            inputs[0][rows], inputs[1][keys], inputs[2][keys], offsets([length_q]),
            offsets([length_k]), length_q, length_k, enable_gqa=True, window_size=(-1, 0),
            return_aux=LSE,
        )  # fmt: skip
        assert_same_bits(alone[0], together[0][rows])
        assert_same_bits(alone[1], together[1][:, rows])
        starts = [starts[0] + length_q, starts[1] + length_k]
        assert i < 4


@pytest.mark.parametrize("window_size", [(-1, 0), (-1, -1)])
@pytest.mark.parametrize(
    "lengths", [([4, 100], [500, 40]), ([1024, 2100], [1024, 2100]), ([900, 3000], [900, 1])]
)
def test_the_lengths_of_others_change_no_bit_of_a_gradient(lengths, window_size):
    inputs, where = make(*lengths)
    inputs[0] = 5.0 * inputs[0]  # large scores show every digit of the sums
    upstream = torch.randn(sum(lengths[0]), 4, 5, dtype=torch.float64)

    def gradients(queries, keys, *place):
        parts = inputs[0][:queries], inputs[1][:keys], inputs[2][:keys]
        leaves = [x.detach().requires_grad_() for x in parts]
        output = varlen_attn(*leaves, *place, enable_gqa=True, window_size=window_size)
        grads = torch.autograd.grad(output, leaves, upstream[:queries])
        return [x[:count] for x, count in zip(grads, (query, key, key), strict=True)]

    query, key = lengths[0][0], lengths[1][0]
    alone = gradients(query, key, offsets([query]), offsets([key]), query, key)
    assert_same_bits(gradients(sum(lengths[0]), sum(lengths[1]), *where), alone)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_slack_rows_are_not_read(poison):
    lengths = LENGTHS["ragged"]
    inputs, where = make(*lengths)
    results = []
    for content in (0.0, poison):
        leaves = [x.clone() for x in inputs]
        for leaf in leaves:
            leaf[-3:] = content
        leaves = [x.requires_grad_() for x in leaves]
        output = varlen_attn(*leaves, *where, enable_gqa=True, softcap=2.0)
        upstream = torch.ones_like(output)
        upstream[-3:] = content
        grads = torch.autograd.grad(output, leaves, upstream, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in grads), leaves)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in leaves]
            moved = varlen_attn(*duals, *where, enable_gqa=True, softcap=2.0)
            moved = forward_ad.unpack_dual(moved).tangent
        results.append([output, *grads, *second, moved])
    assert_same_bits(*results)


def test_threads_change_no_bit(threads):
    inputs, where = make([300, 1, 200], [300, 500, 200], heads=(6, 3, 3))
    results = []
    for count in (1, 3):
        threads(count)
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = varlen_attn(*leaves, *where, enable_gqa=True, window_size=(-1, 0))
        results.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    assert_same_bits(*results)


def test_dropout_belongs_to_the_place_in_the_sequence():
    inputs, where = make([9, 4], [12, 6], heads=(2, 2, 2), slack=0)
    inputs[0].zero_()
    inputs[2] = torch.eye(18, dtype=torch.float64).unsqueeze(1).expand(18, 2, 18)
    torch.manual_seed(4)
    packed = varlen_attn(*inputs, *where, dropout_p=0.5)
    torch.manual_seed(4)
    query, key = torch.zeros(2, 2, 9, 8).double(), torch.zeros(2, 2, 12, 8).double()
    value = torch.eye(12).double().expand(2, 2, 12, 12)
    padded = attention(query, key, value, dropout_p=0.5)
    for sequence, (rows, keys) in enumerate(
        ((slice(0, 9), slice(0, 12)), (slice(9, 13), slice(12, 18)))
    ):
        ours = packed[rows, :, keys].transpose(0, 1) > 0
        count = (keys.stop - keys.start, rows.stop - rows.start)
        assert_same_bits(ours, padded[sequence, :, : count[1], : count[0]] > 0)
    torch.manual_seed(4)
    leaves = [x.clone().requires_grad_() for x in inputs]
    again = varlen_attn(*leaves, *where, dropout_p=0.5)
    (grad,) = torch.autograd.grad(again.sum(), leaves[2])
    assert_close(grad[..., 0], packed.sum(0).transpose(0, 1))


# ---- torch's names ----


def test_the_arguments_are_torchs_and_score_options_follow():
    ours, theirs = (inspect.signature(f).parameters for f in (varlen_attn, torchs))
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)
    assert all(ours[name].kind == theirs[name].kind for name in theirs)


def test_lse_is_returned_when_asked_for_transposed_as_torchs_operator_does():
    inputs, where = make([4, 3], [4, 3])
    output = varlen_attn(*inputs, *where, enable_gqa=True)
    for request in (None, AuxRequest(), AuxRequest(lse=False)):
        plain = varlen_attn(*inputs, *where, enable_gqa=True, return_aux=request)
        assert_same_bits(plain, output)
    both = varlen_attn(*inputs, *where, enable_gqa=True, return_aux=LSE)
    assert_same_bits(both[0], output)
    meta = [x.to("meta") for x in inputs]
    fake = torch.ops.torch_attn._varlen_attn(*meta, *(x.to("meta") for x in where[:2]), 4, 4)
    assert both[1].shape == fake[1].shape


def test_num_splits_is_a_hint():
    inputs, where = make([4, 3], [4, 3])
    plain = varlen_attn(*inputs, *where, enable_gqa=True)
    assert_same_bits(varlen_attn(*inputs, *where, enable_gqa=True, num_splits=1), plain)


def test_seqused_k_shortens_sequences_for_inference():
    lengths = [4, 1, 3], [9, 5, 7]
    inputs, where = make(*lengths, slack=0)
    used = torch.tensor([6, 0, 7], dtype=torch.int32)
    output = varlen_attn(*inputs, *where, enable_gqa=True, window_size=(-1, 0), seqused_k=used)
    kept = [x.split(lengths[1]) for x in inputs[1:]]
    shorter = [
        torch.cat([piece[:n] for piece, n in zip(pieces, used.tolist(), strict=True)])
        for pieces in kept
    ]
    expected = varlen_attn(
        inputs[0], *shorter, where[0], offsets(used.tolist()), 4, 7, enable_gqa=True,
        window_size=(-1, 0),
    )  # fmt: skip
    assert_close(output, expected)
    inputs[0].requires_grad_()
    with pytest.raises(RuntimeError, match="seqused_k is an inference-only parameter"):
        varlen_attn(*inputs, *where, enable_gqa=True, seqused_k=used)
    with torch.no_grad():
        again = varlen_attn(*inputs, *where, enable_gqa=True, window_size=(-1, 0), seqused_k=used)
    assert_same_bits(again, output)


# ---- pages ----


def paged(page_size, lengths, pages=40):
    """Keys and values in pages in random order, NaN in every slot that is not in use."""
    pool = [torch.full((pages, page_size, 2, width), math.nan).double() for width in (8, 5)]
    order = torch.randperm(pages).tolist()
    most = max(-(-length // page_size) for length in lengths) + 2
    table = torch.full((len(lengths), most), -7, dtype=torch.int32)  # unused entries: nonsense
    sequences = [[torch.randn(length, 2, x.shape[-1]).double() for length in lengths] for x in pool]
    for row, length in enumerate(lengths):
        for column in range(-(-length // page_size)):
            page = order.pop()
            table[row, column] = page
            for x, rows in zip(pool, sequences, strict=True):
                piece = rows[row][column * page_size : (column + 1) * page_size]
                x[page, : piece.shape[0]] = piece
    return pool, table, [torch.cat(rows) for rows in sequences]


@pytest.mark.parametrize("page_size", [1, 3, 16, 200])
def test_keys_in_pages_of_any_size_and_order_equal_packed_ones(page_size):
    lengths = [9, 0, 17, 3]
    (key, value), table, packed = paged(page_size, lengths)
    query, cu_seq_q = torch.randn(8, 4, 8).double(), offsets([2, 1, 4, 1])
    used = torch.tensor(lengths, dtype=torch.int32)
    options = {"enable_gqa": True, "window_size": (-1, 0), "softcap": 3.0}
    output, lse = varlen_attn(
        query, key, value, cu_seq_q, None, 4, 17, **options, seqused_k=used, block_table=table,
        return_aux=LSE,
    )  # fmt: skip
    expected = varlen_attn(
        query, *packed, cu_seq_q, offsets(lengths), 4, 17, **options, return_aux=LSE
    )
    assert_close((output, lse), expected)


def test_a_page_that_does_not_exist_is_refused():
    (key, value), table, _ = paged(4, [9, 5])
    query, used = torch.randn(3, 4, 8).double(), torch.tensor([9, 5])
    call = {"enable_gqa": True, "seqused_k": used}
    for wrong in (-1, 40, 2**30):
        broken = table.clone()
        broken[1, 1] = wrong
        with pytest.raises(ArgumentError, match=f"0 to 39, got {wrong} for page 1 of sequence 1"):
            varlen_attn(query, key, value, offsets([2, 1]), None, 2, 9, **call, block_table=broken)
