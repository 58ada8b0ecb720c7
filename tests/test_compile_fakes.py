"""What torch is told about the operators without data: fake kernels, opcheck, the meta device."""

import pytest
import torch
from assertions import assert_close, assert_same_bits, fresh, leaves_of
from cases import BY_NAME, CASES, keywords
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import attention_ext
from attention_ext import scaled_dot_product_attention as attention
from attention_ext.derivatives import inputs_of
from attention_ext.reference import Call

ops = torch.ops.attention_ext
forward, backward = ops.forward.default, ops.backward.default


def significant(tensor):
    """Shape, strides of dimensions of more than one element, dtype."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.shape, [stride for size, stride in pairs if size > 1], tensor.dtype


def fake(mode, tensor):
    return mode.from_tensor(tensor) if isinstance(tensor, torch.Tensor) else tensor


def run_all(call):
    """Every operator on one call."""
    full = Call(*call)
    output, lse, state = forward(*call)
    rest = call[3:]
    results = [output, lse, state]
    if full.cu_seq_q is None:
        results.append(ops.weights.default(*call[:3], state, *rest))
    upstream = torch.empty_like(output), torch.empty_like(lse)
    results += backward(*upstream, None, *call[:3], output, state, *rest)
    direction = [None if x is None or x.dtype == torch.bool else x for x in inputs_of(full)]
    moved = ops.tangent.default(*direction, *call[:3], output, state, *rest)
    arguments = (*upstream, *moved, *direction, *upstream, *call[:3], output, state, *rest)
    results += [*moved, *ops.backward_tangent.default(*arguments)]
    if direction[3] is not None:
        results.append(ops.mask_gradient.default(*upstream, None, *call[:3], output, state, *rest))
        results.append(ops.mask_gradient_tangent.default(*arguments))
    return results


def run_both(call, mode):
    """Every operator, with real tensors and with fake ones."""
    return run_all(tuple(call)), run_all(tuple(fake(mode, x) for x in call))


def packed():
    return Call(
        *(torch.randn(9, heads, 4) for heads in (4, 2, 1)), enable_gqa=True, lower_right=True,
        alibi_slopes=torch.rand(4), sinks=torch.rand(4), cu_seq_q=torch.tensor([0, 3, 8]),
        cu_seq_k=torch.tensor([0, 5, 9]), max_q=5, max_k=5,
    )  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fake_results_look_like_real_ones(case, symbolic):
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    real, faked = run_both(case.make(torch.bfloat16), mode)
    assert [significant(x) for x in real] == [significant(x) for x in faked]


@pytest.mark.parametrize("symbolic", [False, True])
def test_fake_results_of_packed_sequences_look_like_real_ones(symbolic):
    real, faked = run_both(packed(), FakeTensorMode(shape_env=ShapeEnv() if symbolic else None))
    assert [significant(x) for x in real] == [significant(x) for x in faked]


def permuted(*order):
    shape = (2, 3, 5, 4)
    inverse = [order.index(dim) for dim in range(4)]
    return torch.randn([shape[dim] for dim in order]).permute(inverse)


@pytest.mark.parametrize("value_dim", [4, 7])
@pytest.mark.parametrize(
    "query",
    [
        permuted(0, 2, 1, 3),
        permuted(2, 0, 1, 3),
        permuted(3, 2, 1, 0),
        permuted(1, 0, 3, 2),
        torch.randn(2, 3, 5, 9)[..., 2:6],
        torch.randn(2, 3, 5, 8)[..., ::2],
        torch.randn(2, 1, 5, 4).expand(2, 3, 5, 4),
        torch.randn(2, 3, 1, 4).expand(2, 3, 5, 4),
        torch.randn(3, 5, 4),
        torch.randn(1, 3, 5, 4),
        torch.randn(10, 3, 5, 4)[:1].permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
        torch.randn(10, 5, 3, 4)[:1].permute(1, 2, 0, 3).permute(2, 1, 0, 3),
        torch.randn(2, 3, 1, 4),
        torch.randn(2, 3, 5, 4).new_zeros(2, 3, 0, 4),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)
def test_fake_results_lie_in_memory_like_real_ones(query, value_dim):
    key, value = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, value_dim)
    real, faked = run_both(Call(query, key, value), FakeTensorMode())
    assert [significant(x) for x in real] == [significant(x) for x in faked]


# a few calls per operator: each check takes seconds
GROUPED = "grouped heads, projection layout"
EVERYTHING = "everything for one position"


def checked(name):
    if name == GROUPED:
        inputs = (torch.randn(1, 3, heads, 4).transpose(1, 2) for heads in (4, 2, 2))
        return Call(*inputs, enable_gqa=True)
    return packed() if name == "packed" else BY_NAME[name].make(torch.float32)


@pytest.mark.parametrize(
    ("operator", "case"),
    [
        ("forward", GROUPED),
        ("forward", EVERYTHING),
        ("forward", "packed"),
        ("weights", EVERYTHING),
        ("backward", GROUPED),
        ("backward", EVERYTHING),
        ("backward", "packed"),
        ("mask_gradient", EVERYTHING),
        ("tangent", EVERYTHING),
        ("backward_tangent", EVERYTHING),
        ("mask_gradient_tangent", EVERYTHING),
    ],
)
def test_the_operators_pass_opcheck(operator, case):
    call = checked(case)
    output, lse, state = forward(*call)
    upstream = torch.randn_like(output), torch.randn_like(lse)
    behind = (*call[:3], output, state)
    direction = inputs_of(call)
    before = {
        "forward": call[:3],
        "weights": (*call[:3], state),
        "backward": (*upstream, None, *behind),
        "mask_gradient": (*upstream, None, *behind),
        "tangent": (*direction, *behind),
        "backward_tangent": (*upstream, output, lse, *direction, *upstream, *behind),
        "mask_gradient_tangent": (*upstream, output, lse, *direction, *upstream, *behind),
    }[operator]
    torch.library.opcheck(getattr(ops, operator).default, (*before, *call[3:]))


@pytest.mark.filterwarnings("ignore:attention_ext..forward")  # no derivative: as it should be
def test_the_forward_passes_opcheck_with_inputs_that_require_grad_and_zero_sizes():
    leaves = [torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(forward, tuple(leaves))
    empty = [torch.randn(2, 0, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 4)]
    torch.library.opcheck(forward, tuple(empty))


def test_a_traced_training_step_holds_forward_and_backward():
    def step(query, key, value):
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        output = attention(*leaves, is_causal=True)
        return torch.autograd.grad(output.sin().sum(), leaves)

    inputs = [torch.randn(2, 3, 5, 4) for _ in range(3)]
    graph = make_fx(step, tracing_mode="symbolic")(*inputs)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert "attention_ext.forward.default" in targets
    assert "attention_ext.backward.default" in targets
    larger = [torch.randn(2, 3, 9, 4) for _ in range(3)]
    assert_close(graph(*larger), step(*larger), 0.0)


def test_sizes_that_depend_on_data_need_no_guard():
    def step(x, counts):
        length = counts.item()
        torch._check(length >= 0)
        torch._check(length <= 64)
        query = x[:length].unsqueeze(0).expand(2, length, 8).clone()
        return attention(query, query, query, is_causal=True)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch._dynamo.reset()
        run = torch.compile(step, fullgraph=True, backend="aot_eager")
        x = torch.randn(64, 8)
        for length in (3, 9, 1, 0, 64):
            counts = torch.tensor(length)
            assert_close(run(x, counts), step(x, counts), 1e-6)


def test_unbacked_sizes_in_every_dimension_need_no_guard():
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        batch, heads, seqlen, width = (shapes.create_unbacked_symint() for _ in range(4))
        query = torch.empty(batch, heads, seqlen, width)
        output, lse, state = forward(query, query, query, None, True)
        assert str(output.shape) == str(query.shape)
        assert str(lse.shape) == str(query.shape[:-1])
        grads = backward(output, lse, None, query, query, query, output, state, None, True)
        assert all(str(grad.shape) == str(query.shape) for grad in grads[:3])
        other = torch.empty(batch, heads, shapes.create_unbacked_symint(), width)
        assert str(forward(query, other, other)[0].shape) == str(query.shape)


def test_the_meta_device_gives_shapes_and_gradients():
    inputs = BY_NAME["everything"].make(torch.float32)
    call = inputs._replace(
        **{
            name: x.to("meta")
            for name, x in inputs._asdict().items()
            if isinstance(x, torch.Tensor)
        }
    )
    call = fresh(call)
    results = attention(**keywords(call), return_lse=True, return_weights=True)
    expected = attention(**keywords(inputs), return_lse=True, return_weights=True)
    assert [significant(x) for x in results] == [significant(x) for x in expected]
    results.output.sum().backward()
    assert all(leaf.grad.shape == leaf.shape for leaf in leaves_of(call))


def test_a_wrong_fake_call_gets_the_text_of_the_real_one():
    wrong = (torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 3), torch.randn(2, 3, 6, 4))
    with pytest.raises(attention_ext.ArgumentError) as eager:
        attention(*wrong)
    with pytest.raises(attention_ext.ArgumentError) as meta:
        attention(*(x.to("meta") for x in wrong))
    assert str(meta.value) == str(eager.value)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with pytest.raises(attention_ext.ArgumentError) as faked:
        attention(*(fake(mode, x) for x in wrong))
    assert str(faked.value) == str(eager.value)
    assert not mode.shape_env.guards  # the check added none


@pytest.mark.parametrize(
    "options",
    [(), (torch.ones(5, 6, dtype=torch.bool).tril(2), True), (None, True, 0.3, True, True)],
    ids=["plain", "mask", "all"],
)
def test_short_forms_give_the_same_bits_and_pass_opcheck(options):
    query = torch.randn(2, 6, 5, 4)
    key, value = (torch.randn(2, 2 if len(options) > 2 else 6, 6, 4) for _ in range(2))
    call = query, key, value, *options
    output, _, state = forward(*call)
    assert_same_bits(ops.forward.output(*call), output)
    for short, long in zip(ops.forward.with_state(*call), (output, state), strict=True):
        assert_same_bits(short, long)
    upstream = torch.randn_like(output)
    grads = backward(upstream, None, None, *call[:3], output, state, *options)
    saved = output, state, *call
    for short, long in zip(ops.backward.short(upstream, *saved), grads, strict=False):
        assert_same_bits(short, long)
    torch.library.opcheck(ops.forward.output, call)
    torch.library.opcheck(ops.forward.with_state, call)
    torch.library.opcheck(ops.backward.short, (upstream, *saved))
