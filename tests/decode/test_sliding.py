"""A text that is longer than the model's window goes on over its last tokens, the same whoever writes it."""

from collections.abc import Sequence

import pytest
import torch
from tests.decode.small import Asking, decoder
from tests.devices import DEVICES

from weft.decode import generate as many
from weft.decode.beam import beam_search
from weft.decode.bulk import as_json
from weft.decode.config import Beam, Sampling
from weft.decode.contrastive import ContrastiveModel
from weft.decode.engine.engine import Limits
from weft.decode.fast.stepper import Stepper
from weft.decode.generate import generate
from weft.decode.prompt import Prompt, context_window, slide
from weft.decode.speculative import Draft, LookUp, speculate
from weft.decode.text import gather
from weft.models.base import LanguageModel
from weft.models.transformer import Transformer
from weft.nn.config import LayerNorm
from weft.nn.position_config import Learned
from weft.text.config import Byte
from weft.text.tokenizer import Tokenizer, build_tokenizer

WINDOW, HALF = 12, 6


def learned(context: int = WINDOW, **changes: object) -> Transformer:
    """A decoder with so many positions, whose texts go on changing: a window in the wrong place shows."""
    model = decoder(position=Learned(), norm=LayerNorm(), context=context, **changes)
    assert model.decoder is not None
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model


MODEL = learned()
GREEDY = Sampling(temperature=0.0, max_tokens=40)
PROMPTS = [[1, 2, 3], [4] * 11, [5, 6], list(range(30)), [7] * WINDOW]


def by_hand(model: LanguageModel, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy, reading for each token all that is read of the text: half a window less as often as it is full."""
    text = list(prompt)
    for _ in range(count):
        start = 0
        while len(text) - start > WINDOW:
            start += HALF
        with torch.no_grad():
            text.append(int(model(torch.tensor([text[start:]]))[0, -1].argmax()))
    return text[len(prompt) :]


def written(model: LanguageModel, prompts: Sequence[Sequence[int]], settings: Sampling) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in prompts]
    for chunk in generate(model, prompts, settings):
        texts[chunk.row].append(chunk.id)
    return texts


@pytest.mark.parametrize("device", DEVICES)
def test_a_text_goes_on_over_its_last_tokens(device: str) -> None:
    model = learned().to(device)
    expected = [by_hand(MODEL, prompt, 40) for prompt in PROMPTS]
    assert all(len(set(text[-20:])) > 5 for text in expected)
    assert [written(model, [prompt], GREEDY)[0] for prompt in PROMPTS] == expected
    assert written(model, PROMPTS, GREEDY) == expected  # in any company
    chunks = list(generate(model, [PROMPTS[0]], GREEDY))
    assert [chunk.slid for chunk in chunks] == [False] * 10 + [True] * 30
    assert [chunk.finish for chunk in chunks] == [None] * 39 + ["length"]


def test_how_much_of_a_text_was_a_prompt_makes_no_difference() -> None:
    text = [*PROMPTS[0], *by_hand(MODEL, PROMPTS[0], 40)]
    for cut in range(3, 43, 5):
        assert written(MODEL, [text[:cut]], GREEDY.replace(max_tokens=43 - cut))[0] == text[cut:]


def test_without_sliding_the_window_ends_a_text() -> None:
    chunks = list(generate(MODEL, [[1, 2, 3]], GREEDY.replace(slide=False)))
    assert len(chunks) == 10
    assert chunks[-1].finish == "length" and not chunks[-1].slid
    assert [chunk.id for chunk in chunks] == by_hand(MODEL, [1, 2, 3], 10)


def test_texts_that_slide_and_texts_that_end_stand_in_one_batch() -> None:
    settings = [GREEDY, GREEDY.replace(slide=False), GREEDY.replace(max_tokens=2)]
    texts: list[list[int]] = [[], [], []]
    for chunk in generate(MODEL, [[1, 2, 3], [4] * 11, [5, 6]], settings):
        texts[chunk.row].append(chunk.id)
    expected = [(40, [1, 2, 3]), (2, [4] * 11), (2, [5, 6])]
    assert texts == [by_hand(MODEL, prompt, count) for count, prompt in expected]


@pytest.mark.parametrize("settings", [GREEDY, Sampling(max_tokens=100, seed=3)], ids=["greedy", "drawn"])
def test_steps_that_run_ahead_slide_at_the_same_places(settings: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = written(MODEL, PROMPTS, settings)
    monkeypatch.setattr(Stepper, "runs_ahead", True)
    assert written(MODEL, PROMPTS, settings) == expected


def test_guesses_change_nothing() -> None:
    expected = by_hand(MODEL, [1, 2, 3], 40)
    smaller = learned(7, layers=1)
    prompt = Prompt([1, 2, 3])
    for guesser in (LookUp(2), Draft(MODEL, prompt, GREEDY), Draft(smaller, prompt, GREEDY)):
        assert [chunk.id for chunk in speculate(MODEL, prompt, GREEDY, drafter=guesser)] == expected


def test_the_same_model_goes_on_guessing_beyond_the_window() -> None:
    draft = Draft(MODEL, Prompt([1]), GREEDY)
    text = [1, *by_hand(MODEL, [1], 40)]
    for cut in range(1, 36):
        most = min(5, WINDOW - len(slide(text[:cut], WINDOW)) + 1)
        assert draft.draft(text[:cut], most).tokens == text[cut : cut + most]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(Byte(), ["abc"])


def test_the_engine_slides_at_the_same_places(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = learned(vocab_size=tokenizer.vocab_size)
    texts = ["abc", "d" * 11, "ef", "the prompt is longer than the window", "g"]
    for settings in (GREEDY, Sampling(max_tokens=40, seed=5)):
        asked = [Prompt.of(tokenizer, text) for text in texts]
        expected = [gather(generate(model, [each], settings), [each])[0] for each in asked]
        for blocks in (40, 4) if settings is GREEDY else (40,):  # few blocks: some are preempted as well
            engine = Asking(model, tokenizer, Limits(blocks, block_size=4, rows=3))
            requests = [engine.ask(text, settings) for text in texts]
            engine.run()
            assert [request.completion() for request in requests] == expected
        monkeypatch.setattr(many, "MIN_ENGINE_TEXTS", 2)
        assert many.complete(model, asked, settings, seeds=[settings.seed] * len(asked)) == expected
    assert all(each.slid and as_json(each)["slid"] for each in expected if each.tokens == 40)


def test_what_stands_before_every_text_stays() -> None:
    assert slide(range(12), 12, 1) == range(12)
    assert slide(range(13), 12, 1) == [0, *range(6, 13)]
    assert slide(range(29), 12, 2) == [0, 1, *range(22, 29)]
    assert slide([1, 2, 3], 1) == [3]


def test_beam_search_ends_at_the_window() -> None:
    (best,) = beam_search(MODEL, [[1, 2, 3]], Beam(beams=1, max_tokens=40))[0]
    assert (len(best.ids), best.finish) == (10, "length")


def test_two_models_have_the_smaller_window() -> None:
    wide = learned(40)
    assert context_window(ContrastiveModel(wide, MODEL)) == context_window(ContrastiveModel(MODEL, decoder())) == WINDOW
    assert len(written(ContrastiveModel(wide, MODEL), [[1, 2]], GREEDY)[0]) == 40
