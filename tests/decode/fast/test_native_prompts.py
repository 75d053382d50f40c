"""Prompts read in C equal those that the model reads, and do not depend on how they are split."""

import pytest
import torch
from tests.decode.fast.helpers import OLDER_CPUS, amplified
from tests.decode.fast.test_native import CONFIGS, LLAMA, assert_same
from tests.pairwise import each_once
from torch import Tensor

from weft.decode.engine.paging import BlockStore
from weft.decode.fast import native
from weft.decode.fast.native_step import NativeStep, native_decoder
from weft.models.presets import llama
from weft.models.transformer import Transformer

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="no C compiler"),
    pytest.mark.usefixtures("prefer_native"),
]


def read_in(model: Transformer, tokens: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Features of a text that is read in pieces of these sizes, and its keys and values."""
    state = model.start(1, tokens.shape[1] + 3)
    step = NativeStep(model, state)
    with torch.inference_mode():
        features = torch.cat([step.read(piece, None).clone() for piece in tokens.split(sizes, dim=1)], dim=1)
    assert state.longest == tokens.shape[1] and state.lengths.tolist() == [tokens.shape[1]]
    return features, state.cache.store


@pytest.mark.parametrize(("name", "bits"), each_once(CONFIGS, [None, "bf16", "int8", "int4"]))
def test_a_prompt_equals_the_models(name: str, bits: str | None) -> None:
    model = amplified(CONFIGS[name], bits)
    tokens = torch.arange(37)[None] * 7 % 50
    state = model.start(1, 40)
    with torch.inference_mode():
        expected = model.advance(tokens, state)
    features, store = read_in(model, tokens, [37])
    assert_same(features, expected, bits)
    assert_same(store, state.cache.store, bits)
    for sizes in ([2, 17, 18], [33, 4]):  # each piece attends to all before it, summed in the same order
        other_features, other_store = read_in(model, tokens, sizes)
        assert torch.equal(other_features, features) and torch.equal(other_store, store)
    assert_same(read_in(model, tokens, [1, 9, 1, 26])[0], features, bits)


@pytest.mark.parametrize("window", [None, 70])
def test_a_prompt_longer_than_a_step_of_c(window: int | None) -> None:
    config = llama(2, 96, 3, d_ff=160, context=600, vocab_size=50, kv_heads=1)
    config = config.replace(attention=config.attention.replace(window=window, sinks=window is not None))
    model, tokens = amplified(config, "int4"), torch.arange(301)[None] * 7 % 50
    features, store = read_in(model, tokens, [301])
    state = model.start(1, 301)
    with torch.inference_mode():
        assert_same(features, model.advance(tokens, state), "int4")
    for sizes in ([128, 128, 45], [300, 1], [7, 294]):
        other, other_store = read_in(model, tokens, sizes)
        assert torch.equal(other[:, :300], features[:, :300])
        assert torch.equal(other_store[..., :300, :], store[..., :300, :])
        assert_same(other, features, "int4")


@pytest.mark.parametrize(
    ("d_model", "heads", "kv_heads"), [(96, 3, 1), (80, 2, 2), (32, 4, 2), (160, 2, 1), (90, 5, 1)]
)
def test_heads_of_any_width(d_model: int, heads: int, kv_heads: int) -> None:
    """d_head is 32, 40, 8, 80 and 18."""
    model = amplified(llama(2, d_model, heads, d_ff=64, context=200, vocab_size=50, kv_heads=kv_heads))
    tokens = torch.arange(150)[None] * 7 % 50
    state = model.start(1, 150)
    with torch.inference_mode():
        expected = model.advance(tokens, state)
    assert_same(read_in(model, tokens, [70, 80])[0], expected, None)


@pytest.mark.slow
@pytest.mark.parametrize("older_cpu", OLDER_CPUS, indirect=True)
def test_older_cpus(older_cpu: None) -> None:
    test_heads_of_any_width(80, 2, 2)
    test_a_prompt_longer_than_a_step_of_c(None)


def test_rows_of_unequal_length() -> None:
    model = amplified(LLAMA, "int8")
    tokens, lengths = torch.arange(36).view(3, 12) * 7 % 50, torch.tensor([5, 12, 1])
    plain, fast = model.start(3, 24), model.start(3, 24)
    with torch.inference_mode():
        for batch in (tokens, tokens.flip(0)):
            expected = model.advance(batch, plain, lengths)
            found = NativeStep(model, fast).read(batch, lengths)
            for row, length in enumerate(lengths.tolist()):
                assert_same(found[row, :length], expected[row, :length], "int8")
                assert not found[row, length:].any()
    assert fast.lengths.tolist() == plain.lengths.tolist() == [10, 24, 2] and not fast.even


def test_chunks_of_prompts_and_single_tokens_in_blocks() -> None:
    model = amplified(CONFIGS["tied"], "int4")
    size, before, counts = 4, [6, 0, 9], [7, 10, 1]
    store = BlockStore(model, 15, size)
    decoder = native_decoder(model, store)
    assert decoder is not None
    tables = torch.tensor([[(number + 3 * block) % 15 for block in range(5)] for number in range(3)])
    expected, embedded = [], []
    with torch.inference_mode():
        for table, first, count in zip(tables, before, counts, strict=True):
            text, state = torch.arange(first + count)[None] * 7 % 50 + 1, model.start(1, 20)
            step = NativeStep(model, state)
            if first:
                step.read(text[:, :first], None)
            for block, number in enumerate(table.tolist()):
                store.data[:, number] = state.cache.store[:, :, 0, :, block * size :][:, :, :, :size]
            expected.append(step.read(text[:, first:], None)[0].clone())
            embedded.append(model.embed(text[0, first:], model.embedding))
        found = decoder(torch.cat(embedded), torch.tensor(before), tables, counts=torch.tensor(counts))
    assert torch.equal(found, torch.cat(expected))
