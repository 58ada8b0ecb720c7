"""apply_rotary: the formula, every layout, every derivative."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.func as tf
from assertions import assert_close, assert_same_bits
from cases import DTYPES

from attention_ext import ArgumentError, ArgumentTypeError, apply_rotary, library
from attention_ext.nn.rotary import RotaryTable, rotate

TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.bfloat16: 1e-2,
    torch.float16: 1e-3,
}
both_pairings = pytest.mark.parametrize("interleaved", [False, True])


def tables(count, half, dtype=torch.float64):
    angles = torch.randn(count, half, dtype=torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def formula(x, cos, sin, positions=None, interleaved=False):
    """Pair by pair, in float64; x (B, H, L, D), positions (L,) or (B, L)."""
    out, half = x.double().clone(), cos.shape[1]
    if positions is None:
        positions = torch.arange(x.shape[2])
    c, s = (t.double()[positions.expand(len(x), -1)].unsqueeze(1) for t in (cos, sin))
    for j in range(half):
        first, second = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
        a, b = x[..., first].double(), x[..., second].double()
        out[..., first] = a * c[..., j] - b * s[..., j]
        out[..., second] = b * c[..., j] + a * s[..., j]
    return out


@both_pairings
@pytest.mark.parametrize("table_dtype", [None, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_formula(dtype, table_dtype, interleaved):
    for width, half in [(2, 1), (6, 3), (7, 2), (32, 16), (70, 33), (128, 64), (5, 0)]:
        x = torch.randn(2, 3, 5, width).to(dtype)
        cos, sin = tables(5, half, table_dtype or dtype)
        turned = apply_rotary(x, cos, sin, interleaved=interleaved)
        assert turned.dtype == dtype
        tolerance = TOLERANCE[dtype if table_dtype != torch.float32 else torch.float32]
        tolerance = max(tolerance, TOLERANCE[dtype])
        assert_close(turned.double(), formula(x, cos, sin, None, interleaved), tolerance)
        assert_same_bits(turned[..., 2 * half :], x[..., 2 * half :])


@both_pairings
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_positions_choose_the_rows_of_the_tables(integers, interleaved):
    x = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    cos, sin = tables(11, 4)
    for shape in [(4,), (2, 4)]:
        positions = torch.randint(11, shape, dtype=integers)
        turned = apply_rotary(x, cos, sin, positions=positions, interleaved=interleaved)
        assert_close(turned, formula(x, cos, sin, positions, interleaved), 1e-14)
    strided = torch.arange(8, dtype=integers).reshape(4, 2).T
    turned = apply_rotary(x, cos, sin, positions=strided, interleaved=interleaved)
    assert_close(turned, formula(x, cos, sin, strided, interleaved), 1e-14)


@pytest.mark.parametrize("rank", range(2, 9))
def test_any_rank_from_two_to_eight(rank):
    x = torch.randn(*[2] * (rank - 2), 5, 6, dtype=torch.float64)
    cos, sin = tables(5, 2)
    expected = formula(x.reshape(-1, 1, 5, 6), cos, sin).reshape(x.shape)
    assert_close(apply_rotary(x, cos, sin), expected, 1e-14)
    if rank > 2:
        positions = torch.randint(5, (2, 5))
        expected = formula(x.reshape(2, -1, 5, 6), cos, sin, positions).reshape(x.shape)
        assert_close(apply_rotary(x, cos, sin, positions=positions), expected, 1e-14)


LAYOUTS = {
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "columns outermost": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "a slice": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "an odd offset": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "expanded": lambda x: x[:, :1].expand_as(x),
}


@both_pairings
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_give_the_same_bits_and_the_layout_of_empty_like(layout, interleaved):
    x = LAYOUTS[layout](torch.randn(2, 3, 5, 8))
    wide = tuple(t.repeat_interleave(3, 1)[:, ::3] for t in tables(5, 3, torch.float32))
    turned = apply_rotary(x, *wide, interleaved=interleaved)
    dense = [t.contiguous() for t in (x, *wide)]
    assert_same_bits(turned, apply_rotary(*dense, interleaved=interleaved))
    if layout != "expanded":
        assert turned.stride() == torch.empty_like(x).stride()
    else:
        assert turned.is_contiguous()


def test_zero_sizes_give_empty_results():
    cos, sin = tables(4, 2)
    for shape in [(0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4)]:
        assert apply_rotary(torch.randn(shape, dtype=torch.float64), cos, sin).shape == shape
    nothing = torch.zeros(4, 0, dtype=torch.float64)
    assert apply_rotary(torch.zeros(2, 4, 0), nothing, nothing).shape == (2, 4, 0)
    x = torch.randn(3, 0, 4, dtype=torch.float64)
    assert apply_rotary(x, cos[:0], sin[:0], positions=torch.zeros(0).long()).shape == x.shape


def test_threads_do_not_change_a_bit(threads):
    x, (cos, sin) = torch.randn(2, 8, 700, 66), tables(700, 33, torch.float32)
    results = []
    for count in (1, 2):
        threads(count)
        results.append(apply_rotary(x, cos, sin))
    assert_same_bits(*results)


@both_pairings
def test_a_module_rotates_the_same_with_heads_inside(interleaved):
    x, (cos, sin) = torch.randn(2, 5, 3, 8), tables(9, 4, torch.float32)
    positions = torch.randint(9, (2, 5))
    turned = rotate(x, RotaryTable(cos, sin, positions, interleaved))
    expected = apply_rotary(
        x.transpose(1, 2), cos, sin, positions=positions, interleaved=interleaved
    )
    assert_same_bits(turned.transpose(1, 2), expected)


# ---- derivatives ----


def call(interleaved=False, positions=None):
    """A function of x (2, 3, 4, 7) of which 6 columns turn."""
    cos, sin = tables(6, 3)

    def function(x):
        return apply_rotary(x, cos, sin, positions=positions, interleaved=interleaved)

    return function


def sample(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@both_pairings
@pytest.mark.parametrize("shape", [None, (4,), (2, 4)])
def test_all_derivatives_are_right(shape, interleaved):
    positions = None if shape is None else torch.randint(6, shape)
    function, x = call(interleaved, positions), sample(2, 3, 4, 7)
    assert torch.autograd.gradcheck(
        function, x, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(function, x, check_fwd_over_rev=True)


def test_the_gradient_turns_back():
    function, x = call(), sample(2, 3, 4, 7)
    turned = function(x)
    (grad,) = torch.autograd.grad(turned, x, turned.detach())
    assert_close(grad, x.detach(), 1e-14)


def test_func_transforms():
    function, x = call(), torch.randn(2, 3, 4, 7, dtype=torch.float64)
    one = x[:1]
    jacobian = tf.jacrev(function)(one)
    assert_close(tf.jacfwd(function)(one), jacobian)
    assert_close(
        tf.jacfwd(tf.jacrev(lambda y: function(y).pow(3).sum()))(one),
        tf.hessian(lambda y: function(y).pow(3).sum())(one),
    )
    _, tangent = tf.jvp(function, (x,), (x + 1,))
    assert_close(tangent, function(x + 1))


@pytest.mark.parametrize("mapped", ["x", "positions", "both", "tables"])
def test_vmap_is_a_loop(mapped):
    x = torch.randn(3, 2, 3, 4, 8, dtype=torch.float64)
    positions = torch.randint(6, (3, 2, 4))
    cos, sin = (torch.stack(t) for t in zip(*(tables(6, 3) for _ in range(3)), strict=True))
    dims = {"x": (0, None, None), "positions": (None, None, 0), "both": (0, None, 0)}
    of_x, of_tables, of_positions = dims.get(mapped, (0, 0, None))

    def function(x, cos, sin, positions):
        return apply_rotary(x, cos, sin, positions=positions)

    given = [
        t if dim is not None else t[0]
        for t, dim in zip(
            (x, cos, sin, positions), (of_x, of_tables, of_tables, of_positions), strict=True
        )
    ]
    in_dims = of_x, of_tables, of_tables, of_positions
    expected = torch.stack(
        [
            function(*(t if d is None else t[i] for t, d in zip(given, in_dims, strict=True)))
            for i in range(3)
        ]
    )
    assert_close(torch.vmap(function, in_dims)(*given), expected, 1e-14)
    with_grad = tf.vmap(tf.grad(lambda *a: function(*a).square().sum()), in_dims)(*given)
    assert_close(with_grad, 2 * (x if of_x == 0 else x[:1].expand_as(x)), 1e-12)


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_to_one_graph(dynamic, fresh_dynamo):
    cos, sin = tables(9, 3, torch.float32)

    def function(x, positions):
        return apply_rotary(x * 2, cos, sin, positions=positions, interleaved=True) * 3

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (4, 6):
        x = torch.randn(2, 3, length, 8, requires_grad=True)
        positions = torch.randint(9, (2, length))
        expected = function(x, positions)
        actual = compiled(x, positions)
        assert_close(actual, expected, 1e-6)
        upstream = torch.randn_like(expected)
        assert_close(
            torch.autograd.grad(actual, x, upstream),
            torch.autograd.grad(expected, x, upstream),
            1e-6,
        )
        with torch.no_grad():
            assert_close(compiled(x, positions), expected, 1e-6)


def test_opcheck():
    cos, sin = tables(6, 3, torch.float32)
    for x in (torch.randn(2, 3, 4, 8), torch.randn(2, 4, 3, 8).transpose(1, 2).bfloat16()):
        for extra in ((), (torch.randint(6, (2, 4)), True), (None, False, True, -3)):
            torch.library.opcheck(library.rotary, (x, cos, sin, *extra))


# ---- wrong calls ----

X, COS, SIN = torch.randn(2, 3, 4, 8), *tables(6, 3, torch.float32)
WRONG_VALUES = {
    "rank 1": ({"x": torch.randn(8)}, r"x of shape \(..., L, D\), got x \(8,\)"),
    "tables of two shapes": (
        {"sin": SIN[:5]},
        r"cos and sin of one shape .* and sin \(5, 3",
    ),
    "tables of rank 1": ({"cos": COS[0], "sin": SIN[0]}, "cos and sin of one shape"),
    "too wide": (
        {"x": X[..., :5]},
        r"at most x's last dimension, 5, got cos \(6, 3\), which",
    ),
    "too short": (
        {"cos": COS[:3], "sin": SIN[:3]},
        r"tables that reach position 3, got cos \(3",
    ),
    "wrong length": (
        {"positions": torch.zeros(3).long()},
        r"positions of shape \(L,\) or",
    ),
    "wrong batch": (
        {"positions": torch.zeros(3, 4).long()},
        r"got positions \(3, 4\) with x \(2",
    ),
    "no dimension": ({"positions": torch.tensor(1)}, r"positions of shape \(L,\) or"),
    "beyond": ({"positions": torch.tensor([0, 1, 6, 2])}, "positions from 0 to 5, .*got 6"),
    "negative": ({"positions": torch.tensor([0, -1, 0, 2])}, "positions from 0 to 5, .*got -1"),
    "tables with grad": ({"cos": COS.clone().requires_grad_()}, "got cos that requires grad"),
    "sin with grad": ({"sin": SIN.clone().requires_grad_()}, "got sin that requires grad"),
}
WRONG_TYPES = {
    "integers": ({"x": X.long()}, "x of torch.float64, .*, got torch.int64"),
    "half tables": ({"cos": COS.half()}, "cos of torch.float32, torch.float64 or x's dtype"),
    "float positions": ({"positions": torch.zeros(4)}, "positions of torch.int32 or torch.int64"),
    "no tensor": ({"cos": None}, "cos to be a torch.Tensor, got NoneType"),
    "a list": ({"positions": [0, 1, 2, 3]}, "positions to be a torch.Tensor or None, got list"),
    "interleaved": ({"interleaved": 1}, "interleaved to be a bool, got int"),
}


@pytest.mark.parametrize(("changes", "text"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_a_wrong_value_is_named(changes, text):
    with pytest.raises(ArgumentError, match="^apply_rotary: expected .*" + text):
        apply_rotary(**{"x": X, "cos": COS, "sin": SIN} | changes)


@pytest.mark.parametrize(("changes", "text"), WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_a_wrong_type_is_named(changes, text):
    with pytest.raises(ArgumentTypeError, match="^apply_rotary: expected .*" + text):
        apply_rotary(**{"x": X, "cos": COS, "sin": SIN} | changes)


def test_what_is_not_supported_says_so():
    with pytest.raises(NotImplementedError, match="apply_rotary: expected real tensors"):
        apply_rotary(X.to(torch.complex64), COS, SIN)
    with pytest.raises(NotImplementedError, match="at most 8 dimensions"):
        apply_rotary(torch.randn(*[1] * 7, 4, 8), COS, SIN)
    with pytest.raises(NotImplementedError, match="x to be a dense tensor"):
        apply_rotary(X.to_sparse(), COS, SIN)


def test_tables_without_derivative_are_refused_in_every_mode():
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match="without tangent"):
        apply_rotary(X, forward_ad.make_dual(COS, COS), SIN)
    with pytest.raises(ArgumentError, match="got cos that requires grad"):
        tf.grad(lambda cos: apply_rotary(X, cos, SIN).sum())(COS)
    with torch.no_grad():
        apply_rotary(X, COS.clone().requires_grad_(), SIN)
