"""A whole decode step under torch.compile: one graph, however long the rows are."""

import pytest
import torch
from decoders import OPTIONS, make_decoder, random_ids
from torch._dynamo.testing import CompileCounterWithBackend

from attention_ext.nn import KVCache, PagedKVCache

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

KINDS = {
    "contiguous": lambda config: KVCache(config, 3, 20),
    "pages": lambda config: PagedKVCache(config, 3, 12, page_size=5),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def prefill(decoder, kind):
    """A cache with ragged rows."""
    cache = kind(decoder.config)
    generator = torch.Generator().manual_seed(1)
    for row, length in ((0, 3), (1, 1), (2, 6)):
        ids = torch.randint(64, (1, length), generator=generator)
        decoder(ids, cache=cache.rows([row]))
    return cache


def compiled_step(decoder, backend="aot_eager"):
    """A compiled step and the counter of its compilations."""
    counter = CompileCounterWithBackend(backend)

    def step(ids, cache):
        return decoder(ids, cache=cache)

    return torch.compile(step, fullgraph=True, backend=counter), counter


@every_kind
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("default", torch.no_grad),
        ("default", torch.enable_grad),
        ("default", torch.inference_mode),
        ("partial rope", torch.inference_mode),
        ("everything", torch.inference_mode),
        ("like gpt-2", torch.inference_mode),
        ("qk norm", torch.no_grad),
    ],
)
def test_steps_compile_once_as_rows_grow(kind, name, mode):
    decoder = make_decoder(**OPTIONS[name])
    caches = [prefill(decoder, kind) for _ in range(2)]
    if isinstance(caches[0], PagedKVCache):
        caches[0].reserve(12)
    step, counter = compiled_step(decoder)
    with mode():
        for ids in random_ids(3, 12).split(1, dim=1):
            logits = step(ids, caches[0])
            torch.testing.assert_close(logits, decoder(ids, cache=caches[1]))
    assert counter.frame_count == 1
    assert caches[0].seqlens.tolist() == caches[1].seqlens.tolist() == [15, 13, 18]


def test_inductor_compiles_a_step():
    decoder = make_decoder(num_key_value_heads=2)
    caches = [prefill(decoder, KINDS["contiguous"]) for _ in range(2)]
    step, counter = compiled_step(decoder, "inductor")
    with torch.inference_mode():
        for ids in random_ids(3, 4).split(1, dim=1):
            torch.testing.assert_close(step(ids, caches[0]), decoder(ids, cache=caches[1]))
    assert counter.frame_count == 1
    torch.testing.assert_close(caches[0].keys, caches[1].keys)


def test_rows_that_join_and_leave_compile_once_per_number_of_rows():
    decoder = make_decoder()
    cache = KVCache(decoder.config, 4, 20)
    plain = KVCache(decoder.config, 4, 20)
    step, counter = compiled_step(decoder)
    with torch.no_grad():
        for rows in ([0, 1], [1, 3], [3, 0], [2, 1]):
            ids = random_ids(2, 1)
            logits = step(ids, cache.rows(rows))
            torch.testing.assert_close(logits, decoder(ids, cache=plain.rows(rows)))
    assert cache.seqlens.tolist() == plain.seqlens.tolist() == [2, 3, 1, 2]
    assert counter.frame_count == 1


def test_pages_taken_by_compiled_and_plain_steps_are_told_apart():
    decoder = make_decoder()
    cache = PagedKVCache(decoder.config, 1, 10, page_size=2)
    step, _ = compiled_step(decoder)
    ids = random_ids(1, 9)
    with torch.no_grad():
        parts = [decoder(ids[:, :2], cache=cache)]
        cache.reserve(3)
        parts += [step(ids[:, place : place + 1], cache) for place in (2, 3, 4)]
        parts.append(decoder(ids[:, 5:], cache=cache))
        torch.testing.assert_close(torch.cat(parts, 1), decoder(ids))
    assert cache.pages_in_use == 5


@every_kind
def test_a_compiled_step_without_room_leaves_the_lengths(kind):
    decoder = make_decoder()
    cache = prefill(decoder, kind)
    if isinstance(cache, KVCache):
        decoder(random_ids(1, 14), cache=cache.rows([2]))
    else:
        decoder(random_ids(1, 4), cache=cache.rows([2]))  # 10 positions fill two pages
    before = cache.seqlens.clone(), cache.keys.clone()
    step, _ = compiled_step(decoder)
    with torch.no_grad(), pytest.raises(RuntimeError, match="attention_with_kv_cache: expected"):
        step(random_ids(3, 1), cache)
    assert torch.equal(cache.seqlens, before[0])
    assert torch.equal(cache.keys, before[1])
