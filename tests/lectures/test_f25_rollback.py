"""F25: training diverges, and recovers automatically.

Watch the loss and the gradient norm; discard a bad batch; after divergence return to the last good checkpoint, skip the
text that followed it, and resume.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.data import held
from tests.training.small import VOCAB, counting_text, settled, train

from weft.objectives.next_token import NextToken
from weft.runs.lines import read_lines
from weft.training.state import RunResult

SIZE = ["model.layers=2", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=24"]
SIZE += ["batch.size=4", "batch.length=12", "steps=160", "log.every=10", "checkpoint.every=20", "schedule.warmup=5"]
GOOD_RATE = 0.02


def run(path: Path, *changes: str) -> tuple[RunResult, list[dict[str, Any]]]:
    """Train on a text in which each token is likely to be followed by the next number."""
    corpus = SimpleNamespace(train=held.tokens(counting_text(4000)))
    result = train(settled("llama-tiny", *SIZE, *changes), path, corpus=corpus, quiet=True)
    return result, list(read_lines(result.run.events))


def losses(result: RunResult) -> list[float]:
    return [line["loss"] for line in read_lines(result.run.metrics)]


def test_recovery_from_a_learning_rate_a_hundred_times_too_high(tmp_path: Path) -> None:
    result, events = run(tmp_path / "run", f"optimizer.lr={100 * GOOD_RATE}")
    assert any(event["event"] == "rollback" for event in events)
    seen = losses(result)
    assert all(loss is not None and math.isfinite(loss) for loss in seen)
    assert np.mean(seen[-4:]) < np.mean(seen[4:8]) < math.log(VOCAB)


@pytest.mark.slow
def test_batches_with_nan_losses_are_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other batches train the model as usual."""
    loss_of = NextToken.loss

    def poisoned(self: NextToken, model: Any, features: Any, batch: Any) -> Any:
        loss, count, extras = loss_of(self, model, features, batch)
        bad = bool((batch.tokens.sum(1) % 41 == 0).any())
        return (loss * math.nan if bad else loss), count, extras

    monkeypatch.setattr(NextToken, "loss", poisoned)
    result, events = run(tmp_path / "run", f"optimizer.lr={GOOD_RATE}")
    discarded = [step for event in events if event["event"] == "discarded" for step in event["steps"]]
    assert 3 <= len(discarded) <= 60
    assert not any(event["event"] == "rollback" for event in events)
    seen = losses(result)
    assert None not in seen and seen[-1] < 1.7  # chance is 3.14, the entropy of the text is near 1.2
