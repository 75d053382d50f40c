"""Fine-tuning a run on other text, and extending a run beyond its steps."""

import html
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from tests.command import Cli

import weft
from weft.cli.main import run as command
from weft.errors import ConfigError
from weft.runs.folder import RunFolder, changed_files
from weft.runs.lines import read_lines

TINY = ["model.layers=1", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=16"]
SMALL = ["batch.size=2", "batch.length=16", "evaluate.tokens=64", "evaluate.every=2", "log.every=1"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two texts and a run of six steps on one of them."""
    folder, pick = tmp_path_factory.mktemp("further"), random.Random(0)
    words = ["".join(pick.choices("abcdefghij", k=5)) for _ in range(100)]
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("\n".join(" ".join(pick.choices(words, k=12)) + "." for _ in range(200)))
    changes = [*TINY, *SMALL, "steps=6", "optimizer.lr=0.01", "schedule.warmup=1", "checkpoint.every=2"]
    weft.train("gpt-tiny", data=str(folder / "a.txt"), run=folder / "run", changes=changes, log=lambda line: None)
    return folder


def metrics(run: Path) -> list[dict[str, object]]:
    return [{**line, "check": ""} for line in read_lines(run / "metrics.jsonl")]


def files(run: Path) -> dict[str, bytes]:
    """Return the content of all files, except the note that data was verified."""
    paths = (path for path in sorted(run.rglob("*")) if path.is_file() and path.name != ".verified.json")
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


# ---- other text


def test_a_run_and_other_data_is_fine_tuning(base: Path, tmp_path: Path) -> None:
    run, other, lines = base / "run", str(base / "b.txt"), list[str]()
    before = files(run)
    changes = {"steps": 1, "optimizer.lr": 1e-12}
    done = weft.train(run, data=other, run=tmp_path / "new", changes=changes, log=lines.append)
    assert lines[0] == f"fine-tuning the weights of {run} on {other}; {run} itself stays unchanged"
    assert files(run) == before
    old = weft.load(run)
    for name, weight in old.model.state_dict().items():
        torch.testing.assert_close(done.model.state_dict()[name], weight, rtol=0, atol=1e-6)
    assert done.tokenizer.fingerprint == old.tokenizer.fingerprint
    config = done.config
    assert (config.init, config.data.sources, config.model) == (str(run), (other,), old.config.model)
    assert config.batch.length != old.config.batch.length  # chosen again for the other text
    assert (config.objective, config.schedule.kind) == (old.config.objective, "cosine")


def test_an_adapter_is_trained_on_a_run(base: Path, tmp_path: Path, cli: Cli) -> None:
    words = ["--data", str(base / "b.txt"), "--run", str(tmp_path / "new"), "steps=2", "adapter.rank=4"]
    assert "fine-tuning the weights of" in cli.logged("train", base / "run", *words)
    config = weft.load(tmp_path / "new").config
    assert config.adapter is not None and config.adapter.rank == 4
    assert config.init == str(base / "run")


def test_an_imported_model_is_fine_tuned(base: Path, tmp_path: Path) -> None:
    weft.load(base / "run").export("hf", tmp_path / "hf")
    assert command(["import", str(tmp_path / "hf"), str(tmp_path / "mine")]) == 0
    changes = {"steps": 2, "adapter.rank": 2, "batch.length": 16}
    done = weft.train(tmp_path / "mine", data=str(base / "b.txt"), run=tmp_path / "new", changes=changes)
    assert done.config.objective.kind == "next-token"
    assert done.config.init == str(tmp_path / "mine")


def test_a_run_without_data_lists_the_commands(base: Path, cli: Cli) -> None:
    run = base / "run"
    line = cli.refused("train", run, "seed=3")
    for advice in (f"weft train {run} --data FILE", f"weft train --resume {run}", f"weft train {run}/config.toml"):
        assert advice in line


# ---- longer


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base / "run", tmp_path / "run", symlinks=True))


def test_a_finished_run_is_extended(run: Path, tmp_path: Path) -> None:
    first, lines = metrics(run), list[str]()
    weft.resume(run, changes={"steps": 12}, log=lines.append)
    assert lines[0] == (
        "steps = 12 instead of 6; the cosine schedule now spans 12 steps: "
        "the learning rate was 0.001 at step 6 and is 0.0049 at step 7"
    )
    assert metrics(run)[: len(first)] == first
    rates = {line["step"]: line["lr"] for line in metrics(run) if "lr" in line}
    assert list(rates) == list(range(1, 13))
    assert rates[7] == pytest.approx(0.0049, rel=0.02) and rates[12] == pytest.approx(0.001)
    folder = RunFolder(run)
    assert folder.settled_recipe().steps == 12
    assert changed_files(folder) == []
    (event,) = [event for event in read_lines(folder.events) if event["event"] == "recipe"]
    assert (event["step"], event["changes"]) == (6, [lines[0]])
    # resumed from a checkpoint after that, it ends as it did
    whole, weights = metrics(run), weft.load(run).model.state_dict()
    for path in (run / "checkpoints").glob("step-00000012*"):
        shutil.rmtree(path)
    lines.clear()
    again = weft.resume(run, log=lines.append)
    assert metrics(run) == whole
    assert all(torch.equal(weights[name], value) for name, value in again.model.state_dict().items())
    assert not any("has changed" in line for line in lines)


def test_the_commands_of_an_extended_run_are_noted(base: Path, tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text((base / "a.txt").read_text())
    folder = str(tmp_path / "run")
    for words in (
        ["train", "gpt-tiny", "--data", str(tmp_path / "a b.txt"), "--run", folder, *TINY, *SMALL, "steps=2"],
        ["train", "--resume", folder, "steps=4"],
        ["train", "--resume", folder],  # changes nothing, so it is not noted
        ["train", "--resume", folder, "steps=6", "evaluate.every=3"],
        ["export", folder, str(tmp_path / "out"), "--to", "hf"],
    ):
        assert command(words) == 0
    commands = [
        f"weft train gpt-tiny --data '{tmp_path}/a b.txt' --run {folder} {' '.join([*TINY, *SMALL])} steps=2",
        f"weft train --resume {folder} steps=4  # after step 2",
        f"weft train --resume {folder} steps=6 evaluate.every=3  # after step 4",
    ]
    assert "\n".join(commands) in (tmp_path / "out" / "README.md").read_text()
    assert "\n".join(commands) in html.unescape((tmp_path / "run" / "report.html").read_text())


def test_evaluations_and_logs_at_other_steps(run: Path, cli: Cli) -> None:
    words = ["steps=12", "evaluate.every=3", "log.every=2", "checkpoint.every=3"]
    assert command(["train", "--resume", str(run), *words]) == 0
    evaluated = [line["step"] for line in metrics(run) if "validation_loss" in line]
    assert evaluated == [2, 4, 6, 9, 12]
    assert "no line of step" not in cli.logged("train", "--resume", run)


def test_a_run_that_patience_stopped_is_extended_with_more_patience(base: Path, tmp_path: Path) -> None:
    changes = [*TINY, *SMALL, "steps=20", "evaluate.patience=1", "optimizer.lr=1e-12"]
    weft.train("gpt-tiny", data=str(base / "a.txt"), run=tmp_path / "run", changes=changes, log=lambda line: None)
    last = metrics(tmp_path / "run")[-1]["step"]
    assert isinstance(last, int) and last < 20
    config = (tmp_path / "run/config.toml").read_bytes()
    with pytest.raises(ConfigError, match=rf"evaluate\.patience = 1: it stopped the run after step {last}; to resume"):
        weft.resume(tmp_path / "run", changes=["steps=30"])
    assert (tmp_path / "run/config.toml").read_bytes() == config
    weft.resume(tmp_path / "run", changes=["evaluate.patience=50"], log=lambda line: None)
    assert metrics(tmp_path / "run")[-1]["step"] == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("steps=4", "steps = 4: the run has already taken 6; give more"),
        ("model.layers=2", "model.layers: can't change within a run; these can: steps, evaluate.every"),
        ("evaluate.metric=perplexity", "evaluate.metric: can't change within a run"),
        ("step=9", "step: unknown key; did you mean 'steps'?"),
        ("steps=many", "steps = 'many': expected a whole number"),
        ("other.txt", "the run keeps its recipe and text; give nothing else, or steps=3000"),
    ],
)
def test_changes_that_would_make_another_run_are_refused(base: Path, cli: Cli, change: str, message: str) -> None:
    before = files(base / "run")
    assert message in cli.refused("train", "--resume", base / "run", change)
    assert files(base / "run") == before


def test_an_ngram_model_cannot_be_extended(base: Path, tmp_path: Path) -> None:
    weft.train("ngram-3", data=str(base / "a.txt"), run=tmp_path / "run", log=lambda line: None)
    with pytest.raises(ConfigError, match="steps = 5: an n-gram model is counted in one pass"):
        weft.resume(tmp_path / "run", changes=["steps=5"])
    with pytest.raises(ConfigError, match=r"init = .*: an n-gram model is counted in one pass"):
        weft.train(tmp_path / "run", data=str(base / "b.txt"), run=tmp_path / "new")


def test_the_same_text_in_another_encoding_gives_the_same_tokens(tmp_path: Path) -> None:
    text = "".join(f"Où vas-tu, élève {n} ? L’été fut très beau.\n" for n in range(300))
    trained = {}
    for encoding in ("utf-8", "cp1252"):
        (tmp_path / f"{encoding}.txt").write_bytes(text.encode(encoding))
        changes = [*TINY, *SMALL, "steps=1", f"data.encoding={encoding}"]
        data = str(tmp_path / f"{encoding}.txt")
        trained[encoding] = weft.train("gpt-tiny", data=data, run=tmp_path / encoding, changes=changes)
    assert json.loads((tmp_path / "cp1252/data/plan.json").read_text())["encoding"] == "cp1252"
    utf8, other = trained.values()
    assert utf8.tokenizer.fingerprint == other.tokenizer.fingerprint
    assert utf8.objective.fingerprints == other.objective.fingerprints
    expected = utf8.evaluate(str(tmp_path / "utf-8.txt"))
    assert utf8.evaluate(str(tmp_path / "cp1252.txt"), encoding="cp1252") == expected
