"""Keys and values in 8 bits: what the engine writes is what the model writes whose keys and values are rounded so."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.decode.small import Asking, decoder

from weft.cli.main import run
from weft.costs.memory import cache_bytes
from weft.decode.bulk import BulkJob, generate_many
from weft.decode.config import Beam, Sampling
from weft.decode.engine.engine import Limits
from weft.decode.engine.paging import BlockStore, block_bytes
from weft.decode.fast.rounding import quantize_vectors
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
MODELS = {
    "llama": decoder(vocab_size=BYTES.vocab_size, context=96),
    "shared": decoder(vocab_size=BYTES.vocab_size, context=96, attention=Attention(heads=4, kv_heads=2)),
    "gpt2": decoder(vocab_size=BYTES.vocab_size, context=96, position=Learned(), norm=LayerNorm()),
}
GREEDY = Sampling(max_tokens=14, temperature=0.0, banned=(BYTES.eos_id or 0,))
EIGHT = Limits(block_size=4, bits="int8")


def back(x: torch.Tensor) -> torch.Tensor:
    numbers, scales = quantize_vectors(x)
    return numbers * scales.float().unsqueeze(-1)


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """All attention is to keys and values that were rounded to 8 bits."""
    rotated = SelfAttention.rotated

    def rounded(self: SelfAttention, qkv: QKV, mask: AttentionMask) -> QKV:
        q, k, v = rotated(self, qkv, mask)
        return QKV(q, back(k), back(v))

    monkeypatch.setattr(SelfAttention, "rotated", rounded)


@torch.inference_mode()
def greedily(model: Transformer, ids: Sequence[int], count: int) -> list[int]:
    """What follows ids where the whole text is read anew for each token."""
    text = list(ids)
    for _ in range(count):
        logits = model.head(model.features(torch.tensor([text])))[0, -1]
        logits[BYTES.eos_id or 0] = -torch.inf
        text.append(int(logits[: BYTES.vocab_size].argmax()))
    return text


def test_vectors_in_8_bits() -> None:
    x = torch.randn(3, 5, 64) * torch.tensor([1e-3, 1.0, 1e4]).view(3, 1, 1)
    x[0, 0] = 0
    numbers, scales = quantize_vectors(x)
    assert numbers.dtype == torch.int8 and int(numbers.abs().max()) == 127 and scales.shape == (3, 5)
    assert bool(((numbers * scales.float().unsqueeze(-1) - x).abs() <= 0.51 * scales.float().unsqueeze(-1)).all())
    assert not numbers[0, 0].any()


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_the_model_with_rounded_keys_and_values(name: str, rounding: None) -> None:
    """Prompts in chunks, many rows, prefixes that are shared while they are read and after."""
    model, rng = MODELS[name], random.Random(1)
    opening = [rng.randrange(97, 110) for _ in range(17)]
    prompts = [[rng.randrange(97, 110) for _ in range(rng.randint(1, 30))] for _ in range(5)]
    prompts += [opening + tail for tail in ([97], [98, 99], [100])]
    engine = Asking(model, BYTES, Limits(block_size=4, rows=6, prefill=8, bits="int8"))
    for _ in range(2):
        asked = [engine.ask(prompt, GREEDY) for prompt in prompts]
        engine.run()
        # the rounding is done once more there, to what is rounded: the same numbers
        assert [request.ids for request in asked] == [greedily(model, prompt, 14) for prompt in prompts]
    assert engine.counts.shared >= 2 * 16 + 3 * 16
    assert engine.manager.store.data.dtype == torch.int8 and engine.manager.native is None


def test_blocks_that_are_evicted_dropped_and_given_to_others(rounding: None) -> None:
    model, rng = MODELS["llama"], random.Random(5)
    prompts = [[rng.randrange(97, 110) for _ in range(10)] for _ in range(6)]
    settings = GREEDY.replace(max_tokens=30)
    engine = Asking(model, BYTES, Limits(blocks=14, block_size=4, rows=6, bits="int8"))
    asked = [engine.ask(prompt, settings) for prompt in prompts]
    gone = engine.ask([97] * 20, settings)
    while asked[0].written < 4:
        engine.step()
    engine.cancel(gone)
    engine.run()
    assert engine.counts.preempted > 0
    assert [request.ids for request in asked] == [greedily(model, prompt, 30) for prompt in prompts]
    assert engine.manager.pool.free_blocks == 14


def test_what_a_block_weighs_is_what_the_plan_says() -> None:
    model = MODELS["shared"]
    store = BlockStore(model, 7, 4, "int8")
    assert store.scales is not None
    held = sum(each.numel() * each.element_size() for each in (store.data, store.scales))
    assert held == 8 * block_bytes(model, 4, "int8") == 8 * 4 * cache_bytes(model.config, "int8")
    assert block_bytes(model, 4, "int8") < 0.5 * block_bytes(model, 4)


def test_many_texts_with_a_small_cache(rounding: None) -> None:
    """Also where lockstep batches would be faster: only the engine has such a cache."""
    texts, model = ["sea", "one", "two"], MODELS["llama"]
    for text, [found] in zip(
        texts, generate_many(model, BYTES, texts, job=BulkJob(GREEDY, quantize_cache="int8")), strict=True
    ):
        ids = Prompt.of(BYTES, text).ids
        assert found.text == BYTES.decode(greedily(model, ids, 14)[len(ids) :])


def test_what_has_no_small_cache_says_so() -> None:
    recurrent = build(Recurrent(vocab_size=BYTES.vocab_size, d_model=8))
    with pytest.raises(ModelError, match=r"quantize_cache: this model can't keep .* tokens in fewer bits"):
        list(generate_many(recurrent, BYTES, ["a"], job=BulkJob(GREEDY, quantize_cache="int8")))
    with pytest.raises(ConfigError, match="quantize_cache: not supported with beam search"):
        list(generate_many(MODELS["llama"], BYTES, ["a"], job=BulkJob(Beam(max_tokens=3), quantize_cache="int8")))
    with pytest.raises(ConfigError, match="quantize_cache = 'int2': expected 'int8'"):
        list(generate_many(MODELS["llama"], BYTES, ["a"], job=BulkJob(GREEDY, quantize_cache="int2")))


@pytest.mark.parametrize("more", [[], ["--n", "2"], ["--file", "-", "--beam", "3"]])
def test_one_text_and_beam_search_are_refused(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(tmp_path), "--quantize-cache", "int8", *more]) == 2
    assert "--quantize-cache is for many texts: give --file, and no --beam" in capsys.readouterr().err


def test_a_server_refuses_other_widths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", str(tmp_path), "--quantize-cache", "int2"]) == 2
    assert "quantize_cache" in capsys.readouterr().err
