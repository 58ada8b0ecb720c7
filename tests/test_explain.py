"""explain() says which kernel a call takes, without taking it."""

import inspect

import pytest
import torch

import attention_ext
from attention_ext import ArgumentError, ArgumentTypeError, explain, library
from attention_ext import scaled_dot_product_attention as attention

# numbers of float32 in a vector
WIDTH = {"baseline": 4, "avx2": 8, "avx512": 16}[attention_ext.build_info()["cpu_capability"]]


def test_its_arguments_are_those_of_the_operator():
    ours, theirs = (inspect.signature(f).parameters for f in (explain, attention))
    assert list(ours) == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)
    assert all(ours[name].kind == theirs[name].kind for name in theirs)


def test_few_rows_that_read_the_same_keys_take_a_kernel_of_their_own():
    key = torch.randn(1, 2, 500, 16)
    for heads, seqlen_q in ((2, WIDTH), (8, 1), (2, 1)):
        query = torch.randn(1, heads, seqlen_q, 16)
        said = explain(query, key, key, enable_gqa=True)
        few = heads // 2 * seqlen_q <= WIDTH
        assert said.startswith("The few-rows kernel" if few else "The tiled kernel")
        assert f"a vector holds {WIDTH}" in said
    assert explain(torch.randn(1, 2, WIDTH + 1, 16), key, key).startswith("The tiled kernel")
    double = torch.randn(1, 2, WIDTH, 16).double()
    assert explain(double, key.double(), key.double()).startswith("The tiled kernel")


def test_it_names_the_instruction_set_and_the_threads(threads):
    query = torch.randn(2, 4, 500, 64)
    threads(3)
    assert f"the {library.cpu_capability()} instruction set" in explain(query, query, query)
    assert "3 of 3 threads" in explain(query, query, query)
    small = query[:1, :1, :20]
    assert "One thread: " in explain(small, small, small)
    threads(1)
    assert "1 of 1 thread:" in explain(query, query, query)


def test_it_says_where_derivatives_go():
    query = torch.randn(2, 4, 50, 16)
    mask = torch.zeros(50, requires_grad=True)
    assert "gradient of the mask" in explain(query, query, query, mask)
    assert "gradient of the mask" not in explain(query, query, query, mask.detach())
    assert "second pass" in explain(query, query, query, return_weights=True)
    assert "second pass" not in explain(query, query, query)


def test_it_knows_calls_without_a_kernel():
    query = torch.randn(2, 4, 5, 16)
    assert "no row to compute" in explain(query[:, :, :0], query, query)
    assert "meta device" in explain(*(query.to("meta") for _ in range(3)))
    said = []

    def run(x):
        said.append(explain(x, query, query))
        return x.sum()

    torch.func.jvp(lambda x: torch.func.jvp(run, (x,), (x,))[1], (query,), (query,))
    assert said[0].startswith("Plain torch operations")
    torch.func.jvp(run, (query,), (query,))
    assert said[1].startswith("The few-rows kernel" if WIDTH >= 5 else "The tiled kernel")


def test_it_computes_reads_and_draws_nothing(monkeypatch):
    for name in ("forward", "weights", "backward"):
        monkeypatch.setattr(library, name, None)
    query = torch.zeros(1, dtype=torch.bfloat16).expand(2**20, 2**10, 2**10, 8)  # 2^53 numbers
    before = torch.get_rng_state()
    assert "tiled kernel" in explain(query, query, query, dropout_p=0.5, return_weights=True)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        (ArgumentError, {"key": torch.randn(2, 3, 5)}, "query and key of the same width"),
        (ArgumentError, {"window_size": (-2, 0)}, "window_size of two integers"),
        (ArgumentError, {"dropout_p": 1.5}, "dropout_p from 0 to 1, got 1.5"),
        (ArgumentError, {"causal_variant": "x"}, "causal_variant to be"),
        (ArgumentTypeError, {"query": None}, "query to be a torch.Tensor, got NoneType"),
        (ArgumentTypeError, {"softcap": "x"}, "softcap to be a float, got str"),
        (ArgumentTypeError, {"scale": "x"}, "scale to be a float, got str"),
    ],
)
def test_a_wrong_call_raises_what_the_call_would_raise(kind, changes, text):
    call = {name: torch.randn(2, 3, 4) for name in ("query", "key", "value")} | changes
    for function in (explain, attention):
        with pytest.raises(kind, match=f"^scaled_dot_product_attention: expected {text}"):
            function(**call)
