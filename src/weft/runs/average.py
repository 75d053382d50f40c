"""Average a run's last checkpoints: the mean is often better than each of them (Vaswani et al. 2017, §6.1).

`averaged` is loaded like any checkpoint, and `best` may link to it; its state.json lists the averaged steps. It has no
optimizer state, so no run resumes from it.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import RunError
from weft.runs import checkpoint
from weft.runs.folder import writing
from weft.runs.snapshot import Snapshot
from weft.storage.files import remove_folder, replacing_folder

NAME = "averaged"


def average_checkpoints(folder: Path, last: int = 5) -> tuple[Path, list[int]]:
    """Write the mean of the newest `last` intact checkpoints in `folder` to `folder / "averaged"`.

    Return its path and the averaged steps, oldest first: fewer than `last` if fewer exist. Damaged checkpoints are
    skipped; an earlier average is replaced.
    """
    paths = list(islice(checkpoint.intact(folder), last))[::-1]
    if not paths:
        raise RunError(f"{folder}: no intact checkpoint to average")
    steps = [checkpoint.step_of(path) for path in paths]
    tied = [checkpoint.manifest_of(path)["tied"] for path in paths]
    if any(names != tied[-1] for names in tied):
        raise RunError(f"{folder}: the checkpoints hold different models, so they can't be averaged")
    weights, target = _mean([path / "model.safetensors" for path in paths]), folder / NAME
    if _is_written(target, weights, steps):
        return target, steps
    state = json.dumps({"step": steps[-1], "notes": {"averaged": steps}}, indent=1)
    # if this process is killed, resuming the run removes the temporary folder
    with writing(target, "the averaged checkpoint "), replacing_folder(target) as temporary:
        averaged = Snapshot(step=steps[-1], weights=weights, tied=tied[-1], moments=None, random=None, state=state)
        checkpoint.write_files(temporary, averaged)
        if target.exists():
            remove_folder(target)
    return target, steps


def _is_written(target: Path, weights: Mapping[str, Tensor], steps: Sequence[int]) -> bool:
    """Return whether this very average is already there and intact: `best` may link to it, so it isn't rewritten."""
    try:
        checkpoint.verify(target)
        stored = checkpoint.load_tensors(target / "model.safetensors")
    except RunError:
        return False
    same = stored.keys() == weights.keys() and all(torch.equal(stored[name], weights[name]) for name in weights)
    return same and checkpoint.notes_of(target).get("averaged") == steps


def _mean(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of each tensor, summed in float64, in its dtype; integer tensors come from the last file."""
    stored = [checkpoint.load_tensors(file) for file in files]
    shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in stored]
    for file, before, after in zip(files[1:], shapes, shapes[1:], strict=False):
        if after != before:
            name = min(name for name in {**before, **after} if before.get(name) != after.get(name))
            raise RunError(f"{file}: {name} differs from the checkpoint before it, so they can't be averaged")

    def mean(name: str) -> Tensor:
        total = stored[0][name].double()
        for tensors in stored[1:]:
            total += tensors[name]
        return (total / len(stored)).to(stored[-1][name].dtype)

    return {name: mean(name) if last.is_floating_point() else last for name, last in stored[-1].items()}
