"""A model with hashed n-gram embeddings generates the same text on every path: the previous tokens are always known."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from tests.decode.small import VOCAB, Asking, decoder, recompute_greedy, token_ids
from torch import Tensor

from weft.decode.beam import beam_search
from weft.decode.config import Beam, Sampling
from weft.decode.engine.engine import EngineLimits
from weft.decode.fast import native, stepper
from weft.decode.fast.cpu import CPUFastPath
from weft.decode.fast.cuda_graphs import GraphStep
from weft.decode.fast.native_step import NativeStep
from weft.decode.fast.path import is_llama_like
from weft.decode.fast.quantize import quantize
from weft.decode.fast.stepper import Stepper
from weft.decode.prompt import Prompt
from weft.decode.speculative import Draft, LookUp, speculate
from weft.models.transformer import Transformer
from weft.nn.config import LayerNorm
from weft.nn.position_config import Learned
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3]]
GREEDY = Sampling(temperature=0.0, max_tokens=20)


def ngram_decoder(width: int | None = None, **changes: object) -> Transformer:
    model = decoder(ngrams={"orders": [2, 3, 5], "rows": 29, "width": width}, **{"context": 64, **changes})
    with torch.no_grad():
        table_of(model).normal_(std=0.3)
    return model


def table_of(model: Transformer) -> Tensor:
    assert model.ngrams is not None
    return model.ngrams.weight


MODEL, NARROW = ngram_decoder(), ngram_decoder(width=4)


@cache
def recomputed() -> list[list[int]]:
    return [recompute_greedy(MODEL, prompt, 20) for prompt in PROMPTS]


def test_the_embeddings_change_the_text() -> None:
    plain = decoder(context=64)
    assert [recompute_greedy(plain, prompt, 20) for prompt in PROMPTS] != recomputed()
    assert len({*map(tuple, recomputed())}) == 3


@pytest.mark.parametrize("fast", [True, False])
def test_batches_of_different_lengths_and_single_rows(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(stepper, "STEP_PATHS", (stepper.PlainPath,))
    monkeypatch.setattr(stepper, "FIRST_CAPACITY", 2)  # so that the cache grows
    assert token_ids(MODEL, PROMPTS, GREEDY) == recomputed()
    assert [token_ids(MODEL, [prompt], GREEDY)[0] for prompt in PROMPTS] == recomputed()
    assert token_ids(MODEL, [PROMPTS[0]] * 2, GREEDY) == [recomputed()[0]] * 2


@pytest.mark.gpu
def test_a_gpu_generates_the_same_text() -> None:
    assert token_ids(deepcopy(MODEL).cuda(), PROMPTS, GREEDY) == recomputed()


def test_steps_that_run_ahead_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stepper, "runs_ahead", True)
    assert token_ids(MODEL, PROMPTS, GREEDY) == recomputed()


@pytest.mark.parametrize("model", [MODEL, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_fast_paths_agree_with_the_model(model: Transformer, batch: int) -> None:
    paths: list[Callable[..., Any]] = [CPUFastPath, GraphStep]
    with torch.inference_mode():
        states = [model.start(batch, 16) for _ in range(4)]
        prompt = torch.randint(VOCAB, (batch, 3))
        for state in states:
            model.advance(prompt, state)
        assert CPUFastPath.fits(model, states[1])
        if batch == 1 and native.library() is not None:
            assert NativeStep.fits(model, states[1])
            paths.append(NativeStep)
        steps = [path(model, state) for path, state in zip(paths, states[1:], strict=False)]
        for _ in range(7):
            tokens = torch.randint(VOCAB, (batch,))
            expected = model.step(tokens[:, None], states[0])[:, -1]
            for step in steps:
                torch.testing.assert_close(step(tokens), expected, atol=1e-4, rtol=1e-4)


def test_a_gpu_uses_its_general_step() -> None:
    assert not is_llama_like(MODEL.config)
    assert is_llama_like(MODEL.config.replace(ngrams=None))


def test_the_engine_shares_prefixes_and_prefills_in_chunks() -> None:
    tokenizer = build_tokenizer(Byte(), ["any"])
    model = ngram_decoder(vocab_size=tokenizer.vocab_size, context=128)
    engine = Asking(model, tokenizer, EngineLimits(blocks=64, block_size=4, rows=3, prefill=5))
    texts = ["abcabcabcabc", "abcabcabcxyz", "ab", "abcabcabcabcabc", ""]
    requests = [engine.ask(text, GREEDY) for text in texts]
    engine.run()
    assert engine.counts.shared > 0
    for request in requests:
        expected = token_ids(model, [request.prompt.ids], GREEDY)[0]
        assert [chunk.id for chunk in request.chunks] == expected[: len(request.chunks)] != []


@pytest.mark.parametrize("name", ["look-up", "draft"])
def test_rejected_drafts_leave_no_trace(name: str) -> None:
    for prompt, expected in zip(PROMPTS, recomputed(), strict=True):
        drafter = LookUp(2) if name == "look-up" else Draft(NARROW, Prompt(prompt), GREEDY)
        assert [chunk.id for chunk in speculate(MODEL, prompt, GREEDY, drafter=drafter)] == expected


def test_beams_carry_their_previous_tokens() -> None:
    beams = beam_search(MODEL, [Prompt(prompt) for prompt in PROMPTS], Beam(beams=4, n=2, max_tokens=9))
    for prompt, hypotheses in zip(PROMPTS, beams, strict=True):
        for hypothesis in hypotheses:
            with torch.no_grad():
                log_p = MODEL(torch.tensor([[*prompt, *hypothesis.ids]]))[0].log_softmax(-1)
            total = sum(float(log_p[at, id]) for at, id in enumerate(hypothesis.ids, start=len(prompt) - 1))
            assert hypothesis.logprob == pytest.approx(total, abs=1e-4)


def test_tokens_outside_the_window_are_not_previous_tokens() -> None:
    model = ngram_decoder(position=Learned(), norm=LayerNorm(), context=12)
    expected = recompute_greedy(model, [1, 2, 3], 40, window=12)
    assert token_ids(model, [[1, 2, 3]], Sampling(temperature=0.0, max_tokens=40)) == [expected]


@pytest.mark.parametrize("bits", ["bf16", "int8", "int4"])
def test_quantised_models_keep_their_embeddings(bits: str) -> None:
    model = ngram_decoder(width=4, d_model=64, feedforward={"kind": "gated", "d_ff": 64})
    table, tokens = table_of(model).clone(), torch.tensor(PROMPTS[1:2])
    with torch.no_grad():
        before = model(tokens)
        after = quantize(model, bits)(tokens)
        assert torch.equal(table_of(model), table)
        assert float((after - before).norm() / before.norm()) < 0.3
        state = model.start(1, 8)
        for token in PROMPTS[1]:
            last = model.step(torch.tensor([[token]]), state)
        torch.testing.assert_close(last, after[:, -1:], atol=0.05, rtol=0.05)
