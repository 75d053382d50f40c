"""A model with n-gram embeddings writes the same text, whichever way it is read: what came before is always found."""

from copy import deepcopy

import pytest
import torch
from tests.decode.small import VOCAB, Asking, decoder
from torch import Tensor

from weft.decode.beam import beam_search
from weft.decode.config import Beam, Sampling
from weft.decode.engine.engine import Limits
from weft.decode.fast import native, stepper
from weft.decode.fast.cpu import CPUFastPath
from weft.decode.fast.cuda_graphs import GraphStep
from weft.decode.fast.native_step import NativeStep
from weft.decode.fast.quantize import quantize
from weft.decode.fast.stepper import Stepper
from weft.decode.generate import generate
from weft.decode.prompt import Prompt
from weft.decode.speculative import Draft, LookUp, speculate
from weft.models.transformer import Transformer
from weft.nn.config import LayerNorm
from weft.nn.position_config import Learned
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3]]
GREEDY = Sampling(temperature=0.0, max_tokens=20)


def ngrams(width: int | None = None, **changes: object) -> Transformer:
    model = decoder(ngrams={"orders": [2, 3, 5], "rows": 29, "width": width}, **{"context": 64, **changes})
    with torch.no_grad():
        model.ngrams.weight.normal_(std=0.3)
    return model


MODEL, NARROW = ngrams(), ngrams(width=4)


def by_hand(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """Greedy, reading all of the text for each token."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


EXPECTED = [by_hand(MODEL, prompt, 20) for prompt in PROMPTS]


def written(model: Transformer, prompts: list[list[int]], settings: Sampling = GREEDY) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in prompts]
    for chunk in generate(model, prompts, settings):
        texts[chunk.row].append(chunk.id)
    return texts


def test_the_tables_matter() -> None:
    plain = decoder(context=64)
    assert [by_hand(plain, prompt, 20) for prompt in PROMPTS] != EXPECTED
    assert len({*map(tuple, EXPECTED)}) == 3


@pytest.mark.parametrize("fast", [True, False])
def test_rows_of_unequal_length_and_one_alone(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(stepper, "_fastest", lambda model, state, _: lambda t: model.step(t[:, None], state)[:, -1])
    monkeypatch.setattr(stepper, "FIRST_CAPACITY", 2)  # which has to grow
    assert written(MODEL, PROMPTS) == EXPECTED
    assert [written(MODEL, [prompt])[0] for prompt in PROMPTS] == EXPECTED
    assert written(MODEL, [PROMPTS[0]] * 2) == [EXPECTED[0]] * 2


@pytest.mark.gpu
def test_a_gpu_writes_the_same() -> None:
    assert written(deepcopy(MODEL).cuda(), PROMPTS) == EXPECTED


def test_steps_that_run_ahead_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stepper, "runs_ahead", True)
    assert written(MODEL, PROMPTS) == EXPECTED


@pytest.mark.parametrize("model", [MODEL, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_fast_paths_take_them(model: Transformer, batch: int) -> None:
    paths = [CPUFastPath, lambda model, state: GraphStep(model, state, None)]
    with torch.inference_mode():
        states = [model.start(batch, 16) for _ in range(4)]
        prompt = torch.randint(VOCAB, (batch, 3))
        for state in states:
            model.advance(prompt, state)
        assert stepper.cpu_fast_path_fits(model, states[1])
        if batch == 1 and native.library() is not None:
            assert stepper.native_path_fits(model, states[1])
            paths.append(NativeStep)
        steps = [path(model, state) for path, state in zip(paths, states[1:], strict=False)]
        for _ in range(7):
            tokens = torch.randint(VOCAB, (batch,))
            expected = model.step(tokens[:, None], states[0])[:, -1]
            for step in steps:
                torch.testing.assert_close(step(tokens), expected, atol=1e-4, rtol=1e-4)


def test_a_gpu_takes_its_general_step() -> None:
    assert not stepper.llama_like(MODEL.config)
    assert stepper.llama_like(MODEL.config.replace(ngrams=None))


def test_the_engine_shares_beginnings_and_reads_in_chunks() -> None:
    tokenizer = build_tokenizer(Byte(), ["any"])
    model = ngrams(vocab_size=tokenizer.vocab_size, context=128)
    engine = Asking(model, tokenizer, Limits(blocks=64, block_size=4, rows=3, prefill=5))
    texts = ["abcabcabcabc", "abcabcabcxyz", "ab", "abcabcabcabcabc", ""]
    requests = [engine.ask(text, GREEDY) for text in texts]
    engine.run()
    assert engine.counts.shared > 0
    for request in requests:
        found = [id for chunk in request.chunks for id in ([chunk.id] if chunk.id is not None else [])]
        assert found == written(model, [list(request.prompt.ids)])[0][: len(found)] != []


@pytest.mark.parametrize("guesser", ["look-up", "draft"])
def test_guesses_that_are_taken_back_leave_nothing(guesser: str) -> None:
    for prompt, expected in zip(PROMPTS, EXPECTED, strict=True):
        draft = LookUp(2) if guesser == "look-up" else Draft(NARROW, Prompt(prompt), GREEDY)
        assert [chunk.id for chunk in speculate(MODEL, prompt, GREEDY, drafter=draft)] == expected


def test_beams_take_what_they_read_along() -> None:
    beams = beam_search(MODEL, [Prompt(each) for each in PROMPTS], Beam(beams=4, n=2, max_tokens=9))
    for row, several in zip(PROMPTS, beams, strict=True):
        for found in several:
            with torch.no_grad():
                logprobs = MODEL(torch.tensor([[*row, *found.ids]]))[0].log_softmax(-1)
            places = range(len(row) - 1, len(row) - 1 + len(found.ids))
            total = sum(float(logprobs[place, id]) for place, id in zip(places, found.ids, strict=True))
            assert found.logprob == pytest.approx(total, abs=1e-4)


def test_a_text_goes_on_over_its_last_tokens() -> None:
    """What was slid out of the window is no predecessor any more."""
    model = ngrams(position=Learned(), norm=LayerNorm(), context=12)
    text, start = [1, 2, 3], 0
    for _ in range(40):
        start += 6 if len(text) - start > 12 else 0
        with torch.no_grad():
            text.append(int(model(torch.tensor([text[start:]]))[0, -1].argmax()))
    assert written(model, [[1, 2, 3]], Sampling(temperature=0.0, max_tokens=40)) == [text[3:]]


@pytest.mark.parametrize("bits", ["bf16", "int8", "int4"])
def test_quantized_models_keep_their_tables(bits: str) -> None:
    def logits(model: Transformer) -> Tensor:
        return model(torch.tensor(PROMPTS[1:2]))

    model = ngrams(width=4, d_model=64, feedforward={"kind": "gated", "d_ff": 64})
    table = model.ngrams.weight.clone()
    with torch.no_grad():
        before = logits(model)
        quantize(model, bits)
        assert torch.equal(model.ngrams.weight, table)
        assert float((logits(model) - before).norm() / before.norm()) < 0.3
        whole = model(torch.tensor(PROMPTS[1:2]))[:, -1]
        state = model.start(1, 8)
        for token in PROMPTS[1]:
            last = model.step(torch.tensor([[token]]), state)[:, -1]
        torch.testing.assert_close(last, whole, atol=0.05, rtol=0.05)
