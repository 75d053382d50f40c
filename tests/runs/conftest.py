"""Small runs, trained on a text in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.training.small import held_out_loss, small, small_text, train

from weft.training.state import RunResult

TrainRun = Callable[..., RunResult]


@pytest.fixture
def train_run(tmp_path: Path) -> TrainRun:
    """Train with these overrides in tmp_path / `name`; `evaluate` is a dict of metrics, or True to measure the loss."""
    corpus = small_text()

    def run(*changes: str, name: str = "run", evaluate: Any = None, **options: Any) -> RunResult:
        measured = held_out_loss(corpus) if evaluate is True else evaluate and (lambda model: evaluate)
        options = {"quiet": "log" not in options, **options}
        return train(small(*changes), tmp_path / name, corpus=corpus, evaluate=measured, **options)

    return run
