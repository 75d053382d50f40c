"""An engine that is one step ahead of the host writes the same texts, and reuses no block too early."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.decode.engine.test_engine import BYTES, MODELS, Job, alone, check_empty, check_texts, random_jobs, submit
from tests.decode.small import Asking

from weft.decode.config import Sampling
from weft.decode.constrain import regex
from weft.decode.engine.engine import EngineLimits
from weft.decode.fast.cuda_graphs import PagedGraphs
from weft.decode.prompt import Prompt
from weft.errors import ModelError

NO_RULES = {"banned": (), "logit_bias": {}, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}


def ahead(name: str, limits: EngineLimits) -> Asking:
    """An engine as on a GPU, whose steps are not captured here."""
    engine = Asking(MODELS[name], BYTES, limits)
    manager = engine.manager
    manager.graphs = PagedGraphs(manager.model, manager.store, limits.rows, kernels=False)
    return engine


def without_rules(jobs: list[Job]) -> list[Job]:
    """Remove the rules that only the host can apply."""
    return [(prompt, settings.replace(**NO_RULES)) for prompt, settings in jobs]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("rules", [without_rules, list])
def test_many_texts_equal_single_ones(name: str, rules: Callable[[list[Job]], list[Job]]) -> None:
    jobs = rules(random_jobs(40, seed=11))
    engine = ahead(name, EngineLimits(rows=12, prefill=48, block_size=4))
    requests = submit(engine, jobs)
    max_ahead = 0
    while engine.step():
        max_ahead = max(max_ahead, *(request.ahead for request in requests))
    assert max_ahead == 1
    check_texts(requests, MODELS[name], jobs)
    assert engine.counts.written == sum(request.written for request in requests)  # dropped tokens are not counted
    check_empty(engine)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.integers(0, 3))
@examples(max_examples=6, deadline=None)
def test_requests_that_arrive_while_others_run(prefill: int, block_size: int, rows: int, pause: int) -> None:
    jobs = without_rules(random_jobs(8, seed=4))
    engine = ahead("llama", EngineLimits(rows=rows, prefill=prefill, block_size=block_size))
    requests = submit(engine, jobs[:4])
    for job in jobs[4:]:
        for _ in range(pause):
            engine.step()
        requests += submit(engine, [job])
    engine.run()
    check_texts(requests, MODELS["llama"], jobs)
    check_empty(engine)


@pytest.mark.parametrize("blocks", [14, 20])
def test_the_host_catches_up_before_anything_is_preempted(blocks: int) -> None:
    rng = random.Random(5)
    jobs: list[Job] = [("".join(rng.choices("abcdef", k=10)), Sampling(max_tokens=30, seed=n)) for n in range(6)]
    engine = ahead("llama", EngineLimits(blocks=blocks, block_size=4, rows=6))
    requests = submit(engine, jobs)
    engine.run()
    assert engine.counts.preempted > 0
    check_texts(requests, MODELS["llama"], jobs)
    check_empty(engine)


def test_a_sliding_window_waits_for_the_host() -> None:
    jobs: list[Job] = [("abcdefgh" * 5, Sampling(max_tokens=40, seed=n)) for n in range(3)]
    engine = ahead("gpt2", EngineLimits(blocks=64, block_size=4, rows=3))
    requests = submit(engine, jobs)
    engine.run()
    assert any(request.slid for request in requests)
    check_texts(requests, MODELS["gpt2"], jobs)
    check_empty(engine)


def test_blocks_of_an_ended_text_are_reused() -> None:
    """There are so few blocks that the next text writes into those of one that stopped early."""
    greedy = Sampling(max_tokens=8, temperature=0.0)
    stop = alone(MODELS["llama"], ("abc", greedy)).text[2]
    jobs: list[Job] = [("abc", greedy.replace(stop=(stop,)))]
    jobs += [("bcda" + tail, greedy.replace(max_tokens=6)) for tail in "efgh"]
    engine = ahead("llama", EngineLimits(blocks=6, block_size=4, rows=2))
    requests = submit(engine, jobs)
    engine.run()
    assert requests[0].chunks[-1].finish == "stop" and requests[0].written < 8
    check_texts(requests, MODELS["llama"], jobs)
    check_empty(engine)


def test_a_grammar_and_log_probabilities_beside_a_text_that_runs_ahead() -> None:
    engine = ahead("llama", EngineLimits(rows=4, block_size=4))
    settings = Sampling(max_tokens=8, seed=1)
    first = engine.ask("ab", settings)
    engine.step()
    engine.step()
    constrained = engine.ask(Prompt.of(BYTES, "is it? ", regex(BYTES, "(yes|no)!")), settings)
    scored = engine.ask("is it? ", settings.replace(logprobs=2))
    engine.run()
    assert constrained.completion().text in ("yes!", "no!")
    assert len(scored.completion().scored) == scored.written
    for request, prompt in ((first, "ab"), (scored, "is it? ")):
        assert request.completion().text == alone(MODELS["llama"], (prompt, settings)).text


def test_logits_that_are_not_finite_end_only_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ahead("llama", EngineLimits(rows=4, block_size=4))
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
    check_texts(requests[:1], MODELS["llama"], [("ab", settings)])
    check_empty(engine)


def test_an_error_ends_all_requests_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ahead("llama", EngineLimits(rows=4, block_size=4))
    short = engine.ask("ab", Sampling(max_tokens=2, temperature=0.0))
    long = engine.ask("cd", Sampling(max_tokens=9, temperature=0.0))
    engine.step()
    engine.step()  # the last token of the short one is pending
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
