"""Averages of the last checkpoints: of the right ones, loadable like any checkpoint, never half written."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from weft.errors import RunError
from weft.runs import checkpoint
from weft.runs.average import average_checkpoints
from weft.runs.snapshot import snapshot


class Tied(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)
        self.out = nn.Linear(2, 3, bias=False)
        self.out.weight = self.table.weight
        self.count: torch.Tensor
        self.register_buffer("count", torch.tensor(int(value)))
        with torch.no_grad():
            self.table.weight.fill_(value)


def save(folder: Path, step: int, value: float) -> Path:
    return checkpoint.write(folder, snapshot(step, Tied(value), None, notes={}), keep=10)


def value_of(path: Path) -> tuple[float, int]:
    checkpoint.verify(path)
    model = Tied(0.0)
    checkpoint.load_weights(path, model)
    assert model.out.weight is model.table.weight and model.table.weight.unique().numel() == 1
    return model.table.weight[0, 0].item(), int(model.count)


def test_the_last_checkpoints_are_averaged(tmp_path: Path) -> None:
    for step, value in ((1, 100.0), (2, 1.0), (3, 2.0), (4, 6.0)):
        save(tmp_path, step, value)
    path, steps = average_checkpoints(tmp_path, last=3)
    assert (path.name, steps) == ("averaged", [2, 3, 4])
    assert value_of(path) == (3.0, 6)  # integers come from the newest checkpoint
    assert json.loads((path / "state/state.json").read_text())["notes"] == {"averaged": [2, 3, 4]}


def test_small_differences_are_not_lost(tmp_path: Path) -> None:
    for step in range(1, 9):
        save(tmp_path, step, 1.0 if step == 1 else 1.0 + 2.0**-23)  # the next float32
    path, _ = average_checkpoints(tmp_path, last=8)
    assert value_of(path)[0] == 1.0 + 2.0**-23  # the mean, 1 + 7/8 of a step, rounded once


@pytest.mark.parametrize("last", [2, 5])  # as many as are intact, and more
def test_damaged_checkpoints_are_skipped(tmp_path: Path, last: int) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, float(step))
    broken = tmp_path / "step-00000003/model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-4])
    path, steps = average_checkpoints(tmp_path, last=last)
    assert steps == [1, 2] and value_of(path)[0] == 1.5


def test_an_average_is_no_step_and_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    save(tmp_path, 2, 3.0)
    average_checkpoints(tmp_path)
    save(tmp_path, 3, 5.0)
    path, _ = average_checkpoints(tmp_path, last=2)
    assert value_of(path)[0] == 4.0
    assert [p.name for p in checkpoint.checkpoints(tmp_path)][-1] == "step-00000003"
    assert checkpoint.newest_good(tmp_path)[0].name == "step-00000003"
    checkpoint.link(tmp_path, "best", path)
    save(tmp_path, 4, 7.0)  # pruning keeps the target of `best`
    assert value_of(tmp_path / "best")[0] == 4.0
    assert not list(tmp_path.glob(".*"))


def test_no_checkpoints_and_different_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no intact checkpoint"):
        average_checkpoints(tmp_path)
    save(tmp_path, 1, 1.0)
    checkpoint.write(tmp_path, snapshot(2, nn.Linear(2, 2), None, notes={}), keep=10)
    with pytest.raises(RunError, match="can't be averaged"):
        average_checkpoints(tmp_path)
    assert not (tmp_path / "averaged").exists() and not list(tmp_path.glob(".*"))
