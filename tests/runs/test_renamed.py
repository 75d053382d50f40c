"""Checkpoints of version 0.1 load under the current names of parameters."""

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn, optim

from weft.models.base import RENAMED, current_name
from weft.models.build import build
from weft.models.presets import bert
from weft.nn.init import empty_weights
from weft.runs import checkpoint
from weft.runs.average import average_checkpoints
from weft.runs.snapshot import snapshot


def pretrained(seed: int) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(seed)
    model = build(bert(1, 16, 2, vocab_size=32, context=16))
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def as_in_0_1(path: Path) -> None:
    """Give the tensors of a checkpoint the names of version 0.1."""
    for file in (path / "model.safetensors", path / "state/optimizer.safetensors"):
        stored = load_file(file)
        older = {name.replace(new, old): value for name, value in stored.items() for old, new in RENAMED.items()}
        assert older.keys() != stored.keys()
        save_file(older, file)
    (path / "manifest.json").unlink()
    checkpoint.write_manifest(path, checkpoint.step_of(path), {})


def moments(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    pairs = product(("exp_avg", "exp_avg_sq", "step"), model.named_parameters())
    return {f"{kind}/{name}": optimizer.state[parameter][kind] for kind, (name, parameter) in pairs}


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = checkpoint.write(tmp_path, snapshot(7, *pretrained(0), notes={}), keep=1)
    as_in_0_1(path)
    return path


def test_weights_with_and_without_moments(saved: Path) -> None:
    expected, expected_optimizer = pretrained(0)
    model, optimizer = pretrained(1)
    checkpoint.verify(saved)
    checkpoint.load(saved, model, optimizer)
    assert_equal(model.state_dict(), expected.state_dict())
    assert_equal(moments(model, optimizer), moments(expected, expected_optimizer))
    with empty_weights():
        model = build(bert(1, 16, 2, vocab_size=32, context=16))
    checkpoint.place_weights(saved, model, torch.device("cpu"))
    assert_equal(model.state_dict(), pretrained(0)[0].state_dict())


def test_an_average_over_both_versions(saved: Path) -> None:
    other, optimizer = pretrained(1)
    checkpoint.write(saved.parent, snapshot(8, other, optimizer, notes={}), keep=2)
    path, steps = average_checkpoints(saved.parent, 2)
    model = build(bert(1, 16, 2, vocab_size=32, context=16))
    checkpoint.load_weights(path, model)
    first, second = pretrained(0)[0].state_dict(), other.state_dict()
    assert steps == [7, 8]
    torch.testing.assert_close(model.state_dict(), {name: (first[name] + second[name]) / 2 for name in first})


def test_other_names_are_unchanged() -> None:
    assert current_name("exp_avg/output.follows.out.weight") == "exp_avg/output.next_sentence.out.weight"
    assert current_name("decoder.output.follows.weight") == "decoder.output.follows.weight"
    assert current_name("scale/loss") == "scale/loss"
