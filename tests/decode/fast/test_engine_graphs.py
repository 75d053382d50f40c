"""A step of fixed shape over a paged cache returns what the plain step returns, for any number of rows."""

import copy
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.decode.fast.helpers import build_transformer, sharpen
from tests.decode.small import VOCAB, Asking, decoder

from weft.decode.config import Sampling
from weft.decode.engine.engine import EngineLimits
from weft.decode.engine.paging import BlockStore, CacheBits
from weft.decode.fast.cuda import CUDAFastPath, PromptChunk
from weft.decode.fast.cuda_graphs import PagedGraphs, paged_graphs
from weft.decode.generate import generate
from weft.models.presets import llama
from weft.models.transformer import Transformer
from weft.nn.config import Attention, Experts, LayerNorm
from weft.nn.position_config import ALiBi, DynamicNTK, Learned, Rotary
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

KINDS: dict[str, dict[str, object]] = {
    "rotary": {},
    "learned": {"position": Learned(), "norm": LayerNorm()},
    "grouped-query, window": {"attention": Attention(heads=4, kv_heads=2, window=5)},
    "alibi": {"position": ALiBi()},
}


def set_tables(graphs: PagedGraphs, tables: Sequence[Sequence[int]]) -> None:
    """Give the text in slot i the blocks tables[i]."""
    graphs.update_tables({(slot, n): block for slot, row in enumerate(tables) for n, block in enumerate(row)})


def random_tables(blocks: int, slots: int, width: int) -> list[list[int]]:
    return np.random.default_rng(0).permutation(blocks)[: slots * width].reshape(slots, width).tolist()


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_rows_of_a_pool_step_as_alone(kind: str) -> None:
    model = decoder(context=64, **KINDS[kind])
    graphs = PagedGraphs(model, BlockStore(model, 30, 4), 3, kernels=False)
    set_tables(graphs, random_tables(30, 3, 10))
    texts = torch.randint(VOCAB, (3, 33))
    plain = [model.start(1, 40) for _ in range(3)]
    ends = [33, 20, 11]
    for position in range(33):
        slots = [row for row in (2, 0, 1) if position < ends[row]]  # three rows, then two, then one
        features = graphs.step(slots, [position] * len(slots), [int(texts[row, position]) for row in slots])
        for row, found in zip(slots, features, strict=True):
            expected = model.advance(texts[row : row + 1, position : position + 1], plain[row])[0, -1]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert set(graphs.steps) == {(4, 16), (2, 16), (1, 16)}


@torch.inference_mode()
def test_rows_of_unequal_lengths_and_padding_rows() -> None:
    model = decoder()
    graphs = PagedGraphs(model, BlockStore(model, 20, 4), 3, kernels=False)
    set_tables(graphs, np.arange(15).reshape(3, 5).tolist())
    texts, lengths = torch.randint(VOCAB, (3, 17)), [16, 3, 7]
    for row, length in enumerate(lengths):
        for position in range(length):
            graphs.step([row], [position], [int(texts[row, position])])
    before = graphs.store.data[:, 15:20].clone()
    graphs.set_newest([2, 0], texts[[2, 0], [7, 16]])  # only the device knows these two
    features = graphs.step([0, 1, 2], lengths, [-1, int(texts[1, 3]), -1])
    for row, length in enumerate(lengths):
        expected = model.features(texts[row : row + 1, : length + 1])[0, -1]
        torch.testing.assert_close(features[row], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(graphs.store.data[:, 15:20], before)  # blocks of no text are unchanged


def test_unsupported_devices_and_positions() -> None:
    model = decoder()
    assert paged_graphs(model, BlockStore(model, 4, 16), 2) is None  # not on a GPU
    model = decoder(position=Rotary(scaling=DynamicNTK(factor=2.0)))
    assert paged_graphs(model, BlockStore(model, 5, 13), 2) is None


def on_gpu(kind: str, vocab_size: int) -> Transformer:
    if kind in ("fast path", "experts"):
        config = llama(2, 128, 4, d_ff=256, context=512, vocab_size=vocab_size, kv_heads=2)
        config = config.replace(feedforward=Experts(experts=8, d_ff=128)) if kind == "experts" else config
        return sharpen(build_transformer(config)).to("cuda", torch.bfloat16)
    return sharpen(decoder(vocab_size=vocab_size, context=256, **KINDS[kind])).cuda()


@torch.inference_mode()
def shortfall(model: Transformer, prompt: list[int], ids: list[int], quantile: float = 1.0) -> float:
    """Quantile of the gap of chosen tokens to the likeliest, in standard deviations of a float32 model's logits."""
    exact = copy.deepcopy(model).float()
    logits = exact.head(exact.features(torch.tensor([ids[:-1]], device="cuda")))[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(ids[len(prompt) :], device="cuda")[:, None])[:, 0]
    return float(((logits.amax(-1) - chosen) / logits.std(-1)).quantile(quantile))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fast path", "fast path, 8 bits", "experts", *KINDS])
def test_the_engine_on_a_gpu_writes_what_each_text_alone_gets(kind: str) -> None:
    tokenizer = build_tokenizer(Byte(), [])
    bits: CacheBits | None = "int8" if kind == "fast path, 8 bits" else None
    kind = kind.removesuffix(", 8 bits")
    model = on_gpu(kind, tokenizer.vocab_size)
    engine = Asking(model, tokenizer, EngineLimits(blocks=256, block_size=4, rows=8, prefill=16, bits=bits))
    graphs = engine.manager.graphs
    assert graphs is not None
    prompts = [list(range(1, 2 + 5 * row)) for row in range(12)]
    prompts += [[*range(1, 30), row] for row in range(6)]  # with a common prefix
    settings = [Sampling(temperature=float(n % 3 == 1), max_tokens=20 + n) for n in range(len(prompts))]
    requests = [engine.ask(prompt, settings[n], seed=n) for n, prompt in enumerate(prompts)]
    max_ahead = 0
    while engine.step():
        max_ahead = max(max_ahead, *(request.ahead for request in requests))
    assert max_ahead == 1
    assert engine.counts.shared
    assert any(step.captured for step in graphs.steps.values())
    in_16_bits = kind in ("fast path", "experts")
    assert (graphs.kernels is not None) == in_16_bits
    # another order of summation may tip a close choice, in 16 bits more often; a wrong block would tip them all
    for prompt, request, sampling in zip(prompts, requests, settings, strict=True):
        if sampling.greedy:
            quantile = 0.8 if kind == "experts" else 1.0  # a close choice of an expert changes a token much
            assert shortfall(model, prompt, request.ids, quantile) < (0.5 if in_16_bits else 0.01)
    if not in_16_bits:
        sampled = range(1, len(prompts), 3)
        alone = {n: [token.id for token in generate(model, [prompts[n]], settings[n], seeds=[n])] for n in sampled}
        assert sum(requests[n].ids[len(prompts[n]) :] == alone[n] for n in sampled) >= len(sampled) - 2


@pytest.mark.gpu
@torch.inference_mode()
def test_the_kernels_read_blocks_as_they_read_a_contiguous_cache() -> None:
    config = llama(2, 128, 4, d_ff=256, context=512, vocab_size=100, kv_heads=2)
    model = build_transformer(config).to("cuda", torch.bfloat16)
    graphs = paged_graphs(model, BlockStore(model, 200, 16), 3)
    assert graphs is not None and graphs.kernels is not None
    set_tables(graphs, random_tables(200, 3, 40))
    tokens = torch.randint(100, (3, 300), device="cuda")
    contiguous = CUDAFastPath(model, model.start(3, 320))
    for position in range(300):
        features = graphs.step([0, 1, 2], [position] * 3, tokens[:, position].tolist())
        logits, expected = model.head(features.unsqueeze(1))[:, 0], contiguous.step(tokens[:, position : position + 1])
        torch.testing.assert_close(logits, expected.to(logits), atol=0.02, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [None, "int8"])
@pytest.mark.parametrize(("heads", "kv_heads", "d_head"), [(4, 4, 32), (4, 2, 64), (4, 1, 128), (2, 2, 256)])
@torch.inference_mode()
def test_chunks_of_many_prompts_beside_a_step(heads: int, kv_heads: int, d_head: int, bits: CacheBits | None) -> None:
    """Compare with the model's features of whole texts, in float32."""
    config = llama(2, heads * d_head, heads, d_ff=256, context=2048, vocab_size=100, kv_heads=kv_heads)
    exact = build_transformer(config).cuda()
    model = copy.deepcopy(exact).bfloat16()
    graphs = paged_graphs(model, BlockStore(model, 500, 16, bits=bits), 5)
    assert graphs is not None and graphs.kernels is not None
    graphs.store.data.random_(-100, 100)  # unwritten memory must not matter
    if graphs.store.scales is not None:
        graphs.store.scales.fill_(1.0)
    set_tables(graphs, random_tables(500, 5, 100))
    lengths = [700, 129, 33, 1, 400]
    texts = [torch.randint(100, (length + 1,)).tolist() for length in lengths]
    read = [0] * 5
    for share in (0.3, 0.31, 0.9, 1.0):
        ends = [max(1, int(share * length)) for length in lengths]
        chunks = [PromptChunk(n, read[n], texts[n][read[n] : end]) for n, end in enumerate(ends) if end > read[n] + 1]
        rows = [n for n, end in enumerate(ends) if end == read[n] + 1]
        features = graphs.step_and_prefill((rows, [read[n] for n in rows], [texts[n][read[n]] for n in rows]), chunks)
        for n, found in zip([*rows, *(chunk.slot for chunk in chunks)], features, strict=True):
            expected = exact.features(torch.tensor([texts[n][: ends[n]]], device="cuda"))[0, -1]
            torch.testing.assert_close(found.float(), expected, atol=0.06, rtol=0.05)
            read[n] = ends[n]
    graphs.set_newest(range(5), torch.tensor([text[-1] for text in texts], device="cuda"))
    for text, found in zip(texts, graphs.step(range(5), lengths, [-1] * 5), strict=True):
        expected = exact.features(torch.tensor([text], device="cuda"))[0, -1]
        torch.testing.assert_close(found.float(), expected, atol=0.06, rtol=0.05)


@pytest.mark.gpu
def test_a_full_batch_on_a_gpu_with_a_shared_prefix() -> None:
    """Every batch size on the way down from 256 rows, chunks beside them, and blocks that are reused."""
    tokenizer = build_tokenizer(Byte(), [])
    model = on_gpu("fast path", tokenizer.vocab_size)
    rng = random.Random(0)
    prefix = [rng.randrange(256) for _ in range(64)]
    prompts = [prefix + [rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(300)]
    settings = [Sampling(temperature=0.0, max_tokens=rng.randint(1, 40)) for _ in prompts]
    engine = Asking(model, tokenizer, EngineLimits(blocks=1500, rows=256, prefill=512))
    requests = [engine.ask(prompt, sampling) for prompt, sampling in zip(prompts, settings, strict=True)]
    engine.run()
    assert engine.counts.shared >= 299 * 64
    for prompt, request in zip(prompts, requests, strict=True):
        assert shortfall(model, prompt, request.ids) < 0.5
    assert engine.manager.pool.free_blocks == 1500
