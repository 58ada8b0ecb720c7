"""A randomised self-check over the whole option space: our kernels against the definition.

A few hundred cases here; `make fuzz` runs thousands (the environment variable FUZZ_EXAMPLES).
"""

import os

import torch
import torch.autograd.forward_ad as forward_ad
import torch.func as tf
from assertions import assert_close, finite_lse, floating, leaves_of, replaced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_calls import calls
from torch.utils._pytree import tree_leaves

from attention_ext import paths, reference

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
check = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)


def finite(tensor):
    return torch.where(tensor.isfinite(), tensor, 0.0)


def results_of(run, call):
    """Output and lse as a function of the floating inputs; -inf is left out of derivatives."""

    def function(*inputs):
        output, lse, *_ = run(replaced(call, inputs))
        return output, finite_lse(lse)

    return function


def both(call):
    return results_of(paths.attention, call), results_of(reference.attention, call)


def like(tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in tensors]


@check
@given(calls())
def test_results_and_gradients_are_those_of_the_definition(call):
    output, lse, weights = paths.attention(call, call.cu_seq_q is None)
    expected = reference.attention(call)
    assert_close((output, lse), (expected.output, expected.lse), 1e-11)
    if weights is not None:
        assert_close(weights, expected.weights, 1e-11)
    grads = []
    for function in both(call):
        leaves = [x.detach().requires_grad_() for x in leaves_of(call)]
        results = function(*leaves)
        grads.append(torch.autograd.grad(results, leaves, like(results, 1), allow_unused=True))
    assert_close(
        [torch.zeros(()) if g is None else g for g in grads[0]],
        [torch.zeros(()) if g is None else g for g in grads[1]],
        1e-10,
    )


@check
@given(calls())
def test_tangents_and_second_derivatives_are_those_of_the_definition(call):
    tensors = leaves_of(call)
    tangents = [finite(t) for t in like(tensors, 2)]
    moved, second = [], []
    for function in both(call):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents, strict=True)]
            moved.append([finite(forward_ad.unpack_dual(x).tangent) for x in function(*duals)])
        leaves = [x.detach().requires_grad_() for x in tensors]
        results = function(*leaves)
        upstream = [u.requires_grad_() for u in like(results, 1)]
        grads = torch.autograd.grad(results, leaves, upstream, create_graph=True)
        directions = [finite(x) for x in like(grads, 3)]
        second.append(torch.autograd.grad(grads, [*leaves, *upstream], directions))
    assert_close(moved[0], moved[1], 1e-9)
    assert_close([finite(x) for x in second[0]], [finite(x) for x in second[1]], 1e-9)


@st.composite
def mapped_calls(draw):
    """A small call, and for each of its tensors the dimension that vmap maps, or None."""
    call = draw(calls(most=9))
    packed = call.cu_seq_q is not None
    names = [name for name in floating(call) if draw(st.booleans())] or ["query"]
    if call.seqused_k is not None and not packed and draw(st.booleans()):
        names.append("seqused_k")
    fields, in_dims = {}, {}
    for name in names:
        tensor = getattr(call, name)
        dim = draw(st.integers(0, tensor.dim()))
        samples = [tensor, tensor.flip(0) if tensor.dim() else tensor, tensor * 1]
        fields[name], in_dims[name] = torch.stack(samples, dim), dim
    return call._replace(**fields), in_dims


def first(call, run, names):
    """A scalar of all results as a function of the inputs, and those."""

    def function(*inputs):
        results = run(call._replace(**dict(zip(names, inputs, strict=True))))
        return sum(finite(x).sin().sum() for x in results if x is not None)

    return function


@check
@given(mapped_calls(), st.booleans())
def test_transforms_of_torch_func_are_those_of_the_definition(mapped, with_weights):
    call, in_dims = mapped
    with_weights = with_weights and call.cu_seq_q is None
    names = [*floating(call), *(["seqused_k"] if "seqused_k" in in_dims else [])]
    inputs = [getattr(call, name) for name in names]
    dims = tuple(in_dims.get(name) for name in names)
    learned = tuple(range(len(floating(call))))

    def ours(call):
        return paths.attention(call, with_weights)

    def definition(call):
        return reference.attention(call)[: 3 if with_weights else 2]

    def transformed(run):
        function = first(call, run, names)

        def everything(*x):
            moving = tuple(finite(x[i]) for i in learned)

            def along(*y):
                return function(*y, *x[len(learned) :])

            gradient = tf.grad(along, learned)
            start = x[: len(learned)]
            return gradient(*start), tf.jvp(along, start, moving), tf.jvp(gradient, start, moving)

        return tree_leaves(tf.vmap(everything, dims)(*inputs))

    for a, b in zip(transformed(ours), transformed(definition), strict=True):
        assert_close(finite(a), finite(b), 1e-9)
