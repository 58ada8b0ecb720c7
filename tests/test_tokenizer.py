"""Tokenizers: exact round trips, files that others can read, and errors."""

import sys

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ext import ArgumentError
from attention_ext.nn import BpeTokenizer, ByteTokenizer, load_tokenizer, stream_decoder

TEXTS = [
    "Maya lent Ravi her notebook. Ravi lent Maya his.\n\n" * 5,
    "def attend(query, key, value):\n    return softmax(query @ key.T) @ value\n" * 5,
    "naïve café, 東京, ☃ and 🙂\r\n\ttabs  and   spaces " * 3,
]
BPE = BpeTokenizer.train(TEXTS, 320)
both = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
texts = st.text(max_size=60) | st.text(alphabet="Maya lent\n \t\r'’🙂é東", max_size=60)


@both
@settings(deadline=None, derandomize=True, max_examples=150)
@given(text=texts)
def test_every_text_comes_back_exactly(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= index < tokenizer.vocab_size for index in ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@both
@settings(deadline=None, derandomize=True, max_examples=150)
@given(text=texts, data=st.data())
def test_a_stream_yields_whole_characters_that_join_to_the_text(tokenizer, text, data):
    ids = tokenizer.encode(text)
    pieces = list(stream_decoder(tokenizer, iter(ids)))
    assert "".join(pieces) == text
    assert all(pieces)
    cut = ids[: data.draw(st.integers(0, len(ids)))]
    assert "".join(stream_decoder(tokenizer, cut)) == tokenizer.decode(cut)


@both
def test_any_sequence_of_tokens_has_a_text(tokenizer):
    ids = list(range(tokenizer.vocab_size))
    assert isinstance(tokenizer.decode(ids), str)
    assert {tokenizer.token_bytes(index) for index in ids} >= {bytes([b]) for b in range(256)}
    assert tokenizer.decode([]) == ""


@both
def test_batches_equal_texts_one_by_one(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


@both
@pytest.mark.parametrize("outside", [-1, 320, 10**9])
def test_tokens_outside_the_vocabulary_are_refused(tokenizer, outside):
    with pytest.raises(ArgumentError, match=rf"vocabulary \(0 to \d+\), got {outside}"):
        tokenizer.decode([1, outside])


@both
def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(ArgumentError, match=r"lone surrogate '\\ud800' at character 2"):
        tokenizer.encode("ab\ud800")


@both
def test_a_saved_tokenizer_is_read_by_us_and_by_the_library(tokenizer, tmp_path):
    path = tokenizer.save(tmp_path)
    assert path == tmp_path / "tokenizer.json"
    again = load_tokenizer(tmp_path)
    assert type(again) is type(tokenizer)
    foreign = tokenizers.Tokenizer.from_file(str(path))
    for text in (*TEXTS, "", " leading", "🙂"):
        ids = tokenizer.encode(text)
        assert again.encode(text) == ids
        assert foreign.encode(text).ids == ids
        assert foreign.decode(ids) == text
    assert again.vocab_size == foreign.get_vocab_size() == tokenizer.vocab_size
    other = tokenizer.save(tmp_path / "deeper" / "own.json")
    assert other.name == "own.json"
    assert load_tokenizer(other).encode("Maya") == tokenizer.encode("Maya")


def test_training_learns_merges_and_is_repeatable():
    assert BPE.vocab_size == 320
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert BpeTokenizer.train(iter(TEXTS), 320).encode(TEXTS[1]) == BPE.encode(TEXTS[1])


def test_a_text_that_is_too_short_gives_a_smaller_vocabulary():
    tokenizer = BpeTokenizer.train(["ab"], 1000)
    assert tokenizer.vocab_size == 257
    assert tokenizer.encode("abab") == [256, 256]
    assert BpeTokenizer.train([], 256).vocab_size == 256


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(ArgumentError, match=r"vocab_size of at least 256 .* got 255"):
        BpeTokenizer.train(TEXTS, 255)
    with pytest.raises(ArgumentError, match=r"at least 257 .* 1 special tokens.*, got 256"):
        BpeTokenizer.train(TEXTS, 256, special_tokens=["<end>"])


def test_special_tokens_stand_for_themselves(tmp_path):
    tokenizer = BpeTokenizer.train(TEXTS, 300, special_tokens=["<é end>"])
    index = tokenizer.token_id("<é end>")
    assert tokenizer.encode("Maya<é end>")[-1] == index == 0
    assert tokenizer.decode([index]) == "<é end>"
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).decode([index]) == "<é end>"
    assert tokenizer.token_id("absent") is None


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"expected a tokenizer.json, got no file .*gone"):
        load_tokenizer(tmp_path / "gone")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": 3}', '{"model": {}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ArgumentError, match=r"expected a Hugging Face tokenizer in .*got"):
        load_tokenizer(tmp_path)


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match="expected a Hugging Face tokenizer in"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArgumentError, match="with a ByteLevel decoder, got None"):
        load_tokenizer(tmp_path)


def test_the_byte_tokenizer_needs_no_library(tmp_path, monkeypatch):
    ByteTokenizer().save(tmp_path)
    BPE.save(tmp_path / "bpe")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer(tmp_path).encode("é") == [195, 169]
    with pytest.raises(
        ImportError, match=r"needs tokenizers: pip install attention_ext\[decoder\]"
    ):
        load_tokenizer(tmp_path / "bpe")


def test_byte_ids_are_the_bytes():
    assert ByteTokenizer().encode("é\0") == [195, 169, 0]
    assert ByteTokenizer().decode([0xFF, 65]) == "\ufffdA"
