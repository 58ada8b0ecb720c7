"""Where to compute: device, number type and threads, each with the reason for the choice."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_ext.nn import Decoder
from attention_ext.nn.attention import Attention, AttentionCall

from .errors import UsageError

CALIBRATION_STEPS = 3
HOPELESS = 3.0  # times the best so far: a number of threads that is not measured any further


@dataclass(frozen=True)
class Choice:
    """A value and the reason for it."""

    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"


def choose_device(requested: str) -> Choice:
    """The device that ``--device`` means; auto is the only one that the operator has kernels for.

    Raises:
        UsageError: CUDA is asked for, and there is none or no kernel for it.
    """
    if requested == "cpu":
        return Choice("cpu", "asked for")
    if requested == "auto":
        return Choice("cpu", "this version of attention_ext has CPU kernels only")
    if not torch.cuda.is_available():
        raise UsageError(f"device {requested}: torch {torch.__version__} finds no CUDA device here")
    raise UsageError(f"device {requested}: this version of attention_ext has CPU kernels only")


def choose_dtype(requested: str) -> Choice:
    """The number type of the products that ``--dtype`` means; auto is float32.

    Without instructions for it a bfloat16 product takes ten times as long as a float32 one; with
    them a step of the tiny preset still takes 118 ms instead of 92 (one Xeon core with
    avx512_bf16, 2026-11): its matrices are too small to pay for the conversions.
    """
    if requested != "auto":
        return Choice(requested, "asked for")
    if has_bfloat16_instructions():
        return Choice("float32", "exact; bfloat16 may be faster for wide models on this CPU")
    return Choice("float32", "this CPU has no instructions for bfloat16")


def has_bfloat16_instructions() -> bool:
    """Whether the CPU multiplies bfloat16 matrices itself, as far as torch can tell."""
    test = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(test and test())


def autocast(dtype: str) -> AbstractContextManager[object]:
    """The context in which a decoder with float32 weights computes products in ``dtype``."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, dtype))


def num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_threads(requested: str) -> Choice:
    """Sets the threads that ``--threads`` names; auto leaves torch's own number."""
    if requested == "auto":
        return Choice(str(torch.get_num_threads()), "torch's own choice")
    torch.set_num_threads(int(requested))
    return Choice(requested, "asked for")


def calibrate_threads(step: Callable[[], object]) -> Choice:
    """Sets the number of threads with which ``step`` is fastest: all cores, half of them, or one.

    On a machine with other work more threads can be many times slower: they wait for each other at
    every operation, and one of them may not be running.

    Args:
        step: does a step's work, leaving everything as it was.
    """
    cores = num_cores()
    times: dict[int, float] = {}
    for threads in sorted({1, max(1, cores // 2), cores}):
        torch.set_num_threads(threads)
        taken = [_time(step)]  # the first one starts the threads, and tells whether they are of use
        if taken[0] < HOPELESS * min(times.values(), default=math.inf):
            taken = [_time(step) for _ in range(CALIBRATION_STEPS)]
        times[threads] = sum(taken) / len(taken)
    best = min(times, key=lambda threads: times[threads])
    torch.set_num_threads(best)
    measured = ", ".join(f"{1000 * taken:.0f} ms with {n}" for n, taken in times.items())
    return Choice(str(best), f"measured: {measured}")


def keep_freed_memory() -> None:
    """Makes glibc keep what is freed for the next allocation of this process.

    It would give large blocks back to the system at once and get them anew, page by page: 2,200
    page faults and 3 of 86 ms in each step of the tiny preset, for logits and activations; with
    this 20 and 0 (one Xeon core, 2026-11). Other C libraries lack the call or refuse it.
    """
    trim_threshold, mmap_threshold = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


def attention_share(
    step: Callable[[], object], decoder: Decoder, batch_size: int, context: int
) -> float:
    """The part of a training step's time that attention takes, measured alone at its sizes."""
    heads = decoder.config.heads
    call = AttentionCall(alibi_slopes=None if decoder.alibi is None else decoder.alibi.table)
    layers = [module for module in decoder.modules() if isinstance(module, Attention)]
    generator = torch.Generator().manual_seed(0)  # torch's own belongs to the run

    def draw(count: int, width: int) -> Tensor:
        shape = (batch_size, count, context, width)
        return torch.randn(shape, generator=generator, requires_grad=True)

    query = draw(heads.num_heads, heads.head_dim)
    key, value = draw(heads.num_kv_heads, heads.head_dim), draw(heads.num_kv_heads, heads.value_dim)

    def attend() -> None:
        for layer in layers:
            output = layer.attend(query, key, value, call)
            torch.autograd.grad(output, (query, key, value), output.detach())

    with torch.random.fork_rng(devices=[]):  # for dropout
        alone = min(_time(attend) for _ in range(CALIBRATION_STEPS))
        whole = min(_time(step) for _ in range(CALIBRATION_STEPS))
    return min(1.0, alone / whole)


def _time(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
