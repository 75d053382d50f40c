"""One loop for every family of models: what it learns, writes and shows."""

import io
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.training.small import Corpus, Evaluate, MakeRecipe, events, resume, settled, train

from weft import progress
from weft.errors import ConfigError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.runs.lines import read_lines
from weft.training.compiled import compiled, evaluations_pay
from weft.training.display import usual_bits_per_byte
from weft.training.weights import load_model

CHANCE = math.log(23)


@pytest.mark.parametrize("preset", ["lstm", "gru", "elman"])
def test_recurrent_models_train(tmp_path: Path, corpus: Corpus, preset: str) -> None:
    sizes = ["model.d_model=16", "batch.size=8", "batch.length=16"]
    sizes += ["model.d_embedding=16"] if preset == "elman" else []
    recipe = settled(preset, *sizes, "steps=40", "log.every=1", "optimizer.lr=0.03", "schedule.warmup=1")
    result = train(recipe, tmp_path / "run", corpus=corpus, quiet=True)
    losses = [line["loss"] for line in read_lines(result.run.metrics)]
    assert result.steps == 40 and result.loss == losses[-1]
    assert abs(losses[0] - CHANCE) < 0.5 and losses[-1] < losses[0] - 0.5
    model, _ = load_model(result.run, "latest")
    same = zip(model.state_dict().values(), result.model.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in same)


def test_counting_is_training_too(tmp_path: Path, corpus: Corpus, evaluate: Evaluate) -> None:
    result = train(settled("ngram-3"), tmp_path / "run", corpus=corpus, evaluate=evaluate, quiet=True)
    assert result.validation["loss"] < 2.0  # the text's entropy is near 1.2
    model, _ = load_model(result.run)
    assert evaluate(model) == result.validation
    again = resume(tmp_path / "run", corpus=corpus, evaluate=evaluate, quiet=True)
    assert again.validation == result.validation


def test_masked_documents_train(tmp_path: Path, recipe: MakeRecipe, corpus: Corpus) -> None:
    settings = recipe("data.document_mask=true", "steps=20", "log.every=1", "optimizer.lr=0.02", "model.dropout=0")
    result = train(settings, tmp_path / "run", corpus=corpus, quiet=True)
    lines = list(read_lines(result.run.metrics))
    assert lines[0]["loss"] == pytest.approx(CHANCE, abs=0.3) and lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert lines[-1]["tokens"] == 20 * 4 * 12


def test_metrics_hold_only_what_the_recipe_decides(tmp_path: Path, recipe: MakeRecipe, corpus: Corpus) -> None:
    result = train(recipe(), tmp_path / "run", corpus=corpus, quiet=True)
    lines = list(read_lines(result.run.metrics))
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    assert set(lines[0]) == {"step", "loss", "gradient_norm", "lr", "tokens", "epoch"}
    assert lines[-1]["tokens"] == 12 * 4 * 12
    assert all(line["tokens_per_second"] > 0 for line in read_lines(result.run.timings))


# ---- other journals


def test_tensorboard_events_are_written(tmp_path: Path, recipe: MakeRecipe, corpus: Corpus) -> None:
    pytest.importorskip("tensorboard")
    settings = recipe("steps=2", "log.every=1", "log.tensorboard=true")
    result = train(settings, tmp_path / "run", corpus=corpus, quiet=True)
    (file,) = result.run.tensorboard.iterdir()
    assert file.stat().st_size > 200


@pytest.mark.parametrize(
    ("setting", "module", "line"),
    [
        ("log.tensorboard=true", "torch.utils.tensorboard", r"tensorboard is not installed; pip install 'weft\[tensor"),
        ("log.wandb=online", "wandb", r"log\.wandb = 'online': wandb is not installed"),
    ],
)
def test_a_journal_that_is_not_installed_is_one_line(
    tmp_path: Path,
    recipe: MakeRecipe,
    corpus: Corpus,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    module: str,
    line: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=line):
        train(recipe(setting), tmp_path / "run", corpus=corpus, quiet=True)
    assert not (tmp_path / "run").exists()


class Recorder:
    """Replaces the wandb module and records its calls."""

    def __init__(self) -> None:
        self.starts: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.finished = 0

    def init(self, **options: Any) -> "Recorder":
        self.starts.append(options)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, Any]) -> None:
        self.lines.append(values)

    def finish(self) -> None:
        self.finished += 1


def test_weights_and_biases_sees_every_line_and_the_same_run(
    tmp_path: Path, recipe: MakeRecipe, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    settings = recipe("log.wandb=offline", "steps=6", "checkpoint.every=3")
    result = train(settings, tmp_path / "run", corpus=corpus, quiet=True)
    assert [line["loss"] for line in recorder.lines if "loss" in line] == [
        line["loss"] for line in read_lines(result.run.metrics)
    ]
    shutil.rmtree(result.run.checkpoints / "step-00000006")
    resume(tmp_path / "run", corpus=corpus, quiet=True)
    first, second = recorder.starts
    assert first["id"] == second["id"]
    assert first["mode"] == "offline"
    assert first["config"]["steps"] == 6
    assert recorder.finished == 2


@pytest.mark.slow  # because of the service that wandb starts
def test_weights_and_biases_offline(tmp_path: Path, recipe: MakeRecipe, corpus: Corpus) -> None:
    pytest.importorskip("wandb")
    settings = recipe("log.wandb=offline", "steps=2", "log.every=1")
    result = train(settings, tmp_path / "run", corpus=corpus, quiet=True)
    assert list((result.run.path / "wandb").glob("offline-run-*"))


# ---- the display


def test_a_terminal_shows_a_bar_and_a_file_shows_lines(
    tmp_path: Path, recipe: MakeRecipe, corpus: Corpus, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    train(recipe(), tmp_path / "plain", log=lines.append, corpus=corpus, evaluate=evaluate)
    assert "the loss should begin near ln 23 = 3.14" in lines[0]
    assert "bits per byte, give or take a fifth" in lines[1]
    assert lines[2].startswith("pre-flight: a step, an evaluation and a checkpoint")
    assert any(line.startswith("step 3/12 · loss ") and " left" in line for line in lines)
    assert any("validation loss" in line and "(best)" in line for line in lines)

    screen = io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=160))
    train(recipe(), tmp_path / "bar", log=lines.append, corpus=corpus, evaluate=evaluate)
    assert all(text in screen.getvalue() for text in ("12/12", "tok/s", "validation loss"))


def test_the_rule_of_thumb_passes_through_the_runs_it_names() -> None:
    assert usual_bits_per_byte(7e12) == pytest.approx(2.7, rel=0.05)  # nanoGPT on Shakespeare, on a CPU
    assert usual_bits_per_byte(2.2e20) == pytest.approx(0.93, rel=0.05)  # GPT-2 124M
    assert usual_bits_per_byte(4.2e22) == pytest.approx(0.65, rel=0.1)  # LLaMA 7B
    assert usual_bits_per_byte(1.0) == 8.0  # no model needs more


def test_samples_on_the_way_change_nothing(
    tmp_path: Path, recipe: MakeRecipe, corpus: Corpus, evaluate: Evaluate
) -> None:
    silent = train(recipe(), tmp_path / "silent", corpus=corpus, evaluate=evaluate, quiet=True)

    def sample(model: LanguageModel) -> list[str]:
        assert not model.training
        return [str(int(model(torch.tensor([[1]])).argmax()))]

    run = train(recipe(), tmp_path / "run", sample=sample, corpus=corpus, evaluate=evaluate, quiet=True).run
    assert [event["step"] for event in events(run, "samples")] == [4, 8, 12]
    assert all(len(event["texts"]) == 1 for event in events(run, "samples"))
    assert run.metrics.read_text() == silent.run.metrics.read_text()


# ---- compiled passes


def test_compiling_is_undone_and_spares_short_evaluations(recipe: MakeRecipe) -> None:
    model, tokens = build(recipe().model).eval(), torch.randint(0, 20, (2, 8))
    plain, replaced = model.features(tokens), torch.zeros(())
    with compiled(model, capture=False) as passes:
        assert passes.evaluating is passes.plain
    with compiled(model, capture=False, evaluations=False) as passes:
        passes.plain = lambda *args, **kwargs: replaced
        assert model.features(tokens) is replaced
        with torch.no_grad():
            assert torch.equal(model.features(tokens), plain)
    assert torch.equal(model.features(tokens), plain)


@pytest.mark.parametrize(
    ("tokens", "device", "pays"), [(100, "cpu", False), (10**8, "cpu", True), (10**8, "cuda", False)]
)
def test_long_evaluations_are_compiled(recipe: MakeRecipe, tokens: int, device: str, pays: bool) -> None:
    assert evaluations_pay(recipe(f"evaluate.tokens={tokens}"), 1e5, torch.device(device)) is pays
