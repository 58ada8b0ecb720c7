"""Saving and loading: the same bits, tied weights once, whole files or none, clear errors."""

import json
import os
import subprocess
import sys

import pytest
import torch
from decoders import ENCODERS, OPTIONS, make_config, make_decoder, random_ids
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from attention_ext import ArgumentError
from attention_ext.nn import Decoder
from attention_ext.nn.checkpoint import load_tensors, save_tensors, write_atomically

WEIGHTS = "model.safetensors"


EVERY = {**OPTIONS, **ENCODERS}


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_a_loaded_decoder_has_the_same_bits(options, tmp_path):
    decoder = make_decoder(**options)
    decoder.save_pretrained(tmp_path)
    again = Decoder.from_pretrained(tmp_path)
    assert again.config == decoder.config
    assert not again.training
    assert all(parameter.requires_grad for parameter in again.parameters())
    for (name, own), (other_name, other) in zip(
        decoder.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == other_name
        assert torch.equal(own, other)
    ids = random_ids(2, 9)
    assert torch.equal(decoder(ids), again(ids))


def test_tied_weights_are_stored_once(tmp_path):
    decoder = make_decoder()
    decoder.save_pretrained(tmp_path)
    with safe_open(tmp_path / WEIGHTS, "pt") as file:
        names = set(file.keys())
        assert file.metadata() == {"format": "pt"}
    assert names == {name for name, _ in decoder.named_parameters()}
    assert not any("lm_head" in name or "rotary" in name for name in names)
    stored = sum(weight.numel() for weight in load_file(tmp_path / WEIGHTS).values())
    assert stored == decoder.num_parameters()
    again = Decoder.from_pretrained(tmp_path)
    again.loss(random_ids(1, 4), random_ids(1, 4)).backward()
    assert again.num_parameters() == decoder.num_parameters()


def test_an_interrupted_training_goes_on_with_the_same_bits(tmp_path):
    ids = random_ids(2, 9)
    decoder = make_decoder()
    decoder.save_pretrained(tmp_path)
    again = Decoder.from_pretrained(tmp_path)
    for model in (decoder, again):
        model.train()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model.loss(ids[:, :-1], ids[:, 1:]).backward()
            optimizer.step()
    for own, other in zip(decoder.parameters(), again.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_stored_type_comes_back_unless_another_is_wanted(dtype, tmp_path):
    make_decoder().to(dtype).save_pretrained(tmp_path)
    assert Decoder.from_pretrained(tmp_path).dtype == dtype
    wanted = Decoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32)
    assert wanted.dtype == torch.float32
    assert wanted.rotary.table.dtype == torch.float32
    assert torch.equal(wanted.rotary.table, make_decoder().rotary.table)


def test_loading_leaves_the_random_numbers_alone(tmp_path):
    make_decoder().save_pretrained(tmp_path)
    state = torch.get_rng_state()
    Decoder.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_files_are_the_documented_ones(tmp_path):
    folder = tmp_path / "new" / "run"
    make_decoder().save_pretrained(folder)
    assert sorted(os.listdir(folder)) == ["config.json", WEIGHTS]
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("model_type") == "attention_ext"
    assert config == make_config().to_dict()


def test_saving_again_replaces_the_files(tmp_path):
    make_decoder().save_pretrained(tmp_path)
    second = make_decoder(qk_norm=True)
    second.save_pretrained(str(tmp_path))
    assert Decoder.from_pretrained(tmp_path).config == second.config


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_missing_file_is_named(name, tmp_path):
    make_decoder().save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ArgumentError, match=f"expected a folder with .* without {name}"):
        Decoder.from_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"nowhere without config\.json"):
        Decoder.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"vocab_size": 3}'])
def test_a_damaged_configuration_is_named(content, tmp_path):
    make_decoder().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"expected a decoder's configuration in .*, got"):
        Decoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_damaged_weights_are_named(keep, tmp_path):
    make_decoder().save_pretrained(tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[:keep])
    with pytest.raises(ArgumentError, match=rf"expected safetensors in .*{WEIGHTS}, got"):
        Decoder.from_pretrained(tmp_path)


def change_weights(folder, change):
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.pop("norm.weight"), "got none for norm.weight"),
        (lambda w: w.update(extra=torch.ones(1)), "got unknown names extra"),
        (lambda w: w.update({"norm.weight": torch.ones(7)}), r"shape \(32,\), got shape \(7,\)"),
        (lambda w: w.update({"norm.weight": torch.ones(32).int()}), "norm.weight of torch.int32"),
        (lambda w: w.clear(), "got none for embed_tokens.weight, .* and 11 more"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, sentence, tmp_path):
    make_decoder().save_pretrained(tmp_path)
    change_weights(tmp_path, change)
    with pytest.raises(
        ArgumentError, match=f"^from_pretrained: expected the weights of .*{sentence}"
    ):
        Decoder.from_pretrained(tmp_path)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="save_pretrained: expected a folder, got the file"):
        make_decoder().save_pretrained(tmp_path / "file")


def test_importing_the_decoder_loads_no_optional_library():
    code = "import sys, attention_ext.nn; print({'safetensors', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_without_safetensors_the_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(
        ImportError, match=r"needs safetensors: pip install attention_ext\[decoder\]"
    ):
        make_decoder().save_pretrained(tmp_path)


def test_named_tensors_come_back_with_what_the_header_holds(tmp_path):
    tensors = {"a": torch.randn(3, 4).T, "step": torch.tensor(7), "none": torch.empty(0, 2).int()}
    path = tmp_path / "some.safetensors"
    save_tensors(path, tensors, {"numbers": '{"é": 1}'})
    again, metadata = load_tensors(path)
    assert metadata == {"numbers": '{"é": 1}'}
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(again[name], tensor)
        assert again[name].dtype == tensor.dtype
    save_tensors(path, {})
    assert load_tensors(path) == ({}, {})
    with pytest.raises(ArgumentError, match=r"^load_tensors: expected safetensors in .*nothing"):
        load_tensors(tmp_path / "nothing")
