"""Every wrong call: the type of its error and its sentence. And that right calls pay nothing."""

import pathlib
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from wrong_calls import ALL, TABLE, WRONG_TYPES, WRONG_VALUES, tensors

import attention_ext
from attention_ext import ArgumentError, ArgumentTypeError, causal_attention
from attention_ext import scaled_dot_product_attention as attention
from attention_ext.errors import translate


def check(function, kind, text, name="scaled_dot_product_attention"):
    """The error is of just this type, and one sentence that begins with the public function."""
    with pytest.raises(kind, match=f"^{name}: expected .*{text}") as caught:
        function()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert "csrc" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("kind", "changes", "text"), TABLE)
def test_a_wrong_call_raises_one_sentence(kind, changes, text, requires_grad):
    call = tensors(**changes)
    for name in ALL:
        if requires_grad and isinstance(call[name], torch.Tensor):
            tensor = call[name].detach()
            call[name] = tensor.requires_grad_(tensor.is_floating_point())
    check(lambda: attention(**call), kind, text)


# what the operators' own checks say, which stand below every way in
CHECKED_BELOW = [
    param
    for param in TABLE
    if " of " in param.values[2]
    or "that broadcast" in param.values[2]
    or "at least" in param.values[2]
    if not any(name in param.id for name in ("CausalBias", "devices", "sparse", "nested"))
]


def raw(call):
    """The arguments of a call as the operator takes them."""
    left, right = call.get("window_size", (-1, -1))
    names = ("query", "key", "value", "attn_mask", "enable_gqa", "softcap", "dropout_p")
    names += ("alibi_slopes", "sinks", "seqused_k")
    fields = {name: call[name] for name in names if name in call}
    return fields | {"window_left": left, "window_right": right}


@pytest.mark.parametrize(("kind", "changes", "text"), CHECKED_BELOW)
def test_the_operator_itself_has_the_same_sentence(kind, changes, text):
    marks = {ArgumentError: "value", ArgumentTypeError: "type", NotImplementedError: "unsupported"}
    text = rf"\[{marks[kind]}\] scaled_dot_product_attention: expected .*{text}"
    with pytest.raises(RuntimeError, match=text):
        torch.ops.attention_ext.forward(**raw(tensors(**changes)))


@pytest.mark.parametrize(("kind", "changes", "text"), CHECKED_BELOW)
def test_a_wrong_call_under_vmap_and_grad_raises_the_same_type(kind, changes, text):
    call = tensors(**changes)
    others = {name: value for name, value in call.items() if name not in ALL}
    inputs = [torch.stack([call[name]] * 2) for name in ALL]

    def run(*x):
        return attention(*x, **others).sum()

    check(lambda: torch.func.vmap(run)(*inputs), kind, text)
    if inputs[0].is_floating_point() and kind is not NotImplementedError:
        single = [call[name] for name in ALL]
        check(lambda: torch.func.grad(run)(*single), kind, text)


@pytest.mark.parametrize(("kind", "changes", "text"), CHECKED_BELOW)
def test_a_wrong_call_of_fake_tensors_has_the_same_sentence(kind, changes, text):
    call = tensors(**changes)
    if "seqused_k" in changes and "key length" in text:
        return  # numbers that no fake tensor holds
    with FakeTensorMode() as mode:
        fakes = {
            n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in call.items()
        }
        check(lambda: attention(**fakes), kind, text)


@pytest.mark.parametrize(("kind", "changes", "text"), CHECKED_BELOW[::6])
def test_a_wrong_compiled_call_has_the_same_sentence_in_torchs_type(kind, changes, text):
    call = tensors(**changes)
    others = {name: value for name, value in call.items() if name not in ALL}
    torch._dynamo.reset()
    run = torch.compile(lambda *x: attention(*x, **others), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"scaled_dot_product_attention: expected .*{text}"):
        run(*(call[name] for name in ALL))


def test_what_python_calls_false_is_no_dropout():
    call = tensors()
    expected = attention(**call)
    for nothing in (False, 0, torch.tensor(0.0)):
        assert torch.equal(attention(**call, dropout_p=nothing), expected)
    assert not attention(**call, dropout_p=True).any()
    assert not attention(**call, dropout_p=torch.tensor(1.0)).any()


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
OURS_ALONE = {
    name
    for name in (*WRONG_VALUES, *WRONG_TYPES)
    if name.split()[0] in ("variant", "window", "slopes", "sinks", "lengths", "softcap", "a")
    or name.endswith("softcap")
}


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
    for path in pathlib.Path(attention_ext.__path__[0]).glob("*.py"):
        shutil.copy(path, package)
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
