"""Checkpoints: whole or not there, damage found, old ones kept until the new one stands."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from weft.errors import RunError
from weft.train import checkpoint


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
    return checkpoint.save(folder, step, model, optimizer, {"loss": 0.1 + 0.2}, keep, best)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, 7, model, optimizer, {"loss": 0.1 + 0.2}, keep=1)
    after = torch.rand(3)  # what the generator gives next
    other, other_optimizer = trained(seed=1)
    torch.manual_seed(99)
    saved = checkpoint.load(path, other, other_optimizer)
    assert (saved.step, saved.notes) == (7, {"loss": 0.1 + 0.2})
    assert torch.equal(torch.rand(3), after)
    assert torch.equal(other.table.weight, model.table.weight)
    assert other.out.weight is other.table.weight
    for key, value in optimizer.state[model.table.weight].items():
        assert torch.equal(other_optimizer.state[other.table.weight][key], value)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with checkpoint.safe_open(path / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["seen", "table.weight"]
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
    with pytest.raises(RunError, match="every checkpoint is damaged"):
        checkpoint.newest_good(tmp_path)


@pytest.mark.parametrize("crash", ["rename", "fsync", "write"])
def test_a_crash_while_saving_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    old = save(tmp_path, 1, keep=1)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    target = {"rename": (os, "rename"), "fsync": (os, "fsync"), "write": (checkpoint, "save_file")}[crash]
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
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *a, **k: None)  # a killed process cleans up nothing
    monkeypatch.setattr(os, "rename", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert list(tmp_path.glob(".step-*"))
    assert checkpoint.newest_good(tmp_path) == (old, [])
    save(tmp_path, 2)
    assert not list(tmp_path.glob(".step-*"))
    assert checkpoint.newest_good(tmp_path)[0].name == "step-00000002"


def test_the_old_one_goes_only_after_the_new_one_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = save(tmp_path, 1, keep=1)

    def write_something_else(tensors: dict, path: Path) -> None:
        original({name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, path)

    original = checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", write_something_else)
    with pytest.raises(RunError, match="does not read back"):
        save(tmp_path, 2, keep=1)
    assert checkpoint.newest_good(tmp_path) == (old, [])


def test_weights_of_another_shape_are_one_line(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(RunError, match="do not fit the model") as caught:
        checkpoint.load_weights(path, nn.Linear(2, 2))
    assert "\n" not in str(caught.value)
