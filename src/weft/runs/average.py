"""The mean of a run's last checkpoints: often better than each of them (Vaswani et al. 2017, §6.1).

`averaged` is loaded as any checkpoint is, and a link may point at it; its state.json holds the steps that it was taken
over. No run resumes from it: it has no moments.
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
    """Write the mean of the newest `last` whole checkpoints in a run's `checkpoints` folder to `averaged` beside them.

    Its path, and the steps it is the mean of, oldest first: fewer than `last` where fewer stand. Damaged checkpoints
    are passed over; an earlier average is replaced.
    """
    chosen = list(islice(checkpoint.intact(folder), last))[::-1]
    if not chosen:
        raise RunError(f"{folder}: no whole checkpoint to take the mean of")
    steps = [checkpoint.step_of(path) for path in chosen]
    tied = [checkpoint.manifest_of(path)["tied"] for path in chosen]
    if any(others != tied[-1] for others in tied):
        raise RunError(f"{folder}: the checkpoints hold different models, so they have no mean")
    weights, target = _mean([path / "model.safetensors" for path in chosen]), folder / NAME
    state = json.dumps({"step": steps[-1], "notes": {"averaged": steps}}, indent=1)
    if _stands(target, weights, steps):
        return target, steps
    # should this be killed, who resumes the run sweeps away what is beside
    with writing(target, "the averaged checkpoint "), replacing_folder(target) as beside:
        checkpoint.fill(beside, Snapshot(steps[-1], weights, tied[-1], None, None, state))
        if target.exists():
            remove_folder(target)
    return target, steps


def _stands(target: Path, weights: Mapping[str, Tensor], steps: Sequence[int]) -> bool:
    """Whether this mean is there already and whole: `best` may point at it, and a finished run stays as it is."""
    try:
        checkpoint.verify(target)
        found = checkpoint.load_tensors(target / "model.safetensors")
    except RunError:
        return False
    same = found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    return same and checkpoint.notes_of(target).get("averaged") == steps


def _mean(files: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each tensor, summed in 64 bits, in the type it has; whole numbers as the last file has them."""
    stored = [checkpoint.load_tensors(file) for file in files]
    shapes = [{name: tensor.shape for name, tensor in found.items()} for found in stored]
    for file, before, found in zip(files[1:], shapes, shapes[1:], strict=False):
        if found != before:
            name = min(name for name in {**before, **found} if before.get(name) != found.get(name))
            raise RunError(f"{file}: {name} isn't as in the checkpoint before it, so that they have no mean")

    def mean(name: str) -> Tensor:
        total = stored[0][name].double()
        for found in stored[1:]:
            total += found[name]
        return (total / len(stored)).to(stored[-1][name].dtype)

    return {name: mean(name) if last.is_floating_point() else last for name, last in stored[-1].items()}
