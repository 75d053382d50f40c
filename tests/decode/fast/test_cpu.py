"""The CPU fast path returns the logits of `model.step`."""

import pytest
import torch
from tests.decode.fast.helpers import amplified, build_transformer
from tests.pairwise import each_once

from weft.data.batch import Source
from weft.decode.config import Sampling
from weft.decode.fast import cuda, stepper
from weft.decode.fast.cpu import CPUFastPath
from weft.decode.fast.path import PlainPath
from weft.decode.fast.quantize import quantize
from weft.decode.generate import generate
from weft.models.config import LayerKind
from weft.models.head_config import LMHead
from weft.models.presets import gpt, llama, vaswani
from weft.models.transformer import Transformer, TransformerState
from weft.nn import position_config as positions
from weft.nn.config import Attention, Gated, LayerNorm, LoRA, Plain, RMSNorm
from weft.nn.linear import LowRank
from weft.nn.position_config import Rotary
from weft.training.weights import add_adapters

CONFIGS = {
    "plain": llama(2, 32, 4, d_ff=48, context=32, vocab_size=50),
    "grouped-query, tied": llama(3, 48, 6, d_ff=40, context=32, vocab_size=50, kv_heads=2, tied=True),
    "multi-query": llama(1, 32, 4, d_ff=48, context=32, vocab_size=50, kv_heads=1),
    "scaled positions": llama(2, 32, 4, d_ff=48, context=32, vocab_size=50).replace(
        position=Rotary(base=500.0, scaling=positions.LinearScaling(factor=2.0)), embedding_scale=True
    ),
}
GQA = llama(2, 32, 4, d_ff=48, context=32, vocab_size=50, kv_heads=2)
MARIAN = vaswani(2, 32, 4, d_ff=48, dropout=0.0, vocab_size=50, context=32, encoder_layers=1).replace(
    feedforward=Plain(d_ff=48, activation="silu"),
    position=positions.Sinusoidal(layout="halves"),
    head=LMHead(bias=True),
)
FAMILIES = {
    "GPT-2": gpt(2, 32, 4, context=32, vocab_size=50),
    "Qwen": GQA.replace(attention=Attention(heads=4, kv_heads=2, bias="qkv", qk_norm=RMSNorm())),
    "Gemma": GQA.replace(norm=RMSNorm(offset=1.0), feedforward=Gated(d_ff=40, activation="gelu-tanh")),
    "window": GQA.replace(attention=Attention(heads=4, kv_heads=2, window=4)),
    "Swish": GQA.replace(feedforward=Gated(d_ff=40, beta=1.7)),
    "ALiBi, window": GQA.replace(position=positions.ALiBi(), attention=Attention(heads=4, kv_heads=2, window=4)),
    "YaRN, capped logits": GQA.replace(
        position=Rotary(scaling=positions.YaRN(factor=4.0, original_context=8)), head=LMHead(softcap=3.0)
    ),
    "RMS without gains": GQA.replace(norm=RMSNorm(gain=False)),
    "OLMo, scaled": GQA.replace(norm=LayerNorm(bias=False, gain=False), embedding_scale=3.0),
    "no positions, no norms": GQA.replace(position=positions.NoPosition(), placement="none"),
    "Marian": MARIAN,
    "BART": MARIAN.replace(position=positions.Learned(offset=2), embedding_norm=True, embedding_scale=False),
    "T5": MARIAN.replace(placement="pre", attention=Attention(heads=4, d_head=6, scale=1.0), embedding_scale=False)
    .replace(norm=RMSNorm(eps=1e-6), feedforward=Gated(d_ff=40, activation="gelu-tanh"), head=LMHead(scale=32**-0.5))
    .replace(position=positions.T5Bias(buckets=8, max_distance=20)),
    "grouped-query, rotary": MARIAN.replace(
        attention=Attention(heads=4, kv_heads=2, qk_norm=LayerNorm()), position=Rotary()
    ),
}


@pytest.mark.parametrize(("name", "batch", "bits"), each_once(CONFIGS, [1, 3], [None, "int8", "int4"]))
def test_equals_the_plain_step(name: str, batch: int, bits: str | None) -> None:
    model = amplified(CONFIGS[name], bits)
    prompt = torch.randint(50, (batch, 5))
    tolerance = 1e-4 if bits is None else 0.05  # kernels that quantise x to 8 bits may round a tie the other way
    with torch.inference_mode():
        plain, fast = model.start(batch, 16), model.start(batch, 16)
        model.advance(prompt, plain)
        model.advance(prompt, fast)
        assert CPUFastPath.fits(model, fast)
        step = CPUFastPath(model, fast)
        for _ in range(6):
            tokens = torch.randint(50, (batch,))
            expected = model.step(tokens[:, None], plain)[:, -1]
            torch.testing.assert_close(step(tokens), expected, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(fast.cache.store, plain.cache.store, atol=tolerance, rtol=tolerance)
        assert fast.longest == plain.longest == 11 and fast.lengths.tolist() == [11] * batch


def test_generate_uses_it_until_the_last_row_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    model, default_paths = amplified(CONFIGS["grouped-query, tied"]), stepper.STEP_PATHS
    created: list[CPUFastPath] = []

    class Counted(CPUFastPath):
        def __init__(self, model: Transformer, state: TransformerState):
            created.append(self)
            super().__init__(model, state)

    def texts(*paths: type[PlainPath]) -> list[tuple[int, int]]:
        monkeypatch.setattr(stepper, "STEP_PATHS", paths)
        settings = [Sampling(temperature=0.0, max_tokens=length) for length in (9, 4)]
        return [(token.row, token.id) for token in generate(model, [[1, 2, 3], [4, 5, 6]], settings)]

    expected = texts(PlainPath)
    assert texts(Counted) == expected and len(created) == 1  # it continues after a row has ended
    assert texts(*default_paths) == expected


@pytest.mark.parametrize(("name", "kernels"), each_once(FAMILIES, ["torch", "int8", "gemm"]))
def test_every_family_equals_its_forward_pass_while_rows_are_reordered(name: str, kernels: str) -> None:
    model = amplified(FAMILIES[name], "int8" if kernels == "int8" else None)
    source = None
    if model.encoder is not None:
        real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)
        source = Source(torch.randint(50, (2, 6)), real)
    with torch.inference_mode():
        rows, prompt = [0, 0, 0, 1, 1, 1], torch.randint(50, (2, 5))
        state = model.start(2, 16, source)
        model.advance(prompt, state)
        assert CPUFastPath.fits(model, state)
        step = CPUFastPath(model, state, min_gemm_weights=1 if kernels == "gemm" else 1 << 30)
        state.reorder(torch.tensor(rows))
        texts = [prompt[row].tolist() for row in rows]
        tolerance = 0.05 if kernels == "int8" else 1e-4
        # beams continue from others of their source; then the first source's leave; then any order
        for index in ([0, 1, 2, 3, 4, 5], [0, 0, 2, 4, 4, 3], [3, 4, 5], [2, 1, 1], [1, 0]):
            if index != list(range(6)):
                state.reorder(torch.tensor(index))
                rows, texts = [rows[i] for i in index], [texts[i] for i in index]
            tokens = torch.randint(50, (len(index),))
            texts = [[*text, int(token)] for text, token in zip(texts, tokens, strict=True)]
            options = {}
            if source is not None and source.mask is not None:
                options = {"source": Source(source.tokens[rows], source.mask[rows])}
                assert state.source_cache is not None
            expected = model(torch.tensor(texts), **options)[:, -1]
            torch.testing.assert_close(step(tokens), expected, atol=tolerance, rtol=tolerance)
            if state.source_cache is not None:
                assert len(state.source_cache[0][0]) * state.sharing == len(index)
        assert source is None or state.sharing == 2


def test_unsupported_models_and_states() -> None:
    plain = CONFIGS["plain"]
    model = amplified(plain)
    state = model.start(2, 8)
    assert CPUFastPath.fits(model, state)
    uneven = model.start(2, 8)
    model.advance(torch.randint(50, (2, 3)), uneven, torch.tensor([3, 2]))
    assert not CPUFastPath.fits(model, uneven)
    stop = model.get_submodule("decoder.blocks.1.attention.probabilities").watch(lambda _: None)  # type: ignore[operator]
    assert not CPUFastPath.fits(model, state)
    stop()
    assert CPUFastPath.fits(model, state)
    scaling = positions.LongRoPE(short=(1.0,) * 4, long=(2.0,) * 4, original_context=4)
    rotary = Rotary(pairs="adjacent"), Rotary(fraction=0.5), Rotary(scaling=scaling)
    dynamic = Rotary(scaling=positions.DynamicNTK(factor=2.0))
    changes: dict[str, tuple[object, ...]] = {
        "position": (*rotary, dynamic, positions.Relative(), positions.LearnedT5(), positions.Concatenated()),
        "residual": (False,),
        "residual_scale": (0.5,),
        "placement": ("sandwich", "res-post"),
        "sublayers": ("parallel",),
        "pattern": ((LayerKind(window=4), LayerKind()),),
        "attention": (
            Attention(heads=4, softcap=5.0),
            Attention(heads=4, qk_norm=RMSNorm(), qk_norm_over="heads"),
            Attention(heads=4, d_v=5),
        ),
    }
    for name, value in ((name, value) for name, values in changes.items() for value in values):
        other = build_transformer(plain.replace(**{name: value}))
        assert not CPUFastPath.fits(other, other.start(2, 8)), (name, value)
    assert not CPUFastPath.fits(model.double(), model.start(2, 8))


def test_adapters_are_applied() -> None:
    model = amplified(CONFIGS["plain"])
    add_adapters(model, LoRA(rank=2))
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, LowRank):
                part.b.normal_()
    model.eval()
    qkv = model.get_submodule("decoder.blocks.0.attention.qkv")
    assert isinstance(qkv, LowRank) and cuda._weights(qkv) is None
    tokens = torch.randint(50, (1, 6))
    with torch.inference_mode():
        expected = model(tokens)
        state = model.start(1, 8)
        model.advance(tokens[:, :5], state)
        torch.testing.assert_close(CPUFastPath(model, state)(tokens[:, 5]), expected[:, 5], atol=1e-4, rtol=1e-4)
    quantize(model, "int8")
    with torch.inference_mode():
        assert float((model(tokens) - expected).norm() / expected.norm()) < 0.1
