"""Text: read as it is, split without leaks, cut into batches that visit everything."""

import io
import json
import math
import sys

import pytest
import torch

from attention_ext.cli import corpus, docs_corpus
from attention_ext.cli.dataset import Batches, Validation, encode, make_tokenizer
from attention_ext.cli.errors import UsageError
from attention_ext.cli.options import DataOptions
from attention_ext.nn import ByteTokenizer, Decoder, DecoderConfig


def read(*paths, **options):
    return corpus.read_corpus(DataOptions(data=tuple(map(str, paths)), **options))


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    """The default corpus, read once into a cache that belongs to these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield read("docs")


def test_the_default_corpus_is_python_s_own_documentation(docs):
    size = sum(map(len, docs.train)) + sum(map(len, docs.val))
    assert 1.2e6 < size < 4e6
    assert 0.09 < sum(map(len, docs.val)) / size < 0.11
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}" in docs.description
    assert any("statement is used for conditional execution" in text for text in docs.train)
    assert docs.digest[:12] in docs.summary()


def test_less_than_3_percent_of_the_validation_text_is_in_the_training_text(docs):
    train, val = "".join(docs.train), "".join(docs.val)
    pieces = [val[place : place + 64] for place in range(0, len(val) - 64, 128)]
    leaked = sum(piece in train for piece in pieces)
    assert leaked / len(pieces) < 0.03


def test_the_corpus_is_read_again_from_its_cache(docs, monkeypatch):
    monkeypatch.setattr(docs_corpus, "_docstrings", lambda library: pytest.fail("read anew"))
    assert read("docs") == docs


def test_a_damaged_cache_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(docs_corpus, "_topics", lambda: ["One topic of this test."])
    monkeypatch.setattr(docs_corpus, "_docstrings", lambda library: ["One docstring of it."])
    documents = docs_corpus.read_docs()
    (cache,) = docs_corpus.cache_folder().iterdir()
    stored = json.loads(cache.read_text())
    for text in (json.dumps({**stored, "documents": ["Another."]}), "[]", "no JSON"):
        cache.write_text(text)
        assert docs_corpus.read_docs() == documents
    assert json.loads(cache.read_text()) == stored


def test_a_python_without_documentation_asks_for_data(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UsageError, match=r"without its documentation .* name a text by --data"):
        read("docs")


def test_texts_are_read_byte_for_byte(tmp_path):
    text = "één\r\ntwo\n\n" * 1000
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(b"validation\r\n")
    found = read(tmp_path / "a.txt", val=str(tmp_path / "b.txt"))
    assert "".join(found.train) == text + corpus.SEPARATOR
    assert "".join(found.val) == "validation\r\n" + corpus.SEPARATOR


def test_a_folder_gives_its_texts_in_order_and_counts_the_rest(tmp_path):
    files = {
        "b.md": b"second",
        "a/z.py": b"first",
        "c.rst": b"third",
        "empty.txt": b"",
        ".hidden.txt": b"no",
        ".git/x.txt": b"no",
        "picture.png": b"no",
        "binary.txt": b"\0no",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    documents, description = corpus._read((str(tmp_path),))
    assert [text.strip() for text in documents] == ["second", "third", "first"]
    assert "3 files (4 others skipped)" in description


def test_a_wrong_byte_in_a_folder_names_its_file(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match=r"latin\.txt is not UTF-8: wrong byte 0xe9 at position 3"):
        read(tmp_path)


def test_standard_input_is_a_text(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("één\n".encode() * 5000)))
    found = read("-")
    assert "standard input" in found.description
    assert "".join(found.train).startswith("één\n")


def test_the_split_depends_on_the_documents_alone():
    documents = [f"document {number} " * 9 for number in range(200)]
    train, val = corpus.split(documents, 0.1)
    assert sorted(train + val) == sorted(documents)
    assert len(val) == 20
    assert corpus.split(documents[::-1], 0.1) == (train[::-1], val)
    assert set(corpus.split([*documents, "one more"], 0.1)[1]) ^ set(val) <= {val[-1], "one more"}


def test_a_long_text_is_cut_into_blocks_behind_line_ends(tmp_path):
    lines = [f"line {number} of a long text\n" for number in range(3000)]
    (tmp_path / "long.txt").write_text("".join(lines))
    found = read(tmp_path / "long.txt")
    blocks = found.train + found.val
    assert all(len(block) <= corpus.BLOCK for block in blocks)
    assert all(block.startswith("line ") for block in blocks if block.strip())
    assert sorted("".join(blocks).split("\n")) == sorted("".join([*lines, "\n\n"]).split("\n"))
    assert 0.08 < len("".join(found.val)) / len("".join(blocks)) < 0.12


def test_an_epoch_visits_every_window_once():
    batches = Batches(torch.arange(1000, dtype=torch.int32), context=10, batch_size=1, seed=1)
    seen: list[int] = []
    while batches.epoch == 0 and batches.position < len(batches._order):
        ids, targets = batches.next()
        assert torch.equal(targets, ids + 1)
        seen += ids.flatten().tolist()
    assert len(seen) == len(set(seen))
    assert len(seen) >= 1000 - 2 * 10


def test_batches_go_on_from_a_saved_place():
    tokens = torch.arange(100, dtype=torch.int32)
    batches = Batches(tokens, context=8, batch_size=3, seed=5)
    for _ in range(11):
        batches.next()
    numbers, generator = batches.state()
    expected = [batches.next() for _ in range(20)]
    again = Batches(tokens, context=8, batch_size=3, seed=99)
    again.load_state(numbers, generator)
    for (ids, targets), (other_ids, other_targets) in zip(
        expected, [again.next() for _ in range(20)], strict=True
    ):
        assert torch.equal(ids, other_ids)
        assert torch.equal(targets, other_targets)


def test_a_text_of_one_window_is_enough():
    batches = Batches(torch.arange(9, dtype=torch.int32), context=8, batch_size=2, seed=0)
    ids, targets = batches.next()
    assert ids.tolist() == [list(range(8))] * 2
    assert targets[0, -1] == 8


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_bits_per_byte_are_the_loss_over_the_bytes_of_its_tokens(tokenizer):
    text = "Naïve café: ☃ snow. " * 80
    found = corpus.Corpus([text], [text], "", "")
    chosen = make_tokenizer(DataOptions(tokenizer=tokenizer, vocab_size=280), found)
    tokens = encode(chosen, [text])
    decoder = Decoder(DecoderConfig(chosen.vocab_size, 16, 1, 2, max_position_embeddings=32))
    result = Validation(tokens, 32, chosen).evaluate(decoder, 320, torch.no_grad())
    assert result.tokens == 320
    ids, targets = tokens[:320].long().view(10, 32), tokens[1:321].long().view(10, 32)
    with torch.no_grad():
        loss = decoder.loss(ids, targets).item()
    size = sum(len(chosen.token_bytes(token)) for token in targets.flatten().tolist())
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(loss * 320 / size / math.log(2), rel=1e-6)
    assert decoder.training


def test_an_untrained_decoder_needs_8_bits_for_a_byte():
    tokens = torch.randint(256, (5000,), dtype=torch.int32)
    decoder = Decoder(DecoderConfig(256, 16, 1, 2, max_position_embeddings=64))
    torch.nn.init.zeros_(decoder.embed_tokens.weight)  # also the output: every byte is as likely
    result = Validation(tokens, 64, ByteTokenizer()).evaluate(decoder, 4096, torch.no_grad())
    assert result.bits_per_byte == pytest.approx(8, abs=1e-5)
