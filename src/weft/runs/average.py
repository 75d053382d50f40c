"""The mean of a run's last checkpoints: often better than each of them (Vaswani et al. 2017, §6.1).

    averaged/
      model.safetensors        the mean of each weight
      state/state.json         which steps it was taken over
      manifest.json            as every checkpoint has one

It is loaded as any checkpoint is, and a link may point at it. No run resumes from it: it has no moments.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import RunError
from weft.files import replacing_folder
from weft.models.renamed import current_name
from weft.runs import checkpoint, tensors

NAME = "averaged"


def average_checkpoints(folder: Path, last: int = 5) -> tuple[Path, list[int]]:
    """Write the mean of the newest `last` whole checkpoints in a run's `checkpoints` folder to `averaged` beside them.

    Its path, and the steps it is the mean of, oldest first: fewer than `last` where fewer stand. Damaged checkpoints
    are passed over; an earlier average is replaced.
    """
    assert last > 0, last
    chosen = _newest_whole(folder, last)
    steps = [checkpoint.step_of(path) for path, _ in chosen]
    tied = chosen[-1][1]
    if any(others != tied for _, others in chosen):
        raise RunError(f"{folder}: the checkpoints hold different models, so they have no mean")
    weights = _mean([path / "model.safetensors" for path, _ in chosen])
    target = folder / NAME
    try:
        with replacing_folder(target) as beside:  # should this be killed, the next checkpoint sweeps it away
            _write(beside, weights, steps, tied)
            if target.exists():
                checkpoint.remove(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{target}: the averaged checkpoint cannot be written: {reason}") from None
    return target, steps


def _newest_whole(folder: Path, last: int) -> list[tuple[Path, dict[str, str]]]:
    """Up to `last` checkpoints that are as they were written, oldest first, with what is tied in each."""
    found: list[tuple[Path, dict[str, str]]] = []
    for path in reversed(checkpoint.checkpoints(folder)):
        if len(found) == last:
            break
        try:
            found.append((path, checkpoint.verify(path)["tied"]))
        except RunError:
            continue
    if not found:
        raise RunError(f"{folder}: no whole checkpoint to take the mean of")
    return found[::-1]


def _mean(files: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each tensor, summed in 64 bits, in the type it has; whole numbers as the last file has them."""
    sums: dict[str, Tensor] = {}
    types: dict[str, torch.dtype] = {}
    for number, file in enumerate(files):
        with safe_open(file, "pt") as opened:
            names = {current_name(name): name for name in opened.keys()}  # noqa: SIM118
            if number and set(names) != set(sums):
                raise RunError(f"{file}: other weights than in the checkpoint before it, so they have no mean")
            for name, stored in names.items():
                tensor = opened.get_tensor(stored)
                if not number or not tensor.is_floating_point():
                    sums[name] = tensor.double() if tensor.is_floating_point() else tensor.clone()
                elif tensor.shape != sums[name].shape:
                    raise RunError(f"{file}: {name} has another shape than in the checkpoint before it")
                else:
                    sums[name] += tensor
                types[name] = tensor.dtype
    return {
        name: (total / len(files)).to(types[name]) if total.is_floating_point() else total
        for name, total in sums.items()
    }


def _write(folder: Path, weights: Mapping[str, Tensor], steps: Sequence[int], tied: Mapping[str, str]) -> None:
    """The files of a checkpoint, the manifest last."""
    (folder / "state").mkdir()
    tensors.save(folder / "model.safetensors", weights)
    state = {"step": steps[-1], "notes": {"averaged": list(steps)}}
    (folder / "state/state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    checkpoint.seal(folder, steps[-1], tied)
