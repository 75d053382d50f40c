"""Runs with damaged files: each command reports the damage, or its output is unchanged. benchmarks/damage.py tests
this at length."""

import importlib.util
import json
import os
import random
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.command import Cli
from tests.spread import slow

import weft
from weft.cli.main import run as command
from weft.runs.average import average_checkpoints
from weft.runs.checkpoint import intact
from weft.runs.lines import read_lines

RUNS = Path(__file__).parent / "runs-0.1"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 0.1, resumed so that it has the checksums of later versions."""
    run = shutil.copytree(RUNS / "base", tmp_path_factory.mktemp("finished") / "run", symlinks=True)
    return weft.resume(run, log=lambda line: None).path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def overwrite(file: Path, offset: int, size: int) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:offset] + b"\xff" * size + data[offset + size :])


@pytest.mark.parametrize("name", ["train-00000.tokens", "validation-00000.sections", "train-00000.sections"])
@pytest.mark.parametrize("words", [["evaluate"], ["train", "--resume"]])
def test_damaged_tokens_are_refused(run: Path, name: str, words: list[str], cli: Cli) -> None:
    file = run / "data" / name
    overwrite(file, file.stat().st_size // 2, file.stat().st_size // 2)
    line = cli.refused(*words, run)
    assert f"{name}: damaged: the checksum is wrong; remove {run / 'data'}, and `weft train --resume" in line


def test_removed_data_is_prepared_again_from_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} bottles on the wall\n" for number in range(300)), encoding="utf-8")
    words = ["model.layers=1", "model.d_model=16", "model.attention.heads=2", "steps=2", "tokenizer=byte"]
    done = weft.train("gpt-tiny", data=str(text), run="run", changes=words, log=lambda line: None)
    expected = done.evaluate()
    shutil.rmtree(tmp_path / "run/data")
    lines: list[str] = []
    assert weft.resume("run", log=lines.append).evaluate() == expected
    assert any("data: missing; preparing the data again" in line for line in lines)
    shutil.rmtree(tmp_path / "run/data")
    text.write_text("".join(f"{number} other bottles\n" for number in range(400)), encoding="utf-8")
    with pytest.raises(weft.errors.RunError, match="not the data that this run began with"):
        weft.resume("run", log=lambda line: None)


@pytest.mark.parametrize("name", ["config.toml", "tokenizer_config.json"])
def test_a_changed_file_is_reported_once(run: Path, name: str, capsys: Capture) -> None:
    file = run / name
    file.write_text(file.read_text() + "\n")
    weft.load(run)
    assert f"{file}: has changed since the run last started" in capsys.readouterr().err
    lines: list[str] = []
    weft.resume(run, log=lines.append)
    assert any(f"{file}: has changed" in line for line in lines)
    weft.load(run)
    assert f"{file}: has changed" not in capsys.readouterr().err


def test_damaged_metrics_are_reported_and_left_out(run: Path, capsys: Capture) -> None:
    """Even a changed digit, which would be another loss."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    index = next(n for n, line in enumerate(lines) if '"loss": ' in line)
    lines[index] = lines[index].replace('"loss": ', '"loss": 1', 1)
    file.write_text("".join(lines))
    weft.resume(run, log=lambda line: None)
    err = capsys.readouterr().err
    assert f"weft: {file}: 1 line can't be read (first: line {index + 1}); left out" in err
    assert f"{file}: no line of step {json.loads(lines[index])['step']}\n" in err
    assert len(read_lines(file)) == len(lines) - 1


# ---- random damage, as in benchmarks/damage.py


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    file = Path(__file__).parent.parent.parent / "benchmarks/damage.py"
    spec = importlib.util.spec_from_file_location("damage", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [*range(6), *map(slow, range(6, 100))])
def test_random_damage_is_detected_or_harmless(run: Path, harness: ModuleType, seed: int, capsys: Capture) -> None:
    pick = random.Random(seed)
    words = ["evaluate", str(run), "--json"]
    expected = answer(words, capsys)
    file = pick.choice(pick.choice(list(harness._by_name(harness.damageable(run)).values())))
    damage = harness.corrupt(file, pick)
    outcome = answer(words, capsys)
    verdict = harness.verdict(outcome, expected, file)
    assert verdict in ("refused", "warned", "harmless"), (file.name, damage, outcome)


def answer(words: list[str], capsys: Capture) -> dict[str, Any]:
    code = command(words)
    printed = capsys.readouterr()
    metrics = json.loads(printed.out) if code == 0 else {}
    metrics.pop("baseline_bits_per_byte", None)
    return {"code": code, "err": printed.err, "answer": metrics}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with the same recipe and different seeds."""
    folder = tmp_path_factory.mktemp("twins")
    text = folder / "text.txt"
    text.write_text("".join(f"{number} bottles on the wall\n" for number in range(300)), encoding="utf-8")
    words = ["model.layers=1", "model.d_model=16", "model.attention.heads=2", "steps=4", "tokenizer=byte"]
    words += ["checkpoint.every=2", "checkpoint.keep=2", "batch.length=16", "batch.size=2", "evaluate.every=2"]
    for name, seed in (("run", 1), ("other", 2)):
        changes = [*words, f"seed={seed}"]
        weft.train("gpt-tiny", data=str(text), run=folder / name, changes=changes, log=lambda line: None)
    return folder


@pytest.fixture
def pair(twins: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(twins, tmp_path / "pair", symlinks=True))


LAST, FIRST = "checkpoints/step-00000004", "checkpoints/step-00000002"


def swap(pair: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(pair / "run" / name)
        shutil.copytree(pair / "other" / name, pair / "run" / name)


def test_an_intact_checkpoint_of_another_run_is_skipped(pair: Path, cli: Cli) -> None:
    swap(pair, LAST)
    message = f"{pair / 'run' / LAST}: this checkpoint belongs to another run"
    assert message in cli.logged("generate", pair / "run", "--prompt", "1", "--max-tokens", "3")
    steps = average_checkpoints(pair / "run/checkpoints")[1]
    assert steps == [2]
    assert [path.name for path in intact(pair / "run/checkpoints")] == [Path(FIRST).name]  # the target of a rollback
    lines: list[str] = []
    weft.resume(pair / "run", log=lines.append)
    assert f"{message}; continuing from step-00000002" in lines
    assert message not in cli.logged("generate", pair / "run", "--prompt", "1", "--max-tokens", "3")
    swap(pair, LAST, FIRST)
    assert message in cli.refused("evaluate", pair / "run")


def test_an_older_checkpoint_of_another_run_as_the_newest_is_reported(pair: Path, cli: Cli) -> None:
    """It names another best checkpoint."""
    shutil.rmtree(pair / "run" / LAST)
    shutil.copytree(pair / "other" / FIRST, pair / "run" / LAST)
    assert f"{pair / 'run' / LAST}" in cli.logged("evaluate", pair / "run")


def test_a_copy_of_a_whole_run_is_valid(pair: Path, cli: Cli) -> None:
    shutil.rmtree(pair / "run")
    shutil.copytree(pair / "other", pair / "run", symlinks=True)
    assert "another run" not in cli.logged("evaluate", pair / "run")


def test_a_missing_last_checkpoint_is_reported(pair: Path, cli: Cli) -> None:
    expected = {file.name: file.read_bytes() for file in (pair / "run" / LAST).glob("*.safetensors")}
    shutil.rmtree(pair / "run" / LAST)
    assert "its last checkpoint, of step 4, is missing" in cli("runs", pair)
    message = f"{pair / 'run' / LAST}: missing, though the run ended with it"
    assert message in cli.logged("generate", pair / "run", "--prompt", "1", "--max-tokens", "3")
    shutil.copytree(pair / "run", pair / "none", symlinks=True)
    shutil.rmtree(pair / "none" / FIRST)
    line = cli.refused("generate", pair / "none", "--prompt", "1")
    assert "none/checkpoints/step-00000004: missing, though the run ended with it" in line
    for name, then in (("run", "continuing from step-00000002"), ("none", "starting again from the first step")):
        lines: list[str] = []
        weft.resume(pair / name, log=lines.append)
        assert f"{message.replace('/run/', f'/{name}/')}; {then}" in lines
        assert {file.name: file.read_bytes() for file in (pair / name / LAST).glob("*.safetensors")} == expected


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "data/plan.json", "checkpoints/latest"])
def test_a_pipe_instead_of_a_file_is_refused(pair: Path, name: str, cli: Cli) -> None:
    (pair / "run" / name).unlink()
    os.mkfifo(pair / "run" / name)
    assert f"{pair / 'run' / name}: a pipe or a device" in cli.refused("train", "--resume", pair / "run")
