"""One loop for every family of models, and everything that it writes down and shows."""

import io
import shutil
import sys
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.training.small import resume, settled, train

from weft import progress
from weft.errors import ConfigError
from weft.models.build import build
from weft.runs.lines import read_lines
from weft.training.compiled import compiled, evaluations_pay
from weft.training.display import usual_bits_per_byte
from weft.training.weights import load_model

QUICK = ["steps=3", "batch.size=2", "batch.length=8", "log.every=1"]


@pytest.mark.parametrize("preset", ["lstm", "gru", "elman"])
def test_recurrent_models_train(tmp_path, corpus, preset) -> None:  # type: ignore[no-untyped-def]
    size = ["model.d_model=8"] + (["model.d_embedding=8"] if preset == "elman" else [])
    result = train(settled(preset, *QUICK, *size), tmp_path / "run", corpus=corpus, quiet=True)
    assert result.steps == 3
    model, _ = load_model(result.run, "latest")
    same = zip(model.state_dict().values(), result.model.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in same)


def test_counting_is_training_too(tmp_path, corpus, evaluate) -> None:  # type: ignore[no-untyped-def]
    given = {"corpus": corpus, "evaluate": evaluate, "quiet": True}
    result = train(settled("ngram-3"), tmp_path / "run", **given)
    assert result.validation["loss"] < 2.0  # the text's own uncertainty is near 1.2, chance is 3.14
    model, _ = load_model(result.run)
    assert evaluate(model) == result.validation
    assert resume(tmp_path / "run", **given).validation == result.validation


def test_masked_documents_train(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    settings = recipe("data.document_mask=true", "steps=3", "log.every=1")
    result = train(settings, tmp_path / "run", corpus=corpus, quiet=True)
    assert result.loss > 0
    seen = [line["tokens"] for line in read_lines(result.run.metrics)]
    assert seen[-1] <= 3 * 4 * 12  # the last token of a document predicts nothing


def test_tensorboard_events_are_written(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("tensorboard")
    settings = recipe("steps=2", "log.every=1", "log.tensorboard=true")
    result = train(settings, tmp_path / "run", corpus=corpus, quiet=True)
    (file,) = result.run.tensorboard.iterdir()
    assert file.stat().st_size > 200


def test_tensorboard_that_is_not_installed_is_one_line(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, monkeypatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tensorboard is not installed; pip install 'weft\[tensorboard\]'"):
        train(
            recipe("log.tensorboard=true"), tmp_path / "run", corpus=corpus, quiet=True
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


class Recorder:
    """Stands in for the wandb module: it keeps what it is given."""

    def __init__(self) -> None:
        self.starts: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.finished = 0

    def init(self, **given: Any) -> "Recorder":
        self.starts.append(given)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, Any]) -> None:
        self.lines.append(values)

    def finish(self) -> None:
        self.finished += 1


def test_weights_and_biases_sees_every_line_and_the_same_run(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, monkeypatch
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


@pytest.mark.slow  # for the service that wandb starts
def test_weights_and_biases_offline(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("wandb")
    settings = recipe("log.wandb=offline", "steps=2", "log.every=1")
    result = train(settings, tmp_path / "run", corpus=corpus, quiet=True)
    assert list((result.run.path / "wandb").glob("offline-run-*"))


def test_weights_and_biases_that_is_not_installed_is_one_line(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"log\.wandb = 'online': wandb is not installed"):
        train(recipe("log.wandb=online"), tmp_path / "run", corpus=corpus, quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_terminal_shows_a_bar_and_a_file_shows_lines(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, evaluate, monkeypatch
) -> None:
    given = {"corpus": corpus, "evaluate": evaluate}
    lines: list[str] = []
    train(recipe(), tmp_path / "plain", log=lines.append, **given)
    assert "the loss should begin near ln 23 = 3.14" in lines[0]
    assert "bits per byte, give or take a fifth" in lines[1]
    assert lines[2].startswith("pre-flight: a step, an evaluation and a checkpoint")
    assert any(line.startswith("step 3/12 · loss ") and " left" in line for line in lines)
    assert any("validation loss" in line and "(best)" in line for line in lines)

    screen = io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=160))
    train(recipe(), tmp_path / "bar", log=lines.append, **given)
    assert "12/12" in screen.getvalue()
    assert "tok/s" in screen.getvalue()
    assert "validation loss" in screen.getvalue()


def test_metrics_hold_only_what_the_recipe_decides(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    result = train(recipe(), tmp_path / "run", corpus=corpus, quiet=True)
    lines = read_lines(result.run.metrics)
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    assert set(lines[0]) == {"step", "loss", "gradient_norm", "lr", "tokens", "epoch"}
    assert lines[-1]["tokens"] == 12 * 4 * 12
    assert all(line["tokens_per_second"] > 0 for line in read_lines(result.run.timings))


def test_compiling_leaves_the_model_as_it_was(recipe) -> None:  # type: ignore[no-untyped-def]
    model = build(recipe().model)
    tokens = torch.randint(0, 20, (2, 8))
    plain = model.eval().features(tokens)
    with compiled(model, True, capture=False) as passes:
        assert passes is not None
        passes.plain = lambda *given, **named: None
        assert model.features(tokens) is None
    assert torch.equal(model.features(tokens), plain)


def test_evaluations_are_compiled_where_they_are_long(recipe) -> None:  # type: ignore[no-untyped-def]
    model, tokens = build(recipe().model).eval(), torch.randint(0, 20, (2, 8))
    plain = model.features(tokens)
    with compiled(model, True, capture=False, evaluations=False) as passes:
        assert passes is not None
        passes.plain = lambda *given, **named: None
        assert model.features(tokens) is None
        with torch.no_grad():
            assert torch.equal(model.features(tokens), plain)
    few, many = recipe("evaluate.tokens=100"), recipe("evaluate.tokens=100000000")
    processor, gpu = torch.device("cpu"), torch.device("cuda")
    assert not evaluations_pay(few, 1e5, processor)
    assert evaluations_pay(many, 1e5, processor)
    assert not evaluations_pay(many, 1e5, gpu)


def test_the_rule_of_thumb_passes_through_what_it_names() -> None:
    assert usual_bits_per_byte(7e12) == pytest.approx(2.7, rel=0.05)  # nanoGPT on Shakespeare, on a processor
    assert usual_bits_per_byte(2.2e20) == pytest.approx(0.93, rel=0.05)  # GPT-2 124M
    assert usual_bits_per_byte(4.2e22) == pytest.approx(0.65, rel=0.1)  # LLaMA 7B
    assert usual_bits_per_byte(1.0) == 8.0  # nobody needs more than a byte for a byte


def test_what_it_writes_on_the_way_changes_nothing(tmp_path, recipe, corpus, evaluate) -> None:  # type: ignore[no-untyped-def]
    given = {"corpus": corpus, "evaluate": evaluate, "quiet": True}
    silent = train(recipe(), tmp_path / "silent", **given)

    def sample(model: Any) -> list[str]:
        assert not model.training
        return [str(int(model(torch.tensor([[1]])).argmax()))]

    result = train(recipe(), tmp_path / "run", sample=sample, **given)
    events = [line for line in read_lines(result.run.events) if line["event"] == "samples"]
    assert [event["step"] for event in events] == [4, 8, 12]
    assert all(len(event["texts"]) == 1 for event in events)
    assert result.run.metrics.read_text() == silent.run.metrics.read_text()
