"""What a wrong call raises, and how an error from below becomes it.

Every argument is checked once, in C++, below the dispatcher. A C++ operator can only raise
`RuntimeError`, so its text begins with the kind of the error, and the public functions turn it into
the types of this file on the error path: a call that is right pays nothing for it.

    RuntimeError: check_shapes, csrc/checks.cpp:40, [value] scaled_dot_product_attention: expected
    …, got … -> ArgumentError: scaled_dot_product_attention: expected …, got …
"""

import re
from collections.abc import Mapping
from numbers import Real

import torch
from torch import Tensor


class ArgumentError(ValueError, RuntimeError):
    """An argument has a wrong value: a shape, a number, a combination.

    A `RuntimeError` too, because that is what callers of torch's own function catch.
    """


class ArgumentTypeError(TypeError, RuntimeError):
    """An argument has a wrong type or a tensor a wrong dtype.

    A `RuntimeError` too, because that is what callers of torch's own function catch.
    """


# what an error from below can be before it is translated
TRANSLATED = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)

_KINDS: dict[str, type[Exception]] = {
    "value": ArgumentError,
    "type": ArgumentTypeError,
    "unsupported": NotImplementedError,
}
_MARKED = re.compile(r"\[(value|type|unsupported)\] \w+: ([^\n]+)")
_OURS = re.compile(r"\w+: (expected .*)")

_BOOLS = ("is_causal", "enable_gqa", "rotary_interleaved", "interleaved")
_NUMBERS = ("scale", "softcap", "dropout_p", "eps")
_INTEGERS = ("max_q", "max_k", "num_splits")
_OPTIONAL = (
    "attn_mask", "alibi_slopes", "sinks", "seqused_k", "cu_seq_k", "block_table",
    "cache_batch_idx", "rotary_cos", "rotary_sin", "positions",
)  # fmt: skip
_OTHER = ("window_size",)  # checked where it is read
_DEVICES = ("cpu", "meta")


def translate(error: Exception, function: str, arguments: Mapping[str, object]) -> Exception:
    """Return the exception that the caller of a public function should see.

    Args:
        error: What came from below: an error of our operators, of the dispatcher or of Python.
        function: Name of the public function that was called; it begins the sentence.
        arguments: What the caller gave, by name, in the order of the signature.

    Returns:
        An `ArgumentError`, `ArgumentTypeError` or `NotImplementedError` of one sentence, or `error`
        itself where it is none of ours (out of memory, an interrupted hook, …).
    """
    if marked := _MARKED.search(str(error)):
        return _KINDS[marked[1]](f"{function}: {marked[2].strip()}")
    if isinstance(error, tuple(_KINDS.values())) and (ours := _OURS.match(str(error))):
        return type(error)(f"{function}: {ours[1]}")
    return (
        wrong_type(function, arguments)
        or _unsupported(function, arguments)
        or _mixed_devices(function, arguments)
        or error
    )


def wrong_type(function: str, arguments: Mapping[str, object]) -> Exception | None:
    """Return the error of the first argument of a wrong Python type, None where all are right."""
    for name, value in arguments.items():
        if name in _BOOLS:
            right, rule = isinstance(value, bool), "a bool"
        elif name in _NUMBERS:
            right = isinstance(value, Real | torch.SymFloat) or _is_plain_scalar(value)
            right, rule = right or (value is None and name not in ("dropout_p", "eps")), "a float"
        elif name in _INTEGERS:
            right = isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
            right, rule = right or (value is None and name == "num_splits"), "an int"
        elif name in _OPTIONAL:
            right, rule = value is None or isinstance(value, Tensor), "a torch.Tensor or None"
        elif name in _OTHER:
            continue
        else:
            right, rule = isinstance(value, Tensor), "a torch.Tensor"
        if not right:
            return ArgumentTypeError(
                f"{function}: expected {name} to be {rule}, got {type(value).__name__}"
            )
    return None


def _is_plain_scalar(value: object) -> bool:
    """Whether torch reads this as a number: a tensor of one element that asks for no gradient."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad


def _unsupported(function: str, arguments: Mapping[str, object]) -> Exception | None:
    """What a missing kernel means: a kind of tensor that the operator does not know."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        found = remedy = None
        if tensor.is_nested:
            found = "a nested tensor"
            remedy = "pass its values and offsets to attention_ext.varlen_attn"
        elif tensor.layout != torch.strided:
            found = f"a tensor of layout {tensor.layout}"
            remedy = "call its to_dense() first"
        elif tensor.device.type not in _DEVICES:
            found = f"a tensor on {tensor.device}"
            remedy = "move it with .cpu(), or use torch's own function there"
        if found is not None:
            return NotImplementedError(
                f"{function}: expected {name} to be a dense tensor on the CPU, "
                f"got {found}: {remedy}"
            )
    return None


def _mixed_devices(function: str, arguments: Mapping[str, object]) -> Exception | None:
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    devices = [str(tensor.device) for tensor in tensors.values()]
    if len(set(devices)) < 2:
        return None
    return ArgumentError(
        f"{function}: expected {', '.join(tensors)} on one device, got {', '.join(devices)}"
    )
