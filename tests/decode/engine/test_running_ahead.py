"""An engine that is a step ahead of the host writes the same texts, and gives nobody's blocks away too early."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.decode.engine.test_engine import (
    BYTES,
    MODELS,
    Wish,
    alone,
    ask,
    check_empty,
    wishes,
)
from tests.decode.small import Asking

from weft.decode.config import Sampling
from weft.decode.constrain import regex
from weft.decode.engine.engine import Limits
from weft.decode.fast.cuda_graphs import PagedGraphs
from weft.decode.prompt import Prompt
from weft.errors import ModelError

FREE = {"banned": (), "logit_bias": {}, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}


def ahead(name: str, limits: Limits) -> Asking:
    """An engine as there is one on a GPU, whose steps are not captured here."""
    engine = Asking(MODELS[name], BYTES, limits)
    manager = engine.manager
    manager.graphs = PagedGraphs(manager.model, manager.store, limits.rows, kernels=False)
    return engine


def free(some: list[Wish]) -> list[Wish]:
    """The same without rules that only the host can apply."""
    return [(prompt, each.replace(**FREE)) for prompt, each in some]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", [free, list])
def test_many_at_once_are_as_alone(name: str, kind: Callable[[list[Wish]], list[Wish]]) -> None:
    """With rules that only the host can apply among them, and without."""
    some = kind(wishes(40, seed=11))
    engine = ahead(name, Limits(rows=12, prefill=48, block_size=4))
    requests = ask(engine, some)
    most = 0
    while engine.step():
        most = max(most, *(request.ahead for request in requests))
    assert most == 1
    assert [request.completion() for request in requests] == [alone(MODELS[name], wish) for wish in some]
    assert engine.counts.written == sum(request.written for request in requests)  # what was too much is not counted
    check_empty(engine)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.integers(0, 3))
@examples(max_examples=6, deadline=None)
def test_texts_that_come_meanwhile(prefill: int, block_size: int, rows: int, pause: int) -> None:
    some = free(wishes(8, seed=4))
    engine = ahead("llama", Limits(rows=rows, prefill=prefill, block_size=block_size))
    requests = ask(engine, some[:4])
    for wish in some[4:]:
        for _ in range(pause):
            engine.step()
        requests += ask(engine, [wish])
    engine.run()
    assert [request.completion() for request in requests] == [alone(MODELS["llama"], wish) for wish in some]
    check_empty(engine)


@pytest.mark.parametrize("blocks", [14, 20])
def test_the_host_catches_up_before_anything_is_preempted(blocks: int) -> None:
    rng = random.Random(5)
    some: list[Wish] = [("".join(rng.choices("abcdef", k=10)), Sampling(max_tokens=30, seed=n)) for n in range(6)]
    engine = ahead("llama", Limits(blocks=blocks, block_size=4, rows=6))
    requests = ask(engine, some)
    engine.run()
    assert engine.counts.preempted > 0
    assert [request.completion() for request in requests] == [alone(MODELS["llama"], wish) for wish in some]
    check_empty(engine)


def test_a_window_that_slides_waits_for_the_host() -> None:
    some: list[Wish] = [("abcdefgh" * 5, Sampling(max_tokens=40, seed=n)) for n in range(3)]
    engine = ahead("gpt2", Limits(blocks=64, block_size=4, rows=3))
    requests = ask(engine, some)
    engine.run()
    assert any(request.slid for request in requests)
    assert [request.completion() for request in requests] == [alone(MODELS["gpt2"], wish) for wish in some]
    check_empty(engine)


def test_blocks_of_a_text_that_has_ended_go_to_others() -> None:
    """So few blocks that those of a text that stops early are written into by the next one at once."""
    whole = alone(MODELS["llama"], ("abc", Sampling(max_tokens=8, temperature=0.0)))
    stop = whole.text[2]
    some: list[Wish] = [("abc", Sampling(max_tokens=8, temperature=0.0, stop=(stop,)))]
    some += [("bcda" + tail, Sampling(max_tokens=6, temperature=0.0)) for tail in "efgh"]
    engine = ahead("llama", Limits(blocks=6, block_size=4, rows=2))
    requests = ask(engine, some)
    engine.run()
    assert requests[0].chunks[-1].finish == "stop" and requests[0].written < 8
    assert [request.completion() for request in requests] == [alone(MODELS["llama"], wish) for wish in some]
    check_empty(engine)


def test_a_grammar_and_log_probabilities_among_texts_that_run_ahead() -> None:
    engine = ahead("llama", Limits(rows=4, block_size=4))
    settings = Sampling(max_tokens=8, seed=1)
    first = engine.ask("ab", settings)
    engine.step()
    engine.step()
    held = engine.ask(Prompt.of(BYTES, "is it? ", regex(BYTES, "(yes|no)!")), settings)
    told = engine.ask("is it? ", settings.replace(logprobs=2))
    engine.run()
    assert held.completion().text in ("yes!", "no!")
    assert len(told.completion().scored) == told.written
    for request, prompt in ((first, "ab"), (told, "is it? ")):
        assert request.completion().text == alone(MODELS["llama"], (prompt, settings)).text


def test_logits_that_are_not_finite_end_their_own_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ahead("llama", Limits(rows=4, block_size=4))
    settings = Sampling(max_tokens=6, temperature=0.0)
    requests = [engine.ask(prompt, settings) for prompt in ("ab", "cd", "ef")]
    head, calls = engine.manager.head, iter(range(100))

    def damaged(features: torch.Tensor) -> torch.Tensor:
        logits = head(features)
        number = next(calls)
        if number == 2:
            logits[1] = torch.nan
        if number == 4:
            logits[-1] = -torch.inf
        return logits

    monkeypatch.setattr(engine.manager, "head", damaged)
    engine.run()
    with pytest.raises(ModelError, match="NaN"):
        requests[1].completion()
    with pytest.raises(ModelError, match="no token is left"):
        requests[2].completion()
    assert requests[1].written == 2 and requests[2].written == 4
    assert requests[0].completion() == alone(MODELS["llama"], ("ab", settings))
    check_empty(engine)


def test_an_error_on_the_way_ends_all_that_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ahead("llama", Limits(rows=4, block_size=4))
    short = engine.ask("ab", Sampling(max_tokens=2, temperature=0.0))
    long = engine.ask("cd", Sampling(max_tokens=9, temperature=0.0))
    engine.step()
    engine.step()  # the last token of the short one is on its way
    assert short.ahead == 1 and not short.ended

    def broken(features: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.manager, "head", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    for request in (short, long):
        with pytest.raises(ModelError, match="out of memory"):
            request.completion()
    check_empty(engine)
