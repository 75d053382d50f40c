"""A step of fixed shape over the blocks of a pool gives what the plain one gives, whatever the number of rows."""

import numpy as np
import pytest
import torch
from tests.decode.small import VOCAB, decoder

from weft.decode.config import Sampling
from weft.decode.engine.engine import Engine, Limits
from weft.decode.engine.paging import BlockStore
from weft.decode.fast.engine_graphs import PagedGraphs
from weft.decode.fast.stepper import cuda_fast_path, paged_graphs
from weft.decode.generate import generate
from weft.models.build import build
from weft.models.presets import llama
from weft.models.transformer import Transformer
from weft.nn.config import ALiBi, Attention, LayerNorm, Learned, Rotary
from weft.nn.scaling import DynamicNTK
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

KINDS: dict[str, dict[str, object]] = {
    "rotary": {},
    "learned": {"position": Learned(), "norm": LayerNorm()},
    "shared, window": {"attention": Attention(heads=4, kv_heads=2, window=5)},
    "alibi": {"position": ALiBi()},
}


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_rows_of_a_pool_step_as_alone(kind: str) -> None:
    model = decoder(context=64, **KINDS[kind])
    assert model.decoder is not None
    step = PagedGraphs(model, BlockStore(model, 30, 4), lambda state: None)
    numbers = np.random.default_rng(0).permutation(30).reshape(3, 10)
    texts = torch.randint(VOCAB, (3, 33))
    plain = [model.start(1, 40) for _ in range(3)]
    ends = [33, 20, 11]
    for place in range(33):
        rows = [row for row in range(3) if place < ends[row]]  # three rows, two, and at last one
        found = step([int(texts[row, place]) for row in rows], [place] * len(rows), numbers[rows, : place // 4 + 1])
        for row, features in zip(rows, found, strict=True):
            expected = model.advance(texts[row : row + 1, place : place + 1], plain[row])[0, -1]
            torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)
    assert set(step.shapes) == {(4, 16), (2, 16), (1, 16)}


@torch.inference_mode()
def test_rows_of_unequal_lengths_and_those_that_only_fill_up() -> None:
    model = decoder()
    blocks = BlockStore(model, 20, 4)
    step = PagedGraphs(model, blocks, lambda state: None)
    texts, reads = torch.randint(VOCAB, (3, 17)), [16, 3, 7]
    numbers = np.arange(15).reshape(3, 5)
    for row, read in enumerate(reads):
        for place in range(read):
            step([int(texts[row, place])], [place], numbers[row : row + 1])
    before = blocks.data[:, 15:20].clone()
    found = step([int(texts[row, read]) for row, read in enumerate(reads)], reads, numbers)
    for row, read in enumerate(reads):
        expected = model.features(texts[row : row + 1, : read + 1])[0, -1]
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(blocks.data[:, 15:20], before)  # nobody's blocks stay nobody's


def test_positions_that_stretch_are_left_to_the_plain_way() -> None:
    model = decoder()
    assert paged_graphs(model, BlockStore(model, 4, 16)) is None  # it is not on a GPU
    model = decoder(position=Rotary(scaling=DynamicNTK(factor=2.0)))
    assert paged_graphs(model, BlockStore(model, 5, 13)) is None


def shouting(model: Transformer) -> Transformer:
    """Fresh weights give almost even logits; make the choices decided ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fast path", *KINDS])
def test_the_engine_on_a_gpu_writes_what_each_text_alone_gets(kind: str) -> None:
    tokenizer = build_tokenizer(Byte(), [])
    torch.manual_seed(0)
    if kind == "fast path":
        model = build(llama(2, 128, 4, 256, 512, vocab_size=tokenizer.vocab_size))
        model = shouting(model).to("cuda", torch.bfloat16).eval()
    else:
        model = shouting(decoder(vocab_size=tokenizer.vocab_size, context=256, **KINDS[kind])).cuda()
    engine = Engine(model, tokenizer, Limits(blocks=256, block_size=4, rows=8, prefill=16))
    graphs = engine.manager.graphs  # type: ignore[attr-defined]
    prompts = [list(range(1, 2 + 5 * row)) for row in range(12)]
    requests = [engine.submit(p, Sampling(temperature=0.0, max_tokens=20 + n)) for n, p in enumerate(prompts)]
    engine.run()
    assert any(shape.captured for shape in graphs.shapes.values())
    assert all((shape.kernels is not None) == (kind == "fast path") for shape in graphs.shapes.values())
    same = 0
    for n, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        alone = [token.id for token in generate(model, [prompt], Sampling(temperature=0.0, max_tokens=20 + n))]
        same += request.ids[len(prompt) :] == alone
    # 16-bit sums of other order may tip a close choice now and then; a wrong block would tip them all
    assert same == len(prompts) if kind != "fast path" else same >= len(prompts) - 2


@pytest.mark.gpu
@torch.inference_mode()
def test_the_kernels_read_blocks_as_they_read_one_piece() -> None:
    torch.manual_seed(0)
    model = build(llama(2, 128, 4, 256, 512, vocab_size=100, kv_heads=2)).to("cuda", torch.bfloat16).eval()
    step = paged_graphs(model, BlockStore(model, 200, 16))
    assert step is not None
    numbers = np.random.default_rng(0).permutation(200)[:120].reshape(3, 40)
    tokens = torch.randint(100, (3, 300), device="cuda")
    one = cuda_fast_path(model, model.start(3, 320))
    assert one is not None
    for place in range(300):
        found = step(tokens[:, place].tolist(), [place] * 3, numbers[:, : place // 16 + 1])
        expected = one.features(tokens[:, place : place + 1])
        torch.testing.assert_close(found, expected)
