"""A step of fixed shape over the blocks of a pool gives what the plain one gives, whatever the number of rows."""

import copy
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.decode.small import VOCAB, Asking, decoder

from weft.decode.config import Sampling
from weft.decode.engine.engine import Limits
from weft.decode.engine.paging import BlockStore, CacheBits
from weft.decode.fast.cuda import Chunk
from weft.decode.fast.cuda_graphs import PagedGraphs
from weft.decode.fast.stepper import cuda_fast_path, paged_graphs
from weft.decode.generate import generate
from weft.models.build import build
from weft.models.presets import llama
from weft.models.transformer import Transformer
from weft.nn.config import Attention, LayerNorm
from weft.nn.position_config import ALiBi, DynamicNTK, Learned, Rotary
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

KINDS: dict[str, dict[str, object]] = {
    "rotary": {},
    "learned": {"position": Learned(), "norm": LayerNorm()},
    "shared, window": {"attention": Attention(heads=4, kv_heads=2, window=5)},
    "alibi": {"position": ALiBi()},
}


def graphs_of(model: Transformer, numbers: Sequence[Sequence[int]], blocks: int, block_size: int) -> PagedGraphs:
    """Steps over a pool in which the text in slot i has the blocks numbers[i]."""
    graphs = PagedGraphs(model, BlockStore(model, blocks, block_size), len(numbers), kernels=False)
    graphs.place({(slot, n): int(number) for slot, row in enumerate(numbers) for n, number in enumerate(row)})
    return graphs


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_rows_of_a_pool_step_as_alone(kind: str) -> None:
    model = decoder(context=64, **KINDS[kind])
    assert model.decoder is not None
    graphs = graphs_of(model, np.random.default_rng(0).permutation(30).reshape(3, 10).tolist(), 30, 4)
    texts = torch.randint(VOCAB, (3, 33))
    plain = [model.start(1, 40) for _ in range(3)]
    ends = [33, 20, 11]
    for place in range(33):
        slots = [row for row in (2, 0, 1) if place < ends[row]]  # three rows, two, and at last one
        found = graphs.step(slots, [place] * len(slots), [int(texts[row, place]) for row in slots])
        for row, features in zip(slots, found, strict=True):
            expected = model.advance(texts[row : row + 1, place : place + 1], plain[row])[0, -1]
            torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)
    assert set(graphs.shapes) == {(4, 16), (2, 16), (1, 16)}


@torch.inference_mode()
def test_rows_of_unequal_lengths_and_those_that_only_fill_up() -> None:
    model = decoder()
    graphs = graphs_of(model, np.arange(15).reshape(3, 5).tolist(), 20, 4)
    texts, reads = torch.randint(VOCAB, (3, 17)), [16, 3, 7]
    for row, read in enumerate(reads):
        for place in range(read):
            graphs.step([row], [place], [int(texts[row, place])])
    before = graphs.store.data[:, 15:20].clone()
    graphs.keep([2, 0], texts[[2, 0], [7, 16]])  # those two are known to the device alone
    found = graphs.step([0, 1, 2], reads, [-1, int(texts[1, 3]), -1])
    for row, read in enumerate(reads):
        expected = model.features(texts[row : row + 1, : read + 1])[0, -1]
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(graphs.store.data[:, 15:20], before)  # nobody's blocks stay nobody's


def test_positions_that_stretch_are_left_to_the_plain_way() -> None:
    model = decoder()
    assert paged_graphs(model, BlockStore(model, 4, 16), 2) is None  # it is not on a GPU
    model = decoder(position=Rotary(scaling=DynamicNTK(factor=2.0)))
    assert paged_graphs(model, BlockStore(model, 5, 13), 2) is None


def shouting(model: Transformer) -> Transformer:
    """Fresh weights give almost even logits; make the choices decided ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model


def on_gpu(kind: str, vocab_size: int) -> Transformer:
    torch.manual_seed(0)
    if kind == "fast path":
        model = build(llama(2, 128, 4, 256, 512, vocab_size=vocab_size, kv_heads=2))
        return shouting(model).to("cuda", torch.bfloat16).eval()
    return shouting(decoder(vocab_size=vocab_size, context=256, **KINDS[kind])).cuda()


@torch.inference_mode()
def shortfall(model: Transformer, prompt: list[int], ids: list[int]) -> float:
    """How far what was chosen lies below the likeliest at most, in standard deviations of the logits, where a float32
    model reads the whole text at once."""
    exact = copy.deepcopy(model).float()
    logits = exact.head(exact.features(torch.tensor([ids[:-1]], device="cuda")))[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(ids[len(prompt) :], device="cuda")[:, None])[:, 0]
    return float(((logits.amax(-1) - chosen) / logits.std(-1)).max())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fast path", "fast path, 8 bits", *KINDS])
def test_the_engine_on_a_gpu_writes_what_each_text_alone_gets(kind: str) -> None:
    tokenizer = build_tokenizer(Byte(), [])
    bits: CacheBits | None = "int8" if kind == "fast path, 8 bits" else None
    kind = kind.removesuffix(", 8 bits")
    model = on_gpu(kind, tokenizer.vocab_size)
    engine = Asking(model, tokenizer, Limits(blocks=256, block_size=4, rows=8, prefill=16, bits=bits))
    graphs = engine.manager.graphs
    assert graphs is not None
    prompts = [list(range(1, 2 + 5 * row)) for row in range(12)]
    prompts += [[*range(1, 30), row] for row in range(6)]  # these begin alike
    settings = [
        Sampling(max_tokens=20 + n) if n % 3 == 1 else Sampling(temperature=0.0, max_tokens=20 + n)
        for n in range(len(prompts))
    ]
    requests = [engine.ask(*each, seed=n) for n, each in enumerate(zip(prompts, settings, strict=True))]
    most = 0
    while engine.step():
        most = max(most, *(request.ahead for request in requests))
    assert most == 1
    assert engine.counts.shared
    assert any(shape.captured for shape in graphs.shapes.values())
    assert (graphs.kernels is not None) == (kind == "fast path")
    # sums of other order may tip a close choice, more so in 16 bits; a wrong block would tip them all
    for prompt, request, each in zip(prompts, requests, settings, strict=True):
        if each.greedy:
            assert shortfall(model, prompt, request.ids) < (0.5 if kind == "fast path" else 0.01)
    if kind != "fast path":
        drawn = range(1, len(prompts), 3)
        alone = {n: [token.id for token in generate(model, [prompts[n]], settings[n], seeds=[n])] for n in drawn}
        assert sum(requests[n].ids[len(prompts[n]) :] == alone[n] for n in drawn) >= len(drawn) - 2


@pytest.mark.gpu
@torch.inference_mode()
def test_the_kernels_read_blocks_as_they_read_one_piece() -> None:
    torch.manual_seed(0)
    model = build(llama(2, 128, 4, 256, 512, vocab_size=100, kv_heads=2)).to("cuda", torch.bfloat16).eval()
    graphs = paged_graphs(model, BlockStore(model, 200, 16), 3)
    assert graphs is not None and graphs.kernels is not None
    numbers = np.random.default_rng(0).permutation(200)[:120].reshape(3, 40).tolist()
    graphs.place({(slot, n): number for slot, row in enumerate(numbers) for n, number in enumerate(row)})
    tokens = torch.randint(100, (3, 300), device="cuda")
    one = cuda_fast_path(model, model.start(3, 320))
    assert one is not None
    for place in range(300):
        found = graphs.step([0, 1, 2], [place] * 3, tokens[:, place].tolist())
        logits, expected = model.head(found.unsqueeze(1))[:, 0], one.step(tokens[:, place : place + 1])
        torch.testing.assert_close(logits, expected.to(logits), atol=0.02, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [None, "int8"])
@pytest.mark.parametrize(("heads", "kv_heads", "d_head"), [(4, 4, 32), (4, 2, 64), (4, 1, 128), (2, 2, 256)])
@torch.inference_mode()
def test_chunks_of_many_prompts_beside_a_step(heads: int, kv_heads: int, d_head: int, bits: CacheBits | None) -> None:
    """Against the model's own features of whole texts, in float32."""
    torch.manual_seed(0)
    exact = build(llama(2, heads * d_head, heads, 256, 2048, vocab_size=100, kv_heads=kv_heads)).cuda().eval()
    model = copy.deepcopy(exact).bfloat16()
    graphs = paged_graphs(model, BlockStore(model, 500, 16, bits), 5)
    assert graphs is not None and graphs.kernels is not None
    graphs.store.data.random_(-100, 100)  # what nobody has written must not be seen
    if graphs.store.scales is not None:
        graphs.store.scales.fill_(1.0)
    numbers = np.random.default_rng(0).permutation(500).reshape(5, 100).tolist()
    graphs.place({(slot, n): number for slot, row in enumerate(numbers) for n, number in enumerate(row)})
    lengths = [700, 129, 33, 1, 400]
    texts = [torch.randint(100, (length + 1,)).tolist() for length in lengths]
    reads = [0] * 5
    for share in (0.3, 0.31, 0.9, 1.0):
        ends = [max(1, int(share * length)) for length in lengths]
        chunks = [Chunk(n, reads[n], texts[n][reads[n] : end]) for n, end in enumerate(ends) if end > reads[n] + 1]
        rows = [n for n, end in enumerate(ends) if end == reads[n] + 1]
        given = rows, [reads[n] for n in rows], [texts[n][reads[n]] for n in rows]
        found = graphs.together(given, chunks)
        for n, features in zip([*rows, *(chunk.slot for chunk in chunks)], found, strict=True):
            expected = exact.features(torch.tensor([texts[n][: ends[n]]], device="cuda"))[0, -1]
            torch.testing.assert_close(features.float(), expected, atol=0.06, rtol=0.05)
            reads[n] = ends[n]
    graphs.keep(range(5), torch.tensor([text[-1] for text in texts], device="cuda"))
    found = graphs.step(range(5), lengths, [-1] * 5)
    for text, features in zip(texts, found, strict=True):
        expected = exact.features(torch.tensor([text], device="cuda"))[0, -1]
        torch.testing.assert_close(features.float(), expected, atol=0.06, rtol=0.05)


@pytest.mark.gpu
def test_a_full_batch_on_a_gpu_with_a_shared_prefix() -> None:
    """Every size of step on the way down from 256 rows, chunks beside them, and blocks that are handed on."""
    tokenizer = build_tokenizer(Byte(), [])
    model = on_gpu("fast path", tokenizer.vocab_size)
    rng = random.Random(0)
    opening = [rng.randrange(256) for _ in range(64)]
    prompts = [opening + [rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(300)]
    settings = [Sampling(temperature=0.0, max_tokens=rng.randint(1, 40)) for _ in prompts]
    engine = Asking(model, tokenizer, Limits(blocks=1500, rows=256, prefill=512))
    requests = [engine.ask(*each) for each in zip(prompts, settings, strict=True)]
    engine.run()
    assert engine.counts.shared >= 299 * 64
    assert all(shortfall(model, *each) < 0.5 for each in zip(prompts, [one.ids for one in requests], strict=True))
    assert engine.manager.pool.free_blocks == 1500
