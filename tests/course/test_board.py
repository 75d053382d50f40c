"""A board of runs: ranked by a metric, verified from their folders, and trained again."""

from pathlib import Path

import pytest
from tests.command import Cli

import weft
from weft.course.board import board_table, rank
from weft.errors import ConfigError

TEXT = "the cows eat grass. the cows eat hay. our goats eat corn and leaves. " * 40
TINY = {
    "steps": 3,
    "model.layers": 1,
    "model.d_model": 16,
    "model.attention.heads": 2,
    "batch.length": 16,
    "tokenizer": "char",
}


def train(folder: Path, text: str, seed: int) -> Path:
    data = folder.with_suffix(".txt")
    data.write_text(text)
    weft.train("gpt-tiny", data=data, run=folder, changes={**TINY, "seed": seed}, log=lambda _: None)
    return folder


def test_runs_are_ranked_verified_and_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (train(tmp_path / name, TEXT, seed) for seed, name in enumerate(("one", "two")))
    other = train(tmp_path / "other", TEXT[::-1], 0)
    entries = rank([one, two, other], "bits_per_byte", within=1e6)
    assert [bool(entry.problems) for entry in entries] == [False, False, True]
    assert entries[-1].run == str(other) and entries[-1].problems == ("trained on another text",)
    values = [entry.value for entry in entries[:2]]
    assert None not in values and values == sorted(values, key=lambda value: value or 0.0)
    assert not any(entry.difference for entry in rank([one], "bits_per_byte", replay=True))

    events = two / "metrics.jsonl"
    events.write_text(events.read_text().replace('"loss": ', '"loss": 1'))  # a forged loss
    assert "differs" in rank([two], "bits_per_byte", replay=True)[0].difference
    assert "can't be read" in rank([two], "bits_per_byte")[0].problems[0]  # found without training it again
    weft.resume(other, changes={"steps": 4}, log=lambda _: None)
    assert "it was resumed with another recipe" in rank([other], "bits_per_byte")[0].problems
    assert not rank([other], "bits_per_byte", within=1e6)[0].problems[1:], "both sessions' times are known"
    lines = (other / "events.jsonl").read_text().splitlines(keepends=True)
    (other / "events.jsonl").write_text(
        "".join(line for line in lines if '"finish"' not in line or '"step": 4' in line)
    )
    problems = rank([other], "bits_per_byte", within=1e6)[0].problems
    assert "it was interrupted, so its time is not known" in problems
    with (one / "config.toml").open("a") as file:
        file.write("# changed\n")
    [changed] = rank([one], "parameters", within=0.0)
    assert any("changed" in problem for problem in changed.problems) and any("took" in p for p in changed.problems)
    assert "not counted" in board_table([changed], "parameters").header[-1]
    cli = Cli(capsys)
    assert "bits per byte" in cli("exercise", "board", one, two)
    assert "no such metric" in cli.refused("exercise", "board", one, "--by", "beauty")
    with pytest.raises(ConfigError, match="expected METRIC=NUMBER"):
        rank([one], "parameters", at_least="accuracy")
