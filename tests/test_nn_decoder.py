"""The decoder as a function: its formula, its loss, what it may see, what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from decoders import ENCODERS, OPTIONS, VOCAB, make_config, make_decoder, pad, random_ids

from attention_ext import ArgumentError, ArgumentTypeError
from attention_ext.nn import Decoder

every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def plain_decoder(decoder, ids):
    """The decoder's formula head by head, without its modules, for one row of ids (length,).

    Returns the logits (length, vocab) and the weights (layers, heads, length, length).
    """
    config, weights = decoder.config, decoder.state_dict()
    heads = config.heads
    length = len(ids)
    attention = torch.zeros(config.num_hidden_layers, heads.num_heads, length, length).double()

    def norm(x, name):
        weight = weights[f"{name}.weight"]
        if config.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        return x + weights.get(f"{name}.bias", 0)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def turn(x):
        width = config.rotary_dim
        pairs = torch.arange(width // 2, dtype=x.dtype)
        angle = torch.arange(length, dtype=x.dtype)[:, None] * config.rope_theta ** (
            -2 * pairs / width
        )
        if config.rope_scaling:
            angle = angle / config.rope_scaling["factor"]
        if config.rope_interleaved:
            first, second = 2 * pairs.long(), 2 * pairs.long() + 1
        else:
            first, second = pairs.long(), pairs.long() + width // 2
        turned = x.clone()
        turned[:, first] = x[:, first] * angle.cos() - x[:, second] * angle.sin()
        turned[:, second] = x[:, second] * angle.cos() + x[:, first] * angle.sin()
        return turned

    def attend(x, layer, name):
        q_width, k_width = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        q, k, v = linear(x, f"{name}.qkv_proj").tensor_split([q_width, q_width + k_width], -1)
        outputs = []
        for head in range(heads.num_heads):
            kv_head = head // (heads.num_heads // heads.num_kv_heads)
            query = q[:, head * heads.head_dim :][:, : heads.head_dim]
            key = k[:, kv_head * heads.head_dim :][:, : heads.head_dim]
            value = v[:, kv_head * heads.value_dim :][:, : heads.value_dim]
            if config.qk_norm:
                query, key = norm_rms(query, f"{name}.q_norm"), norm_rms(key, f"{name}.k_norm")
            if config.position == "rope":
                query, key = turn(query), turn(key)
            scores = query @ key.T / math.sqrt(heads.head_dim)
            if config.softcap:
                scores = config.softcap * (scores / config.softcap).tanh()
            ahead = torch.arange(length) - torch.arange(length)[:, None]  # j - i
            if config.position == "alibi":
                scores = scores - 2.0 ** (-8 * (head + 1) / heads.num_heads) * ahead.abs()
            left, right = config.window(layer)
            hidden = (ahead < -left) & (left >= 0) | (ahead > right) & (right >= 0)
            scores = scores.masked_fill(hidden | (ahead > 0) & config.causal, -math.inf)
            if config.sinks:
                sink = weights[f"{name}.sinks"][head].expand(length, 1)
                scores, value = torch.cat([scores, sink], -1), F.pad(value, (0, 0, 0, 1))
            attention[layer, head] = scores.softmax(-1)[:, :length]
            outputs.append(scores.softmax(-1) @ value)
        return linear(torch.cat(outputs, -1), f"{name}.o_proj")

    def norm_rms(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    def feed_forward(x, name):
        if config.mlp == "gelu":
            return linear(
                F.gelu(linear(x, f"{name}.up_proj"), approximate="tanh"), f"{name}.down_proj"
            )
        gate, up = linear(x, f"{name}.gate_up_proj").chunk(2, -1)
        return linear(gate * gate.sigmoid() * up, f"{name}.down_proj")

    x = weights["embed_tokens.weight"][ids]
    if config.position == "learned":
        x = x + weights["embed_positions.weight"][:length]
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}"
        x = x + attend(norm(x, f"{name}.attention_norm"), layer, f"{name}.attention")
        x = x + feed_forward(norm(x, f"{name}.mlp_norm"), f"{name}.mlp")
    vocabulary = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    return norm(x, "norm") @ vocabulary.T, attention


@pytest.mark.parametrize("options", (every := {**OPTIONS, **ENCODERS}).values(), ids=every)
def test_logits_and_weights_follow_the_formula(options):
    decoder = make_decoder(**options).double()
    ids = random_ids(2, 9)
    logits, weights = zip(*(plain_decoder(decoder, row) for row in ids), strict=True)
    torch.testing.assert_close(decoder(ids), torch.stack(logits), rtol=1e-9, atol=1e-9)
    found = decoder.attention_weights(ids)
    torch.testing.assert_close(found, torch.stack(weights, dim=1), rtol=1e-9, atol=1e-9)


@every_option
def test_every_parameter_learns(options):
    decoder = make_decoder(**{**options, "dropout": 0.0}).train()
    ids = random_ids(4, 13)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.02)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = decoder.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    for name, parameter in decoder.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        assert gradient.any() or name.endswith("qkv_proj.bias"), name


@every_option
def test_a_changed_token_moves_no_earlier_logit_by_a_bit(options):
    decoder = make_decoder(**options)
    ids = random_ids(2, 11)
    before = decoder(ids)
    for place in (0, 5, 10):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % VOCAB
        after = decoder(changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place:], before[:, place:])


@every_option
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_each_row_alone(options, side):
    decoder = make_decoder(**options)
    rows = [random_ids(1, length)[0] for length in (3, 7, 1, 5)]
    ids, mask = pad(rows, side, filler=-100)
    logits = decoder(ids, attention_mask=mask)
    assert logits.isfinite().all()
    for row, own, real in zip(logits, rows, mask, strict=True):
        torch.testing.assert_close(row[real], decoder(own[None])[0], rtol=1e-4, atol=1e-4)


def test_padding_takes_no_gradient():
    decoder = make_decoder()
    ids, mask = pad([torch.tensor([1, 2, 3]), torch.tensor([4])], "left", filler=63)
    decoder(ids, attention_mask=mask)[mask].sum().backward()
    alone = make_decoder()
    alone.load_state_dict(decoder.state_dict())
    (alone(torch.tensor([[1, 2, 3]])).sum() + alone(torch.tensor([[4]])).sum()).backward()
    for own, other in zip(decoder.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-3)


def test_loss_is_the_mean_negative_log_probability_of_the_next_token():
    decoder = make_decoder()
    text = random_ids(3, 8)
    ids, targets = text[:, :-1], text[:, 1:].clone()
    targets[0, 2:5] = -100
    log_probabilities = decoder(ids).double().log_softmax(-1)
    terms = [
        -log_probabilities[row, place, targets[row, place]]
        for row in range(3)
        for place in range(7)
        if targets[row, place] != -100
    ]
    torch.testing.assert_close(decoder.loss(ids, targets).double(), sum(terms) / len(terms))


def test_loss_of_nothing_is_zero_with_zero_gradients():
    decoder = make_decoder()
    ids = random_ids(2, 4)
    loss = decoder.loss(ids, torch.full_like(ids, -100))
    loss.backward()
    assert loss.item() == 0
    assert not any(parameter.grad.any() for parameter in decoder.parameters())


def test_a_fresh_decoder_knows_nothing():
    decoder = Decoder(make_config())
    ids = random_ids(8, 20)
    assert decoder.loss(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(math.log(VOCAB), abs=0.5)


def test_a_decoder_learns_a_text_by_heart():
    decoder = Decoder(make_config())
    text = random_ids(1, 24)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = decoder.loss(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    assert torch.equal(decoder.generate(text[:, :1], 23), text)


def test_weights_start_as_documented():
    decoder = Decoder(make_config(hidden_size=160, attention_bias=True, norm="layer"))
    weights = decoder.state_dict()
    for name in ("embed_tokens", "layers.0.attention.qkv_proj", "layers.1.mlp.gate_up_proj"):
        assert weights[f"{name}.weight"].std().item() == pytest.approx(0.05, rel=0.1)
    for name in ("attention.o_proj", "mlp.down_proj"):
        assert weights[f"layers.1.{name}.weight"].std().item() == pytest.approx(0.025, rel=0.1)
    assert not weights["layers.0.attention.qkv_proj.bias"].any()
    assert (weights["layers.0.mlp_norm.weight"] == 1).all()
    assert not weights["norm.bias"].any()


def test_parameters_are_counted_once():
    config = make_config(num_key_value_heads=2, value_dim=6, intermediate_size=40)
    attention = 32 * (4 * 8 + 2 * 8 + 2 * 6) + 4 * 6 * 32
    layer = attention + 3 * 32 * 40 + 2 * 32
    assert Decoder(config).num_parameters() == 64 * 32 + 2 * layer + 32
    untied = make_config(tie_word_embeddings=False)
    assert Decoder(untied).num_parameters() == Decoder(make_config()).num_parameters() + 64 * 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_agree_with_float32(dtype):
    decoder = make_decoder(rope_interleaved=True, num_key_value_heads=2)
    ids = random_ids(2, 9)
    expected = decoder(ids)
    decoder.to(dtype)
    logits = decoder(ids)
    assert logits.dtype == dtype
    error = (logits.double() - expected.double()).square().mean().sqrt() / expected.std()
    assert error < {torch.bfloat16: 0.05, torch.float16: 0.005, torch.float64: 1e-5}[dtype]
    loss = decoder.loss(ids, ids)
    loss.backward()
    assert loss.dtype == (dtype if dtype == torch.float64 else torch.float32)


def test_autocast_trains_and_decodes():
    decoder = make_decoder()
    ids = random_ids(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        decoder.loss(ids, ids).backward()
        assert decoder.generate(ids, 4).shape == (2, 13)
    assert decoder.embed_tokens.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0)])
def test_empty_inputs_give_empty_logits(batch, length):
    assert make_decoder()(random_ids(batch, length)).shape == (batch, length, VOCAB)


def test_int32_ids_and_a_vocabulary_of_one():
    decoder = make_decoder()
    ids = random_ids(2, 5)
    assert torch.equal(decoder(ids.int()), decoder(ids))
    single = Decoder(make_config(vocab_size=1))
    nothing = torch.zeros(1, 4, dtype=torch.int64)
    assert single.loss(nothing, nothing).item() == 0


def test_the_whole_vocabulary_is_reachable():
    decoder = make_decoder()
    assert decoder(torch.tensor([[0, VOCAB - 1]])).isfinite().all()
    for wrong in (-1, VOCAB):
        with pytest.raises(ArgumentError, match=f"Decoder: expected ids from 0 to 63, .*{wrong}"):
            decoder(torch.tensor([[3, wrong]]))
        with pytest.raises(ArgumentError, match="Decoder: expected targets from 0 to 63"):
            decoder.loss(torch.tensor([[3, 4]]), torch.tensor([[wrong, -100]]))


def test_the_context_has_an_end():
    decoder = make_decoder()
    assert decoder(random_ids(1, 24)).shape[1] == 24
    with pytest.raises(ArgumentError, match="max_position_embeddings = 24 positions, got 25"):
        decoder(random_ids(1, 25))
    mask = torch.arange(30) >= 6
    assert decoder(random_ids(1, 30), attention_mask=mask[None]).isfinite().all()
    with pytest.raises(ArgumentError, match="max_position_embeddings = 24 positions, got 25"):
        decoder(random_ids(1, 30), attention_mask=(torch.arange(30) >= 5)[None])


@pytest.mark.parametrize(
    ("ids", "mask", "error", "sentence"),
    [
        ([[1, 2]], None, ArgumentTypeError, "expected ids to be int64 or int32, got list"),
        (torch.ones(1, 2), None, ArgumentTypeError, "int64 or int32, got torch.float32"),
        (torch.ones(3).long(), None, ArgumentError, r"ids of shape \(batch, length\), got \(3,\)"),
        (torch.ones(1, 2).long(), torch.ones(1, 2), ArgumentTypeError, "mask to be bool"),
        (
            torch.ones(1, 2).long(),
            torch.ones(1, 3).bool(),
            ArgumentError,
            r"attention_mask in the shape of ids, got \(1, 3\) and \(1, 2\)",
        ),
    ],
)
def test_wrong_inputs_are_named(ids, mask, error, sentence):
    with pytest.raises(error, match=sentence):
        make_decoder()(ids, attention_mask=mask)


def test_targets_have_the_shape_of_ids():
    with pytest.raises(ArgumentError, match=r"targets in the shape of ids, got \(2, 4\)"):
        make_decoder().loss(random_ids(2, 5), random_ids(2, 4))


@pytest.mark.parametrize("name", ["default", "interleaved rope", "everything"])
def test_a_compiled_decoder_gives_the_same_loss(fresh_dynamo, name):
    decoder = make_decoder(**OPTIONS[name])
    ids = random_ids(2, 9)
    expected = decoder.loss(ids, ids)
    expected.backward()
    gradient = decoder.embed_tokens.weight.grad
    decoder.zero_grad()
    compiled = torch.compile(decoder.loss, backend="aot_eager", fullgraph=True)
    loss = compiled(ids, ids)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(decoder.embed_tokens.weight.grad, gradient)
