"""An engine that is one step ahead of the host waits for it where it must, and reuses no block too early."""

import pytest
import torch
from tests.decode.engine.test_engine import BYTES, MODELS, Job, alone, check_empty, check_run, check_texts, engine_for

from weft.decode.config import Sampling
from weft.decode.constrain import regex
from weft.decode.engine.engine import EngineLimits
from weft.decode.prompt import Prompt
from weft.errors import ModelError


def test_a_sliding_window_waits_for_the_host() -> None:
    jobs: list[Job] = [("abcdefgh" * 5, Sampling(max_tokens=40, seed=n)) for n in range(3)]
    engine = engine_for("gpt2", EngineLimits(blocks=64, block_size=4, rows=3), ahead=True)
    assert any(request.slid for request in check_run(engine, jobs))


def test_blocks_of_an_ended_text_are_reused() -> None:
    """There are so few blocks that the next text writes into those of one that stopped early."""
    greedy = Sampling(max_tokens=8, temperature=0.0)
    stop = alone(MODELS["llama"], ("abc", greedy)).text[2]
    jobs: list[Job] = [("abc", greedy.replace(stop=(stop,)))]
    jobs += [("bcda" + tail, greedy.replace(max_tokens=6)) for tail in "efgh"]
    engine = engine_for("llama", EngineLimits(blocks=6, block_size=4, rows=2), ahead=True)
    stopped = check_run(engine, jobs)[0]
    assert stopped.chunks[-1].finish == "stop" and stopped.written < 8


def test_a_grammar_and_log_probabilities_beside_a_text_that_runs_ahead() -> None:
    engine = engine_for("llama", EngineLimits(rows=4, block_size=4), ahead=True)
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
    engine = engine_for("llama", EngineLimits(rows=4, block_size=4), ahead=True)
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
    engine = engine_for("llama", EngineLimits(rows=4, block_size=4), ahead=True)
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
