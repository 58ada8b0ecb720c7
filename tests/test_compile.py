"""torch.compile and torch.export: one graph, few recompilations, the same results and errors."""

import io

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.func as tf
from assertions import assert_close
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.bias import causal_lower_right
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from attention_ext import causal_attention, varlen_attn
from attention_ext import scaled_dot_product_attention as attention

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def make(seqlen_q=5, seqlen_kv=7, heads=(4, 2, 2), requires_grad=True):
    lengths = (seqlen_q, seqlen_kv, seqlen_kv)
    return [
        torch.randn(2, h, s, 8, requires_grad=requires_grad)
        for h, s in zip(heads, lengths, strict=True)
    ]


@pytest.mark.parametrize(("dynamic", "recompilations"), [(False, 2), (True, 0), (None, 1)])
def test_forward_and_backward_are_one_graph_and_equal_eager(dynamic, recompilations):
    counter = CompileCounterWithBackend("aot_eager")

    def step(query, key, value):
        options = {"is_causal": True, "causal_variant": "lower_right", "enable_gqa": True}
        output, lse, _ = attention(query * 1.5, key, value, **options, return_lse=True)
        return output.sin() + lse.unsqueeze(-1)

    run = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=counter)
    frames = []
    for seqlen_q, seqlen_kv in ((5, 7), (6, 9), (11, 64)):
        leaves = make(seqlen_q, seqlen_kv)
        actual, expected = run(*leaves), step(*leaves)
        assert_close(actual, expected, 1e-6)
        grads = torch.autograd.grad(actual.square().sum(), leaves)
        assert_close(grads, torch.autograd.grad(expected.square().sum(), leaves), 1e-5)
        frames.append(counter.frame_count)
    assert frames[2] - frames[0] == recompilations


def test_masks_and_scale_under_dynamic_lengths():
    run = compiled(lambda q, k, v, m: attention(q, k, v, m, scale=0.3), dynamic=True)
    for length in (5, 17, 64, 2):
        inputs = make(length, length + 1, (2, 2, 2), requires_grad=False)
        for mask in (torch.rand(length, length + 1) < 0.7, torch.randn(2, 1, 1, length + 1)):
            assert_close(run(*inputs, mask), attention(*inputs, mask, scale=0.3), 0.0)


def options_of(length=7):
    """Tensors and numbers of every option, for 4 heads."""
    learned = [torch.randn(4, 1, length), torch.rand(4), torch.randn(4)]
    return [x.requires_grad_() for x in learned], torch.tensor([length, length - 3])


@pytest.mark.parametrize(("dynamic", "recompilations"), [(False, 1), (True, 0)])
def test_every_option_and_its_gradients(dynamic, recompilations):
    counter = CompileCounterWithBackend("aot_eager")

    def step(query, key, value, mask, slopes, sinks, used):
        options = {"window_size": (4, 2), "softcap": 2.0, "alibi_slopes": slopes, "sinks": sinks}
        options |= {"seqused_k": used, "causal_variant": "lower_right", "enable_gqa": True}
        result = attention(query, key, value, mask, **options, return_lse=True, return_weights=True)
        lse = torch.where(result.lse.isinf(), 0.0, result.lse)
        return result.output.sin().sum() + lse.sum() + result.weights.square().sum()

    run = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=counter)
    frames = []
    for length in (7, 12):
        learned, used = options_of(length)
        leaves = [*make(5, length), *learned]
        actual, expected = run(*leaves, used), step(*leaves, used)
        assert_close(actual, expected, 1e-5)
        grads = torch.autograd.grad(actual, leaves)
        assert_close(grads, torch.autograd.grad(expected, leaves), 1e-5)
        frames.append(counter.frame_count)
    assert frames[1] - frames[0] == recompilations


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_has_one_pattern_in_forward_and_backward(checkpointed):
    def drop(query, key, value):
        return attention(query, key, value, dropout_p=0.5)

    def step(*inputs):
        return checkpoint(drop, *inputs, use_reentrant=False) if checkpointed else drop(*inputs)

    query, key = torch.zeros(1, 1, 64, 4), torch.zeros(1, 1, 32, 4)
    value = torch.eye(32).reshape(1, 1, 32, 32).requires_grad_()
    run = compiled(step)
    first, second = run(query, key, value), run(query, key, value)
    assert not torch.equal(first, second)
    for output in (first, second):  # 2 / 32 where kept: the gradient counts what was kept
        (grad,) = torch.autograd.grad(output.sum(), value)
        assert_close(grad[..., 0], output.sum(-2), 1e-5)
        assert set(output.unique().tolist()) == {0.0, 2 / 32}


@pytest.mark.parametrize(("dynamic", "recompilations"), [(False, 1), (True, 0)])
def test_packed_sequences(dynamic, recompilations):
    counter = CompileCounterWithBackend("aot_eager")

    def step(query, key, value, offsets, longest):
        lengths = offsets, offsets, longest, longest
        options = {"window_size": (-1, 0), "enable_gqa": True, "dropout_p": 0.0}
        return varlen_attn(query, key, value, *lengths, **options).sin().sum()

    run = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=counter)
    frames = []
    for lengths in ([3, 0, 6], [5, 9, 8, 2]):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        total = int(offsets[-1]) + 2
        leaves = [torch.randn(total, heads, 8, requires_grad=True) for heads in (6, 2, 2)]
        actual, expected = (f(*leaves, offsets, 9) for f in (run, step))
        assert_close(actual, expected, 1e-6)
        grads = torch.autograd.grad(actual, leaves)
        assert_close(grads, torch.autograd.grad(expected, leaves), 1e-6)
        frames.append(counter.frame_count)
    assert frames[1] - frames[0] == recompilations


def test_packed_sequences_in_pages():
    key = torch.randn(6, 2, 2, 4)
    query, offsets, table = (
        torch.randn(3, 4, 4),
        torch.tensor([0, 2, 3]),
        torch.tensor([[3, 1], [5, 0]]),
    )

    def step(query, key, table):
        call = query, key, key, offsets, None, 2, 4
        return varlen_attn(
            *call, enable_gqa=True, block_table=table, seqused_k=torch.tensor([3, 4])
        )

    assert_close(compiled(step)(query, key, table), step(query, key, table), 0.0)
    with pytest.raises(IndexError):  # out of bounds is not read, also without our own check
        compiled(step)(query, key, table + 9)


@pytest.mark.slow
def test_the_default_backend_gives_the_eager_result_in_its_memory_order():
    def block(x):
        query, key, value = x.chunk(3, dim=-1)
        heads = [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (query, key, value)]
        return attention(*heads, is_causal=True).transpose(1, 2).flatten(2) * 2.0

    x = torch.randn(2, 9, 24, requires_grad=True)
    actual, expected = torch.compile(block, fullgraph=True)(x), block(x)
    assert_close(actual, expected, 1e-6)
    actual_grad = torch.autograd.grad(actual.sin().sum(), x)
    assert_close(actual_grad, torch.autograd.grad(expected.sin().sum(), x), 1e-5)


def test_one_tensor_in_several_places():
    x = torch.randn(2, 3, 5, 4, requires_grad=True)

    def run(x):
        return attention(x, x, x)

    actual, expected = compiled(run)(x), run(x)
    assert_close(actual, expected, 1e-6)
    grads = [torch.autograd.grad(output.sin().sum(), x) for output in (actual, expected)]
    assert_close(*grads, 1e-5)


def test_without_gradients_and_in_inference_mode():
    inputs = make(requires_grad=False)
    run = compiled(lambda *x: attention(*x, enable_gqa=True))
    expected = attention(*inputs, enable_gqa=True)
    assert_close(run(*inputs), expected, 0.0)
    with torch.inference_mode():
        assert_close(run(*inputs), expected, 0.0)


def test_autocast_inside_and_outside_the_compiled_function():
    leaves = make()

    def inside(*x):
        with torch.autocast("cpu", torch.bfloat16):
            return attention(*x, enable_gqa=True)

    outside = compiled(lambda *x: attention(*x, enable_gqa=True))
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = attention(*leaves, enable_gqa=True), outside(*leaves)
    assert actual.dtype == expected.dtype == torch.bfloat16
    assert_close(actual, expected, 0.0)
    assert_close(compiled(inside)(*leaves), expected, 0.0)
    assert_close(outside(*leaves), attention(*leaves, enable_gqa=True), 0.0)


def test_a_causal_bias():
    inputs = make(requires_grad=False)
    run = compiled(lambda bias, *x: attention(*x, bias, enable_gqa=True))
    bias = causal_lower_right(5, 7)
    assert_close(run(bias, *inputs), attention(*inputs, bias, enable_gqa=True), 0.0)


def test_causal_attention():
    leaves = [torch.randn(6, 4, requires_grad=True) for _ in range(3)]
    actual, expected = compiled(causal_attention)(*leaves), causal_attention(*leaves)
    assert_close(actual, expected, 1e-6)
    grads = [torch.autograd.grad(o.sum() + w.sin().sum(), leaves) for o, w in (actual, expected)]
    assert_close(*grads, 1e-6)


def test_activation_checkpointing_inside():
    leaves = make()

    def step(*x):
        return attention(*x, enable_gqa=True).sin()

    run = compiled(lambda *x: checkpoint(step, *x, use_reentrant=False))
    grads = torch.autograd.grad(run(*leaves).sum(), leaves)
    assert_close(grads, torch.autograd.grad(step(*leaves).sum(), leaves), 1e-6)


TRANSFORMS = {
    "grad": lambda f: tf.grad(lambda *x: f(*x).pow(2).sum(), argnums=(0, 1, 2)),
    "vmap of grad": lambda f: tf.vmap(tf.grad(lambda *x: f(*x).pow(2).sum(), argnums=(0, 1, 2))),
    "jvp": lambda f: lambda *x: tf.jvp(f, x, x),
    "vmap": tf.vmap,
}


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "window_size": (2, 2)}], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_torch_func_transform_inside_is_right_and_not_silently_zero(name, options):
    inputs = make(requires_grad=False)
    options = {"is_causal": True, "enable_gqa": True} | options
    transformed = TRANSFORMS[name](lambda *x: attention(*x, **options))
    actual, expected = compiled(transformed)(*inputs), transformed(*inputs)
    for a, b in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        assert_close(a, b, 1e-5)
        assert a.any()


def test_a_tangent_that_enters_a_compiled_function_is_not_dropped():
    inputs = make(5, 7, (2, 2, 2), requires_grad=False)
    run = compiled(lambda *x: attention(*x))
    run(*inputs)  # compiled without tangents first
    expected = tf.jvp(attention, tuple(inputs), tuple(inputs))[1]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, x) for x in inputs]
        assert_close(forward_ad.unpack_dual(run(*duals)).tangent, expected, 1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_double_backward_through_a_compiled_call_raises(backend):
    leaves = make(5, 7, (2, 2, 2))
    output = torch.compile(lambda *x: attention(*x), fullgraph=True, backend=backend)(*leaves)

    def twice():
        grads = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        torch.autograd.grad(grads[2].sum(), leaves)

    with pytest.raises(RuntimeError, match=r"does not currently support|does not require grad"):
        twice()


# ---- export ----


class Layer(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.projection = torch.nn.Linear(16, 48)
        self.sinks = torch.nn.Parameter(torch.zeros(4))
        self.options = options

    def forward(self, x):
        heads = self.projection(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        options = {"is_causal": True, "sinks": self.sinks} | self.options
        return attention(*heads.unbind(0), **options).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_runs_at_another_length(strict):
    layer = Layer(window_size=(8, -1), softcap=5.0, alibi_slopes=torch.rand(4))
    length = torch.export.Dim("length", min=2, max=512)
    shapes = {"x": {1: length}}
    program = torch.export.export(
        layer, (torch.randn(2, 9, 16),), dynamic_shapes=shapes, strict=strict
    )
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for size in (2, 9, 33, 100):
        x = torch.randn(2, size, 16)
        assert_close(loaded(x), layer(x), 1e-6)


def test_an_exported_program_holds_the_operator_itself():
    with torch.no_grad():
        program = torch.export.export(Layer().eval(), (torch.randn(2, 9, 16),))
    targets = [str(node.target) for node in program.graph.nodes]
    assert "attention_ext.forward.default" in targets


# ---- errors ----


def test_a_wrong_call_gets_the_text_of_the_eager_error():
    query, key, value = make(5, 7, (2, 2, 2), requires_grad=False)
    with pytest.raises(RuntimeError, match="expected query and key of the same width"):
        attention(query, key[..., :3], value)
    for leaves in ((query, key[..., :3], value), (query.requires_grad_(), key[..., :3], value)):
        with pytest.raises(Exception, match="expected query and key of the same width"):
            compiled(lambda *x: attention(*x))(*leaves)
    with pytest.raises(Exception, match="expected query and key of the same width"):
        compiled(lambda *x: attention(*x), dynamic=True)(query, key[..., :3], value)


def test_a_wrong_option_gets_the_text_of_the_eager_error():
    inputs = make(5, 7, (2, 2, 2), requires_grad=False)
    with pytest.raises(Exception, match="expected causal_variant to be 'upper_left' or"):
        compiled(lambda *x: attention(*x, causal_variant="middle"))(*inputs)
    with pytest.raises(Exception, match=r"expected dropout_p from 0 to 1, got 1\.5"):
        compiled(lambda *x: attention(*x, dropout_p=1.5))(*inputs)
    with pytest.raises(Exception, match=r"expected window_size of two integers .*, got \(-2, 0\)"):
        compiled(lambda *x: attention(*x, window_size=(-2, 0)))(*inputs)
    with pytest.raises(Exception, match=r"expected sinks of shape .*, got sinks \(3,\)"):
        compiled(lambda *x: attention(*x, sinks=torch.zeros(3)))(*inputs)


def test_an_exported_wrong_call_gets_the_text_of_the_eager_error():
    layer = Layer(sinks=torch.zeros(3))
    for strict in (False, True):
        with pytest.raises(Exception, match=r"expected sinks of shape .*, got sinks \(3,\)"):
            torch.export.export(layer, (torch.randn(2, 9, 16),), strict=strict)


def test_a_call_that_becomes_wrong_under_dynamic_lengths_raises():
    run = compiled(lambda *x: attention(*x), dynamic=True)
    query, key, value = make(5, 7, (2, 2, 2), requires_grad=False)
    run(query, key, value)
    with pytest.raises(Exception, match="expected key and value of the same length"):
        run(query, key[..., :6, :], value)
