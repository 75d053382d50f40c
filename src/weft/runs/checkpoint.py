"""Checkpoints: everything a run needs to go on as if it had never stopped.

    step-00000500/
      model.safetensors        weights; tensors that share memory are stored once
      state/optimizer.safetensors, state/random.safetensors, state/state.json
      manifest.json            size and SHA-256 of each file, 32 MiB at a time; written last
    interrupted-00000507/      the same, where a run was asked to stop between two checkpoints

A checkpoint is written into a folder beside, synced, read back, and only then renamed: a folder called `step-…` is
whole or was damaged later, and the manifest tells which. Old ones are removed after the new one stands, each renamed
before it is taken apart. What follows from the newest one's notes (the links, and which others are still needed) is
worked out anew each time, so that a process may be killed anywhere in between: the next one puts it right.

An interruption leaves no trace: what it saved is where the run continues, and goes once the next `step-…` stands. It
is in no average, no rollback leads to it, and it takes no other's place.
Loading runs no code: safetensors and JSON only (`tensors.py`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn, optim

from weft.errors import DamageError, RunError
from weft.models.base import current_name
from weft.runs.folder import CHECKPOINT, RunFolder, writing
from weft.runs.snapshot import Snapshot, learned_state, load_optimizer_state, restore_random_state
from weft.storage import files, tensors

FORMAT = 2
WEIGHTS, MOMENTS = "model.safetensors", "state/optimizer.safetensors"
T = TypeVar("T")


def checkpoint_name(step: int, interrupted: bool = False) -> str:
    """step-00000500"""
    return f"{'interrupted' if interrupted else 'step'}-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that the recipe asked for in a run's `checkpoints` folder, oldest first."""
    return [path for path in standing(folder) if path.name.startswith("step-")]


def standing(folder: Path) -> list[Path]:
    """Those, and what an interruption saved; oldest first."""
    found = [p for p in folder.glob("*-*") if CHECKPOINT.fullmatch(p.name) and p.is_dir()]
    if (linked := next((path for path in found if path.is_symlink()), None)) is not None:
        raise RunError(f"{linked}: a link, where weft keeps a checkpoint; put the folder itself in its place")
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = CHECKPOINT.fullmatch(path.resolve().name)
    if match is None:
        raise RunError(f"{path}: not a checkpoint; expected a folder called {checkpoint_name(0)} or the like")
    return int(match[2])


def write(folder: Path, copy: Snapshot, keep: int, interrupted: bool = False) -> Path:
    """Write a checkpoint, point the links at what they name now, and remove what is needed no longer (`tidy`)."""
    return put(folder, checkpoint_name(copy.step, interrupted), lambda beside: fill(beside, copy), keep)


def put(folder: Path, name: str, fill: Callable[[Path], None], keep: int) -> Path:
    """The same for a checkpoint whose files `fill` makes, in a folder beside its place."""
    target = folder / name
    with writing(target, "the checkpoint "):
        folder.mkdir(parents=True, exist_ok=True)
        files.sweep(folder)
        stands = target.exists()
        try:
            if stands:
                verify(target)
        except RunError:
            files.remove_folder(target)
            stands = False
        if not stands:
            with files.replacing_folder(target) as beside:
                fill(beside)
        tidy(folder, keep)
    return target


def link(folder: Path, name: str, target: Path) -> None:
    """Make `name` a link to the checkpoint `target`, at once: there is always either the old link or the new."""
    if (folder / name).is_dir() and not (folder / name).is_symlink():
        raise RunError(f"{folder / name}: a folder, where weft keeps a link to a checkpoint; move it away")
    files.replace_link(folder / name, target.name)


def fill(folder: Path, copy: Snapshot) -> None:
    """Write the files of a checkpoint, the manifest last."""
    (folder / "state").mkdir()
    tensors.save(folder / WEIGHTS, copy.weights)
    if copy.moments is not None:
        tensors.save(folder / MOMENTS, copy.moments)
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
    about = {"format": FORMAT, "run": RunFolder(folder.parent.parent).id(), "step": step, "torch": torch.__version__}
    manifest = {**about, "tied": dict(tied), "files": listed}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def tidy(folder: Path, keep: int) -> list[str]:
    """Point the links where the newest checkpoint's notes say, and remove what is needed no longer; the links changed.

    Needed are the newest `keep`; while training goes wrong, the last one from before that; and the best one by the
    notes of each of these, to which the run may yet return.
    """
    found, planned = standing(folder), checkpoints(folder)
    changed = _point(folder, found[-1] if found else None)
    needed = {*found[-1:], *planned[-keep:]}
    match notes_of(planned[-1]).get("guard") if planned else None:
        case {"wrong": [int(first), *_]}:  # the step at which the trouble began that the guard sees
            needed.update([path for path in planned if step_of(path) < first][-1:])
    needed |= {best for path in needed if (best := _best_by_notes(path)) is not None}
    if (folder / "best").exists():
        needed.add(folder / (folder / "best").resolve().name)
    for old in found:
        if old not in needed:
            files.remove_folder(old)
    return changed


def forget_after(folder: Path, step: int) -> list[str]:
    """Remove the checkpoints of later steps: a run that went back will write them again; the links that changed.

    Links never hang. The newest goes first: wherever this is cut short, the newest that is left is one from which the
    run went on.
    """
    found = standing(folder)
    changed = _point(folder, next((path for path in reversed(found) if step_of(path) <= step), None))
    for later in reversed(found):
        if step_of(later) > step:
            files.remove_folder(later)
    return changed


def _point(folder: Path, newest: Path | None) -> list[str]:
    """Make `latest` and `best` what they are when `newest` is the newest checkpoint; those that were something else."""
    changed = []
    for name, target in (("latest", newest), ("best", newest and best_of(folder, newest))):
        place = folder / name
        if target is None:
            if place.is_symlink():
                place.unlink()
        elif not place.is_symlink() or place.readlink() != Path(target.name):
            link(folder, name, target)
            changed.append(f"{name} → {target.name}")
    return changed


def best_of(folder: Path, newest: Path) -> Path | None:
    """The checkpoint that holds the best weights so far, by the notes of the newest one.

    The link alone may be older, where a process was killed before it could change it. It decides where the notes name
    none that stands, and for the mean of the last checkpoints.
    """
    linked = (folder / "best").resolve() if (folder / "best").exists() else None
    step = 0 if linked is None else _state_of(linked).get("step", 0)
    if linked is not None and step == step_of(newest) and "averaged" in notes_of(linked):
        return linked
    return _best_by_notes(newest) or (linked if step <= step_of(newest) else None)  # else from before a rollback


def _best_by_notes(path: Path) -> Path | None:
    step = notes_of(path).get("best_step")
    best = path.parent / checkpoint_name(step) if type(step) is int else None
    return best if best is not None and best.is_dir() else None


def notes_of(path: Path) -> dict[str, Any]:
    """What a run remembered when it wrote a checkpoint; nothing where that can't be read."""
    notes = _state_of(path).get("notes")
    return notes if isinstance(notes, dict) else {}


def _state_of(path: Path) -> dict[str, Any]:
    state = read_note(path / "state/state.json")
    return state if type(state.get("step")) is int else {}


def read_note(path: Path) -> dict[str, Any]:
    """What a small file of JSON says; nothing where it is missing or damaged."""
    try:
        note = json.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there and as long as it says."""
    try:
        manifest = json.loads(files.read_text(path / "manifest.json"))
        version, listed = manifest["format"], manifest["files"]
        if version != FORMAT:
            raise DamageError(f"{path}: checkpoint format {version}; this version of weft reads {FORMAT}")
        for file_name, expected in listed.items():
            file = path / file_name
            size = file.stat().st_size
            if size != expected["bytes"]:
                raise DamageError(f"{file}: {size} bytes instead of {expected['bytes']}; the checkpoint is damaged")
            if not isinstance(expected["sha256"], list):
                raise TypeError
        manifest["tied"].items()
        if WEIGHTS not in listed:
            raise KeyError
        name = CHECKPOINT.fullmatch(path.resolve().name)
        if name is not None and int(name[2]) != manifest["step"]:
            raise DamageError(f"{path}: the manifest is that of step {manifest['step']}; the checkpoint is damaged")
        run = RunFolder(path.resolve().parent.parent).id()
        if run is not None and manifest.get("run") != run:
            raise DamageError(f"{path}: a checkpoint of another run, which was put in its place")
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


def present(path: Path) -> Path:
    """The checkpoint itself, whose files are all there and as long as they were; they are not read."""
    manifest_of(path)
    return path


def newest_good(folder: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint that is whole, and a line for each damaged one that was passed over."""
    return find(folder, "latest", whole)


def find(folder: Path, which: Literal["best", "latest"], use: Callable[[Path], T]) -> tuple[T, list[str]]:
    """What `use` makes of the checkpoint asked for, or of the newest in which it finds no damage; and that damage."""
    if not folder.is_dir():
        raise RunError(f"{folder.parent}: no checkpoint yet; continue with `weft train --resume {folder.parent}`")
    found, damage = standing(folder), dict[str, None]()  # in order, each once
    order = found[::-1]
    if (line := lost(folder)) is not None:
        damage[line] = None
    if which == "best" and found:
        best = best_of(folder, found[-1]) or found[-1]
        try:
            manifest_of(found[-1])
        except DamageError as error:  # which is the best may not be what it says
            damage[str(error)] = None
        if not _state_of(found[-1]):
            state = found[-1] / "state/state.json"
            damage[f"{state}: damaged, so that the best may be another; taking {best.name}"] = None
        if not (folder / "best").exists() and notes_of(found[-1]).get("best_step") is not None:
            damage[f"{folder / 'best'}: the link to the best checkpoint is broken; taking {best.name}"] = None
        order = [best, *(path for path in order if path.resolve() != best.resolve())]
    for path in order:
        try:
            return use(path), list(damage)
        except DamageError as error:
            damage[str(error)] = None
    if not damage:
        raise RunError(f"{folder}: no checkpoint here yet; continue with `weft train --resume {folder.parent}`")
    raise RunError(f"{folder}: no checkpoint can be read: {'; '.join(damage)}")


def lost(folder: Path) -> str | None:
    """A message where the checkpoint is gone with which a run ended."""
    step = RunFolder(folder.parent).lost_step()
    return None if step is None else f"{folder / checkpoint_name(step)}: missing, though the run ended with it"


def intact(folder: Path, before: int | None = None) -> Iterator[Path]:
    """The recipe's checkpoints, of steps `before` one, that are as they were written; the newest first."""
    for path in reversed(checkpoints(folder)):
        if before is None or step_of(path) < before:
            with suppress(RunError):
                yield whole(path)


def load_weights(path: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights into `model`, wherever it is. The checkpoint was verified before."""
    tied = json.loads(files.read_text(path / "manifest.json"))["tied"]
    found = load_tensors(path / WEIGHTS)
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
    manifest, file = manifest_of(path), path / WEIGHTS
    assert not manifest["tied"], "a model that holds one tensor under two names is filled by load_weights"
    dtype = tensors.common_type(file)
    if device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    sums = manifest["files"][file.name]["sha256"]
    found = {
        current_name(name): tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.placed(file, device, sums)
    }
    _fill(path, model, found, assign=True)


def load(path: Path, model: nn.Module, optimizer: optim.Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Put back weights, moments and random generators of a verified checkpoint, bit for bit; return the notes, and the
    state of the step that is stored with the moments."""
    load_weights(path, model)
    notes = load_notes(path, optimizer)
    return notes, load_optimizer_state(optimizer, model, load_tensors(path / MOMENTS))


def load_notes(path: Path, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Put the random generators back; the notes. Moments that the optimizer can't use are refused."""
    state = json.loads(files.read_text(path / "state/state.json"))
    kind, own = state.get("optimizer"), type(optimizer).__name__
    if kind not in (None, own):
        raise RunError(f"{path}: saved by {kind}, whose state {own} can't use; change optimizer.kind back")
    restore_random_state(tensors.load(path / "state/random.safetensors"))
    return dict(state["notes"])
