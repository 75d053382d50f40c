"""A text longer than the model's window continues from its last tokens, whichever method generates it."""

from functools import cache

import pytest
import torch
from tests.decode.small import Asking, decoder, recompute_greedy, token_ids
from tests.devices import DEVICES

from weft.decode.beam import beam_search
from weft.decode.bulk import as_json
from weft.decode.config import Beam, Sampling
from weft.decode.contrastive import ContrastiveModel
from weft.decode.engine.engine import EngineLimits
from weft.decode.fast.stepper import Stepper
from weft.decode.generate import engine_completions, generate
from weft.decode.prompt import Prompt, context_window, slide
from weft.decode.speculative import Draft, LookUp, speculate
from weft.decode.text import gather
from weft.models.transformer import Transformer
from weft.nn.config import LayerNorm
from weft.nn.position_config import Learned
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

WINDOW = 12


def learned(context: int = WINDOW, **changes: object) -> Transformer:
    """A decoder with learned positions whose texts don't become periodic, so that a wrong window shows."""
    model = decoder(position=Learned(), norm=LayerNorm(), context=context, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4.0 if name.startswith("decoder.") and parameter.ndim > 1 else 1.0)
    return model


MODEL = learned()
GREEDY = Sampling(temperature=0.0, max_tokens=40)
PROMPTS = [[1, 2, 3], [4] * 11, [5, 6], list(range(30)), [7] * WINDOW]


@cache
def recomputed() -> list[list[int]]:
    return [recompute_greedy(MODEL, prompt, 40, WINDOW) for prompt in PROMPTS]


@pytest.mark.parametrize("device", DEVICES)
def test_a_text_continues_from_its_last_tokens(device: str) -> None:
    model = learned().to(device)
    assert all(len(set(text[-20:])) > 5 for text in recomputed())
    assert [token_ids(model, [prompt], GREEDY)[0] for prompt in PROMPTS] == recomputed()
    assert token_ids(model, PROMPTS, GREEDY) == recomputed()
    chunks = list(generate(model, [PROMPTS[0]], GREEDY))
    assert [chunk.slid for chunk in chunks] == [False] * 10 + [True] * 30
    assert [chunk.finish for chunk in chunks] == [None] * 39 + ["length"]


def test_the_window_does_not_depend_on_the_length_of_the_prompt() -> None:
    text = [*PROMPTS[0], *recomputed()[0]]
    for cut in range(3, 43, 5):
        assert token_ids(MODEL, [text[:cut]], GREEDY.replace(max_tokens=43 - cut))[0] == text[cut:]


def test_without_sliding_a_full_window_ends_the_text() -> None:
    chunks = list(generate(MODEL, [[1, 2, 3]], GREEDY.replace(slide=False)))
    assert chunks[-1].finish == "length" and not chunks[-1].slid
    assert [chunk.id for chunk in chunks] == recompute_greedy(MODEL, [1, 2, 3], 10)


def test_a_batch_may_mix_texts_that_slide_and_texts_that_end() -> None:
    settings = [GREEDY, GREEDY.replace(slide=False), GREEDY.replace(max_tokens=2)]
    texts = token_ids(MODEL, [[1, 2, 3], [4] * 11, [5, 6]], settings)
    assert texts == [recomputed()[0], recomputed()[1][:2], recomputed()[2][:2]]


@pytest.mark.parametrize("settings", [GREEDY, Sampling(max_tokens=100, seed=3)], ids=["greedy", "sampled"])
def test_steps_that_run_ahead_slide_at_the_same_positions(settings: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = token_ids(MODEL, PROMPTS, settings)
    monkeypatch.setattr(Stepper, "runs_ahead", True)
    assert token_ids(MODEL, PROMPTS, settings) == expected


def test_drafts_change_nothing() -> None:
    prompt = Prompt([1, 2, 3])
    for drafter in (LookUp(2), Draft(MODEL, prompt, GREEDY), Draft(learned(7, layers=1), prompt, GREEDY)):
        assert [chunk.id for chunk in speculate(MODEL, prompt, GREEDY, drafter=drafter)] == recomputed()[0]


def test_a_draft_model_continues_beyond_its_window() -> None:
    draft = Draft(MODEL, Prompt([1]), GREEDY)
    text = [1, *recompute_greedy(MODEL, [1], 40, WINDOW)]
    for cut in range(1, 36):
        count = min(5, WINDOW - len(slide(text[:cut], WINDOW)) + 1)
        assert draft.draft(text[:cut], count).tokens == text[cut : cut + count]


def test_the_engine_slides_at_the_same_positions() -> None:
    tokenizer = build_tokenizer(Byte(), ["abc"])
    model = learned(vocab_size=tokenizer.vocab_size)
    texts = ["abc", "d" * 11, "ef", "the prompt is longer than the window", "g"]
    prompts = [Prompt.of(tokenizer, text) for text in texts]
    for settings in (GREEDY, Sampling(max_tokens=40, seed=5)):
        expected = [gather(generate(model, [prompt], settings), [prompt])[0] for prompt in prompts]
        for blocks in (40, 4) if settings is GREEDY else (40,):  # with few blocks, some requests are preempted
            engine = Asking(model, tokenizer, EngineLimits(blocks, block_size=4, rows=3))
            requests = [engine.ask(text, settings) for text in texts]
            engine.run()
            assert [request.completion() for request in requests] == expected
        seeds = [settings.seed] * len(prompts)
        assert list(engine_completions(model, prompts, settings, seeds=seeds, limits=EngineLimits(rows=5))) == expected
    assert all(each.slid and as_json(each)["slid"] for each in expected if each.tokens == 40)


def test_leading_tokens_stay_in_the_window() -> None:
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
    assert len(token_ids(ContrastiveModel(wide, MODEL), [[1, 2]], GREEDY)[0]) == 40
