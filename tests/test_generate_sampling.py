"""Filters against closed forms, draws against their probabilities, streams against their text."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ext import ArgumentError
from attention_ext.nn import ByteTokenizer, TextStream, filter_logits, sample_next

PROBABILITIES = torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2]])
LOGITS = PROBABILITIES.log() + 3  # any shift


def kept(**options):
    return set(filter_logits(LOGITS, **options).isfinite()[0].nonzero()[:, 0].tolist())


def frequencies(count=4000, **options):
    generator = torch.Generator().manual_seed(1)
    logits = LOGITS.expand(count, -1)
    return sample_next(logits, generator=generator, **options).bincount(minlength=5) / count


@pytest.mark.parametrize("top_k", range(7))
def test_top_k_keeps_the_k_likeliest(top_k):
    assert kept(top_k=top_k) == set([1, 3, 4, 0, 2][: top_k or 5])


def test_top_k_keeps_ties_with_the_last():
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0]])
    assert filter_logits(logits, top_k=2).isfinite().tolist() == [[True, True, True, False]]


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(1.0, {0, 1, 2, 3, 4}), (0.94, {0, 1, 3, 4}), (0.8, {1, 3, 4}), (0.5, {1, 3}), (1e-6, {1})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, expected):
    assert kept(top_p=top_p) == expected


@pytest.mark.parametrize(
    ("min_p", "expected"),
    [(0.0, {0, 1, 2, 3, 4}), (0.2, {0, 1, 3, 4}), (0.6, {1, 3}), (1.0, {1})],
)
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(min_p, expected):
    assert kept(min_p=min_p) == expected


def test_filters_work_on_what_the_filters_before_leave():
    # Of {.4, .25, .2}, renormalised to .47, .29, .24, top-p 0.7 keeps two.
    assert kept(top_k=3, top_p=0.7) == {1, 3}
    assert kept(top_p=0.7) == {1, 3, 4}


def test_kept_logits_keep_their_value():
    filtered = filter_logits(LOGITS, top_k=3, top_p=0.9, min_p=0.1)
    real = filtered.isfinite()
    assert torch.equal(filtered[real], LOGITS[real])


def test_draws_follow_the_softmax():
    torch.testing.assert_close(frequencies(), PROBABILITIES[0], rtol=0, atol=0.03)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_raises_probabilities_to_its_inverse(temperature):
    expected = PROBABILITIES[0] ** (1 / temperature)
    expected = expected / expected.sum()
    torch.testing.assert_close(frequencies(temperature=temperature), expected, rtol=0, atol=0.03)


def test_filtered_tokens_are_never_drawn():
    drawn = frequencies(top_k=3, top_p=0.7)
    torch.testing.assert_close(drawn, torch.tensor([0, 8 / 13, 0, 5 / 13, 0]), rtol=0, atol=0.03)
    assert drawn[[0, 2, 4]].sum() == 0


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 1}, {"temperature": 1e-30}])
def test_the_greedy_limit_takes_the_likeliest(options):
    logits = torch.randn(50, 20).mul(5)
    assert torch.equal(sample_next(logits, **options), logits.argmax(-1))
    assert sample_next(torch.zeros(1, 4), temperature=0).tolist() == [0]


def test_rows_are_drawn_apart():
    logits = torch.full((3, 4), -math.inf)
    logits[[0, 1, 2], [2, 0, 3]] = 0.0
    assert sample_next(logits).tolist() == [2, 0, 3]


def test_the_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.5]])
    seen = torch.tensor([[True, False, False, False]])
    options = {"temperature": 0, "seen": seen}
    assert sample_next(logits, repetition_penalty=1.2, **options).item() == 0
    assert sample_next(logits, repetition_penalty=1.5, **options).item() == 1
    assert sample_next(logits, repetition_penalty=0.5, **options).item() == 0
    below = torch.tensor([[-1.0, -1.5]])
    options["seen"] = torch.tensor([[True, False]])
    assert sample_next(below, repetition_penalty=1.4, **options).item() == 0
    assert sample_next(below, repetition_penalty=1.6, **options).item() == 1


def test_half_precision_logits_are_drawn_in_float32():
    logits = torch.tensor([[300.0, 299.0, 0.0]], dtype=torch.bfloat16)
    assert sample_next(logits, temperature=0.01).item() in (0, 1)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.text(alphabet="abEN D", max_size=30),
    st.lists(st.text(alphabet="abEND ", min_size=1, max_size=4), max_size=3),
)
def test_a_stream_shows_the_text_before_the_first_stop(text, stop):
    stream = TextStream(ByteTokenizer(), stop)
    shown = ""
    for token in text.encode():
        shown += stream.push(token)
        assert text.startswith(shown)
        assert not any(end in shown for end in stop)
    shown += stream.finish()
    # The stream stops as soon as any stop text is complete.
    ends = [text.find(end) + len(end) for end in stop if end in text]
    assert stream.stopped == bool(ends)
    if ends:
        seen = text[: min(ends)]
        assert shown == seen[: min(seen.find(end) for end in stop if end in seen)]
    else:
        assert shown == text


def test_a_stream_holds_back_no_more_than_it_must():
    stream = TextStream(ByteTokenizer(), ["\n\n"])
    assert [stream.push(token) for token in b"a\nb\n\nc"] == ["a", "", "\nb", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""


def test_a_stream_shows_whole_characters_only():
    stream = TextStream(ByteTokenizer())
    assert [stream.push(token) for token in "é☃".encode()] == ["", "é", "", "", "☃"]
    stream.push(0xE2)
    assert stream.finish() == "\ufffd"


def test_a_single_text_is_one_stop():
    stream = TextStream(ByteTokenizer(), "ab")
    assert stream.push(ord("b")) == "b"
    with pytest.raises(ArgumentError, match="stop to hold non-empty texts, got"):
        TextStream(ByteTokenizer(), [""])
