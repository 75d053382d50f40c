"""The CPU fast path gives what `model.step` gives."""

import pytest
import torch
from tests.pairwise import each_once

from weft.data.batch import Source
from weft.decode.config import Sampling
from weft.decode.fast import cpu, cuda, stepper
from weft.decode.fast.cpu import CPUFastPath
from weft.decode.fast.quantize import quantize
from weft.decode.fast.stepper import cpu_fast_path_fits as fits
from weft.decode.generate import generate
from weft.models.build import build
from weft.models.config import Decoder, EncoderDecoder, LayerKind, LMHead
from weft.models.presets import gpt, llama
from weft.models.transformer import Transformer, TransformerState
from weft.nn.config import Attention, Gated, LayerNorm, LoRA, Plain, RMSNorm
from weft.nn.linear import LowRank
from weft.nn.position_config import (
    ALiBi,
    DynamicNTK,
    Learned,
    LearnedT5,
    LinearScaling,
    LongRoPE,
    NoPosition,
    Relative,
    Rotary,
    Sinusoidal,
    T5Bias,
    YaRN,
)
from weft.training.weights import add_adapters

CONFIGS = {
    "plain": llama(2, 32, 4, d_ff=48, context=32, vocab_size=50),
    "shared, tied": llama(3, 48, 6, d_ff=40, context=32, vocab_size=50, kv_heads=2, tied=True),
    "one key head": llama(1, 32, 4, d_ff=48, context=32, vocab_size=50, kv_heads=1),
    "stretched": llama(2, 32, 4, d_ff=48, context=32, vocab_size=50).replace(
        position=Rotary(base=500.0, scaling=LinearScaling(factor=2.0)), embedding_scale=True
    ),
}
TWO = llama(2, 32, 4, d_ff=48, context=32, vocab_size=50, kv_heads=2)
MARIAN = EncoderDecoder(
    vocab_size=50,
    context=32,
    layers=2,
    encoder_layers=1,
    d_model=32,
    attention=Attention(heads=4, bias="all"),
    feedforward=Plain(d_ff=48, activation="silu"),
    norm=LayerNorm(),
    placement="post",
    position=Sinusoidal(layout="halves"),
    embedding_scale=True,
    head=LMHead(bias=True),
)
FAMILIES = {
    "GPT-2": gpt(2, 32, 4, context=32, vocab_size=50),
    "Qwen": TWO.replace(attention=Attention(heads=4, kv_heads=2, bias="qkv", qk_norm=RMSNorm())),
    "Gemma": TWO.replace(norm=RMSNorm(offset=1.0), feedforward=Gated(d_ff=40, activation="gelu-tanh")),
    "window": TWO.replace(attention=Attention(heads=4, kv_heads=2, window=4)),
    "ALiBi, window": TWO.replace(position=ALiBi(), attention=Attention(heads=4, kv_heads=2, window=4)),
    "YaRN, capped logits": TWO.replace(
        position=Rotary(scaling=YaRN(factor=4.0, original_context=8)), head=LMHead(softcap=3.0)
    ),
    "OLMo, scaled": TWO.replace(norm=LayerNorm(bias=False, gain=False), embedding_scale=3.0),
    "no positions, no norms": TWO.replace(position=NoPosition(), placement="none"),
    "Marian": MARIAN,
    "BART": MARIAN.replace(position=Learned(offset=2), embedding_norm=True, embedding_scale=False),
    "T5": MARIAN.replace(
        placement="pre",
        attention=Attention(heads=4, d_head=6, scale=1.0),
        feedforward=Gated(d_ff=40, activation="gelu-tanh"),
        norm=RMSNorm(eps=1e-6),
        position=T5Bias(buckets=8, max_distance=20),
        embedding_scale=False,
        head=LMHead(scale=32**-0.5),
    ),
    "shared heads": MARIAN.replace(attention=Attention(heads=4, kv_heads=2, qk_norm=LayerNorm()), position=Rotary()),
}


def built(config: Decoder | EncoderDecoder) -> Transformer:
    torch.manual_seed(0)
    model = build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(torch.rand_like(parameter))
    return model


@pytest.mark.parametrize(("name", "batch", "bits"), each_once(CONFIGS, [1, 3], [None, "int8", "int4"]))
def test_it_equals_the_plain_step(name: str, batch: int, bits: str | None) -> None:
    model = built(CONFIGS[name])
    if bits is not None:
        quantize(model, bits)
    prompt = torch.randint(50, (batch, 5))
    with torch.inference_mode():
        plain, ours = model.start(batch, 16), model.start(batch, 16)
        model.advance(prompt, plain)
        model.advance(prompt, ours)
        assert fits(model, ours)
        step = CPUFastPath(model, ours)
        for _ in range(6):
            tokens = torch.randint(50, (batch,))
            expected = model.step(tokens[:, None], plain)[:, -1]
            # a kernel that rounds its input to 8 bits may round a last digit the other way
            tolerance = 1e-4 if bits is None else 0.05
            torch.testing.assert_close(step(tokens), expected, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(ours.cache.store, plain.cache.store, atol=tolerance, rtol=tolerance)
        assert ours.longest == plain.longest == 11 and ours.lengths.tolist() == [11] * batch


def test_generate_takes_it_and_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(CONFIGS["shared, tied"])
    taken: list[int] = []

    class Counted(CPUFastPath):
        def __init__(self, model: Transformer, state: TransformerState):
            taken.append(1)
            super().__init__(model, state)

    monkeypatch.setattr(stepper, "CPUFastPath", Counted)

    def texts(prompts: list[list[int]]) -> list[tuple[int, int]]:
        settings = [Sampling(temperature=0.0, max_tokens=length) for length in (9, 4)[: len(prompts)]]
        return [(token.row, token.id) for token in generate(model, prompts, settings)]

    others = texts([[1, 2, 3], [4, 5, 6]])  # of a single row the native path is taken, where there is one
    monkeypatch.setattr(stepper, "native_path_fits", lambda model, state: False)
    taken.clear()
    ours = texts([[1, 2, 3], [4, 5, 6]])
    assert len(taken) == 1 and ours == others  # it goes on when a row has ended
    monkeypatch.setattr(stepper, "cpu_fast_path_fits", lambda model, state: False)
    assert texts([[1, 2, 3], [4, 5, 6]]) == ours
    assert len(taken) == 1


@pytest.mark.parametrize(("name", "bits"), each_once(FAMILIES, [None, "int8", "many"]))
def test_every_family_steps_as_whole_texts_are_read_while_rows_move(
    name: str, bits: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "MIN_WEIGHTS", 1 if bits == "many" else 1 << 30)
    model = built(FAMILIES[name])
    if bits == "int8":
        quantize(model, bits)
    source = None
    if model.encoder is not None:
        real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)
        source = Source(torch.randint(50, (2, 6)), real)
    with torch.inference_mode():
        rows, prompt = [0, 0, 0, 1, 1, 1], torch.randint(50, (2, 5))
        ours = model.start(2, 16, source)
        model.advance(prompt, ours)
        assert fits(model, ours)
        step = CPUFastPath(model, ours)
        ours.reorder(torch.tensor(rows))
        read = [prompt[row].tolist() for row in rows]
        tolerance = 0.05 if bits == "int8" else 1e-4
        # beams go on from others of their line; then the first line leaves; then rows without an order
        for index in ([0, 1, 2, 3, 4, 5], [0, 0, 2, 4, 4, 3], [3, 4, 5], [2, 1, 1], [1, 0]):
            if index != list(range(6)):
                ours.reorder(torch.tensor(index))
                rows, read = [rows[place] for place in index], [read[place] for place in index]
            tokens = torch.randint(50, (len(index),))
            read = [[*text, int(token)] for text, token in zip(read, tokens, strict=True)]
            given = {} if source is None else {"source": Source(source.tokens[rows], source.mask[rows])}  # type: ignore[index]
            expected = model(torch.tensor(read), **given)[:, -1]
            torch.testing.assert_close(step(tokens), expected, atol=tolerance, rtol=tolerance)
            if source is not None:
                assert len(ours.source_cache[0][0]) * ours.sharing == len(index)  # type: ignore[index]
        assert source is None or ours.sharing == 2


def test_what_it_is_not_written_for() -> None:
    model = built(CONFIGS["plain"])
    state = model.start(2, 8)
    assert fits(model, state)
    uneven = model.start(2, 8)
    model.advance(torch.randint(50, (2, 3)), uneven, torch.tensor([3, 2]))
    assert not fits(model, uneven)
    stop = model.decoder.blocks[1].attention.probabilities.watch(lambda _: None)  # type: ignore[union-attr]
    assert not fits(model, state)
    stop()
    assert fits(model, state)
    for other in (
        CONFIGS["plain"].replace(position=Rotary(pairs="adjacent")),
        CONFIGS["plain"].replace(position=Rotary(scaling=DynamicNTK(factor=2.0))),
        CONFIGS["plain"].replace(
            position=Rotary(scaling=LongRoPE(short=(1.0,) * 4, long=(2.0,) * 4, original_context=4))
        ),
        CONFIGS["plain"].replace(position=Relative()),
        CONFIGS["plain"].replace(position=Rotary(fraction=0.5)),
        CONFIGS["plain"].replace(position=LearnedT5()),
        CONFIGS["plain"].replace(residual=False),
        CONFIGS["plain"].replace(residual_scale=0.5),
        CONFIGS["plain"].replace(placement="sandwich"),
        CONFIGS["plain"].replace(placement="res-post"),
        CONFIGS["plain"].replace(sublayers="parallel"),
        CONFIGS["plain"].replace(pattern=(LayerKind(window=4), LayerKind())),
        CONFIGS["plain"].replace(attention=Attention(heads=4, softcap=5.0)),
        CONFIGS["plain"].replace(attention=Attention(heads=4, qk_norm=RMSNorm(), qk_norm_over="heads")),
    ):
        different = build(other).eval()
        assert not fits(different, different.start(2, 8))
    assert not fits(model.double(), model.start(2, 8))


def test_an_adapter_is_never_left_out() -> None:
    model = built(CONFIGS["plain"])
    add_adapters(model, LoRA(rank=2))
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, LowRank):
                part.b.normal_()
    model.eval()
    attention = model.decoder.blocks[0].attention  # type: ignore[union-attr]
    assert isinstance(attention.qkv, LowRank) and cuda._matrix(attention.qkv) is None  # type: ignore[arg-type]
    tokens = torch.randint(50, (1, 6))
    with torch.inference_mode():
        expected = model(tokens)
        state = model.start(1, 8)
        model.advance(tokens[:, :5], state)
        torch.testing.assert_close(CPUFastPath(model, state)(tokens[:, 5]), expected[:, 5], atol=1e-4, rtol=1e-4)
    quantize(model, "int8")
    with torch.inference_mode():
        assert float((model(tokens) - expected).norm() / expected.norm()) < 0.1
