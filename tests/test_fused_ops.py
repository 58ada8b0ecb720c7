"""RMSNorm and SwiGLU as operators: the formula, every layout, every derivative."""

import pytest
import torch
import torch.func as tf
import torch.nn.functional as F
from assertions import ErrorRatio, assert_close, assert_same_bits
from cases import DTYPES

from attention_ext import ArgumentError, ArgumentTypeError, library
from attention_ext.layers import rms_norm, swiglu

EPS = 1e-5


def norm(x, weight):
    return rms_norm(x, weight, EPS)


def plain_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def plain_swiglu(x):
    gate, up = x.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


OPERATORS = {
    "rms_norm": (norm, plain_norm, lambda n: ((n,), (n,))),
    "swiglu": (swiglu, plain_swiglu, lambda n: ((2 * n,),)),
}
both = pytest.mark.parametrize("name", OPERATORS)
WIDTHS = [1, 2, 3, 8, 17, 64, 65, 130, 352]


def make(name, n, *leading, dtype=torch.float64, scale=1.0):
    """Inputs of an operator of width n: the first with leading dimensions."""
    first, *others = OPERATORS[name][2](n)
    shapes = [(*leading, *first), *others]
    return [(scale * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(function, inputs, upstream):
    output = function(*inputs)
    return output, *torch.autograd.grad(output, inputs, upstream.to(output.dtype))


@both
@pytest.mark.parametrize("n", WIDTHS)
def test_it_is_the_formula_with_its_gradients(name, n):
    function, plain, _ = OPERATORS[name]
    inputs = make(name, n, 3, 67)
    upstream = torch.randn(3, 67, n, dtype=torch.float64)
    actual = with_gradients(function, inputs, upstream)
    assert_close(actual, with_gradients(plain, inputs, upstream), 1e-12)


@both
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_it_is_as_accurate_as_the_plain_formula_in_its_dtype(dtype, scale, name):
    function, plain, _ = OPERATORS[name]
    results = ["output", "gradient of x", "gradient of the weight"]
    rules = [ErrorRatio(f"{name}: {what}", 2.0) for what in results]
    for n in (3, 64, 200):
        inputs = make(name, n, 150, dtype=dtype, scale=scale)
        upstream = torch.randn(150, n).to(dtype).double()
        wide = [x.detach().double().requires_grad_() for x in inputs]
        forms = (function, inputs), (plain, inputs), (plain, wide)
        found = [with_gradients(form, given, upstream) for form, given in forms]
        assert all(x.dtype == dtype for x in found[0])
        for rule, actual, baseline, truth in zip(rules, *found, strict=False):
            rule.add(actual, baseline, truth)
    for rule in rules:
        rule.check()


def test_it_replaces_what_the_modules_had():
    x, weight = make("rms_norm", 96, 4, 7, dtype=torch.float32)
    assert_close(norm(x, weight), F.rms_norm(x, (96,), weight, EPS), 2e-6)
    gate, up = x.chunk(2, -1)
    assert_close(swiglu(x), F.silu(gate) * up, 2e-6)


def test_gates_of_any_size_are_finite():
    gate = torch.tensor([0.0, 1e-30, -1e-30, 20.0, -20.0, 87.0, -87.0, -100.0, 1e4, -1e4, 3e38])
    for dtype in (torch.float32, torch.float64):
        x = torch.cat([gate, torch.ones_like(gate)]).to(dtype).requires_grad_()
        y, grad = with_gradients(swiglu, [x], torch.ones_like(gate))
        assert_close(y, F.silu(gate.to(dtype)), 1e-6)
        assert grad.isfinite().all()
        assert_close(y[3:6].double(), F.silu(gate[3:6].double()), 1e-6)
        relative = (y[4] / F.silu(gate[4].to(dtype)) - 1).abs()
        assert relative < 20 * torch.finfo(dtype).eps


def test_nan_stays_in_its_row():
    x, weight = torch.randn(3, 20), torch.ones(20)
    x[1, 3] = torch.nan
    assert norm(x, weight).isnan().any(-1).tolist() == [False, True, False]
    assert swiglu(x).isnan().sum() == 1


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_the_norms_weight_may_be_float32(x_dtype):
    x, weight = torch.randn(5, 40).to(x_dtype), torch.randn(40, requires_grad=True)
    x.requires_grad_()
    y, grad_x, grad_weight = with_gradients(norm, [x, weight], torch.ones(5, 40))
    assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (x_dtype, x_dtype, torch.float32)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = with_gradients(plain_norm, wide, torch.ones(5, 40))
    tolerance = 4 * max(torch.finfo(x_dtype).eps, torch.finfo(torch.float32).eps)
    assert_close([t.double() for t in (y, grad_x)], list(expected[:2]), 2 * tolerance)
    assert_close(grad_weight.double(), expected[2], 1e-5)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "columns outermost": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "a slice": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "rows backwards in dimensions": lambda x: torch.stack([x, x], 1)[:, 1],
    "expanded": lambda x: x[:1].expand_as(x),
}


@both
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_give_the_same_bits(layout, name):
    function = OPERATORS[name][0]
    first, *others = make(name, 21, 3, 5, dtype=torch.float32)
    change = LAYOUTS[layout]
    strided, dense = change(first.detach()).requires_grad_(), change(first.detach()).contiguous()
    upstream = change(torch.randn(3, 5, 21))
    actual = with_gradients(function, [strided, *others], upstream)
    expected = with_gradients(function, [dense.requires_grad_(), *others], upstream.contiguous())
    assert_same_bits(actual, expected)
    if name == "rms_norm" and layout != "expanded":
        assert actual[0].stride() == torch.empty_like(strided).stride()


@both
@pytest.mark.parametrize("rank", [1, 2, 5, 8])
def test_any_rank(rank, name):
    function, plain, _ = OPERATORS[name]
    inputs = make(name, 6, *[2] * (rank - 1))
    assert_close(function(*inputs), plain(*inputs), 1e-13)


@both
def test_zero_sizes_have_empty_results_and_zero_gradients(name):
    function = OPERATORS[name][0]
    for n, leading in [(4, (0,)), (4, (2, 0)), (0, (3,)), (0, ())]:
        inputs = make(name, n, *leading)
        y, *grads = with_gradients(function, inputs, torch.ones(*leading, n))
        assert y.shape == (*leading, n)
        assert [g.shape for g in grads] == [x.shape for x in inputs]
        assert all((g == 0).all() for g in grads)


@both
@pytest.mark.parametrize("rows", [1, 33, 2100])
def test_threads_do_not_change_a_bit(rows, name, threads):
    function = OPERATORS[name][0]
    inputs = make(name, 300, rows, dtype=torch.float32)
    upstream, results = torch.randn(rows, 300), []
    for count in (1, 2):
        threads(count)
        results.append(with_gradients(function, inputs, upstream))
    assert_same_bits(*results)


@both
def test_all_derivatives_are_right(name):
    function = OPERATORS[name][0]
    inputs = make(name, 5, 2, 3)
    assert torch.autograd.gradcheck(
        function,
        inputs,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)


@both
def test_func_transforms_agree_with_the_plain_formula(name):
    function, plain, _ = OPERATORS[name]
    inputs = [x.detach() for x in make(name, 3, 2)]
    places = tuple(range(len(inputs)))

    def forms(f):
        yield tf.jacrev(f, places)(*inputs)
        yield tf.jacfwd(f, places)(*inputs)
        yield tf.hessian(lambda *given: f(*given).pow(2).sum(), places)(*inputs)
        yield tf.jacfwd(tf.jacfwd(f, places), places)(*inputs)

    for actual, expected in zip(forms(function), forms(plain), strict=True):
        assert_close(actual, expected, 1e-11)


@pytest.mark.parametrize("in_dims", [(0, None), (1, None), (None, 0), (0, 0), (2, 1)])
def test_vmap_of_the_norm_is_a_loop(in_dims):
    x = torch.randn(4, 4, 4, dtype=torch.float64)
    weight = torch.randn(4, 4, dtype=torch.float64)
    given = x, weight[0] if in_dims[1] is None else weight
    pairs = [
        [t if dim is None else t.select(dim, i) for t, dim in zip(given, in_dims, strict=True)]
        for i in range(4)
    ]
    assert_close(torch.vmap(norm, in_dims)(*given), torch.stack([norm(*p) for p in pairs]))
    grad = tf.grad(lambda *a: norm(*a).pow(3).sum(), (0, 1))
    expected = [torch.stack(t) for t in zip(*(grad(*p) for p in pairs), strict=True)]
    assert_close(list(torch.vmap(grad, in_dims)(*given)), expected)


def test_vmap_of_swiglu_is_a_loop():
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    for dim in range(2):
        expected = torch.stack([swiglu(part) for part in x.unbind(dim)])
        assert_close(torch.vmap(swiglu, dim)(x), expected)


@both
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_to_one_graph(name, dynamic, fresh_dynamo):
    function = OPERATORS[name][0]

    def step(*inputs):
        return function(inputs[0] * 2, *inputs[1:]) * 3

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 5):
        inputs = make(name, 6, rows, dtype=torch.float32)
        upstream = torch.randn(rows, 6)
        actual = with_gradients(compiled, inputs, upstream)
        assert_close(actual, with_gradients(step, inputs, upstream), 1e-5)
        with torch.no_grad():
            assert_close(compiled(*inputs), step(*inputs), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    x, weight = torch.randn(2, 3, 6).to(dtype), torch.randn(6).to(dtype)
    moved = x.transpose(0, 1)
    for given in (x, moved):
        torch.library.opcheck(library.rms_norm, (given, weight, EPS))
        torch.library.opcheck(library.rms_norm_backward, (given * 2, given, weight, EPS))
        torch.library.opcheck(library.swiglu, (given,))
        torch.library.opcheck(library.swiglu_backward, (given[..., :3], given))


X, WEIGHT = torch.randn(2, 6), torch.ones(6)
WRONG = {
    "another width": (ArgumentError, rms_norm, (X, WEIGHT[:5], EPS), r"x \(2, 6\) and weight \(5,"),
    "a scalar": (ArgumentError, rms_norm, (X[0, 0], WEIGHT, EPS), r"x \(..., width\)"),
    "negative eps": (ArgumentError, rms_norm, (X, WEIGHT, -1.0), "eps that is .*got -1"),
    "half weight": (
        ArgumentTypeError,
        rms_norm,
        (X, WEIGHT.half(), EPS),
        "weight of torch.float32",
    ),
    "integers": (ArgumentTypeError, rms_norm, (X.int(), WEIGHT, EPS), "x of torch.float64, "),
    "eps None": (ArgumentTypeError, rms_norm, (X, WEIGHT, None), "eps to be a float, got NoneType"),
    "no weight": (ArgumentTypeError, rms_norm, (X, None, EPS), "weight to be a torch.Tensor"),
    "complex": (NotImplementedError, rms_norm, (X + 1j, WEIGHT, EPS), "real tensors"),
    "odd": (ArgumentError, swiglu, (X[:, :5],), r"x \(..., 2 \* width\), .*got x \(2, 5\)"),
    "a number": (ArgumentError, swiglu, (X[0, 0],), "got x "),
    "a list": (ArgumentTypeError, swiglu, ([1.0],), "x to be a torch.Tensor, got list"),
    "sparse": (NotImplementedError, swiglu, (X.to_sparse(),), "x to be a dense tensor"),
    "nine dimensions": (NotImplementedError, swiglu, (X.reshape(2, *[1] * 7, 6),), "at most 8"),
}


@pytest.mark.parametrize(("kind", "function", "arguments", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_named(kind, function, arguments, text):
    with pytest.raises(kind, match=f"^{function.__name__}: expected .*{text}"):
        function(*arguments)


def test_a_wrong_call_has_the_same_text_while_tracing():
    for device in ("cpu", "meta"):
        with pytest.raises(ArgumentError, match=r"weight .*, got x .* and weight"):
            rms_norm(X.to(device), WEIGHT[:5].to(device), EPS)
