"""Our operator in the place of torch's function: where it reaches, and that it goes away again."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_close, assert_same_bits
from torch.nn.attention.bias import causal_lower_right

from attention_ext import library, replace_sdpa
from attention_ext import scaled_dot_product_attention as attention
from attention_ext.replace_sdpa import scaled_dot_product_attention as replacement

TORCHS = F.scaled_dot_product_attention


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of our forward operator, in any of its forms."""
    counted = []

    def counting(operator):
        def run(*call):
            counted.append(call)
            return operator(*call)

        return run

    for name in ("forward", "forward_output", "forward_with_state"):
        monkeypatch.setattr(library, name, counting(getattr(library, name)))
    return counted


def make(requires_grad=False):
    return [torch.randn(2, 3, 5, 4, requires_grad=requires_grad) for _ in range(3)]


def test_torchs_function_is_replaced_inside_and_back_afterwards(calls):
    inputs = make()
    with replace_sdpa():
        assert F.scaled_dot_product_attention is replacement
        assert torch.nn.functional.scaled_dot_product_attention is replacement
        assert_same_bits(F.scaled_dot_product_attention(*inputs), attention(*inputs))
    assert F.scaled_dot_product_attention is TORCHS
    assert len(calls) == 2


def test_it_may_be_nested_and_entered_again():
    outer = replace_sdpa()
    with outer:
        with replace_sdpa():
            with outer:
                assert F.scaled_dot_product_attention is replacement
            assert F.scaled_dot_product_attention is replacement
        assert F.scaled_dot_product_attention is replacement
    assert F.scaled_dot_product_attention is TORCHS
    with outer:
        assert F.scaled_dot_product_attention is replacement
    assert F.scaled_dot_product_attention is TORCHS


def test_torchs_function_comes_back_after_an_exception():
    with pytest.raises(KeyError), replace_sdpa(), replace_sdpa():
        raise KeyError
    assert F.scaled_dot_product_attention is TORCHS


def test_it_replaces_what_it_found_there(monkeypatch):
    def theirs(*args, **kwargs):
        return TORCHS(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with replace_sdpa():
        assert F.scaled_dot_product_attention is replacement
    assert F.scaled_dot_product_attention is theirs


def test_overlapping_uses_end_in_any_order():
    first, second = replace_sdpa(), replace_sdpa()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is replacement
    second.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is TORCHS


PERMANENT = """
import torch.nn.functional as F
before = F.scaled_dot_product_attention
import attention_ext
assert F.scaled_dot_product_attention is before, "importing changed torch"
attention_ext.replace_sdpa(permanent=True)
assert F.scaled_dot_product_attention is not before
with attention_ext.replace_sdpa():
    pass
assert F.scaled_dot_product_attention is not before, "a context manager undid it"
print("kept")
"""


def test_importing_changes_nothing_and_permanent_stays():
    done = subprocess.run([sys.executable, "-c", PERMANENT], capture_output=True, text=True)
    assert done.stdout == "kept\n", done.stderr


def test_names_and_positions_are_torchs():
    inputs, mask = make(), torch.rand(5, 5) < 0.6
    with replace_sdpa():
        output = F.scaled_dot_product_attention(*inputs, mask, 0.0, False, scale=0.5)
        named = F.scaled_dot_product_attention(
            query=inputs[0], key=inputs[1], value=inputs[2], attn_mask=mask, scale=0.5
        )
    assert_same_bits(output, named)
    assert_close(output, TORCHS(*inputs, mask, 0.0, False, scale=0.5), 1e-6)


def test_a_causal_bias_is_understood_and_not_read_as_a_mask():
    inputs = make()
    bias = causal_lower_right(5, 5)
    with replace_sdpa():
        assert_same_bits(F.scaled_dot_product_attention(*inputs, bias), attention(*inputs, bias))
        with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
            F.scaled_dot_product_attention(*inputs, bias, is_causal=True)


def test_dropout_is_ours_and_follows_torchs_seed():
    inputs = make()
    torch.manual_seed(3)
    expected = attention(*inputs, dropout_p=0.5)
    torch.manual_seed(3)
    with replace_sdpa():
        assert_same_bits(F.scaled_dot_product_attention(*inputs, dropout_p=0.5), expected)


def test_what_is_not_supported_raises_and_does_not_fall_back():
    with replace_sdpa(), pytest.raises(NotImplementedError, match="complex"):
        F.scaled_dot_product_attention(*(x.to(torch.complex64) for x in make()))


# ---- modules ----


def test_multihead_attention_uses_it_in_training(calls):
    module, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5)
    options = [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": causal, "is_causal": True},
        {"attn_mask": causal != 0.0, "key_padding_mask": padding},
    ]
    for keywords in options:
        results = []
        for context in (replace_sdpa(), torch.enable_grad()):
            module.zero_grad()
            with context:
                output, _ = module(x, x, x, need_weights=False, **keywords)
            output.sin().sum().backward()
            results.append([output.detach(), *(p.grad.clone() for p in module.parameters())])
        assert_close(*results, 1e-5)
    assert len(calls) == len(options)


def test_multihead_attention_in_eval_mode_gives_the_same_whichever_path_torch_takes():
    module, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        expected, _ = module(x, x, x, need_weights=False)
        with replace_sdpa():
            assert_close(module(x, x, x, need_weights=False)[0], expected, 1e-6)
    with replace_sdpa():
        assert_close(module(x, x, x, need_weights=False)[0], expected, 1e-6)


def test_an_encoder_layer_trains_with_it(calls):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    with replace_sdpa():
        output = layer(x)
    assert len(calls) == 1
    assert_close(output, layer(x), 1e-5)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    with replace_sdpa():
        layer(x).sum().backward()
    assert len(calls) == 2
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("module", ["MultiheadAttention", "TransformerEncoderLayer"])
def test_torchscript_compiles_modules_meanwhile_and_keeps_torchs_function(module):
    x = torch.randn(5, 2, 8)
    if module == "MultiheadAttention":
        plain = torch.nn.MultiheadAttention(8, 2)
        args = (x, x, x, None, False)
    else:
        plain = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        args = (x,)
    with replace_sdpa():
        scripted = torch.jit.script(plain)
        assert "scaled_dot_product_attention" in str(scripted.inlined_graph)
        results = []
        for run in (scripted, plain):
            plain.zero_grad()
            output = run(*args)
            output = output[0] if isinstance(output, tuple) else output
            output.sin().sum().backward()
            results.append([output.detach(), *(p.grad.clone() for p in plain.parameters())])
    assert_close(*results, 1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_caller_works_with_every_argument():
    def run(query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, query, query, mask, 0.0, False, scale=0.5)

    query, mask = torch.randn(2, 5, 4, requires_grad=True), torch.rand(5, 5) < 0.6
    with replace_sdpa():
        scripted = torch.jit.script(run)
        (grad,) = torch.autograd.grad(scripted(query, mask).sum(), query)
        (expected,) = torch.autograd.grad(run(query, mask).sum(), query)
    assert_close(grad, expected, 1e-5)


# ---- torch.compile ----


def test_compiled_functions_notice(fresh_dynamo, calls):
    run = torch.compile(
        lambda *x: F.scaled_dot_product_attention(*x), fullgraph=True, backend="eager"
    )
    inputs = make()
    expected = run(*inputs)
    graphs = []

    def keep(graph, _):
        graphs.append(str(graph.graph))
        return graph

    run = torch.compile(lambda *x: F.scaled_dot_product_attention(*x), fullgraph=True, backend=keep)
    run(*inputs)
    with replace_sdpa():
        assert_close(run(*inputs), expected, 1e-6)
    run(*inputs)
    assert ["attention_ext.forward" in graph for graph in graphs] == [False, True]


def test_a_replacement_inside_a_compiled_training_step(fresh_dynamo):
    run = torch.compile(
        lambda *x: F.scaled_dot_product_attention(*x), fullgraph=True, backend="aot_eager"
    )
    leaves = make(requires_grad=True)
    with replace_sdpa():
        grads = torch.autograd.grad(run(*leaves).sin().sum(), leaves)
    expected = torch.autograd.grad(TORCHS(*leaves).sin().sum(), leaves)
    assert_close(grads, expected, 1e-5)
