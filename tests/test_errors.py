"""Every wrong call: the type of its error and its sentence. And that right calls pay nothing."""

import pickle
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attention_ext
from attention_ext import ArgumentError, ArgumentTypeError, causal_attention
from attention_ext import scaled_dot_product_attention as attention
from attention_ext.errors import translate


def tensors(**changes):
    """A right call with some arguments changed; a tuple is the shape of a tensor."""
    call = {"query": (2, 3, 5, 4), "key": (2, 3, 7, 4), "value": (2, 3, 7, 6)} | changes
    return {
        name: torch.randn(value) if isinstance(value, tuple) else value
        for name, value in call.items()
    }


def cast(dtype, *names):
    return {name: x.to(dtype) for name, x in tensors().items() if name in names}


ALL = ("query", "key", "value")
WRONG_VALUES = {
    "rank 0 query": ({"query": ()}, r"of at least 2 dimensions, got query \(\)"),
    "rank 1 query": ({"query": (4,)}, r"at least 2 dimensions, got query \(4,\)"),
    "rank 1 key": ({"key": (4,)}, r"at least 2 dimensions, got key \(4,\)"),
    "rank 1 value": ({"value": (6,)}, r"at least 2 dimensions, got value \(6,\)"),
    "widths differ": (
        {"key": (2, 3, 7, 5)},
        r"query and key of the same width .*, got query \(2, 3, 5, 4\) and key \(2, 3, 7, 5\)",
    ),
    "lengths differ": (
        {"value": (2, 3, 8, 6)},
        r"key and value of the same length .*, got key \(2, 3, 7, 4\) and value \(2, 3, 8, 6\)",
    ),
    "heads do not broadcast": (
        {"query": (2, 4, 5, 4), "key": (2, 2, 7, 4), "value": (2, 2, 7, 6)},
        r"heads that broadcast \(equal, or 1; or pass enable_gqa=True\), got query \(2, 4, 5, 4\)",
    ),
    "batches do not broadcast": (
        {"query": (4, 3, 5, 4)},
        r"leading dimensions of query, key and value that broadcast, got query \(4, 3, 5, 4\)",
    ),
    "batches of different rank do not broadcast": (
        {"query": (4, 2, 3, 5, 4), "key": (5, 2, 3, 7, 4)},
        "leading dimensions of query, key and value that broadcast",
    ),
    "heads not a multiple": (
        {"enable_gqa": True, "key": (2, 2, 7, 4), "value": (2, 2, 7, 6)},
        "multiple of the key heads with enable_gqa=True, got 3 query heads and 2 key heads",
    ),
    "value heads not a multiple": (
        {"enable_gqa": True, "key": (2, 1, 7, 4), "value": (2, 2, 7, 6)},
        "multiple of the value heads with enable_gqa=True, got 3 query heads and 2 value heads",
    ),
    "more key heads than query heads": (
        {"enable_gqa": True, "key": (2, 6, 7, 4), "value": (2, 6, 7, 6)},
        "got 3 query heads and 6 key heads",
    ),
    "no key heads": (
        {"enable_gqa": True, "key": (2, 0, 7, 4), "value": (2, 0, 7, 6)},
        "got 3 query heads and 0 key heads",
    ),
    "grouped heads without a head dimension": (
        {"enable_gqa": True, "query": (5, 4), "key": (7, 4), "value": (7, 6)},
        r"a head dimension \(at least 3 dimensions\) with enable_gqa=True, got query \(5, 4\)",
    ),
    "mask too short": ({"attn_mask": (5, 6)}, r"mask that broadcasts .*, got attn_mask \(5, 6\)"),
    "mask of too many rows": ({"attn_mask": (6, 7)}, r"attn_mask that broadcasts to .*\(6, 7\)"),
    "mask of other heads": ({"attn_mask": (2, 2, 5, 7)}, r"mask that broadcasts .*\(2, 2, 5, 7\)"),
    "mask of more batches": (
        {"attn_mask": (4, 2, 3, 5, 7)}, r"attn_mask that broadcasts to .*\(4, 2, 3, 5, 7\)",
    ),
    "variant unknown": (
        {"causal_variant": "top_left"},
        "causal_variant to be 'upper_left' or 'lower_right', got 'top_left'",
    ),
    "dropout below 0": ({"dropout_p": -0.1}, r"dropout_p to be a probability .*, got -0\.1"),
    "dropout above 1": ({"dropout_p": 1.1}, r"dropout_p to be a probability .*, got 1\.1"),
    "dropout NaN": ({"dropout_p": float("nan")}, "dropout_p to be a probability .*, got nan"),
    "CausalBias beside is_causal": (
        {"attn_mask": causal_upper_left(5, 7), "is_causal": True},
        "is_causal=False beside a CausalBias.*CausalBias should not be used with causal=True",
    ),
    "CausalBias of another length": (
        {"attn_mask": causal_lower_right(5, 8)}, r"sizes \(L, S\) = \(5, 7\) .*, got \(5, 8\)",
    ),
    "CausalBias of other queries": (
        {"attn_mask": causal_upper_left(4, 7)}, r"sizes \(L, S\) = \(5, 7\) .*, got \(4, 7\)",
    ),
    "devices differ": (
        {"query": torch.randn(2, 3, 5, 4, device="meta")},
        "query, key, value on one device, got meta, cpu, cpu",
    ),
}  # fmt: skip

WRONG_TYPES = {
    "query a list": ({"query": [[1.0]]}, "query to be a torch.Tensor, got list"),
    "key None": ({"key": None}, "key to be a torch.Tensor, got NoneType"),
    "value a number": ({"value": 1.0}, "value to be a torch.Tensor, got float"),
    "mask a list": ({"attn_mask": [[True]]}, "attn_mask to be a torch.Tensor or None, got list"),
    "scale a string": ({"scale": "1"}, "scale to be a float, got str"),
    "scale a tensor that requires grad": (
        {"scale": torch.ones((), requires_grad=True)}, "scale to be a float, got Tensor"
    ),
    "is_causal a number": ({"is_causal": 1}, "is_causal to be a bool, got int"),
    "is_causal None": ({"is_causal": None}, "is_causal to be a bool, got NoneType"),
    "enable_gqa a string": ({"enable_gqa": "yes"}, "enable_gqa to be a bool, got str"),
    "dropout a string": ({"dropout_p": "0"}, "dropout_p to be a float, got str"),
    "dropout None": ({"dropout_p": None}, "dropout_p to be a float, got NoneType"),
    "variant None": ({"causal_variant": None}, "causal_variant to be .*, got None"),
    "int": (cast(torch.int64, *ALL), "query of float64, .* or float16, got torch.int64"),
    "bool": (cast(torch.bool, *ALL), "query of float64, .*, got torch.bool"),
    "float8": (cast(torch.float8_e4m3fn, *ALL), "query of float64, .*, got torch.float8_e4m3fn"),
    "dtypes differ": (
        cast(torch.float64, "key"),
        "of one dtype, got query torch.float32, key torch.float64, value torch.float32",
    ),
    "int mask": (
        {"attn_mask": torch.ones(5, 7, dtype=torch.int32)},
        "attn_mask of torch.bool, torch.float32 or the query's dtype, got attn_mask torch.int32",
    ),
    "double mask": (
        {"attn_mask": torch.ones(5, 7, dtype=torch.float64)},
        "got attn_mask torch.float64 with query torch.float32",
    ),
    "half mask": (
        cast(torch.bfloat16, *ALL) | {"attn_mask": torch.ones(5, 7).half()},
        "got attn_mask torch.float16 with query torch.bfloat16",
    ),
}  # fmt: skip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # nested and sparse CSR tensors are a prototype
    NESTED = torch.nested.nested_tensor([torch.randn(5, 4), torch.randn(7, 4)], layout=torch.jagged)
    STRIDED_NESTED = torch.nested.nested_tensor([torch.randn(5, 4), torch.randn(7, 4)])
    CSR = torch.randn(5, 4).to_sparse_csr()

UNSUPPORTED = {
    "complex": (cast(torch.complex64, *ALL), "real tensors, got query of torch.complex64"),
    "more than 8 dimensions": (
        {"query": (1,) * 7 + (5, 4)}, "at most 8 dimensions, got query .*; flatten some of",
    ),
    "sparse": (
        {"query": torch.randn(5, 4).to_sparse()},
        r"query to be a dense tensor on the CPU, got .*sparse_coo: call its to_dense\(\)",
    ),
    "sparse CSR": ({"key": CSR}, "key to be a dense tensor on the CPU, got .*sparse_csr"),
    "nested": (dict.fromkeys(ALL, NESTED), "query to be a dense .*nested tensor: pad it"),
    "nested, strided": (dict.fromkeys(ALL, STRIDED_NESTED), "query to be a dense .*: pad it"),
    "dropout": ({"dropout_p": 0.1}, r"dropout_p=0\.0, got 0\.1: .* not supported yet"),
    "dropout of all": ({"dropout_p": 1.0}, r"dropout_p=0\.0, got 1\.0: .* not supported yet"),
    "learned mask": (
        {"attn_mask": torch.zeros(5, 7, requires_grad=True)}, "an attn_mask without gradient",
    ),
}  # fmt: skip

TABLE = [
    pytest.param(kind, *entry, id=name)
    for kind, entries in (
        (ArgumentError, WRONG_VALUES),
        (ArgumentTypeError, WRONG_TYPES),
        (NotImplementedError, UNSUPPORTED),
    )
    for name, entry in entries.items()
]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("kind", "changes", "text"), TABLE)
def test_a_wrong_call_raises_one_sentence(kind, changes, text, requires_grad):
    call = tensors(**changes)
    for name in ALL:
        if requires_grad and isinstance(call[name], torch.Tensor):
            tensor = call[name].detach()
            call[name] = tensor.requires_grad_(tensor.is_floating_point())
    with pytest.raises(kind, match=f"^scaled_dot_product_attention: expected .*{text}") as caught:
        attention(**call)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert "csrc" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_wrong_values_are_value_errors_and_wrong_types_type_errors_and_all_runtime_errors():
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(ArgumentTypeError, TypeError)
    assert issubclass(ArgumentError, RuntimeError)
    assert issubclass(ArgumentTypeError, RuntimeError)
    assert issubclass(NotImplementedError, RuntimeError)


def test_errors_survive_pickling():
    for kind in (ArgumentError, ArgumentTypeError):
        copy = pickle.loads(pickle.dumps(kind("f: expected a, got b")))
        assert (type(copy), str(copy)) == (kind, "f: expected a, got b")


TAKEN_BY_TORCH = {"dropout below 0", "dropout NaN", "no key heads", "CausalBias of other queries"}
OURS_ALONE = {"variant unknown", "variant None"}


@pytest.mark.parametrize(
    "name", sorted({*WRONG_VALUES, *WRONG_TYPES} - TAKEN_BY_TORCH - OURS_ALONE)
)
def test_a_caller_who_catches_torchs_error_catches_ours(name):
    changes, _ = (WRONG_VALUES | WRONG_TYPES)[name]
    with pytest.raises((RuntimeError, TypeError, IndexError, ValueError)) as torchs:
        F.scaled_dot_product_attention(**tensors(**changes))
    ours = ValueError if torchs.type is ValueError else RuntimeError
    with pytest.raises(TypeError if torchs.type is TypeError else ours):
        attention(**tensors(**changes))


def test_missing_and_unknown_arguments_are_python_errors():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'value'"):
        attention(torch.randn(5, 4), torch.randn(5, 4))
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        attention(**tensors(), window=3)
    with pytest.raises(TypeError, match="positional arguments"):
        attention(*tensors().values(), None, 0.0, False, None, False, "lower_right")


TEXTBOOK = {
    "rank": ((1, 5, 4), (5, 4), (5, 4), r"query of 2 dimensions, .*, got shape \(1, 5, 4\)"),
    "rank of value": ((5, 4), (5, 4), (5,), r"value of 2 dimensions, .*, got shape \(5,\)"),
    "lengths": (
        (5, 4),
        (6, 4),
        (6, 4),
        r"query and key of the same length T, got .*\(5, 4\) and \(6, 4\)",
    ),
    "width": (
        (5, 4),
        (5, 3),
        (5, 4),
        r"query and key of the same width .*, got query \(5, 4\) and key",
    ),
    "length of value": ((5, 4), (5, 4), (6, 4), "key and value of the same length"),
}


@pytest.mark.parametrize("name", TEXTBOOK)
def test_the_textbook_function_names_itself(name):
    *shapes, text = TEXTBOOK[name]
    with pytest.raises(ArgumentError, match=f"^causal_attention: expected {text}"):
        causal_attention(*(torch.randn(shape) for shape in shapes))


def test_the_textbook_function_names_itself_for_types_too():
    x = torch.randn(5, 4)
    with pytest.raises(
        ArgumentTypeError, match=r"^causal_attention: expected key to be a torch\.Ten"
    ):
        causal_attention(x, None, x)
    with pytest.raises(
        ArgumentTypeError, match=r"^causal_attention: expected query, key and value of"
    ):
        causal_attention(x, x.double(), x)


def test_an_error_that_is_not_ours_passes_unchanged():
    error = RuntimeError("a hook failed")
    assert translate(error, "f", tensors()) is error


def test_an_error_from_a_hook_is_not_swallowed():
    class Refuse(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise KeyError("from a mode")

    with pytest.raises(KeyError, match="from a mode"), Refuse():
        attention(**tensors())


def test_checks_come_before_anything_is_allocated():
    huge = torch.empty(1, dtype=torch.bfloat16).expand(2**20, 2**20, 2**10, 8)
    with pytest.raises(ArgumentError, match="query and key of the same width"):
        attention(huge, torch.randn(3, 4).bfloat16(), torch.randn(3, 4).bfloat16())


IMPORT = """
import sys
sys.path.insert(0, sys.argv[1])
try:
    import attention_ext
except ImportError as error:
    print(error)
"""


def test_a_missing_library_is_said_with_its_path_and_how_to_build_it(tmp_path):
    package = tmp_path / "attention_ext"
    package.mkdir()
    for name in (
        "__init__",
        "errors",
        "library",
        "functional",
        "autograd",
        "reference",
        "replace_sdpa",
    ):
        shutil.copy(f"{attention_ext.__path__[0]}/{name}.py", package)
    command = [sys.executable, "-c", IMPORT, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"expected its compiled library at {package}/_C.so, got: no such file" in output
    assert "python setup.py build_ext --inplace" in output
    (package / "_C.so").write_text("not a library")
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "_C.so, got: " in output
    assert "file too short" in output or "invalid ELF header" in output


def test_build_info_says_what_is_installed_and_what_runs():
    info = attention_ext.build_info()
    assert info["version"] == attention_ext.__version__
    assert info["torch"] == torch.__version__
    assert info["library"].endswith("_C.so")
    assert info["cpu_capability"] in ("baseline", "avx2", "avx512")
