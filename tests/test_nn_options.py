"""Windows, slopes, sinks, soft cap, dropout and encoders in a decoder; padding of every form."""

import pytest
import torch
from decoders import ENCODERS, OPTIONS, VOCAB, make_config, make_decoder, pad, random_ids
from torch.utils.checkpoint import checkpoint

from attention_ext import ArgumentError
from attention_ext.nn import Decoder, KVCache
from attention_ext.nn.packing import make_packing

EVERY = {**OPTIONS, **ENCODERS}
every_encoder = pytest.mark.parametrize("options", ENCODERS.values(), ids=ENCODERS)


def learn(decoder, text, steps, seed=0):
    """Losses on a text (batch, length) while the decoder learns it."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = decoder.loss(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- dropout ----


def test_evaluation_never_drops_out():
    decoder = make_decoder(dropout=0.5)
    plain = make_decoder()
    plain.load_state_dict(decoder.state_dict())
    ids = random_ids(2, 9)
    state = torch.get_rng_state()
    assert torch.equal(decoder(ids), plain(ids))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(decoder.train().generate(ids, 9), plain.generate(ids, 9))


def test_the_seed_decides_what_is_dropped():
    decoder = make_decoder(dropout=0.2).train()
    ids = random_ids(2, 9)
    logits = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        logits.append(decoder(ids))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("branch", ["weights", "attention", "mlp"])
def test_each_branch_drops_by_itself(branch):
    decoder = make_decoder(dropout=0.5, num_hidden_layers=1).train()
    (block,) = decoder.layers
    block.attention.dropout = 0.5 if branch == "weights" else 0.0
    if branch == "weights":
        block.dropout = 0.0
    elif branch == "attention":
        block.mlp.down_proj.weight.data.zero_()
    else:
        block.attention.o_proj.weight.data.zero_()
    ids = random_ids(1, 9)
    assert not torch.equal(decoder(ids), decoder(ids))
    assert torch.equal(decoder.eval()(ids), decoder(ids))


def test_a_decoder_learns_under_dropout():
    torch.manual_seed(1)
    text = random_ids(1, 24)
    losses = learn(Decoder(make_config(dropout=0.1, sinks=True)), text, 30)
    assert losses[-1] < 0.5 * losses[0]


def test_training_under_dropout_is_reproducible():
    text, config = random_ids(2, 12), make_config(dropout=0.3)
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(0)
        runs.append(learn(Decoder(config), text, 4, seed))
    assert runs[0] == runs[1] != runs[2]


def test_what_is_kept_is_scaled():
    decoder = make_decoder(dropout=0.25, num_hidden_layers=1).train()
    block = decoder.layers[0]
    block.attention.dropout = 0.0
    x = torch.randn(1, 5, 32)
    update = block._drop(x)
    dropped = update == 0
    assert 0.1 < dropped.float().mean() < 0.4
    torch.testing.assert_close(update[~dropped], x[~dropped] / 0.75)


def test_activation_checkpointing_repeats_what_was_dropped():
    decoder = make_decoder(**OPTIONS["everything"]).train()
    ids = random_ids(2, 9)
    results = []
    for recompute in (False, True):
        torch.manual_seed(7)
        if recompute:
            loss = checkpoint(decoder.loss, ids, ids, use_reentrant=False)
        else:
            loss = decoder.loss(ids, ids)
        results.append([loss, *torch.autograd.grad(loss, list(decoder.parameters()))])
    assert all(map(torch.equal, *results))


# ---- windows, slopes, sinks ----


def test_behind_a_window_nothing_is_seen():
    decoder = make_decoder(window_sizes=[(2, 0), (3, 0)])
    ids = random_ids(1, 12)
    before = decoder(ids)
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % VOCAB
    after = decoder(changed)
    assert torch.equal(after[:, :4], before[:, :4])
    assert torch.equal(after[:, 4 + 2 + 3 + 1 :], before[:, 4 + 2 + 3 + 1 :])
    assert not torch.equal(after[:, 4 + 2 + 3], before[:, 4 + 2 + 3])


def test_slopes_keep_their_bits_in_half_types():
    decoder = make_decoder(position="alibi", num_attention_heads=3, head_dim=8)
    slopes = torch.tensor([2**-4, 2**-8, 2**-2])
    assert torch.equal(decoder.alibi.table, slopes)
    for dtype in (torch.bfloat16, torch.float64):
        decoder.to(dtype)
        assert torch.equal(decoder.alibi.table, slopes.to(decoder.alibi.table.dtype))
    assert decoder.alibi.table.dtype == torch.float64
    assert not any("alibi" in name for name in decoder.state_dict())


def test_slopes_see_distances_alone():
    decoder = make_decoder(position="alibi").double()
    cache = KVCache(decoder.config, 1, 24, dtype=torch.float64)
    ids = random_ids(1, 10)
    whole = decoder.attention_weights(torch.cat([ids, ids], 1), [0])[..., 10:, 10:]
    ratio = whole / decoder.attention_weights(ids, [0])  # what the first ten took of each row
    for row in range(10):
        own = ratio[0, 0, :, row, : row + 1]
        torch.testing.assert_close(own, own[:, :1].expand_as(own))
    assert cache.seqlens.tolist() == [0]


def test_a_sink_that_outweighs_everything_silences_its_head():
    decoder = make_decoder(sinks=True)
    ids = random_ids(1, 7)
    before = decoder.attention_weights(ids, [0])
    decoder.layers[0].attention.sinks.data[2] = 1e4
    after = decoder.attention_weights(ids, [0])
    assert not after[0, 0, 2].any()
    assert torch.equal(after[0, 0, [0, 1, 3]], before[0, 0, [0, 1, 3]])


def test_sinks_begin_at_zero_and_are_counted():
    decoder = Decoder(make_config(sinks=True))
    assert not decoder.layers[1].attention.sinks.any()
    assert decoder.num_parameters() == Decoder(make_config()).num_parameters() + 2 * 4


# ---- encoders ----


@every_encoder
def test_an_encoder_sees_the_future(options):
    encoder = make_decoder(**options)
    ids = random_ids(2, 3)
    changed = ids.clone()
    changed[:, 2] = (changed[:, 2] + 1) % VOCAB
    assert not torch.isclose(encoder(changed)[:, 0], encoder(ids)[:, 0]).all()


@every_encoder
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_of_an_encoder_equal_each_row_alone(options, side):
    encoder = make_decoder(**options)
    rows = [random_ids(1, length)[0] for length in (3, 7, 1, 5)]
    ids, mask = pad(rows, side, filler=-100)
    logits = encoder(ids, attention_mask=mask)
    for row, own, real in zip(logits, rows, mask, strict=True):
        torch.testing.assert_close(row[real], encoder(own[None])[0], rtol=1e-4, atol=1e-4)


@every_encoder
def test_an_encoder_learns_to_fill_gaps(options):
    encoder = make_decoder(**{**options, "dropout": 0.0}).train()
    ids = random_ids(4, 9)
    masked = ids.clone()
    masked[:, ::3] = 0
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        logits = encoder(masked)[:, ::3].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, ::3].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_an_encoder_has_no_loss_no_text_and_no_cache():
    encoder = make_decoder(causal=False)
    ids = random_ids(1, 3)
    cache = KVCache(make_config(), 1, 8)
    sentence = "expected a causal decoder, got one with causal=False: an encoder sees the tokens"
    for call, name in (
        (lambda: encoder.loss(ids, ids), "Decoder.loss"),
        (lambda: encoder.generate(ids, 2), "Decoder.generate"),
        (lambda: encoder(ids, cache=cache), "Decoder with a cache"),
        (lambda: KVCache(encoder.config, 1, 8), "KVCache"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: {sentence}"):
            call()


# ---- padding ----


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_holes_are_padding_too(options):
    decoder = make_decoder(**options)
    ids = random_ids(2, 11)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0], [1, 0] * 5 + [1]]).bool()
    logits = decoder(ids, attention_mask=mask)
    cached = None
    if decoder.config.causal:
        cached = decoder(ids, cache=KVCache(decoder.config, 2, 6), attention_mask=mask)
    for row in range(2):
        alone = decoder(ids[row, mask[row]][None])[0]
        torch.testing.assert_close(logits[row, mask[row]], alone, rtol=1e-4, atol=1e-4)
        if cached is not None:
            torch.testing.assert_close(cached[row, mask[row]], alone.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_a_row_of_nothing_but_padding_stays_finite(options):
    decoder = make_decoder(**options)
    ids = random_ids(2, 5)
    mask = torch.tensor([[False] * 5, [True] * 5])
    logits = decoder(ids, attention_mask=mask)
    assert logits.isfinite().all()
    logits[1].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in decoder.parameters())
    torch.testing.assert_close(logits[1], decoder(ids[1:])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [4, 7])
def test_packing_is_undone_where_there_are_tokens(width):
    ids = torch.arange(1, 15).view(2, 7)
    mask = torch.tensor([[0, 1, 0, 1, 1, 0, 0], [0, 1, 0, 1, 0, 1, 1]]).bool()
    packing = make_packing(mask, width)
    packed = packing.pack(ids * mask)
    for row, count in enumerate((3, 4)):
        assert packed[row, :count].tolist() == ids[row, mask[row]].tolist()
        assert packed[row].count_nonzero() == count
    assert torch.equal(packing.unpack(packed[..., None])[mask], ids[mask][:, None])
    assert packing.counts.tolist() == [3, 4]


def test_no_mask_over_pairs_is_made(monkeypatch):
    from attention_ext.nn import attention

    masks = []

    def spy(*args, attn_mask=None, **options):
        masks.append(attn_mask)
        return real(*args, attn_mask=attn_mask, **options)

    real = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    decoder = make_decoder()
    ids, mask = pad([random_ids(1, 3)[0], random_ids(1, 6)[0]], "left")
    decoder(ids, attention_mask=mask)
    decoder.generate(ids, 4, attention_mask=mask, use_cache=False)
    assert len(masks) == 2 * 5
    assert masks == [None] * len(masks)


@pytest.mark.parametrize("options", [OPTIONS["everything"], ENCODERS["encoder with everything"]])
def test_a_compiled_decoder_takes_padded_rows(fresh_dynamo, options):
    decoder = make_decoder(**options)
    ids, mask = pad([random_ids(1, 3)[0], random_ids(1, 6)[0]], "left")
    compiled = torch.compile(decoder, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(ids, attention_mask=mask), decoder(ids, attention_mask=mask)
    )
