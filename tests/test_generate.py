"""generate(): the same text with and without cache, alone and in a batch, and where it ends."""

import pytest
import torch
from decoders import OPTIONS, VOCAB, make_decoder, pad, random_ids

from attention_ext import ArgumentError, ArgumentTypeError
from attention_ext.nn import ByteTokenizer, KVCache, PagedKVCache
from attention_ext.nn.generate import window_start

every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


class Script:
    """A decoder whose logits write a given text, whatever came before, and that counts calls."""

    def __new__(cls, text):
        decoder = make_decoder(vocab_size=256, max_position_embeddings=200)
        tokens = list(text.encode())

        def hidden_states(ids, *, cache=None, attention_mask=None):
            decoder.calls += 1
            return torch.full((*ids.shape, 1), decoder.calls - 1)

        def project(hidden):
            wanted = torch.tensor(tokens)[hidden[..., 0]]
            return torch.nn.functional.one_hot(wanted, 256).float()

        decoder.calls = 0
        decoder.hidden_states = hidden_states
        decoder.project = project
        return decoder


@every_option
def test_cached_and_uncached_greedy_text_are_identical(options):
    decoder = make_decoder(**options)
    ids = random_ids(2, 5)
    # 24 positions: the window moves several times.
    cached = decoder.generate(ids, 50)
    assert torch.equal(cached, decoder.generate(ids, 50, use_cache=False))
    assert torch.equal(cached[:, :5], ids)
    assert cached[:, 5:].unique().numel() > 4


@every_option
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_ragged_batch_writes_what_each_prompt_writes_alone(options, side):
    decoder = make_decoder(**options)
    rows = [random_ids(1, length)[0] for length in (6, 2, 9)]
    ids, mask = pad(rows, side, filler=-1)
    texts = decoder.generate(ids, 25, attention_mask=mask)
    assert torch.equal(texts[:, :9], ids)
    for text, row in zip(texts, rows, strict=True):
        assert torch.equal(text[9:], decoder.generate(row[None], 25)[0, len(row) :])


@every_option
@pytest.mark.parametrize("page_size", [1, 5])
def test_pages_write_the_same_text(options, page_size):
    decoder = make_decoder(**options)
    rows = [random_ids(1, length)[0] for length in (6, 2, 9)]
    ids, mask = pad(rows, "left", filler=-1)
    cache = PagedKVCache(decoder.config, 5, 3 * -(-24 // page_size), page_size)
    # 24 positions: the windows move several times, all pages in use before
    texts = decoder.generate(ids, 40, attention_mask=mask, cache=cache.rows([4, 0, 2]))
    assert torch.equal(texts, decoder.generate(ids, 40, attention_mask=mask, use_cache=False))
    assert cache.seqlens[[1, 3]].tolist() == [0, 0]


@pytest.mark.parametrize("make", [KVCache, PagedKVCache])
def test_a_talk_goes_on_where_the_cache_ends(make):
    decoder = make_decoder()
    cache = make(decoder.config, 2, 24)
    text, fed = random_ids(2, 3), []
    real = decoder.hidden_states
    decoder.hidden_states = lambda ids, **options: (fed.append(ids.shape[1]), real(ids, **options))[
        1
    ]
    for _ in range(3):
        text = torch.cat([text, random_ids(2, 2)], dim=1)
        expected = decoder.generate(text, 3, use_cache=False)
        fed.clear()
        text = decoder.generate(text, 3, cache=cache)
        assert torch.equal(text, expected)
        assert fed[1:] == [1, 1]
        assert cache.seqlens.tolist() == [text.shape[1] - 1] * 2
    assert fed[0] == 3  # the last token of the answer and two new ones


def test_texts_share_a_prefix_of_another_length_each():
    decoder = make_decoder()
    cache = PagedKVCache(decoder.config, 3, 30, page_size=4)
    prefix = random_ids(1, 9)
    decoder(prefix, cache=cache.rows([0]))
    cache.share(0, 1, 6)
    cache.share(0, 2)
    ids = torch.cat([prefix.expand(2, 9), random_ids(2, 2)], dim=1)
    text = decoder.generate(ids, 8, cache=cache.rows([1, 2]))
    assert torch.equal(text, decoder.generate(ids, 8, use_cache=False))
    assert cache.seqlens.tolist() == [9, 18, 18]


def test_a_prompt_beyond_the_context_replaces_what_a_cache_holds():
    decoder = make_decoder()
    cache = KVCache(decoder.config, 1, 24)
    decoder(random_ids(1, 20), cache=cache)
    ids = random_ids(1, 30)
    assert torch.equal(decoder.generate(ids, 9, cache=cache), decoder.generate(ids, 9))


def test_a_cache_that_does_not_fit_is_refused():
    decoder = make_decoder()
    cache = KVCache(decoder.config, 2, 8)
    ids = random_ids(2, 5)
    decoder(ids, cache=cache)
    for options, sentence in (
        (
            {"cache": cache},
            "a cache that holds less than each prompt, got one of 5 positions for 5",
        ),
        ({"cache": cache.rows([1])}, "a cache of the batch size of ids, 2, got 1"),
        ({"cache": cache, "use_cache": False}, "expected use_cache=True beside a cache, got False"),
    ):
        with pytest.raises(ArgumentError, match=sentence):
            decoder.generate(ids, 2, **options)
    cache.reset()
    with pytest.raises(ArgumentError, match=r"capacity = 8 positions .* 1 new ones after 8 in use"):
        decoder.generate(ids, 5, cache=cache)
    assert decoder.generate(ids, 0, cache=KVCache(decoder.config, 2, 8)).shape == (2, 5)


def test_greedy_text_follows_the_logits():
    decoder = make_decoder()
    ids = random_ids(1, 4)
    text = decoder.generate(ids, 12)
    for length in range(4, 16):
        assert text[0, length] == decoder(text[:, :length])[0, -1].argmax()


def test_beyond_the_context_a_window_of_at_least_three_quarters_is_read():
    decoder = make_decoder()
    text = decoder.generate(random_ids(1, 40), 30)
    for length in range(40, 70):
        start = window_start(length, 24)
        assert 18 < length - start <= 24
        assert text[0, length] == decoder(text[:, start:length])[0, -1].argmax()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 24])
def test_windows_move_forward_and_never_overflow(window):
    starts = [window_start(length, window) for length in range(1, 100)]
    assert starts == sorted(starts)
    assert all(start == 0 for start in starts[:window])
    assert all(0 < length - start <= window for length, start in enumerate(starts, 1))


def test_a_context_of_one_token_still_writes():
    decoder = make_decoder(max_position_embeddings=1)
    ids = random_ids(2, 3)
    assert torch.equal(decoder.generate(ids, 6), decoder.generate(ids, 6, use_cache=False))


def test_the_same_seed_writes_the_same_text():
    decoder = make_decoder()
    ids = random_ids(2, 4)
    options = {"temperature": 1.0, "top_k": 20}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = decoder.generate(ids, 20, seed=1, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(first, decoder.generate(ids, 20, seed=1, **options))
    assert not torch.equal(first, decoder.generate(ids, 20, seed=2, **options))
    assert torch.equal(first, decoder.generate(ids, 20, seed=1, use_cache=False, **options))


def test_without_a_seed_torchs_generator_decides():
    decoder = make_decoder()
    ids = random_ids(1, 4)
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(decoder.generate(ids, 20, temperature=1.0))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_a_strong_repetition_penalty_never_repeats():
    decoder = make_decoder()
    ids, mask = pad([random_ids(1, 1)[0], torch.tensor([7, 8, 9])], "left", filler=5)
    options = {"attention_mask": mask, "repetition_penalty": 1e9}
    text = decoder.generate(ids, 18, **options)
    for row, real in zip(text, mask, strict=True):
        tokens = row[torch.cat([real, torch.ones(18, dtype=torch.bool)])].tolist()
        assert len(set(tokens)) == len(tokens)
    assert torch.equal(text, decoder.generate(ids, 18, use_cache=False, **options))


@pytest.mark.parametrize("stop", ["END", ["never", "END"], ("ND",), ["DEN", "E"]])
def test_a_stop_text_ends_the_row_at_the_token_that_completes_it(stop):
    decoder = Script("abc END more")
    first = min(
        ("abc END more".find(text) + len(text), text)
        for text in ([stop] if isinstance(stop, str) else stop)
        if text in "abc END more"
    )
    text = decoder.generate(
        torch.tensor([[69, 78, 68]]), 12, stop=stop, tokenizer=ByteTokenizer()
    )  # the prompt says END, too
    assert text.shape[1] == 3 + first[0]
    assert decoder.calls == first[0]


def test_a_stop_text_may_be_cut_anywhere_by_tokens():
    class Pairs:
        """Two characters per token."""

        def token_bytes(self, token_id):
            return bytes([token_id, token_id + 1])

    decoder = Script("acegi")  # ab cd ef gh ij
    text = decoder.generate(torch.tensor([[1]]), 5, stop="def", tokenizer=Pairs())
    assert text.tolist() == [[1, *b"ace"]]


def test_rows_end_apart_and_are_filled():
    decoder = make_decoder()
    ids = random_ids(4, 6)
    free = decoder.generate(ids, 12)
    eos = int(free[0, 6 + 3])
    text = decoder.generate(ids, 12, eos_token_id=eos, pad_token_id=VOCAB - 1)
    for row, own in zip(text[:, 6:].tolist(), free[:, 6:].tolist(), strict=True):
        end = own.index(eos) + 1 if eos in own else len(own)
        assert row[:end] == own[: min(end, len(row))]
        assert set(row[end:]) <= {VOCAB - 1}
    default = decoder.generate(ids, 12, eos_token_id=eos)
    assert torch.equal(default == eos, (text == eos) | (text == VOCAB - 1) & (default == eos))


def test_a_batch_whose_rows_have_all_ended_stops_early():
    decoder = Script("abcabc")
    text = decoder.generate(torch.tensor([[1], [2]]), 6, eos_token_id=ord("c"))
    assert text.tolist() == [[1, *b"abc"], [2, *b"abc"]]
    assert decoder.calls == 3


def test_streaming_sees_every_step():
    decoder = make_decoder()
    ids = random_ids(3, 4)
    steps = []
    text = decoder.generate(ids, 7, on_token=lambda token: steps.append(token.clone()))
    assert torch.equal(torch.stack(steps, dim=1), text[:, 4:])


def test_no_new_tokens_give_the_prompt():
    ids = random_ids(2, 4).int()
    text = make_decoder().generate(ids, 0)
    assert torch.equal(text, ids.long())
    assert text.dtype == torch.int64


def test_every_module_keeps_its_training_flag():
    decoder = make_decoder().train()
    decoder.layers[0].eval()
    flags = [module.training for module in decoder.modules()]
    during = []

    def look(token):
        during.append(any(module.training for module in decoder.modules()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.generate(random_ids(1, 2), 3, on_token=look)
    decoder.generate(random_ids(1, 2), 3)
    assert during == [False]
    assert [module.training for module in decoder.modules()] == flags


def test_the_text_may_be_trained_on():
    decoder = make_decoder()
    text = decoder.generate(random_ids(1, 2), 5)
    decoder.loss(text[:, :-1], text[:, 1:]).backward()
    assert not text.is_inference()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_write_too(dtype):
    decoder = make_decoder().to(dtype)
    ids = random_ids(2, 3)
    assert decoder.generate(ids, 9).shape == (2, 12)
    if dtype == torch.float64:
        assert torch.equal(decoder.generate(ids, 40), decoder.generate(ids, 40, use_cache=False))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens of at least 0, got -1"),
        ({"temperature": -0.5}, "expected temperature to be at least 0 and finite, got -0.5"),
        ({"temperature": float("nan")}, "temperature to be at least 0 and finite, got nan"),
        ({"top_k": -1}, "expected top_k to be at least 0, got -1"),
        ({"top_p": 0.0}, r"expected top_p to be in \(0, 1\], got 0.0"),
        ({"min_p": 1.5}, r"expected min_p to be in \[0, 1\], got 1.5"),
        ({"repetition_penalty": 0.0}, "expected repetition_penalty to be above 0, got 0.0"),
        ({"eos_token_id": VOCAB}, "expected eos_token_id from 0 to 63, got 64"),
        ({"pad_token_id": -1}, "expected pad_token_id from 0 to 63, got -1"),
        ({"stop": "x"}, r"expected a tokenizer to find the stop texts \['x'\], got None"),
        ({"stop": ["x", ""], "tokenizer": ByteTokenizer()}, "stop to hold non-empty texts"),
    ],
)
def test_wrong_options_are_named(options, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        make_decoder().generate(random_ids(1, 3), **{"max_new_tokens": 2, **options})


def test_prompts_hold_tokens_of_the_vocabulary():
    decoder = make_decoder()
    for options in ({}, {"repetition_penalty": 2.0}):
        with pytest.raises(ArgumentError, match="ids from 0 to 63, got values from 3 to 64"):
            decoder.generate(torch.tensor([[3, 64]]), 2, **options)


def test_prompts_hold_at_least_one_token():
    decoder = make_decoder()
    with pytest.raises(ArgumentError, match="at least one token in each prompt, got 0"):
        decoder.generate(random_ids(2, 0), 3)
    ids, mask = pad([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)], "left")
    with pytest.raises(ArgumentError, match="at least one token in each prompt, got 1"):
        decoder.generate(ids, 3, attention_mask=mask)
    with pytest.raises(ArgumentTypeError, match="expected ids to be int64 or int32"):
        decoder.generate([[1]], 3)


def test_an_empty_batch_writes_nothing():
    assert make_decoder().generate(random_ids(0, 3), 4).shape == (0, 3)
