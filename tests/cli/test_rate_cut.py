"""The last lines of `weft train` say that the learning rate was cut."""

from pathlib import Path

import pytest

from weft.cli.main import run


def test_a_cut_learning_rate_is_in_the_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text("The quick brown fox jumps over the lazy dog, and then it sleeps.\n" * 200)
    model = ["model.layers=1", "model.d_model=16", "tokenizer=byte", "batch.size=4", "batch.length=32"]
    rate = ["optimizer.lr=3", "schedule.warmup=1", "guard.patience=3", "steps=30", "log.every=1", "guard.rollbacks=9"]
    words = ["train", "gpt-tiny", "--data", str(tmp_path / "book.txt"), "--run", str(tmp_path / "run"), *model, *rate]
    assert run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines[-6:] if "learning rate was cut" in line]
    assert line.startswith("Training diverged and was rolled back ") and "of optimizer.lr, from 3 to " in line
