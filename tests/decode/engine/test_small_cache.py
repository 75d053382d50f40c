"""With an 8-bit cache the engine writes what a model writes whose keys and values are rounded to 8 bits."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.decode.small import Asking, decoder, recompute_greedy
from tests.spread import spread

from weft.cli.main import run
from weft.costs.memory import cache_bytes
from weft.decode.bulk import BulkJob, generate_many
from weft.decode.config import Beam, Sampling
from weft.decode.engine.engine import EngineLimits
from weft.decode.engine.paging import BlockStore, block_bytes
from weft.decode.fast.quantized_weights import quantize_vectors
from weft.decode.prompt import Prompt
from weft.errors import ConfigError, ModelError
from weft.models.build import build
from weft.models.config import Recurrent
from weft.models.transformer import Transformer
from weft.nn.attention import SelfAttention
from weft.nn.config import Attention, LayerNorm
from weft.nn.mask import AttentionMask
from weft.nn.position_config import Learned
from weft.nn.scaled_dot_product import QKV
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

BYTES = build_tokenizer(Byte(), ["any"])
EOS = BYTES.eos_id or 0
MODELS = {
    "llama": decoder(vocab_size=BYTES.vocab_size, context=96),
    "grouped-query": decoder(vocab_size=BYTES.vocab_size, context=96, attention=Attention(heads=4, kv_heads=2)),
    "gpt2": decoder(vocab_size=BYTES.vocab_size, context=96, position=Learned(), norm=LayerNorm()),
}
GREEDY = Sampling(max_tokens=14, temperature=0.0, banned=(EOS,))


def rounded(x: torch.Tensor) -> torch.Tensor:
    numbers, scales = quantize_vectors(x)
    return numbers * scales.float().unsqueeze(-1)


@pytest.fixture
def rounded_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round the keys and values of all attention to 8 bits."""
    rotate = SelfAttention.rotate

    def rotate_and_round(self: SelfAttention, qkv: QKV, mask: AttentionMask) -> QKV:
        q, k, v = rotate(self, qkv, mask)
        return QKV(q, rounded(k), rounded(v))

    monkeypatch.setattr(SelfAttention, "rotate", rotate_and_round)


def continued(model: Transformer, ids: Sequence[int], count: int) -> list[int]:
    return [*ids, *recompute_greedy(model, ids, count, banned=[EOS])]


def test_vectors_in_8_bits() -> None:
    x = torch.randn(3, 5, 64) * torch.tensor([1e-3, 1.0, 1e4]).view(3, 1, 1)
    x[0, 0] = 0
    numbers, scales = quantize_vectors(x)
    assert numbers.dtype == torch.int8 and int(numbers.abs().max()) == 127 and scales.shape == (3, 5)
    assert bool(((rounded(x) - x).abs() <= 0.51 * scales.float().unsqueeze(-1)).all())
    assert not numbers[0, 0].any()


@pytest.mark.parametrize("name", spread(MODELS, 1))
def test_texts_equal_those_of_a_rounded_model(name: str, rounded_attention: None) -> None:
    """Prompts in chunks, many rows, and prefixes that are shared while they are read and after."""
    model, rng = MODELS[name], random.Random(1)
    prefix = [rng.randrange(97, 110) for _ in range(17)]
    prompts = [[rng.randrange(97, 110) for _ in range(rng.randint(1, 30))] for _ in range(5)]
    prompts += [prefix + tail for tail in ([97], [98, 99], [100])]
    engine = Asking(model, BYTES, EngineLimits(block_size=4, rows=6, prefill=8, bits="int8"))
    for _ in range(2):
        requests = [engine.ask(prompt, GREEDY) for prompt in prompts]
        engine.run()
        # the engine rounds a second time, which changes nothing
        assert [request.ids for request in requests] == [continued(model, prompt, 14) for prompt in prompts]
    assert engine.counts.shared >= 2 * 16 + 3 * 16
    assert engine.manager.store.data.dtype == torch.int8 and engine.manager.native is None


@pytest.mark.slow
def test_preempted_cancelled_and_reused_blocks(rounded_attention: None) -> None:
    model, rng = MODELS["llama"], random.Random(5)
    prompts = [[rng.randrange(97, 110) for _ in range(10)] for _ in range(6)]
    settings = GREEDY.replace(max_tokens=30)
    engine = Asking(model, BYTES, EngineLimits(blocks=14, block_size=4, rows=6, bits="int8"))
    requests = [engine.ask(prompt, settings) for prompt in prompts]
    cancelled = engine.ask([97] * 20, settings)
    while requests[0].written < 4:
        engine.step()
    engine.cancel(cancelled)
    engine.run()
    assert engine.counts.preempted > 0
    assert [request.ids for request in requests] == [continued(model, prompt, 30) for prompt in prompts]
    assert engine.manager.pool.free_blocks == 14


def test_block_sizes_are_those_of_the_plan() -> None:
    model = MODELS["grouped-query"]
    store = BlockStore(model, 7, 4, bits="int8")
    assert store.scales is not None
    allocated = store.data.nbytes + store.scales.nbytes
    assert allocated == 8 * block_bytes(model, 4, "int8") == 8 * 4 * cache_bytes(model.config, "int8")
    assert block_bytes(model, 4, "int8") < 0.5 * block_bytes(model, 4)


def test_many_texts_with_a_small_cache(rounded_attention: None) -> None:
    """Few texts would be faster in lockstep, but only the engine has an 8-bit cache."""
    texts, model = ["sea", "one", "two"], MODELS["llama"]
    completions = generate_many(model, BYTES, texts, job=BulkJob(GREEDY, quantize_cache="int8"))
    for text, [completion] in zip(texts, completions, strict=True):
        expected = recompute_greedy(model, Prompt.of(BYTES, text).ids, 14, banned=[EOS])
        assert completion.text == BYTES.decode(expected)


def test_unsupported_models_and_searches_are_refused() -> None:
    recurrent = build(Recurrent(vocab_size=BYTES.vocab_size, d_model=8))
    with pytest.raises(ModelError, match=r"quantize_cache: this model can't keep .* tokens in fewer bits"):
        list(generate_many(recurrent, BYTES, ["a"], job=BulkJob(GREEDY, quantize_cache="int8")))
    with pytest.raises(ConfigError, match="quantize_cache: not supported with beam search"):
        list(generate_many(MODELS["llama"], BYTES, ["a"], job=BulkJob(Beam(max_tokens=3), quantize_cache="int8")))
    with pytest.raises(ConfigError, match="quantize_cache = 'int2': expected 'int8'"):
        list(generate_many(MODELS["llama"], BYTES, ["a"], job=BulkJob(GREEDY, quantize_cache="int2")))


def test_commands_refuse_what_they_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--n", "2"], ["--file", "-", "--beam", "3"]):
        assert run(["generate", str(tmp_path), "--quantize-cache", "int8", *options]) == 2
        assert "--quantize-cache is for many texts: give --file, and no --beam" in capsys.readouterr().err
    assert run(["serve", str(tmp_path), "--quantize-cache", "int2"]) == 2
    assert "quantize_cache" in capsys.readouterr().err
