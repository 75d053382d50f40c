"""Prompts that the step in C reads: as the model reads them, and the same in whatever pieces they come."""

import pytest
import torch
from tests.decode.fast.test_native import CONFIGS, LLAMA, built, older, quickly, same
from tests.decode.fast.test_native import by_our_kernels as by_our_kernels
from tests.decode.fast.test_native import fresh as fresh
from tests.pairwise import each_once
from torch import Tensor

from weft.decode.engine.paging import BlockStore
from weft.decode.fast import native, stepper
from weft.decode.fast.native_step import NativeStep
from weft.decode.fast.quantize import quantize
from weft.models.presets import llama
from weft.models.transformer import Transformer
from weft.native import compiler

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")


def read_in(model: Transformer, tokens: Tensor, pieces: list[int]) -> tuple[Tensor, Tensor]:
    """Features of a text that is read in pieces of these sizes, and its keys and values."""
    state = model.start(1, tokens.shape[1] + 3)
    step = NativeStep(model, state)
    with torch.inference_mode():
        features = torch.cat([step.read(piece, None).clone() for piece in tokens.split(pieces, dim=1)], dim=1)
    assert state.longest == tokens.shape[1] and state.lengths.tolist() == [tokens.shape[1]]
    return features, state.cache.store


@pytest.mark.parametrize(("name", "bits"), each_once(CONFIGS, [None, "bf16", "int8", "int4"]))
def test_a_prompt_is_read_as_the_model_reads_it(name: str, bits: str | None) -> None:
    model = built(CONFIGS[name])
    if bits is not None:
        quantize(model, bits)
    tokens = torch.arange(37)[None] * 7 % 50
    state = model.start(1, 40)
    with torch.inference_mode():
        expected = model.advance(tokens, state)
    whole, kept = read_in(model, tokens, [37])
    same(expected, whole, bits)
    same(state.cache.store, kept, bits)
    for pieces in ([2, 17, 18], [33, 4]):  # each of them looks at all before it, and is summed up as in one
        again, others = read_in(model, tokens, pieces)
        assert torch.equal(again, whole) and torch.equal(others, kept)
    again, _ = read_in(model, tokens, [1, 9, 1, 26])
    same(whole, again, bits)


def test_a_long_prompt_goes_through_in_parts() -> None:
    config = llama(2, 96, 3, d_ff=160, context=600, vocab_size=50, kv_heads=1)
    model, tokens = built(config), torch.arange(301)[None] * 7 % 50
    quantize(model, "int4")
    whole, kept = read_in(model, tokens, [301])
    for pieces in ([128, 128, 45], [300, 1], [7, 294]):
        again, others = read_in(model, tokens, pieces)
        assert torch.equal(again[:, :300], whole[:, :300]) and torch.equal(others[..., :300, :], kept[..., :300, :])
        same(whole, again, "int4")


@pytest.mark.parametrize("heads", [(96, 3, 1), (80, 2, 2), (32, 4, 2), (160, 2, 1)])  # heads of 32, 40, 8 and 80
def test_heads_of_any_width_look_back(heads: tuple[int, int, int]) -> None:
    width, count, shared = heads
    model = built(llama(2, width, count, d_ff=64, context=200, vocab_size=50, kv_heads=shared))
    tokens = torch.arange(150)[None] * 7 % 50
    state = model.start(1, 150)
    with torch.inference_mode():
        expected = model.advance(tokens, state)
    same(expected, read_in(model, tokens, [70, 80])[0], None)


@pytest.mark.parametrize("flag", older())
def test_processors_that_know_less_read_the_same(flag: str, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    native_flags = () if flag.startswith("-march") else ("-march=native",)
    monkeypatch.setattr(compiler, "TUNING", ((*native_flags, flag),))
    monkeypatch.setattr(compiler, "FLAGS", quickly(*compiler.FLAGS))
    if native.library() is None:
        pytest.skip("a compiler without this flag")
    test_heads_of_any_width_look_back((80, 2, 2))
    test_a_long_prompt_goes_through_in_parts()


def test_rows_of_unequal_length_are_read_together() -> None:
    model = built(LLAMA)
    quantize(model, "int8")
    tokens, lengths = torch.arange(36).view(3, 12) * 7 % 50, torch.tensor([5, 12, 1])
    plain, ours = model.start(3, 24), model.start(3, 24)
    with torch.inference_mode():
        for some in (tokens, tokens.flip(0)):
            expected = model.advance(some, plain, lengths)
            found = NativeStep(model, ours).read(some, lengths)
            for row, length in enumerate(lengths.tolist()):
                same(expected[row, :length], found[row, :length], "int8")
                assert not found[row, length:].any()
    assert ours.lengths.tolist() == plain.lengths.tolist() == [10, 24, 2] and not ours.even


def test_pieces_of_prompts_and_single_tokens_in_blocks_are_read_together() -> None:
    model = built(CONFIGS["tied"])
    quantize(model, "int4")
    size, before, counts = 4, [6, 0, 9], [7, 10, 1]
    store = BlockStore(model, 15, size)
    rows = stepper.native_rows(model, store)
    assert rows is not None
    tables = torch.tensor([[(number + 3 * place) % 15 for place in range(5)] for number in range(3)])
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
        found = rows(torch.cat(embedded), torch.tensor(before), tables, torch.tensor(counts))
    assert torch.equal(found, torch.cat(expected))
