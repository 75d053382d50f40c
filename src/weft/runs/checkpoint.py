"""Checkpoints: everything a run needs to resume as if it had never stopped.

    step-00000500/
      model.safetensors        weights; tensors that share memory are stored once
      state/optimizer.safetensors, state/random.safetensors, state/state.json
      manifest.json            size and SHA-256 of each file, per 32 MiB block; written last
    interrupted-00000507/      the same files, saved when a run was interrupted between two checkpoints

A checkpoint is written to a temporary folder, synced, read back, and only then renamed. So a folder named `step-…` is
complete, or was damaged later, which the manifest detects. Old checkpoints are removed after the new one exists, each
renamed before it is deleted. The links, and which checkpoints are still needed, follow from the newest one's notes and
are derived again each time: a process may be killed at any point, and the next one repairs them.

An `interrupted-…` checkpoint exists only to resume from, and is removed once the next `step-…` exists. Averages and
rollbacks ignore it, and it doesn't count towards `checkpoint.keep`.
Loading runs no code: files are safetensors and JSON only (`tensors.py`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn, optim

from weft.errors import DamageError, RunError, quoted
from weft.models.base import current_name
from weft.runs.folder import CHECKPOINT, RunFolder, writing
from weft.runs.snapshot import Snapshot, learned_state, load_optimizer_state, restore_random_state
from weft.storage import files, tensors

FORMAT = 2  # version of the manifest
WEIGHTS, MOMENTS = "model.safetensors", "state/optimizer.safetensors"
T = TypeVar("T")


def checkpoint_name(step: int, interrupted: bool = False) -> str:
    """Return the folder name of a checkpoint, such as step-00000500."""
    return f"{'interrupted' if interrupted else 'step'}-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Return the regular checkpoints (`step-…`) in a run's `checkpoints` folder, oldest first."""
    return [path for path in all_checkpoints(folder) if path.name.startswith("step-")]


def all_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints, including one saved by an interruption, oldest first."""
    paths = [p for p in folder.glob("*-*") if CHECKPOINT.fullmatch(p.name) and p.is_dir()]
    if (linked := next((path for path in paths if path.is_symlink()), None)) is not None:
        raise RunError(f"{linked}: a link, where weft expects a checkpoint; replace it with the folder itself")
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    match = CHECKPOINT.fullmatch(path.resolve().name)
    if match is None:
        raise RunError(f"{path}: not a checkpoint; expected a folder named like {checkpoint_name(0)}")
    return int(match[2])


def write(folder: Path, copy: Snapshot, keep: int, *, interrupted: bool = False) -> Path:
    """Write a checkpoint, update the links, and remove checkpoints that are no longer needed (`prune`)."""
    target = folder / checkpoint_name(copy.step, interrupted)
    return write_with(lambda temporary: write_files(temporary, copy), target, keep)


def write_with(fill: Callable[[Path], None], target: Path, keep: int) -> Path:
    """Write the checkpoint `target`, whose files `fill` writes to a temporary folder; update the links and prune."""
    folder = target.parent
    with writing(target, "the checkpoint "):
        folder.mkdir(parents=True, exist_ok=True)
        files.sweep(folder)
        try:
            if target.exists():
                verify(target)
        except RunError:
            files.remove_folder(target)
        if not target.exists():
            with files.replacing_folder(target) as temporary:
                fill(temporary)
        prune(folder, keep)
    return target


def link(folder: Path, name: str, target: Path) -> None:
    """Make `name` a link to the checkpoint `target`, atomically: either the old link or the new one exists."""
    if (folder / name).is_dir() and not (folder / name).is_symlink():
        raise RunError(f"{folder / name}: a folder, where weft expects a link to a checkpoint; move it away")
    files.replace_link(folder / name, target.name)


def write_files(folder: Path, copy: Snapshot) -> None:
    """Write the files of a checkpoint, the manifest last."""
    (folder / "state").mkdir()
    tensors.save(folder / WEIGHTS, copy.weights)
    if copy.moments is not None:
        tensors.save(folder / MOMENTS, copy.moments)
    if copy.random is not None:
        tensors.save(folder / "state/random.safetensors", copy.random)
    (folder / "state/state.json").write_text(copy.state, encoding="utf-8")
    write_manifest(folder, copy.step, copy.tied)


def write_manifest(folder: Path, step: int, tied: Mapping[str, str]) -> None:
    """Write the manifest of a checkpoint whose other files are complete."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    sums = {p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": files.checksums(p)} for p in paths}
    about = {"format": FORMAT, "run": RunFolder(folder.parent.parent).id(), "step": step, "torch": torch.__version__}
    manifest = {**about, "tied": dict(tied), "files": sums}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def prune(folder: Path, keep: int) -> list[str]:
    """Update the links from the newest checkpoint's notes, remove unneeded checkpoints, and return the changed links.

    Needed are the newest `keep`; while training diverges, the last one before that; and the best one according to the
    notes of each of these, because the run may return to it.
    """
    existing, regular = all_checkpoints(folder), checkpoints(folder)
    changed = _update_links(folder, existing[-1] if existing else None)
    needed = {*existing[-1:], *regular[-keep:]}
    match notes_of(regular[-1]).get("guard") if regular else None:
        case {"wrong": [int(first), *_]}:  # the step at which the divergence began
            needed.update([path for path in regular if step_of(path) < first][-1:])
    needed |= {best for path in needed if (best := _best_by_notes(path)) is not None}
    if (folder / "best").exists():
        needed.add(folder / (folder / "best").resolve().name)
    for path in existing:
        if path not in needed:
            files.remove_folder(path)
    return changed


def forget_after(folder: Path, step: int) -> list[str]:
    """Remove the checkpoints of later steps, which a run that rolled back writes again; return the changed links."""
    existing = all_checkpoints(folder)
    changed = _update_links(folder, next((path for path in reversed(existing) if step_of(path) <= step), None))
    for path in reversed(existing):  # newest first: if this is killed, the run resumes from a valid state
        if step_of(path) > step:
            files.remove_folder(path)
    return changed


def _update_links(folder: Path, newest: Path | None) -> list[str]:
    """Set `latest` and `best` for `newest` as the newest checkpoint; return a message for each that changed."""
    changed = []
    for name, target in (("latest", newest), ("best", newest and best_of(folder, newest))):
        path = folder / name
        if target is None:
            if path.is_symlink():
                path.unlink()
        elif not path.is_symlink() or path.readlink() != Path(target.name):
            link(folder, name, target)
            changed.append(f"{name} → {target.name}")
    return changed


def best_of(folder: Path, newest: Path) -> Path | None:
    """Return the checkpoint with the best weights so far, according to the notes of the newest one.

    The link alone may be outdated, if a process was killed before it could change it. It decides only if the notes name
    no existing checkpoint, and for the average of the last checkpoints.
    """
    linked = (folder / "best").resolve() if (folder / "best").exists() else None
    step = 0 if linked is None else _state_of(linked).get("step", 0)
    if linked is not None and step == step_of(newest) and "averaged" in notes_of(linked):
        return linked
    return _best_by_notes(newest) or (linked if step <= step_of(newest) else None)  # a later one predates a rollback


def _best_by_notes(path: Path) -> Path | None:
    step = notes_of(path).get("best_step")
    best = path.parent / checkpoint_name(step) if type(step) is int else None
    return best if best is not None and best.is_dir() else None


def notes_of(path: Path) -> dict[str, Any]:
    """Return the training state saved with a checkpoint; empty if it can't be read."""
    notes = _state_of(path).get("notes")
    return notes if isinstance(notes, dict) else {}


def _state_of(path: Path) -> dict[str, Any]:
    state = read_json(path / "state/state.json")
    return state if type(state.get("step")) is int else {}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file; empty if it is missing or damaged."""
    try:
        value = json.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def manifest_of(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, after checking that all its files exist with the right size."""
    try:
        manifest = json.loads(files.read_text(path / "manifest.json"))
        version, checksums = manifest["format"], manifest["files"]
        if version != FORMAT:
            raise DamageError(f"{path}: checkpoint format {version}; this version of weft reads {FORMAT}")
        for file_name, expected in checksums.items():
            file = path / file_name
            size = file.stat().st_size
            if size != expected["bytes"]:
                raise DamageError(f"{file}: {size} bytes instead of {expected['bytes']}; the checkpoint is damaged")
            if not isinstance(expected["sha256"], list):
                raise TypeError
        manifest["tied"].items()
        if WEIGHTS not in checksums:
            raise KeyError
        name = CHECKPOINT.fullmatch(path.resolve().name)
        if name is not None and int(name[2]) != manifest["step"]:
            raise DamageError(f"{path}: the manifest is of step {manifest['step']}; the checkpoint is damaged")
        run = RunFolder(path.resolve().parent.parent).id()
        if run is not None and manifest.get("run") != run:
            raise DamageError(f"{path}: this checkpoint belongs to another run")
    except FileNotFoundError as error:
        missing = Path(error.filename) if error.filename else path
        raise DamageError(f"{missing}: missing; the checkpoint is damaged") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise DamageError(f"{path / 'manifest.json'}: not a manifest; the checkpoint is damaged") from None
    except OSError as error:
        raise DamageError(f"{path}: cannot be read: {error.strerror}") from None
    return manifest


def verify(path: Path) -> Path:
    """Return the path of a checkpoint after checking every file's checksums; raise an error that names any damage."""
    for name, expected in manifest_of(path)["files"].items():
        tensors.check(path / name, expected["sha256"])
    return path


def complete(path: Path) -> Path:
    """Return the path of a checkpoint after checking that all its files exist with the right size; none is read."""
    manifest_of(path)
    return path


def newest_good(folder: Path) -> tuple[Path, list[str]]:
    """Return the newest intact checkpoint, and a message for each damaged one that was skipped."""
    return find(folder, "latest", verify)


def find(folder: Path, which: Literal["best", "latest"], use: Callable[[Path], T]) -> tuple[T, list[str]]:
    """Return what `use` makes of the best or latest checkpoint, or of the newest undamaged one, and damage found."""
    if not folder.is_dir():
        resume = f"weft train --resume {quoted(folder.parent)}"
        raise RunError(f"{folder.parent}: no checkpoint yet; continue with `{resume}`")
    existing, damage = all_checkpoints(folder), dict[str, None]()  # an ordered set
    order = existing[::-1]
    if (message := lost(folder)) is not None:
        damage[message] = None
    if which == "best" and existing:
        newest = existing[-1]
        best = best_of(folder, newest) or newest
        try:
            manifest_of(newest)
        except DamageError as error:  # its notes, which name the best checkpoint, may be wrong
            damage[str(error)] = None
        if not _state_of(newest):
            state = newest / "state/state.json"
            damage[f"{state}: damaged, so another checkpoint may be the best; taking {best.name}"] = None
        if not (folder / "best").exists() and notes_of(newest).get("best_step") is not None:
            damage[f"{folder / 'best'}: the link to the best checkpoint is broken; taking {best.name}"] = None
        order = [best, *(path for path in order if path.resolve() != best.resolve())]
    for path in order:
        try:
            return use(path), list(damage)
        except DamageError as error:
            damage[str(error)] = None
    if not damage:
        raise RunError(f"{folder}: no checkpoint here yet; continue with `weft train --resume {quoted(folder.parent)}`")
    raise RunError(f"{folder}: no checkpoint can be read: {'; '.join(damage)}")


def lost(folder: Path) -> str | None:
    """Return a message if the checkpoint of a run's last step is missing."""
    step = RunFolder(folder.parent).lost_step()
    return None if step is None else f"{folder / checkpoint_name(step)}: missing, though the run ended with it"


def intact(folder: Path, before: int | None = None) -> Iterator[Path]:
    """Yield the regular checkpoints whose checksums match, newest first; only those of steps below `before`."""
    for path in reversed(checkpoints(folder)):
        if before is None or step_of(path) < before:
            with suppress(RunError):
                yield verify(path)


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the weights of a verified checkpoint into `model`, on its device."""
    tied = json.loads(files.read_text(path / "manifest.json"))["tied"]
    weights = load_tensors(path / WEIGHTS)
    weights |= {current_name(alias): weights[current_name(name)] for alias, name in tied.items()}
    _load_state(path, model, weights, assign=False)


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint's file under the current names of their parameters."""
    return {current_name(name): tensor for name, tensor in tensors.iterate(file)}


def _load_state(path: Path, model: nn.Module, weights: Mapping[str, Tensor], *, assign: bool) -> None:
    try:
        if model.state_dict().keys() - learned_state(model).keys() and not assign:
            weights = {**model.state_dict(), **weights}  # checkpoints don't hold frozen weights
        model.load_state_dict(weights, assign=assign)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise RunError(f"{path}: the weights do not fit the model in config.toml: {reason}") from None


def place_weights(path: Path, model: nn.Module, device: torch.device) -> None:
    """Load a checkpoint's weights into a model with empty weights, one by one, directly on `device`; verify checksums.

    On a CPU the weights are memory-mapped, so no second copy exists. All weights get the dtype that most of them have,
    in which the model then computes; a CPU converts 16-bit weights to float32, because few CPUs multiply those fast.
    """
    manifest, file = manifest_of(path), path / WEIGHTS
    assert not manifest["tied"], "load_weights loads models with tied weights"
    dtype = tensors.common_dtype(file)
    if device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    stored = tensors.load_verified(file, device, manifest["files"][file.name]["sha256"])
    trained = {name for name, _ in model.named_parameters()}  # buffers keep their dtype
    weights = {name: value.to(dtype) if value.is_floating_point() and name in trained else value
               for name, value in ((current_name(name), value) for name, value in stored)}  # fmt: skip
    _load_state(path, model, weights, assign=True)


def load(path: Path, model: nn.Module, optimizer: optim.Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Restore weights, optimizer state and random-number generators from a verified checkpoint; return its notes, and
    the state of the step, which is stored with the moments."""
    load_weights(path, model)
    notes = load_notes(path, optimizer)
    return notes, load_optimizer_state(optimizer, model, load_tensors(path / MOMENTS))


def load_notes(path: Path, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Restore the random-number generators and return the notes; refuse the state of another kind of optimizer."""
    state = json.loads(files.read_text(path / "state/state.json"))
    saved, current = state.get("optimizer"), type(optimizer).__name__
    if saved not in (None, current):
        raise RunError(f"{path}: saved by {saved}, whose state {current} can't use; change optimizer.kind back")
    restore_random_state(tensors.load(path / "state/random.safetensors"))
    return dict(state["notes"])
