"""Checkpoints: complete or absent, damage detected, old ones kept until the new one exists."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from tests.runs.conftest import TrainRun
from torch import Tensor, nn

from weft.errors import DamageError, RunError
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, lock_run
from weft.runs.lines import read_lines
from weft.runs.snapshot import Snapshot, snapshot
from weft.storage import tensors
from weft.training.learner import Saver


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("seen", torch.tensor(float("nan")))


def trained(seed: int = 0) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model.out(model.table(torch.tensor([1, 2]))).square().sum().backward()
    optimizer.step()
    return model, optimizer


def failing(error: Exception) -> Callable[..., None]:
    def fail(*args: object, **options: object) -> None:
        raise error

    return fail


def save(folder: Path, step: int, keep: int = 2, best: bool = False, seed: int = 0) -> Path:
    model, optimizer = trained(seed)
    notes = {"loss": 0.1 + 0.2} | ({"best_step": step} if best else {})
    return checkpoint.write(folder, snapshot(step, model, optimizer, notes=notes), keep)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint.write(tmp_path, snapshot(7, model, optimizer, notes={"loss": 0.1 + 0.2}), keep=1)
    after = torch.rand(3)  # the generator's next values
    other, other_optimizer = trained(seed=1)
    torch.manual_seed(99)
    assert checkpoint.load(path, other, other_optimizer)[0] == {"loss": 0.1 + 0.2}
    assert path.name == "step-00000007" and torch.equal(torch.rand(3), after)
    assert torch.equal(other.table.weight, model.table.weight) and other.out.weight is other.table.weight
    for key, value in optimizer.state[model.table.weight].items():
        assert torch.equal(other_optimizer.state[other.table.weight][key], value)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    assert sorted(tensors.load(path / "model.safetensors")) == ["seen", "table.weight"]
    assert json.loads((path / "manifest.json").read_text())["tied"] == {"out.weight": "table.weight"}


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoint.all_checkpoints(folder)]


def links(folder: Path) -> tuple[str, str]:
    return os.readlink(folder / "latest"), os.readlink(folder / "best")


def test_links_and_kept_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2, best=step == 1)
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]
    assert links(tmp_path) == ("step-00000004", "step-00000001")
    assert not list(tmp_path.glob(".*"))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda p: os.truncate(p / "model.safetensors", (p / "model.safetensors").stat().st_size - 5),
    "flipped bit": lambda p: flip_a_bit(p / "state/optimizer.safetensors"),
    "missing file": lambda p: os.remove(p / "state/state.json"),
    "missing manifest": lambda p: os.remove(p / "manifest.json"),
    "emptied manifest": lambda p: (p / "manifest.json").write_text(""),
    "other manifest": lambda p: (p / "manifest.json").write_text("[1]"),
    "empty folder": empty,
}


def test_a_manifest_must_list_the_weights_and_the_right_step(tmp_path: Path) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    (bad / "manifest.json").write_text(json.dumps(json.loads((bad / "manifest.json").read_text()) | {"files": {}}))
    with pytest.raises(DamageError, match="not a manifest"):
        checkpoint.verify(bad)
    renamed = good.rename(tmp_path / "step-00000007")
    with pytest.raises(DamageError, match="the manifest is of step 1"):
        checkpoint.verify(renamed)


def test_a_folder_instead_of_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(RunError, match="latest: a folder, where weft expects a link"):
        save(tmp_path, 1)


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_detected_and_the_previous_checkpoint_used(tmp_path: Path, how: str) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    DAMAGE[how](bad)
    with pytest.raises(RunError, match=r"step-00000002.*(damaged|missing)") as caught:
        checkpoint.verify(bad)
    assert "\n" not in str(caught.value)
    path, lines = checkpoint.newest_good(tmp_path)
    assert (path, len(lines)) == (good, 1)
    DAMAGE[how](good)
    with pytest.raises(RunError, match="no checkpoint can be read"):
        checkpoint.newest_good(tmp_path)


@pytest.mark.parametrize("crash", ["rename", "fsync", "write"])
def test_a_crash_while_saving_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    old = save(tmp_path, 1, keep=1)
    target = {"rename": (os, "replace"), "fsync": (os, "fsync"), "write": (tensors, "save_file")}[crash]
    monkeypatch.setattr(*target, failing(OSError(28, "No space left on device")))
    with pytest.raises(RunError, match="No space left"):
        save(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert checkpoint.newest_good(tmp_path) == (old, [])
    assert os.readlink(tmp_path / "latest") == old.name
    assert not list(tmp_path.glob(".step-*"))


def test_leftovers_of_a_killed_process_are_ignored_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between writing and renaming, when the folder still has its temporary name."""
    old = save(tmp_path, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)  # a killed process cleans up nothing
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert list(tmp_path.glob(".step-*"))
    assert checkpoint.newest_good(tmp_path) == (old, [])
    save(tmp_path, 2)
    assert not list(tmp_path.glob(".step-*"))
    assert checkpoint.newest_good(tmp_path)[0].name == "step-00000002"


@pytest.mark.parametrize("name", ["", "checkpoints", "data", "quantized"])
def test_leftovers_anywhere_in_a_run_are_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(exist_ok=True)
    left = [tmp_path / name / ".train.safetensors.0123abcd", tmp_path / name / ".int4.safetensors.89abcdef"]
    left[0].write_bytes(b"half")
    left[1].mkdir()
    with lock_run(RunFolder(tmp_path)):
        assert not any(path.exists() for path in left)


def test_the_old_checkpoint_is_removed_only_after_the_new_one_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save(tmp_path, 1, keep=1)

    def write_something_else(tensors: dict[str, Tensor], path: Path) -> None:
        original({name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, path)

    original = tensors.save_file
    monkeypatch.setattr(tensors, "save_file", write_something_else)
    with pytest.raises(RunError, match="does not read back"):
        save(tmp_path, 2, keep=1)
    assert checkpoint.newest_good(tmp_path) == (old, [])


def test_weights_of_another_shape_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="do not fit the model") as caught:
        checkpoint.load_weights(save(tmp_path, 1), nn.Linear(2, 2))
    assert "\n" not in str(caught.value)


# ---- written by a thread while training continues


def write(folder: Path, copy: Snapshot, keep: int, interrupted: bool) -> Path:
    return checkpoint.write(folder, copy, keep, interrupted=interrupted)


def saver(run: RunFolder, keep: int = 2) -> Saver:
    return Saver(run, write, keep, before=lambda: None)


def state(step: int) -> Callable[[], Snapshot]:
    model, optimizer = trained()
    return lambda: snapshot(step, model, optimizer, notes={})


def test_the_state_at_the_time_of_saving_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step may change the weights while the thread still writes."""
    model, optimizer = trained()
    expected = model.table.weight.detach().clone()
    go, original = threading.Event(), tensors.save_file

    def slow(*args: Any) -> None:
        assert go.wait(20)
        original(*args)

    monkeypatch.setattr(tensors, "save_file", slow)
    run, notes = RunFolder(tmp_path), {"waiting": [1.0]}
    writing = saver(run)
    writing.save(1, lambda: snapshot(1, model, optimizer, notes=notes), best=True)
    assert not checkpoint.checkpoints(run.checkpoints)
    notes["waiting"].append(2.0)
    with torch.no_grad():
        model.table.weight.zero_()
        optimizer.state[model.table.weight]["exp_avg"].zero_()
    go.set()
    writing.finish()
    other, moments = trained(seed=1)
    assert checkpoint.load(run.checkpoints / "latest", other, moments)[0] == {"waiting": [1.0]}
    assert torch.equal(other.table.weight, expected)
    assert moments.state[other.table.weight]["exp_avg"].abs().sum() > 0


def test_a_full_disk_is_logged_and_the_next_write_may_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    writing = saver(run, keep=1)
    writing.save(1, state(1), best=True)
    writing.wait()
    error = SafetensorError("I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(tensors, "save_file", failing(error))
    writing.save(2, state(2), best=True)
    writing.wait()
    message = writing.failure_message() or ""
    assert "step-00000002: the checkpoint cannot be written: I/O error: No space left" in message
    assert writing.failure_message() is None and writing.lost_best
    assert checkpoint.newest_good(run.checkpoints)[0].name == "step-00000001"
    assert not list(run.checkpoints.glob(".step*"))
    with pytest.raises(RunError, match=r"the newest whole checkpoint is step-00000001; `weft train --resume") as caught:
        writing.finish()
    assert "\n" not in str(caught.value)

    monkeypatch.undo()
    writing.save(3, state(3), best=True)
    writing.finish()
    assert not writing.lost_best
    assert checkpoint.newest_good(run.checkpoints)[0].name == "step-00000003"
    assert [line["event"] for line in read_lines(run.events)] == ["checkpoint", "checkpoint failed", "checkpoint"]


def test_failures_before_and_in_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint is written without its metrics; a bug in the thread is raised where the loop waits."""
    writing = Saver(RunFolder(tmp_path), write, 1, before=failing(OSError(28, "No space left on device")))
    writing.save(1, state(1))
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written: No space left.*no checkpoint was written"):
        writing.finish()
    monkeypatch.setattr(tensors, "save_file", failing(ZeroDivisionError()))
    writing = saver(RunFolder(tmp_path))
    writing.save(1, state(1))
    with pytest.raises(ZeroDivisionError):
        writing.wait()


def test_training_continues_through_a_full_disk(train_run: TrainRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second checkpoint fails, the third succeeds, and the best weights are saved in the end."""
    attempts, original = 0, checkpoint.write

    def sometimes(folder: Path, copy: Snapshot, *args: Any, **options: Any) -> Path:
        nonlocal attempts
        attempts += folder.name == "checkpoints"
        if attempts == 2 and folder.name == "checkpoints":
            raise RunError(f"{folder}: the checkpoint cannot be written: No space left on device")
        return original(folder, copy, *args, **options)

    monkeypatch.setattr(checkpoint, "write", sometimes)
    lines: list[str] = []
    result = train_run(evaluate=True, log=lines.append)
    assert result.steps == 12 and any("training continues" in line for line in lines)
    assert (result.run.checkpoints / "best").exists()
    assert checkpoint.newest_good(result.run.checkpoints)[0].name == "step-00000012"


def test_a_failed_last_checkpoint_is_one_line(train_run: TrainRun, monkeypatch: pytest.MonkeyPatch) -> None:
    original = checkpoint.write

    def last(folder: Path, copy: Snapshot, *args: Any, **options: Any) -> Path:
        if copy.step == 12:
            raise RunError(f"{folder}: the checkpoint cannot be written: Read-only file system")
        return original(folder, copy, *args, **options)

    monkeypatch.setattr(checkpoint, "write", last)
    with pytest.raises(RunError, match=r"Read-only file system; the newest whole checkpoint is step-00000010"):
        train_run()


def test_a_rollback_leaves_no_dangling_links(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3, best=step == 3)
    checkpoint.forget_after(tmp_path, 2)
    assert os.readlink(tmp_path / "latest") == "step-00000002" and not (tmp_path / "best").is_symlink()
    checkpoint.forget_after(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_best_of_each_kept_checkpoint_is_kept(tmp_path: Path) -> None:
    """A run may return to any of them, and to what was the best then."""

    def write_best(step: int, best: int) -> None:
        checkpoint.write(tmp_path, snapshot(step, *trained(), notes={"best_step": best}), keep=2)

    for step, best in ((1, 1), (2, 1), (3, 3)):
        write_best(step, best)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    checkpoint.forget_after(tmp_path, 2)
    assert links(tmp_path) == ("step-00000002", "step-00000001")
    write_best(3, 3)
    write_best(4, 3)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_a_checkpoint_of_an_interruption_is_extra_and_temporary(tmp_path: Path) -> None:
    old = [save(tmp_path, 1), save(tmp_path, 2)]
    for step in (3, 4):
        checkpoint.write(tmp_path, snapshot(step, *trained(), notes={}), keep=2, interrupted=True)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "interrupted-00000004"]
    assert checkpoint.newest_good(tmp_path)[0].name == os.readlink(tmp_path / "latest") == "interrupted-00000004"
    assert list(checkpoint.intact(tmp_path)) == old[::-1]
    save(tmp_path, 5)
    assert names(tmp_path) == ["step-00000002", "step-00000005"]
