"""torch.func: every transform and their compositions, against those of the definition."""

import pytest
import torch
import torch.func as tf
from assertions import assert_close, assert_same_bits
from torch.utils._pytree import tree_leaves

from attention_ext import paths, reference
from attention_ext import scaled_dot_product_attention as attention
from attention_ext.reference import Call

ALL = (0, 1, 2)


def make(*heads, seqlen_q=3, seqlen_kv=4, batch=2):
    generator = torch.Generator().manual_seed(3)
    shapes = zip(heads, (seqlen_q, seqlen_kv, seqlen_kv), (3, 3, 2), strict=True)
    return tuple(
        torch.randn(batch, h, s, d, generator=generator, dtype=torch.float64) for h, s, d in shapes
    )


MASK = torch.tensor([[True, False, True, True], [True, True, False, True], [False] * 4])
OPTIONS = {
    "window_left": 2, "window_right": 1, "softcap": 2.0, "dropout_p": 0.3, "seed": torch.tensor(3),
    "alibi_slopes": torch.tensor([0.1, 0.3], dtype=torch.float64),
    "sinks": torch.tensor([0.5, -0.5], dtype=torch.float64),
}  # fmt: skip
FUNCTIONS = {
    "plain": ((2, 2, 2), {}),
    "lower right": ((2, 2, 2), {"is_causal": True, "lower_right": True}),
    "grouped heads": ((4, 2, 2), {"enable_gqa": True, "is_causal": True}),
    "mask with an empty row": ((2, 2, 2), {"attn_mask": MASK}),
    "options": ((2, 2, 2), OPTIONS),
}


def ours(options):
    return lambda *inputs: paths.attention(Call(*inputs, **options))[0]


def definition(options):
    return lambda *inputs: reference.attention(Call(*inputs, **options)).output


def loss(function, power=3):
    return lambda *inputs: function(*inputs).pow(power).sum()


def third_order(function, inputs):
    def first(query):
        return tf.grad(lambda q: loss(function)(q, *inputs[1:]))(query).pow(2).sum()

    return tf.grad(lambda q: tf.grad(first)(q).sum())(inputs[0])


TRANSFORMS = {
    "jvp": lambda f, x: tf.jvp(f, x, x),
    "vjp": lambda f, x: tf.vjp(f, *x)[1](torch.ones_like(f(*x))),
    "grad": lambda f, x: tf.grad(loss(f), ALL)(*x),
    "linearize": lambda f, x: tf.linearize(f, *x)[1](*x),
    "jacfwd": lambda f, x: tf.jacfwd(f, ALL)(*x),
    "jacrev": lambda f, x: tf.jacrev(f, ALL)(*x),
    "hessian": lambda f, x: tf.hessian(loss(f), ALL)(*x),
    "jacrev of jacrev": lambda f, x: tf.jacrev(tf.jacrev(loss(f), ALL), ALL)(*x),
    "jacrev of jacfwd": lambda f, x: tf.jacrev(tf.jacfwd(loss(f), ALL), ALL)(*x),
    "jacfwd of jacfwd": lambda f, x: tf.jacfwd(tf.jacfwd(loss(f), ALL), ALL)(*x),
    "vmap": lambda f, x: tf.vmap(f)(*x),
    "vmap of the query": lambda f, x: tf.vmap(f, (0, None, None))(torch.stack([x[0]] * 2), *x[1:]),
    "vmap of the value": lambda f, x: tf.vmap(f, (None, None, 1))(
        *x[:2], torch.stack([x[2]] * 2, 1)
    ),
    "vmap of other dimensions": lambda f, x: tf.vmap(f, 2, 1)(
        *(torch.stack([y, -y], 2) for y in x)
    ),
    "vmap of vmap": lambda f, x: tf.vmap(tf.vmap(f))(*(torch.stack([y, -y]) for y in x)),
    "vmap of grad": lambda f, x: tf.vmap(tf.grad(loss(f), ALL))(*x),
    "vmap of grad, shared keys": lambda f, x: tf.vmap(tf.grad(loss(f), ALL), (0, None, None))(
        torch.stack([x[0], -x[0]]), *x[1:]
    ),
    "vmap of jvp": lambda f, x: tf.vmap(lambda t: tf.jvp(lambda q: f(q, *x[1:]), x[:1], (t,)))(
        torch.stack([x[0], -x[0]])
    ),
    "jvp of grad": lambda f, x: tf.jvp(tf.grad(loss(f), ALL), x, x),
    "grad of jvp": lambda f, x: tf.grad(lambda q: tf.jvp(loss(f), (q, *x[1:]), x)[1])(x[0]),
    "jvp of jvp": lambda f, x: tf.jvp(lambda *y: tf.jvp(f, y, x)[1], x, x),
    "grad of grad of grad": third_order,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_equals_that_of_the_definition(transform, name):
    heads, options = FUNCTIONS[name]
    inputs = make(*heads)
    actual = TRANSFORMS[transform](ours(options), inputs)
    expected = TRANSFORMS[transform](definition(options), inputs)
    for a, b in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        assert_close(a, b, 1e-10)
    assert any(leaf.any() for leaf in tree_leaves(actual))


# ---- vmap is a loop, to the bit ----


def loop(function, in_dims, inputs):
    size = next(x.shape[d] for x, d in zip(inputs, in_dims, strict=True) if d is not None)
    return torch.stack(
        [
            function(
                *(x if d is None else x.select(d, i) for x, d in zip(inputs, in_dims, strict=True))
            )
            for i in range(size)
        ]
    )


VMAPS = {
    "rank 2": ([(5, 3, 4), (5, 6, 4), (5, 6, 2)], (0, 0, 0)),
    "rank 3": ([(2, 5, 3, 4), (2, 5, 6, 4), (2, 5, 6, 2)], (1, 1, 1)),
    "last dimension": ([(2, 3, 4, 5), (2, 6, 4, 5), (2, 6, 2, 5)], (3, 3, 3)),
    "3-D query, 4-D shared keys": ([(5, 2, 3, 4), (3, 2, 6, 4), (3, 2, 6, 2)], (0, None, None)),
    "2-D keys, 4-D shared query": ([(3, 2, 3, 4), (5, 6, 4), (6, 2)], (None, 0, None)),
    "value alone": ([(2, 3, 4), (2, 6, 4), (2, 6, 5, 2)], (None, None, 2)),
    "mask alone": ([(2, 3, 4), (2, 6, 4), (2, 6, 2), (5, 3, 6)], (None, None, None, 0)),
    "mask by key": ([(5, 2, 3, 4), (5, 2, 6, 4), (5, 2, 6, 2), (6, 5)], (0, 0, 0, 1)),
    "shared mask": ([(5, 2, 3, 4), (5, 2, 6, 4), (5, 2, 6, 2), (2, 1, 6)], (0, 0, 0, None)),
}


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_gives_the_bits_of_a_loop(name):
    shapes, in_dims = VMAPS[name]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    if len(inputs) == 4:
        inputs[3] = inputs[3] > 0

    def run(*tensors):
        return attention(*tensors, is_causal=True)

    assert_same_bits(tf.vmap(run, in_dims)(*inputs), loop(run, in_dims, inputs))


@pytest.mark.parametrize("name", VMAPS)
def test_per_sample_gradients_are_those_of_a_loop(name):
    shapes, in_dims = VMAPS[name]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    if len(inputs) == 4:
        inputs[3] = inputs[3] > 0
    gradients = tf.grad(loss(lambda *x: attention(*x, is_causal=True)), ALL)
    actual = tf.vmap(gradients, in_dims)(*inputs)
    for i, grad in enumerate(actual):
        assert_same_bits(grad, loop(lambda *x, i=i: gradients(*x)[i], in_dims, inputs))


def test_vmap_keeps_grouped_heads():
    inputs = [torch.randn(5, h, s, 4, dtype=torch.float64) for h, s in ((4, 3), (2, 6), (2, 6))]

    def run(*tensors):
        return attention(*tensors, enable_gqa=True)

    assert_same_bits(tf.vmap(run)(*inputs), loop(run, (0, 0, 0), inputs))


def test_vmap_returns_lse_too():
    inputs = [torch.randn(5, 3, 4) for _ in range(3)]
    lse = tf.vmap(lambda *x: attention(*x, return_lse=True).lse)(*inputs)
    assert_same_bits(lse, attention(*inputs, return_lse=True).lse)


def test_vmap_adds_a_dimension_and_makes_no_loop(monkeypatch):
    from attention_ext import library

    shapes = []
    forward = library.forward

    def counted(*call):
        shapes.append([tuple(tensor.shape) for tensor in call[:3]])
        return forward(*call)

    monkeypatch.setattr(library, "forward", counted)
    query, key = torch.randn(5, 2, 3, 4), torch.randn(7, 2, 6, 4)
    tf.vmap(lambda q: attention(q, key, key))(query)
    assert shapes == [[(5, 1, 2, 3, 4), (7, 2, 6, 4), (7, 2, 6, 4)]]


def test_a_jacobian_by_batched_gradients_is_the_one_by_rows():
    leaves = [torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    output = attention(*leaves, is_causal=True)
    upstream = torch.eye(output.numel(), dtype=torch.float64).reshape(-1, *output.shape)
    batched = torch.autograd.grad(
        output, leaves, upstream, retain_graph=True, is_grads_batched=True
    )
    for i, row in enumerate(upstream):
        grads = torch.autograd.grad(output, leaves, row, retain_graph=True)
        assert_close([x[i] for x in batched], list(grads))


def test_functional_call_and_per_sample_gradients_of_a_module():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = torch.nn.Linear(8, 24)

        def forward(self, x):  # (L, 8)
            query, key, value = self.projection(x).unflatten(-1, (3, 2, 4)).permute(1, 2, 0, 3)
            return attention(query, key, value, is_causal=True).transpose(0, 1).flatten(1)

    layer, data = Layer().double(), torch.randn(4, 5, 8, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def sample_loss(parameters, x):
        return tf.functional_call(layer, parameters, (x,)).square().sum()

    actual = tf.vmap(tf.grad(sample_loss), (None, 0))(parameters, data)
    for i, x in enumerate(data):
        layer.zero_grad()
        layer(x).square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert_close(actual[name][i], parameter.grad)


# ---- the other tensors of a call ----

# (field, shape of the mapped tensor, mapped dimension), for 2 batch elements, 4 heads, 3 x 6 pairs
MAPPED = {
    "float mask": ("attn_mask", (5, 2, 4, 3, 6), 0),
    "mask per head and key": ("attn_mask", (4, 5, 1, 6), 1),
    "slopes (H,)": ("alibi_slopes", (4, 5), 1),
    "slopes (B, H)": ("alibi_slopes", (5, 2, 4), 0),
    "sinks": ("sinks", (5, 4), 0),
}
INPUTS = [(2, 4, 3, 4), (2, 2, 6, 4), (2, 2, 6, 3)]
BASE = {"enable_gqa": True, "is_causal": True, "lower_right": True, "softcap": 3.0}


@pytest.mark.parametrize("inputs_too", [False, True])
@pytest.mark.parametrize("name", MAPPED)
def test_mapping_another_tensor_gives_the_bits_of_a_loop_and_its_gradients(name, inputs_too):
    field, shape, dim = MAPPED[name]
    leading = (5,) if inputs_too else ()
    tensors = [torch.randn(*leading, *s, dtype=torch.float64) for s in INPUTS]
    tensors.append(torch.rand(shape, dtype=torch.float64))
    in_dims = (*(0 if inputs_too else None for _ in ALL), dim)

    def run(*x):
        return paths.attention(Call(*x[:3], **BASE, **{field: x[3]}))[0]

    assert_same_bits(tf.vmap(run, in_dims)(*tensors), loop(run, in_dims, tensors))
    gradients = tf.grad(loss(run), (0, 1, 2, 3))
    actual = tf.vmap(gradients, in_dims)(*tensors)
    for i, grad in enumerate(actual):
        assert_same_bits(grad, loop(lambda *x, i=i: gradients(*x)[i], in_dims, tensors))
    moved = tf.vmap(lambda *x: tf.jvp(run, x, x)[1], in_dims)(*tensors)
    assert_same_bits(moved, loop(lambda *x: tf.jvp(run, x, x)[1], in_dims, tensors))


@pytest.mark.parametrize("field", ["attn_mask", "alibi_slopes", "sinks"])
def test_what_is_shared_has_gradients_per_sample(field):
    shape = {"attn_mask": (4, 1, 6), "alibi_slopes": (4,), "sinks": (4,)}[field]
    tensors = [torch.randn(5, *s, dtype=torch.float64) for s in INPUTS]
    shared = torch.rand(shape, dtype=torch.float64)

    def gradient(*inputs):
        def run(x):
            return paths.attention(Call(*inputs, **BASE, **{field: x}))[0].sin().sum()

        return tf.grad(run)(shared)

    actual = tf.vmap(gradient)(*tensors)
    assert actual.shape == (5, *shape)
    assert_same_bits(actual, loop(gradient, (0, 0, 0), tensors))


def test_lengths_are_mapped():
    tensors = [torch.randn(5, *s, dtype=torch.float64) for s in INPUTS]
    for used in (torch.randint(0, 7, (5, 2)), torch.randint(0, 7, (5,))):

        def run(*x):
            return paths.attention(Call(*x[:3], **BASE, seqused_k=x[3]))[0]

        inputs, in_dims = [*tensors, used], (0, 0, 0, 0)
        assert_same_bits(tf.vmap(run)(*inputs), loop(run, in_dims, inputs))
        shared = tf.vmap(run, (0, 0, 0, None))(*tensors, used[0])
        assert_same_bits(shared, loop(run, (0, 0, 0, None), [*tensors, used[0]]))


def test_a_two_dimensional_call_keeps_its_one_head_when_it_is_mapped():
    tensors = [torch.randn(5, s, 4, dtype=torch.float64) for s in (3, 6, 6)]
    slopes, sinks = torch.rand(1, dtype=torch.float64), torch.rand(1, dtype=torch.float64)

    def run(*x):
        options = {"alibi_slopes": slopes, "sinks": sinks, "softcap": 1.0}
        return attention(*x, **options, return_lse=True, return_weights=True)

    actual = tf.vmap(run)(*tensors)
    for i, result in enumerate(actual):
        assert_same_bits(result, loop(lambda *x, i=i: run(*x)[i], (0, 0, 0), tensors))
    gradients = tf.vmap(tf.grad(lambda *x: run(*x).output.sin().sum(), ALL))(*tensors)
    for i, grad in enumerate(gradients):
        single = tf.grad(lambda *x: run(*x).output.sin().sum(), i)
        assert_same_bits(grad, loop(single, (0, 0, 0), tensors))


def test_every_transform_of_slopes_sinks_and_mask_equals_that_of_the_definition():
    inputs = make(2, 2, 2)
    learned = (torch.randn(2, 1, 4).double(), torch.rand(2).double(), torch.rand(2).double())

    def of(run):
        def function(mask, slopes, sinks):
            options = {"attn_mask": mask, "alibi_slopes": slopes, "sinks": sinks, "softcap": 2.0}
            return run(Call(*inputs, is_causal=True, **options))[0]

        return function

    for name in ("jvp", "grad", "jacfwd", "jacrev", "hessian", "jacrev of jacfwd", "jvp of grad"):
        actual = TRANSFORMS[name](of(paths.attention), learned)
        expected = TRANSFORMS[name](of(reference.attention), learned)
        for a, b in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
            assert_close(a, b, 1e-10)
            assert a.any()
