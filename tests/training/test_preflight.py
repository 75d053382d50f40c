"""The pre-flight: it finds what would fail later, and leaves no trace in what follows."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training.small import GivenText, loader, meddle_with_steps, resume, train

from weft.data.batch import Batch
from weft.errors import ConfigError, RunError
from weft.models.build import build
from weft.parallel.passes import Parallel
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.runs.lines import read_lines
from weft.storage import tensors
from weft.training import learner, loop, preflight
from weft.training.display import expectations
from weft.training.learner import Learner
from weft.training.preflight import Preflight, one_pass
from weft.training.step import OptimisationStep


def too_large(monkeypatch: pytest.MonkeyPatch, rows: int) -> list[int]:
    """A device with memory for `rows` sequences at a time; the sizes that were tried."""
    tried: list[int] = []

    def fit(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        most = max(len(part.tokens) for part in parts)
        tried.append(most)
        if most > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    meddle_with_steps(monkeypatch, fit)
    return tried


def found_micro(run: RunFolder) -> int:
    """The rows at a time that a run's newest checkpoint remembers."""
    return json.loads((run.checkpoints / "latest/state/state.json").read_text())["notes"]["micro"]


def test_the_run_is_the_same_with_and_without_it(tmp_path, recipe, corpus, evaluate, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Dropout and moments included, which a step too many would change."""
    given = {"corpus": corpus, "evaluate": evaluate, "quiet": True}
    checked = train(recipe(), tmp_path / "checked", **given)
    (event,) = [line for line in read_lines(checked.run.events) if line["event"] == "preflight"]
    assert event["memory"] > 0
    assert event["checkpoint"] > 0
    assert not checked.run.scratch.exists()
    monkeypatch.setattr(loop.Loop, "_preflight", lambda *args: None)
    bare = train(recipe(), tmp_path / "bare", **given)
    assert checked.run.metrics.read_text() == bare.run.metrics.read_text()
    same = zip(checked.model.parameters(), bare.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


def test_a_batch_that_does_not_fit_names_one_that_does(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    tried = too_large(monkeypatch, rows=3)
    with pytest.raises(
        RunError, match=r"batch\.micro = 16: 16 times a sequence of 12 .* batch\.micro=2 does"
    ) as caught:
        train(recipe("batch.size=16"), tmp_path / "run", corpus=corpus, quiet=True)
    assert "\n" not in str(caught.value)
    assert tried == [16, 8, 4, 2]
    assert not (tmp_path / "run/config.toml").exists()  # it never became a run
    train(recipe("batch.size=16", "batch.micro=2"), tmp_path / "run", corpus=corpus, quiet=True)


def test_auto_finds_what_fits_and_remembers_it(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The recipe stays as it was written; what was found is saved with the checkpoints."""
    too_large(monkeypatch, rows=3)
    settings = recipe("batch.size=6", "batch.micro=auto", "steps=3")
    result = train(settings, tmp_path / "run", corpus=corpus, quiet=True)
    assert result.steps == 3
    assert result.run.settled_recipe() == settings
    assert found_micro(result.run) == 3


def test_a_resumed_run_begins_with_what_was_found(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    settings = recipe("batch.size=8", "batch.micro=auto", "steps=4", "checkpoint.every=2", "checkpoint.keep=3")
    tried = too_large(monkeypatch, rows=3)
    run = train(settings, tmp_path / "run", corpus=corpus, quiet=True).run
    assert tried[:4] == [8, 4, 2, 2]
    checkpoint.forget_after(run.checkpoints, 2)
    tried.clear()
    assert resume(tmp_path / "run", corpus=corpus, quiet=True).steps == 4
    assert tried == [2, 2, 2]  # the pre-flight's step and the run's
    assert found_micro(run) == 2


def test_neither_a_number_nor_auto_is_one_line(recipe) -> None:  # type: ignore[no-untyped-def]
    for wrong in ("some", "0", "-2", "true", "1.5"):
        with pytest.raises(ConfigError, match=r"batch\.micro: .* expected a whole number above 0, or auto"):
            recipe(f"batch.micro={wrong}")


def test_auto_is_the_whole_batch_where_it_fits(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    settings = recipe("batch.micro=auto", "steps=2")
    assert found_micro(train(settings, tmp_path / "run", corpus=corpus, quiet=True).run) == 4


def test_not_even_one_sequence_is_one_line(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    too_large(monkeypatch, rows=0)
    with pytest.raises(RunError, match=r"too little memory for one sequence of 12 tokens; shorten batch\.length"):
        train(recipe("batch.micro=auto"), tmp_path / "run", corpus=corpus, quiet=True)


@pytest.mark.parametrize("auto", [False, True])
def test_the_optimizers_moments_count(tmp_path, recipe, corpus, auto) -> None:  # type: ignore[no-untyped-def]
    """They come with the first update, so that a second step needs more memory than the first."""
    settings, moments = recipe("batch.size=8"), 0

    def step(parts: Any) -> None:
        nonlocal moments
        if 10 * len(parts[0].tokens) + moments > 85:
            raise torch.OutOfMemoryError("CUDA out of memory")
        moments = 20

    model = build(settings.model)
    learner = Learner(Parallel(model), torch.optim.SGD(model.parameters()))
    tried = Preflight(learner, loader(settings, corpus), step, dict, torch.device("meta"), int, auto=auto)
    if auto:
        assert tried.run(tmp_path / "scratch", {}).micro == 4
    else:
        with pytest.raises(RunError, match=r"batch\.micro=4 does"):
            tried.run(tmp_path / "scratch", {})
    assert not (tmp_path / "scratch").exists()


def test_an_evaluation_that_does_not_fit_is_found_at_once(tmp_path, recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    def hungry(model: Any) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RunError, match="the evaluation runs out of memory although training fits"):
        train(recipe(), tmp_path / "run", corpus=corpus, evaluate=hungry, quiet=True)


def test_a_full_disk_is_found_at_once(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensors, "save_file", full)
    with pytest.raises(RunError, match="the checkpoint cannot be written: No space left on device"):
        train(recipe(), tmp_path / "run", corpus=corpus, quiet=True)
    assert not (tmp_path / "run/.preflight").exists()


def test_a_disk_that_will_be_full_is_warned_of(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Weights and two moments of 4,800 fp32 numbers: 57,600 bytes a checkpoint, four of them at once."""
    for free, warned in ((240_000, False), (200_000, True)):
        lines: list[str] = []
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        run = tmp_path / str(free)
        train(recipe("steps=1", "optimizer=adamw"), run, corpus=corpus, log=lines.append)
        assert any("checkpoint.keep = 2 needs up to 22" in line for line in lines) is warned
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000))
    with pytest.raises(RunError, match=r"48\.8 KiB left on the disk; a checkpoint needs 56\.\d KiB"):
        train(recipe("steps=1", "optimizer=adamw"), tmp_path / "none", corpus=corpus, quiet=True)


def test_other_errors_are_not_hidden(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def broken(*given: Any) -> None:
        raise RuntimeError("a bug")

    meddle_with_steps(monkeypatch, broken)
    with pytest.raises(RuntimeError, match="a bug"):
        train(recipe(), tmp_path / "run", corpus=corpus, quiet=True)


def test_one_pass_of_an_evaluation_is_enough(recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    model = build(recipe().model)
    tokens = loader(recipe(), corpus).parts(1)[0].tokens
    seen = 0
    with one_pass(model):
        for _ in range(5):
            model(tokens)
            seen += 1
    assert seen == 1
    assert "features" not in vars(model)
    assert model(tokens).shape == (4, 12, 23)


def test_it_costs_less_than_two_steps(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """On a processor: one step, and an evaluation that reads no more than a step does."""
    steps: list[int] = []
    read: list[int | None] = []
    meddle_with_steps(monkeypatch, lambda number, step, parts: steps.append(number))
    less = GivenText.reading_less

    def noted(self: GivenText, tokens: int) -> GivenText:
        found = less(self, tokens)
        read.append(found.recipe.evaluate.tokens)
        assert found.recipe.evaluate.tokens != self.recipe.evaluate.tokens
        return found

    monkeypatch.setattr(GivenText, "reading_less", noted)
    settings = recipe("steps=1", "evaluate.tokens=99999")
    train(settings, tmp_path / "run", corpus=corpus, evaluate=lambda model: {"loss": 1.0}, quiet=True)
    assert steps == [0, 1]
    assert read == [4 * 12]


def test_moments_that_cannot_be_written_are_noticed_before_the_first_step(  # type: ignore[no-untyped-def]
    tmp_path, recipe, corpus, monkeypatch
) -> None:
    """They come with the first update, and are two thirds of a checkpoint."""
    save = tensors.save

    def full(path: Path, given: Any) -> None:
        if sum(tensor.nbytes for tensor in given.values()) > 25_000:
            raise OSError(27, "File too large")
        save(path, given)

    monkeypatch.setattr(tensors, "save", full)
    weights = 4 * sum(p.numel() for p in build(recipe().model).parameters())
    assert weights < 25_000 < 2 * weights
    with pytest.raises(RunError, match=r"moments\.safetensors: cannot be written: File too large"):
        train(recipe("optimizer=adamw"), tmp_path / "run", corpus=corpus, quiet=True)
    assert not (tmp_path / "run").exists()


def test_what_is_announced_is_true_of_weights_that_are_not_fresh(recipe) -> None:  # type: ignore[no-untyped-def]
    settings = recipe()
    model = build(settings.model)
    first, second = expectations(settings, Parallel(model).sizes, 0, torch.device("cpu"))
    assert "from fresh weights" in first and "ln 23 = 3.14" in first and "operations in all" in second
    later, _ = expectations(settings, Parallel(model).sizes, 5, torch.device("cpu"))
    assert "from step 5" in later and "ln 23" not in later
    (only,) = expectations(settings.replace(init="runs/other"), Parallel(model).sizes, 0, torch.device("cpu"))
    assert "from runs/other" in only and "ln 23" not in only


# ---- what can't fit is refused before it is allocated


class AllocatedError(Exception):
    """Memory was asked for."""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["batch.size=1000000"], r"1000000 times a sequence of 12 tokens need at least .* of memory at once, and this"),
        (["batch.size=100000000000"], r"batch\.size = 100000000000 × batch\.length = 12: the tokens of a step alone"),
        (["model.d_model=100000", "model.layers=100"], r"this model needs at least .* for weights, gradients and"),
        (["batch.length=10000000", "model.context=10000000"], r"4 times a sequence of 10000000 tokens need"),
    ],
)
def test_what_cannot_fit_is_refused(tmp_path, recipe, corpus, monkeypatch, words, message) -> None:  # type: ignore[no-untyped-def]
    """Without a step, and where the model alone is too large, without the model."""

    def allocate(*given: Any) -> None:
        raise AllocatedError

    meddle_with_steps(monkeypatch, allocate)
    monkeypatch.setattr(preflight, "total_memory", lambda device: 1 << 30)
    if "model.layers=100" in words:
        monkeypatch.setattr(learner, "first_model", allocate)
    if any("length" in word for word in words):
        corpus = SimpleNamespace(train=Endless(), validation=None)
    with pytest.raises(RunError, match=message):
        train(recipe(*words), tmp_path / "run", corpus=corpus, quiet=True)


class Endless:
    """A text that is long enough for anything."""

    def __len__(self) -> int:
        return 1 << 40


def test_auto_begins_with_rows_that_fit_a_processor(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    settings = recipe("batch.size=64", "batch.micro=auto")
    need = preflight.Need(settings, lambda: pytest.fail("not needed"))
    monkeypatch.setattr(preflight, "total_memory", lambda device: round(preflight.AMPLE * need(16)) + 1)
    tried = too_large(monkeypatch, 64)
    train(settings, tmp_path / "run", corpus=corpus, quiet=True)
    assert set(tried) == {16}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_refused_would_not_have_fitted(recipe, corpus, dropout) -> None:  # type: ignore[no-untyped-def]
    """The least that a step needs is below what it keeps for the backward pass."""
    settings = recipe("batch.size=64", "batch.length=32", "model.context=32", f"model.dropout={dropout}")
    model, kept = build(settings.model).train(), dict[int, torch.UntypedStorage]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    objective = GivenText(settings, [corpus])
    (part,) = objective.loader.parts(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        objective.loss(model, model.read(part), part)
    fixed = 4 * 4 * sum(p.numel() for p in model.parameters())
    least = preflight.Need(settings, lambda: part)(64) - preflight.SURE * fixed
    saved = sum(storage.nbytes() for storage in kept.values())
    assert saved / 3 < least <= saved


def test_the_machine_has_memory() -> None:
    there = preflight.total_memory(torch.device("cpu"))
    assert 1 << 27 < there < 1 << 50
