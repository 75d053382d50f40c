"""Checkpoints: whole or not there, damage found, old ones kept until the new one stands."""

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
from tests.training.small import train
from torch import nn

from weft.errors import DamageError, RunError
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, held
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


def save(folder: Path, step: int, keep: int = 2, best: bool = False, seed: int = 0) -> Path:
    model, optimizer = trained(seed)
    notes = {"loss": 0.1 + 0.2} | ({"best_step": step} if best else {})
    return checkpoint.write(folder, snapshot(step, model, optimizer, notes), keep)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint.write(tmp_path, snapshot(7, model, optimizer, {"loss": 0.1 + 0.2}), keep=1)
    after = torch.rand(3)  # what the generator gives next
    other, other_optimizer = trained(seed=1)
    torch.manual_seed(99)
    assert checkpoint.load(path, other, other_optimizer)[0] == {"loss": 0.1 + 0.2}
    assert path.name == "step-00000007"
    assert torch.equal(torch.rand(3), after)
    assert torch.equal(other.table.weight, model.table.weight)
    assert other.out.weight is other.table.weight
    for key, value in optimizer.state[model.table.weight].items():
        assert torch.equal(other_optimizer.state[other.table.weight][key], value)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    assert sorted(tensors.load(path / "model.safetensors")) == ["seen", "table.weight"]
    assert json.loads((path / "manifest.json").read_text())["tied"] == {"out.weight": "table.weight"}


def test_links_and_keeping(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2, best=step == 1)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-00000001", "step-00000003", "step-00000004"]
    assert os.readlink(tmp_path / "latest") == "step-00000004"
    assert os.readlink(tmp_path / "best") == "step-00000001"
    assert not list(tmp_path.glob(".*"))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "truncated": lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-5]),
    "flipped bit": lambda p: flip_a_bit(p / "state/optimizer.safetensors"),
    "missing file": lambda p: (p / "state/state.json").unlink(),
    "missing manifest": lambda p: (p / "manifest.json").unlink(),
    "emptied manifest": lambda p: (p / "manifest.json").write_text(""),
    "other manifest": lambda p: (p / "manifest.json").write_text("[1]"),
    "empty folder": lambda p: (shutil.rmtree(p), p.mkdir()),
}


def change_manifest(path: Path, **changes: Any) -> None:
    tree = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(tree | changes))


def test_a_manifest_must_vouch_for_the_weights_and_the_step(tmp_path: Path) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    change_manifest(bad, files={})
    with pytest.raises(DamageError, match="not a manifest"):
        checkpoint.verify(bad)
    renamed = good.rename(tmp_path / "step-00000007")
    with pytest.raises(DamageError, match="the manifest is that of step 1"):
        checkpoint.verify(renamed)


def test_a_folder_in_the_place_of_a_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(RunError, match="latest: a folder, where weft keeps a link"):
        save(tmp_path, 1)


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_found_and_the_one_before_is_taken(tmp_path: Path, how: str) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    DAMAGE[how](bad)
    with pytest.raises(RunError, match=r"step-00000002.*(damaged|missing)") as caught:
        checkpoint.verify(bad)
    assert "\n" not in str(caught.value)
    path, lines = checkpoint.newest_good(tmp_path)
    assert path == good
    assert len(lines) == 1


def test_all_damaged_is_one_clear_line(tmp_path: Path) -> None:
    DAMAGE["truncated"](save(tmp_path, 1))
    with pytest.raises(RunError, match="no checkpoint can be read"):
        checkpoint.newest_good(tmp_path)


@pytest.mark.parametrize("crash", ["rename", "fsync", "write"])
def test_a_crash_while_saving_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    old = save(tmp_path, 1, keep=1)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    target = {"rename": (os, "replace"), "fsync": (os, "fsync"), "write": (tensors, "save_file")}[crash]
    monkeypatch.setattr(*target, fail)
    with pytest.raises(RunError, match="No space left"):
        save(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert checkpoint.newest_good(tmp_path) == (old, [])
    assert os.readlink(tmp_path / "latest") == old.name
    assert not list(tmp_path.glob(".step-*"))


def test_what_a_killed_process_left_is_never_taken_and_swept_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between writing and renaming: the half-made folder has another name."""
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
def test_what_killed_processes_left_anywhere_in_a_run_is_swept_away(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(exist_ok=True)
    left = [tmp_path / name / ".train.safetensors.0123abcd", tmp_path / name / ".int4.safetensors.89abcdef"]
    left[0].write_bytes(b"half")
    left[1].mkdir()
    with held(RunFolder(tmp_path)):
        assert not any(path.exists() for path in left)


def test_the_old_one_goes_only_after_the_new_one_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = save(tmp_path, 1, keep=1)

    def write_something_else(tensors: dict, path: Path) -> None:
        original({name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, path)

    original = tensors.save_file
    monkeypatch.setattr(tensors, "save_file", write_something_else)
    with pytest.raises(RunError, match="does not read back"):
        save(tmp_path, 2, keep=1)
    assert checkpoint.newest_good(tmp_path) == (old, [])


def test_weights_of_another_shape_are_one_line(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(RunError, match="do not fit the model") as caught:
        checkpoint.load_weights(path, nn.Linear(2, 2))
    assert "\n" not in str(caught.value)


# ---- beside the training


def saver(run: RunFolder, keep: int = 2) -> Saver:
    return Saver(run, checkpoint.write, keep, before=lambda: None)


def state(step: int, notes: dict[str, Any] | None = None) -> Callable[[], Snapshot]:
    """What a saver is asked to write."""
    model, optimizer = trained()
    return lambda: snapshot(step, model, optimizer, notes or {})


def test_what_is_written_is_the_state_when_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after a save may change the weights while the thread still writes."""
    model, optimizer = trained()
    expected = model.table.weight.detach().clone()
    go = threading.Event()
    original = tensors.save_file

    def slow(*args: Any) -> None:
        assert go.wait(20)
        original(*args)

    monkeypatch.setattr(tensors, "save_file", slow)
    run = RunFolder(tmp_path)
    writing = saver(run)
    notes = {"waiting": [1.0]}
    writing.save(1, lambda: snapshot(1, model, optimizer, notes), best=True)
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

    def full(*args: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensors, "save_file", full)
    writing.save(2, state(2), best=True)
    writing.wait()
    news = writing.failure_message()
    assert news is not None
    assert "step-00000002: the checkpoint cannot be written: I/O error: No space left" in news
    assert writing.failure_message() is None
    assert writing.lost_best
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
    events = [line["event"] for line in read_lines(run.events)]
    assert events == ["checkpoint", "checkpoint failed", "checkpoint"]


def test_metrics_that_cannot_be_written_hold_the_checkpoint_back(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    run = RunFolder(tmp_path)
    writing = Saver(run, checkpoint.write, 1, before=full)
    writing.save(1, state(1))
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written: No space left.*no checkpoint was written"):
        writing.finish()


def test_a_bug_in_the_thread_is_raised_where_the_loop_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(tensors, "save_file", broken)
    run = RunFolder(tmp_path)
    writing = saver(run)
    writing.save(1, state(1))
    with pytest.raises(ZeroDivisionError):
        writing.wait()


def test_training_goes_on_through_a_full_disk(tmp_path, recipe, corpus, evaluate, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The second checkpoint fails, the third succeeds, and the best weights are on the disk in the end."""
    attempts = 0
    original = checkpoint.write

    def sometimes(folder: Path, copy: Snapshot, *rest: Any, **more: Any) -> Path:
        nonlocal attempts
        attempts += folder.name == "checkpoints"
        if attempts == 2 and folder.name == "checkpoints":
            raise RunError(f"{folder}: the checkpoint cannot be written: No space left on device")
        return original(folder, copy, *rest, **more)

    monkeypatch.setattr(checkpoint, "write", sometimes)
    lines: list[str] = []
    given = {"corpus": corpus, "evaluate": evaluate}
    result = train(recipe(), tmp_path / "run", log=lines.append, **given)
    assert result.steps == 12
    assert any("training continues" in line for line in lines)
    assert (result.run.checkpoints / "best").exists()
    assert checkpoint.newest_good(result.run.checkpoints)[0].name == "step-00000012"


def test_a_last_checkpoint_that_fails_ends_with_one_line(tmp_path, recipe, corpus, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    original = checkpoint.write

    def last(folder: Path, copy: Snapshot, *rest: Any, **more: Any) -> Path:
        if copy.step == 12:
            raise RunError(f"{folder}: the checkpoint cannot be written: Read-only file system")
        return original(folder, copy, *rest, **more)

    monkeypatch.setattr(checkpoint, "write", last)
    with pytest.raises(RunError, match=r"Read-only file system; the newest whole checkpoint is step-00000010"):
        train(recipe(), tmp_path / "run", corpus=corpus, quiet=True)


def test_going_back_leaves_no_hanging_links(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3, best=step == 3)
    checkpoint.forget_after(tmp_path, 2)
    assert os.readlink(tmp_path / "latest") == "step-00000002"
    assert not (tmp_path / "best").is_symlink()
    checkpoint.forget_after(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoint.standing(folder)]


def test_the_best_of_each_that_is_kept_stays(tmp_path: Path) -> None:
    """A run may return to any of them, and to what was the best then."""
    for step, best in ((1, 1), (2, 1), (3, 3)):
        checkpoint.write(tmp_path, snapshot(step, *trained(), {"best_step": best}), keep=2)
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [1, 2, 3]
    checkpoint.write(tmp_path, snapshot(4, *trained(), {"best_step": 3}), keep=2)
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [3, 4]


def test_going_back_restores_what_was_the_best_then(tmp_path: Path) -> None:
    for step, best in ((1, 1), (2, 1), (3, 3)):
        checkpoint.write(tmp_path, snapshot(step, *trained(), {"best_step": best}), keep=2)
    checkpoint.forget_after(tmp_path, 2)
    assert (os.readlink(tmp_path / "latest"), os.readlink(tmp_path / "best")) == ("step-00000002", "step-00000001")


def test_what_an_interruption_saved_takes_no_place_and_goes(tmp_path: Path) -> None:
    old = [save(tmp_path, 1), save(tmp_path, 2)]
    for step in (3, 4):
        checkpoint.write(tmp_path, snapshot(step, *trained(), {}), keep=2, interrupted=True)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "interrupted-00000004"]
    assert checkpoint.newest_good(tmp_path)[0].name == os.readlink(tmp_path / "latest") == "interrupted-00000004"
    assert list(checkpoint.intact(tmp_path)) == old[::-1]
    save(tmp_path, 5)
    assert names(tmp_path) == ["step-00000002", "step-00000005"]


def test_a_link_in_place_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (tmp_path / "step-00000009").symlink_to(path.name)
    with pytest.raises(RunError, match="step-00000009: a link, where weft keeps a checkpoint"):
        checkpoint.checkpoints(tmp_path)
