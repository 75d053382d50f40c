"""One loop for every family of models: what it learns, writes and shows."""

import io
import math
import shutil
import sys
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.spread import slow
from tests.training.small import Runs, events, settled, small, train

from weft import progress
from weft.errors import ConfigError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.runs.lines import read_lines
from weft.training.compiled import compiled, evaluations_pay
from weft.training.display import usual_bits_per_byte
from weft.training.weights import load_model

CHANCE = math.log(23)


@pytest.mark.parametrize("preset", [slow("lstm"), slow("gru"), "elman"])
def test_recurrent_models_train(runs: Runs, preset: str) -> None:
    sizes = ["model.d_model=16", "batch.size=8", "batch.length=16"]
    sizes += ["model.d_embedding=16"] if preset == "elman" else []
    recipe = settled(preset, *sizes, "steps=40", "log.every=1", "optimizer.lr=0.03", "schedule.warmup=1")
    result = train(recipe, runs.folder / "run", corpus=runs.corpus, quiet=True)
    losses = [line["loss"] for line in read_lines(result.run.metrics)]
    assert result.steps == 40 and result.loss == losses[-1]
    assert abs(losses[0] - CHANCE) < 0.5 and losses[-1] < losses[0] - 0.5
    model, _ = load_model(result.run, "latest")
    same = zip(model.state_dict().values(), result.model.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in same)


def test_counting_is_training_too(runs: Runs) -> None:
    recipe, options = settled("ngram-3"), {"corpus": runs.corpus, "evaluate": runs.evaluate}
    result = train(recipe, runs.folder / "run", quiet=True, **options)
    assert result.validation["loss"] < 2.0  # the text's entropy is near 1.2
    model, _ = load_model(result.run)
    assert runs.evaluate(model) == result.validation
    assert runs.resume(evaluate=runs.evaluate).validation == result.validation


def test_masked_documents_train(runs: Runs) -> None:
    settings = ["data.document_mask=true", "steps=20", "log.every=1", "optimizer.lr=0.02", "model.dropout=0"]
    result = runs.train(*settings)
    lines = list(read_lines(result.run.metrics))
    assert lines[0]["loss"] == pytest.approx(CHANCE, abs=0.3) and lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert lines[-1]["tokens"] == 20 * 4 * 12


def test_metrics_hold_only_what_the_recipe_decides(runs: Runs) -> None:
    result = runs.train()
    lines = list(read_lines(result.run.metrics))
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    assert set(lines[0]) == {"step", "loss", "gradient_norm", "lr", "tokens", "epoch"}
    assert lines[-1]["tokens"] == 12 * 4 * 12
    assert all(line["tokens_per_second"] > 0 for line in read_lines(result.run.timings))


# ---- other journals


def test_tensorboard_events_are_written(runs: Runs) -> None:
    pytest.importorskip("tensorboard")
    result = runs.train("steps=2", "log.every=1", "log.tensorboard=true")
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
    runs: Runs, monkeypatch: pytest.MonkeyPatch, setting: str, module: str, line: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=line):
        runs.train(setting)
    assert not (runs.folder / "run").exists()


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


def test_weights_and_biases_sees_every_line_and_the_same_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    result = runs.train("log.wandb=offline", "steps=6", "checkpoint.every=3")
    expected = [line["loss"] for line in read_lines(result.run.metrics)]
    assert [line["loss"] for line in recorder.lines if "loss" in line] == expected
    shutil.rmtree(result.run.checkpoints / "step-00000006")
    runs.resume(quiet=True)
    first, second = recorder.starts
    assert first["id"] == second["id"]
    assert first["mode"] == "offline"
    assert first["config"]["steps"] == 6
    assert recorder.finished == 2


@pytest.mark.slow  # because of the service that wandb starts
def test_weights_and_biases_offline(runs: Runs) -> None:
    pytest.importorskip("wandb")
    result = runs.train("log.wandb=offline", "steps=2", "log.every=1")
    assert list((result.run.path / "wandb").glob("offline-run-*"))


# ---- the display


def test_a_terminal_shows_a_bar_and_a_file_shows_lines(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    runs.train(name="plain", log=lines.append, evaluate=runs.evaluate, quiet=False)
    assert "the loss should begin near ln 23 = 3.14" in lines[0]
    assert "bits per byte, give or take a fifth" in lines[1]
    assert lines[2].startswith("pre-flight: a step, an evaluation and a checkpoint")
    assert any(line.startswith("step 3/12 · loss ") and " left" in line for line in lines)
    assert any("validation loss" in line and "(best)" in line for line in lines)

    screen = io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=160))
    runs.train(name="bar", log=lines.append, evaluate=runs.evaluate, quiet=False)
    assert all(text in screen.getvalue() for text in ("12/12", "tok/s", "validation loss"))


def test_the_rule_of_thumb_passes_through_the_runs_it_names() -> None:
    assert usual_bits_per_byte(7e12) == pytest.approx(2.7, rel=0.05)  # nanoGPT on Shakespeare, on a CPU
    assert usual_bits_per_byte(2.2e20) == pytest.approx(0.93, rel=0.05)  # GPT-2 124M
    assert usual_bits_per_byte(4.2e22) == pytest.approx(0.65, rel=0.1)  # LLaMA 7B
    assert usual_bits_per_byte(1.0) == 8.0  # no model needs more


def test_samples_on_the_way_change_nothing(runs: Runs) -> None:
    silent = runs.train(name="silent", evaluate=runs.evaluate)

    def sample(model: LanguageModel) -> list[str]:
        assert not model.training
        return [str(int(model(torch.tensor([[1]])).argmax()))]

    run = runs.train(sample=sample, evaluate=runs.evaluate).run
    assert [event["step"] for event in events(run, "samples")] == [4, 8, 12]
    assert all(len(event["texts"]) == 1 for event in events(run, "samples"))
    assert run.metrics.read_text() == silent.run.metrics.read_text()


# ---- compiled passes


@pytest.mark.slow
def test_compiling_is_undone_and_spares_short_evaluations() -> None:
    model, tokens = build(small().model).eval(), torch.randint(0, 20, (2, 8))
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
def test_long_evaluations_are_compiled(tokens: int, device: str, pays: bool) -> None:
    assert evaluations_pay(small(f"evaluate.tokens={tokens}"), 1e5, torch.device(device)) is pays
