"""Checkpoints: everything a run needs to go on as if it had never stopped.

    step-00000500/
      model.safetensors        weights; tensors that share memory are stored once
      state/optimizer.safetensors, state/random.safetensors, state/state.json
      manifest.json            size and SHA-256 of each file, 32 MiB at a time; written last

A checkpoint is written into a folder beside, synced, read back, and only then renamed: a folder called `step-…` is
whole or was damaged later, and the manifest tells which. Old ones are removed after the new one stands.
Loading runs no code: safetensors and JSON only (`runs/tensors.py`).
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn, optim

from weft import files
from weft.errors import DamageError, RunError
from weft.models.renamed import current_name
from weft.runs import tensors
from weft.runs.folder import writing
from weft.runs.snapshot import (
    Snapshot,
    copies,
    learned_state,
    load_optimizer_state,
    optimizer_state,
    restore_random_state,
)

FORMAT = 2
_NAME = re.compile(r"step-(\d{8,})$")
T = TypeVar("T")


def checkpoint_name(step: int) -> str:
    """step-00000500"""
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's `checkpoints` folder, oldest first."""
    found = [p for p in folder.glob("step-*") if _NAME.match(p.name) and p.is_dir()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.match(path.resolve().name)
    assert match, path
    return int(match[1])


# ---- writing


def try_moments(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Write the optimizer's state as a checkpoint would: it is most of one, and exists after the first update only."""
    file = folder / "moments.safetensors"
    with writing(file):
        tensors.save(file, copies(optimizer_state(optimizer, model)))
        file.unlink()


def write(folder: Path, copy: Snapshot, keep: int, best: bool = False, spare: int | None = None) -> Path:
    """Write a checkpoint, point `latest` (and `best`) at it, and remove all but the newest `keep` and the best one.

    The newest checkpoint before step `spare` stays too.
    """
    target = folder / checkpoint_name(copy.step)
    with writing(target, "the checkpoint "):
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        if not _stands(target):
            with files.replacing_folder(target) as beside:
                fill(beside, copy)
        link(folder, "latest", target)
        if best:
            link(folder, "best", target)
        _prune(folder, keep, spare)
    return target


def _stands(target: Path) -> bool:
    """Whether this step's checkpoint is there and whole; a damaged one is cleared away."""
    with suppress(RunError):
        if target.exists():
            verify(target)
            return True
    if target.exists():
        remove(target)
    return False


def link(folder: Path, name: str, target: Path) -> None:
    """Make `name` a link to the checkpoint `target`, at once: there is always either the old link or the new."""
    if (folder / name).is_dir() and not (folder / name).is_symlink():
        raise RunError(f"{folder / name}: a folder, where weft keeps a link to a checkpoint; move it away")
    files.replace_link(folder / name, target.name)


def fill(folder: Path, copy: Snapshot) -> None:
    """Write the files of a checkpoint, the manifest last."""
    (folder / "state").mkdir()
    tensors.save(folder / "model.safetensors", copy.weights)
    if copy.moments is not None:
        tensors.save(folder / "state/optimizer.safetensors", copy.moments)
    if copy.random is not None:
        tensors.save(folder / "state/random.safetensors", copy.random)
    (folder / "state/state.json").write_text(copy.state, encoding="utf-8")
    seal(folder, copy.step, copy.tied)


def seal(folder: Path, step: int, tied: Mapping[str, str]) -> None:
    """Write the manifest of a checkpoint whose other files are all there."""
    listed = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": files.checksums(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"format": FORMAT, "step": step, "torch": torch.__version__, "tied": dict(tied), "files": listed}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _sweep(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    for left in (*folder.glob(".step-*"), *folder.glob(".averaged.*")):
        shutil.rmtree(left, ignore_errors=True)
    for left in (*folder.glob(".latest.*"), *folder.glob(".best.*")):
        left.unlink(missing_ok=True)


def _prune(folder: Path, keep: int, spare: int | None) -> None:
    best = (folder / "best").resolve() if (folder / "best").exists() else None
    found = checkpoints(folder)
    spared = [path for path in found if spare is not None and step_of(path) < spare][-1:]
    for old in found[:-keep]:
        if old.resolve() != best and old not in spared:
            remove(old)


def forget_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps: a run that went back will write them again. Links never hang."""
    for later in checkpoints(folder):
        if step_of(later) > step:
            remove(later)
    standing = checkpoints(folder)
    if standing:
        link(folder, "latest", standing[-1])
    else:
        (folder / "latest").unlink(missing_ok=True)
    if not (folder / "best").exists():
        (folder / "best").unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a checkpoint. Its manifest goes first: what is half deleted must not look whole."""
    (path / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(path)


# ---- reading


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there and as long as it says."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        version, listed = manifest["format"], manifest["files"]
        if version != FORMAT:
            raise DamageError(f"{path}: checkpoint format {version}; this version of weft reads {FORMAT}")
        for name, expected in listed.items():
            file = path / name
            size = file.stat().st_size
            if size != expected["bytes"]:
                raise DamageError(f"{file}: {size} bytes instead of {expected['bytes']}; the checkpoint is damaged")
            if not isinstance(expected["sha256"], list):
                raise TypeError
        manifest["tied"].items()
        if "model.safetensors" not in listed:
            raise KeyError
        name = path.resolve().name
        if _NAME.match(name) and name != checkpoint_name(manifest["step"]):
            raise DamageError(f"{path}: the manifest is that of step {manifest['step']}; the checkpoint is damaged")
    except FileNotFoundError as error:
        missing = Path(error.filename) if error.filename else path
        raise DamageError(f"{missing}: missing; the checkpoint is damaged") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise DamageError(f"{path / 'manifest.json'}: not a manifest; the checkpoint is damaged") from None
    except OSError as error:
        raise DamageError(f"{path}: cannot be read: {error.strerror}") from None
    return manifest


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all as they were written; else an error that names the damage."""
    manifest = manifest_of(path)
    for name, expected in manifest["files"].items():
        tensors.check(path / name, expected["sha256"])
    return manifest


def whole(path: Path) -> Path:
    """The checkpoint itself, verified."""
    verify(path)
    return path


def newest_good(folder: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint that is whole, and a line for each damaged one that was passed over."""
    return find(folder, None, whole)


def find(folder: Path, which: Literal["best", "latest"] | None, use: Callable[[Path], T]) -> tuple[T, list[str]]:
    """What `use` makes of the checkpoint asked for, or of the newest in which it finds no damage; and that damage."""
    if not folder.is_dir():
        raise RunError(f"{folder.parent}: no checkpoint yet; go on with `weft train --resume {folder.parent}`")
    asked = [(folder / which).resolve()] if which is not None and (folder / which).exists() else []
    others = [path for path in reversed(checkpoints(folder)) if path.resolve() not in asked]
    damage: dict[str, None] = {}  # in order, each once
    for path in (*asked, *others):
        try:
            return use(path), list(damage)
        except DamageError as error:
            damage[str(error)] = None
    if not damage:
        raise RunError(f"{folder}: no checkpoint here yet; start the run again")
    raise RunError(f"{folder}: no checkpoint can be read: {'; '.join(damage)}")


def intact(folder: Path, before: int | None = None) -> Iterator[Path]:
    """The checkpoints, of steps `before` one, that are as they were written; the newest first."""
    for path in reversed(checkpoints(folder)):
        if before is None or step_of(path) < before:
            with suppress(RunError):
                yield whole(path)


def load_weights(path: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights into `model`, wherever it is. The checkpoint was verified before."""
    tied = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["tied"]
    found = load_tensors(path / "model.safetensors")
    found |= {current_name(alias): found[current_name(name)] for alias, name in tied.items()}
    _fill(path, model, found, assign=False)


def load_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's file by the names that parameters have today."""
    return {current_name(name): tensor for name, tensor in tensors.each(file)}


def _fill(path: Path, model: nn.Module, found: Mapping[str, Tensor], assign: bool) -> None:
    try:
        if model.state_dict().keys() - learned_state(model).keys() and not assign:
            found = {**model.state_dict(), **found}  # what is frozen is in no checkpoint
        model.load_state_dict(found, assign=assign)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise RunError(f"{path}: the weights do not fit the model in config.toml: {reason}") from None


def place_weights(path: Path, model: nn.Module, device: torch.device) -> None:
    """Give a model with empty weights those of a checkpoint, straight on `device`, one by one, hashed on the way.

    On a CPU they are the file's own pages until they are written to, so no second copy is held. All weights take the
    type that most have, in which the model then computes; a CPU widens 16 bits to 32, for few multiply those fast.
    """
    manifest = manifest_of(path)
    assert not manifest["tied"], "a model that holds one tensor under two names is filled by load_weights"
    file = path / "model.safetensors"
    dtype = tensors.common_type(file)
    if device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    sums = manifest["files"][file.name]["sha256"]
    found = {
        current_name(name): tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.placed(file, device, sums)
    }
    _fill(path, model, found, assign=True)


def load(path: Path, model: nn.Module, optimizer: optim.Optimizer | None) -> dict[str, Any]:
    """Put back weights, moments and random generators, bit for bit; the notes that were saved with them.

    The checkpoint was verified before.
    """
    load_weights(path, model)
    state = json.loads((path / "state/state.json").read_text(encoding="utf-8"))
    if optimizer is not None:
        kind, own = state.get("optimizer"), type(optimizer).__name__
        if kind is not None and kind != own:
            raise RunError(f"{path}: saved by {kind}, whose state {own} can't use; change optimizer.kind back")
        load_optimizer_state(optimizer, model, load_tensors(path / "state/optimizer.safetensors"))
    restore_random_state(tensors.load(path / "state/random.safetensors"))
    return dict(state["notes"])
