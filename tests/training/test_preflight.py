"""The pre-flight finds what would fail later, and does not change the run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training.small import CPU, Corpus, Runs, TextInMemory, change_steps, events, loader, same_parameters, small

from weft.data.batch import Batch
from weft.errors import ConfigError, RunError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.parallel.passes import Parallel
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.storage import tensors
from weft.training import learner, preflight
from weft.training.display import expectations
from weft.training.learner import Learner
from weft.training.loop import Loop
from weft.training.preflight import Preflight, one_pass
from weft.training.step import OptimisationStep


def too_large(monkeypatch: pytest.MonkeyPatch, rows: int) -> list[int]:
    """Simulate a device with memory for `rows` sequences; return the list that the tried sizes are added to."""
    tried: list[int] = []

    def fit(number: int, step: OptimisationStep, parts: Sequence[Batch]) -> None:
        largest = max(len(part.tokens) for part in parts)
        tried.append(largest)
        if largest > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    change_steps(monkeypatch, fit)
    return tried


def saved_micro(run: RunFolder) -> int:
    """Return the rows of a micro-batch in a run's newest checkpoint."""
    return json.loads((run.checkpoints / "latest/state/state.json").read_text())["notes"]["micro"]


def test_the_run_is_the_same_with_and_without_it(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra step would change dropout and moments."""
    checked = runs.train(name="checked", evaluate=runs.evaluate)
    (event,) = events(checked.run, "preflight")
    assert event["memory"] > 0
    assert event["checkpoint"] > 0
    assert not checked.run.scratch.exists()
    monkeypatch.setattr(Loop, "_preflight", lambda *args: None)
    bare = runs.train(name="bare", evaluate=runs.evaluate)
    assert checked.run.metrics.read_text() == bare.run.metrics.read_text()
    assert same_parameters(checked.model, bare.model)


def test_a_batch_that_does_not_fit_names_one_that_does(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = too_large(monkeypatch, rows=3)
    line = r"batch\.micro = 16: 16 times a sequence of 12 .* batch\.micro=2 does"
    with pytest.raises(RunError, match=line) as caught:
        runs.train("batch.size=16")
    assert "\n" not in str(caught.value)
    assert tried == [16, 8, 4, 2]
    assert not (runs.folder / "run/config.toml").exists()  # it did not become a run
    runs.train("batch.size=16", "batch.micro=2")


def test_auto_finds_and_saves_what_fits(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe is unchanged; the size is saved with the checkpoints."""
    too_large(monkeypatch, rows=3)
    settings = ["batch.size=6", "batch.micro=auto", "steps=3"]
    result = runs.train(*settings)
    assert result.steps == 3
    assert result.run.settled_recipe() == small(*settings)
    assert saved_micro(result.run) == 3


def test_a_resumed_run_begins_with_the_saved_size(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["batch.size=8", "batch.micro=auto", "steps=4", "checkpoint.every=2", "checkpoint.keep=3"]
    tried = too_large(monkeypatch, rows=3)
    run = runs.train(*settings).run
    assert tried[:4] == [8, 4, 2, 2]
    checkpoint.forget_after(run.checkpoints, 2)
    tried.clear()
    assert runs.resume(quiet=True).steps == 4
    assert tried == [2, 2, 2]  # the pre-flight's step and the run's
    assert saved_micro(run) == 2


def test_neither_a_number_nor_auto_is_one_line() -> None:
    for wrong in ("some", "0", "-2", "true", "1.5"):
        with pytest.raises(ConfigError, match=r"batch\.micro: .* expected a whole number above 0, or auto"):
            small(f"batch.micro={wrong}")


def test_auto_is_the_whole_batch_where_it_fits(runs: Runs) -> None:
    assert saved_micro(runs.train("batch.micro=auto", "steps=2").run) == 4


def test_not_even_one_sequence_is_one_line(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    too_large(monkeypatch, rows=0)
    with pytest.raises(RunError, match=r"too little memory for one sequence of 12 tokens; shorten batch\.length"):
        runs.train("batch.micro=auto")


@pytest.mark.parametrize("auto", [False, True])
def test_the_optimizers_moments_count(tmp_path: Path, corpus: Corpus, auto: bool) -> None:
    """The first update creates them, so that the second step needs more memory."""
    settings, moments = small("batch.size=8"), 0

    def step(parts: list[Batch]) -> None:
        nonlocal moments
        if 10 * len(parts[0].tokens) + moments > 85:
            raise torch.OutOfMemoryError("CUDA out of memory")
        moments = 20

    model = build(settings.model)
    learner = Learner(Parallel(model), torch.optim.SGD(model.parameters()))
    device = torch.device("meta")
    trial = Preflight(learner, loader(settings, corpus), step, evaluate=dict, device=device, need=int, auto=auto)
    if auto:
        assert trial.run(tmp_path / "scratch", {}).micro == 4
    else:
        with pytest.raises(RunError, match=r"batch\.micro=4 does"):
            trial.run(tmp_path / "scratch", {})
    assert not (tmp_path / "scratch").exists()


def test_an_evaluation_that_does_not_fit_is_found(runs: Runs) -> None:
    def hungry(model: Any) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RunError, match="the evaluation runs out of memory although training fits"):
        runs.train(evaluate=hungry)


def test_a_full_disk_is_found(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensors, "save_file", full)
    with pytest.raises(RunError, match="the checkpoint cannot be written: No space left on device"):
        runs.train(quiet=True)
    assert not (runs.folder / "run/.preflight").exists()


def test_a_disk_that_will_be_full_gives_a_warning(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and two moments of 4,800 fp32 values are 57,600 bytes a checkpoint; four are held at the same time."""
    for free, warned in ((240_000, False), (200_000, True)):
        lines: list[str] = []
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        runs.train("steps=1", "optimizer=adamw", name=str(free), log=lines.append, quiet=False)
        assert any("checkpoint.keep = 2 needs up to 22" in line for line in lines) is warned
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000))
    with pytest.raises(RunError, match=r"48\.8 KiB left on the disk; a checkpoint needs 56\.\d KiB"):
        runs.train("steps=1", "optimizer=adamw", name="none")


def test_other_errors_are_not_hidden(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("a bug")

    change_steps(monkeypatch, broken)
    with pytest.raises(RuntimeError, match="a bug"):
        runs.train(quiet=True)


def test_one_pass_of_an_evaluation_is_enough(corpus: Corpus) -> None:
    model = build(small().model)
    tokens = loader(small(), corpus).parts(1)[0].tokens
    seen = 0
    with one_pass(model):
        for _ in range(5):
            model(tokens)
            seen += 1
    assert seen == 1
    assert "features" not in vars(model)
    assert model(tokens).shape == (4, 12, 23)


def test_it_costs_less_than_two_steps(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: one step, and an evaluation that reads no more tokens than a step."""
    steps: list[int] = []
    change_steps(monkeypatch, lambda number, step, parts: steps.append(number))
    limits: list[int | None] = []

    def record(self: TextInMemory, model: LanguageModel, max_tokens: int | None) -> dict[str, float]:
        limits.append(max_tokens)
        return {"loss": 1.0}

    monkeypatch.setattr(TextInMemory, "validation_metrics", record)
    runs.train("steps=1", "evaluate.tokens=99999", evaluate=lambda model: {})
    assert steps == [0, 1] and limits == [4 * 12, 99999]


def test_unwritable_moments_are_found_before_the_first_step(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update creates them, and they are two thirds of a checkpoint."""
    save = tensors.save

    def full(path: Path, values: Mapping[str, torch.Tensor]) -> None:
        if sum(tensor.nbytes for tensor in values.values()) > 25_000:
            raise OSError(27, "File too large")
        save(path, values)

    monkeypatch.setattr(tensors, "save", full)
    weights = 4 * sum(p.numel() for p in build(small().model).parameters())
    assert weights < 25_000 < 2 * weights
    with pytest.raises(RunError, match=r"moments\.safetensors: cannot be written: File too large"):
        runs.train("optimizer=adamw")
    assert not (runs.folder / "run").exists()


def test_expectations_depend_on_where_the_weights_come_from() -> None:
    settings = small()
    sizes = Parallel(build(settings.model)).sizes
    first, second = expectations(settings, sizes, 0, device=CPU)
    assert "from fresh weights" in first and "ln 23 = 3.14" in first and "operations in total" in second
    later, _ = expectations(settings, sizes, 5, device=CPU)
    assert "from step 5" in later and "ln 23" not in later
    (only,) = expectations(settings.replace(init="runs/other"), sizes, 0, device=CPU)
    assert "from runs/other" in only and "ln 23" not in only


# ---- refused before anything is allocated


class AllocatedError(Exception):
    """Memory was allocated."""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["batch.size=1000000"], r"1000000 times a sequence of 12 tokens need at least .* of memory, and this"),
        (["batch.size=100000000000"], r"batch\.size = 100000000000 × batch\.length = 12: the tokens of a step alone"),
        (["model.d_model=100000", "model.layers=100"], r"this model needs at least .* for weights, gradients and"),
        (["batch.length=10000000", "model.context=10000000"], r"4 times a sequence of 10000000 tokens need"),
    ],
)
def test_excess_memory_is_refused(runs: Runs, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str) -> None:
    """Without a step and, if the model alone is too large, without building it."""

    def allocate(*args: Any) -> None:
        raise AllocatedError

    change_steps(monkeypatch, allocate)
    monkeypatch.setattr(preflight, "total_memory", lambda device: 1 << 30)
    if "model.layers=100" in words:
        monkeypatch.setattr(learner, "first_model", allocate)
    if any("length" in word for word in words):
        runs.corpus = SimpleNamespace(train=Endless(), validation=None)
    with pytest.raises(RunError, match=message):
        runs.train(*words)


class Endless:
    """A text that is long enough for any window."""

    def __len__(self) -> int:
        return 1 << 40


def test_auto_begins_with_rows_that_fit_a_cpu(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["batch.size=64", "batch.micro=auto"]
    need = preflight.MemoryNeed(small(*settings), lambda: pytest.fail("not needed"))
    monkeypatch.setattr(preflight, "total_memory", lambda device: round(preflight.MAX_CPU_FACTOR * need(16)) + 1)
    tried = too_large(monkeypatch, 64)
    runs.train(*settings)
    assert set(tried) == {16}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_refused_would_not_have_fitted(corpus: Corpus, dropout: float) -> None:
    """The least memory of a step is below that of the tensors saved for the backward pass."""
    settings = small(*["batch.size=64", "batch.length=32", "model.context=32", f"model.dropout={dropout}"])
    model, kept = build(settings.model).train(), dict[int, torch.UntypedStorage]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    objective = TextInMemory(settings, [corpus])
    (part,) = objective.loader.parts(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        objective.loss(model, model.read(part), part)
    fixed = 4 * 4 * sum(p.numel() for p in model.parameters())
    least = preflight.MemoryNeed(settings, lambda: part)(64) - preflight.CERTAIN * fixed
    saved = sum(storage.nbytes() for storage in kept.values())
    assert saved / 3 < least <= saved


def test_the_machine_has_memory() -> None:
    assert 1 << 27 < preflight.total_memory(CPU) < 1 << 50
