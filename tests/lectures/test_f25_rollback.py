"""F25: training goes wrong, and goes on without a person.

Watch the loss and the gradient norm; pass over a bad batch; on a crash go back to the last good checkpoint, take other
text, and resume.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.data import held

from weft.recipe.config import NextToken, Recipe
from weft.recipe.resolve import resolve
from weft.recipe.settle import TextFacts, settle
from weft.runs.folder import RunResult, read_lines
from weft.training.start import train

VOCAB = 23
SIZE = ["model.layers=2", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=24"]
SIZE += [f"model.vocab_size={VOCAB}", "tokenizer=byte", "batch.size=4", "batch.length=12", "steps=160"]
SIZE += ["log.every=10", "checkpoint.every=20", "schedule.warmup=5"]
GOOD_RATE = 0.02


class Words:
    vocab_size = VOCAB

    def save(self, path: Path) -> None:
        (path / "tokenizer.json").write_text("{}")


def run(path: Path, *changes: str) -> tuple[RunResult, list[dict[str, Any]]]:
    """Train on a text where each token is likely to be followed by the next number."""
    generator = np.random.default_rng(0)
    jumps = np.where(generator.random(4000) < 0.8, 1, generator.integers(0, VOCAB, 4000))
    corpus = SimpleNamespace(train=held.tokens(np.cumsum(jumps) % VOCAB))
    recipe: Recipe = settle(resolve("llama-tiny", [*SIZE, *changes]), TextFacts(4000))[0]
    result = train(recipe, path, corpus=corpus, tokenizer=Words(), quiet=True)
    return result, list(read_lines(result.run.events))


def losses(result: RunResult) -> list[float]:
    return [line["loss"] for line in read_lines(result.run.metrics)]


def test_a_rate_a_hundred_times_too_high_is_survived(tmp_path: Path) -> None:
    result, events = run(tmp_path / "run", f"optimizer.lr={100 * GOOD_RATE}")
    assert any(event["event"] == "rollback" for event in events)
    seen = losses(result)
    assert all(loss is not None and math.isfinite(loss) for loss in seen)
    assert np.mean(seen[-4:]) < np.mean(seen[4:8]) < math.log(VOCAB)


def test_batches_that_give_no_number_are_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some windows of the text always give NaN. Their updates are not made, and the rest teaches as well as ever."""
    build = NextToken.build

    def poisoned(self: NextToken, *args: Any) -> Any:
        objective = build(self, *args)

        def loss_of(model: Any, batch: Any) -> Any:
            loss, count, extras = objective(model, batch)
            bad = bool((batch.tokens.sum(1) % 41 == 0).any())
            return (loss * math.nan if bad else loss), count, extras

        return loss_of

    monkeypatch.setattr(NextToken, "build", poisoned)
    result, events = run(tmp_path / "run", f"optimizer.lr={GOOD_RATE}")
    held = [step for event in events if event["event"] == "discarded" for step in event["steps"]]
    assert 3 <= len(held) <= 60
    assert not any(event["event"] == "rollback" for event in events)
    seen = losses(result)
    assert all(loss is not None for loss in seen)
    assert seen[-1] < 1.7  # chance is 3.14, the text's own uncertainty near 1.2
