"""Checkpoints of a model that several processes hold in parts, in the files that one process would have written.

Each process writes its own pieces into the files of one checkpoint, side by side, and reads the pieces that it needs.
So a run may go on over any other mesh, or in one process; its checkpoints are exported and looked at as ever.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim

from weft.errors import RunError
from weft.models.base import current_name
from weft.parallel.apply import ShardedParallel
from weft.parallel.ranks import Ranks
from weft.parallel.sharding import Geometry, TensorChunk
from weft.runs import checkpoint
from weft.runs.checkpoint import MOMENTS, WEIGHTS
from weft.runs.snapshot import random_state
from weft.storage import tensors
from weft.storage.safetensors_header import Place, read_header


@dataclass(frozen=True)
class Held:
    """What a process holds of a tensor of the whole: its own part, and where the pieces of it lie."""

    tensor: Tensor
    geometry: Geometry


@dataclass(frozen=True)
class Part:
    """This process's part of everything resumable, in the host's memory; by file and name."""

    step: int
    held: dict[str, Held]
    random: dict[str, Tensor]
    state: str  # JSON


def part(
    step: int,
    parallel: ShardedParallel,
    optimizer: optim.Optimizer,
    notes: Mapping[str, Any],
    step_state: Mapping[str, Tensor],
) -> Part:
    """Copy this process's weights, moments, random generators and `notes`; `step_state` is stored with the moments."""
    held = {
        key: Held(torch.empty(found.tensor.shape, dtype=found.tensor.dtype).copy_(found.tensor), found.geometry)
        for key, found in (_weights(parallel) | _moments(parallel, optimizer, step_state)).items()
    }
    state = {"step": step, "optimizer": type(optimizer).__name__, "notes": dict(notes)}
    return Part(step, held, random_state(), json.dumps(state, indent=1))


def _weights(parallel: ShardedParallel) -> dict[str, Held]:
    learned = [name for name, parameter in parallel.model.named_parameters() if parameter.requires_grad]
    return {f"{WEIGHTS}/{name}": Held(parallel.local[name], parallel.geometries[name]) for name in learned}


def _moments(
    parallel: ShardedParallel, optimizer: optim.Optimizer, step_state: Mapping[str, Tensor]
) -> dict[str, Held]:
    names = {tensor: name for name, tensor in parallel.local.items()}
    found = {f"{MOMENTS}/{name}": Held(value, Geometry.full(value)) for name, value in step_state.items()}
    for of, values in optimizer.state.items():
        name = names[of]
        for key, value in values.items():
            if isinstance(value, Tensor):
                found[f"{MOMENTS}/{key}/{name}"] = Held(value, _geometry(parallel, name, value))
    return found


def _geometry(parallel: ShardedParallel, name: str, value: Tensor) -> Geometry:
    """A moment lies as its parameter does; a number of its own, or what belongs to no parameter, is the same to all."""
    if name in parallel.local and value.shape == parallel.local[name].shape and value.dim():
        return parallel.geometries[name]
    return Geometry.full(value)


def size(parallel: ShardedParallel, optimizer: optim.Optimizer, step_state: Mapping[str, Tensor]) -> int:
    """About how many bytes a checkpoint takes on the disk, over all processes."""
    every = [*_weights(parallel).values(), *_moments(parallel, optimizer, step_state).values()]
    return sum(held.tensor.element_size() * held.geometry.shape.numel() for held in every)


def write(folder: Path, copy: Part, keep: int, interrupted: bool, ranks: Ranks) -> Path:
    """Write a checkpoint together with the other processes of `ranks`, which all call this.

    The first of them names the place beside, and renames it when all pieces are there: should one process be lost
    before, the checkpoints that stand are untouched.
    """
    name = checkpoint.checkpoint_name(copy.step, interrupted)
    with ranks.watching(f"while the checkpoint of step {copy.step} was being written"):
        if ranks.min(copy.step) != ranks.max(copy.step):  # pieces of two steps must not end in one checkpoint
            raise RunError(f"{folder / name}: cannot be written: the other processes write that of another step")
        return (_lead if ranks.leads else _follow)(folder, name, copy, keep, ranks)


def _follow(folder: Path, name: str, copy: Part, keep: int, ranks: Ranks) -> Path:
    beside = ranks.share(str)
    if beside:
        with suppress(OSError):  # the first one hears of it as well, and says why
            _save(Path(beside), copy, ranks)
    if not ranks.share(bool):
        raise RunError(f"{folder / name}: the checkpoint cannot be written")
    return folder / name


def _lead(folder: Path, name: str, copy: Part, keep: int, ranks: Ranks) -> Path:
    begun = stands = False

    def fill(beside: Path) -> None:
        nonlocal begun
        (beside / "state").mkdir()
        ranks.share(lambda: str(beside))
        begun = True
        _save(beside, copy, ranks)
        tensors.save(beside / "state/random.safetensors", copy.random)
        (beside / "state/state.json").write_text(copy.state, encoding="utf-8")
        checkpoint.seal(beside, copy.step, {})

    try:
        target = checkpoint.put(folder, name, fill, keep)
        stands = True
    finally:
        if not begun:
            ranks.share(str)  # nothing to write, or it can't be: the others wait to hear
        ranks.share(lambda: stands)
    return target


def _save(folder: Path, copy: Part, ranks: Ranks) -> None:
    """Write this process's pieces, at their places in files that the first process lays out for all."""
    # a tensor's type and shape, and where the pieces of it that are here begin, with their bytes; as JSON has it
    offered = {}
    for key, held in copy.held.items():
        width, pieces = held.tensor.element_size(), held.geometry.chunks
        places = [[list(piece.offsets), width * math.prod(piece.sizes)] for piece in pieces]
        offered[key] = [tensors.NAMES[held.tensor.dtype], list(held.geometry.shape), places]
    everyone = ranks.gather(offered)
    _agreed(ranks, lambda: _lay_out(folder, everyone) if ranks.leads else None)
    chosen = _chosen(everyone, ranks.rank)
    _agreed(ranks, lambda: write_pieces(folder, copy.held, chosen))


def _lay_out(folder: Path, everyone: list[dict[str, list[Any]]]) -> None:
    wanted: dict[str, dict[str, tuple[torch.dtype, torch.Size]]] = {WEIGHTS: {}, MOMENTS: {}}
    for key, (dtype, shape, _) in (item for offered in everyone for item in offered.items()):
        file, name = file_of(key)
        wanted[file][name] = tensors.DTYPES[dtype], torch.Size(shape)
    for file, names in wanted.items():
        tensors.reserve(folder / file, names)


def _chosen(everyone: list[dict[str, list[Any]]], rank: int) -> set[tuple[str, tuple[int, ...]]]:
    """The pieces that a process writes: of those that hold the same one, it is the one that has least to write."""
    holders: dict[tuple[str, tuple[int, ...]], tuple[int, list[int]]] = {}
    for holder, offered in enumerate(everyone):
        for key, (_, _, places) in offered.items():
            for offsets, size in places:
                holders.setdefault((key, tuple(offsets)), (size, []))[1].append(holder)
    load, mine = [0] * len(everyone), set()
    for piece, (size, several) in sorted(holders.items()):
        writer = min(several, key=lambda holder: load[holder])
        load[writer] += size
        if writer == rank:
            mine.add(piece)
    return mine


def write_pieces(folder: Path, held: Mapping[str, Held], chosen: set[tuple[str, tuple[int, ...]]]) -> None:
    """Write the chosen pieces, each at its place, and sync them."""
    for file in sorted({file_of(key)[0] for key, _ in chosen}):
        places = read_header(folder / file).tensors
        handle = os.open(folder / file, os.O_WRONLY)
        try:
            for key in (key for key in held if file_of(key)[0] == file):
                for piece in held[key].geometry.chunks:
                    if (key, piece.offsets) in chosen:
                        _put(handle, places[file_of(key)[1]], piece, piece.of(held[key].tensor))
            os.fsync(handle)
        finally:
            os.close(handle)


def _agreed(ranks: Ranks, work: Callable[[], None]) -> None:
    """Do something that may fail to write, on every process; where it has failed for one, it has for all."""
    failure: OSError | None = None
    try:
        work()
    except OSError as error:
        failure = error
    if told := [found for found in ranks.gather(failure and [failure.errno, failure.strerror]) if found]:
        raise failure or OSError(*told[0])


def file_of(key: str) -> tuple[str, str]:
    """model.safetensors/decoder.norm.weight → the file, and the name in it."""
    file = next(file for file in (WEIGHTS, MOMENTS) if key.startswith(f"{file}/"))
    return file, key.removeprefix(f"{file}/")


def _put(handle: int, place: Place, piece: TensorChunk, value: Tensor) -> None:
    """Write a block of a tensor (row-major): one run of bytes for each row that it cuts."""
    shape, sizes, width = place.shape, tuple(value.shape), value.element_size()
    cut = max((axis for axis in range(len(shape)) if sizes[axis] != shape[axis]), default=0)
    strides = [width] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    rows = memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    run = len(rows) // max(1, math.prod(sizes[:cut]))
    for number, index in enumerate(product(*(range(size) for size in sizes[:cut]))):
        begin = place.begin + sum(o * s for o, s in zip(piece.offsets, strides, strict=True))
        begin += sum(i * s for i, s in zip(index, strides, strict=False))
        data = rows[number * run : (number + 1) * run]
        while data:
            done = os.pwrite(handle, data, begin)
            data, begin = data[done:], begin + done


def load(path: Path, parallel: ShardedParallel, optimizer: optim.Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Put back weights, moments and random generators on this mesh, whatever mesh they were saved on; return the notes,
    and the state of the step that is stored with the moments.

    The checkpoint was verified before; every process calls this.
    """
    notes = checkpoint.load_notes(path, optimizer)
    load_weights(path, parallel)
    moments = _room(path, parallel)
    _read(path, {key: held for key, (_, _, held) in moments.items()})
    optimizer.state.clear()
    step_state = {}
    for of, moment, held in moments.values():
        if isinstance(of, Tensor):
            optimizer.state[of][moment] = held.tensor
        else:
            step_state[f"{moment}/{of}"] = held.tensor
    return notes, step_state


def load_weights(path: Path, parallel: ShardedParallel) -> None:
    """Put back the weights alone; those of another model are refused."""
    wanted = _weights(parallel)
    there = {current_name(name): place.shape for name, place in read_header(path / WEIGHTS).tensors.items()}
    for key, held in wanted.items():
        name, shape = file_of(key)[1], tuple(held.geometry.shape)
        if there.get(name) != shape:
            found = "which is missing" if name not in there else f"which is {there[name]} there"
            raise RunError(f"{path}: the weights do not fit the model in config.toml: {name} {shape}, {found}")
    _read(path, wanted)


def _room(path: Path, parallel: ShardedParallel) -> dict[str, tuple[Any, str, Held]]:
    """For each moment in a checkpoint what it belongs to, its kind, and memory for this process's part of it."""
    found: dict[str, tuple[Any, str, Held]] = {}
    anywhere = next(iter(parallel.local.values())).device
    for stored, place in read_header(path / MOMENTS).tensors.items():
        moment, _, name = current_name(stored).partition("/")
        of: Any = parallel.local.get(name, name)
        dtype = tensors.DTYPES[place.dtype]
        if isinstance(of, str) and name in parallel.elsewhere:
            continue
        if isinstance(of, Tensor) and place.shape and place.shape == tuple(parallel.geometries[name].shape):
            held = Held(torch.zeros_like(of, dtype=dtype), parallel.geometries[name])
        else:
            whole = torch.zeros(place.shape, dtype=dtype, device=anywhere)
            held = Held(whole, _geometry(parallel, "", whole))
        found[f"{MOMENTS}/{moment}/{name}"] = of, moment, held
    return found


@torch.no_grad()
def _read(path: Path, held: Mapping[str, Held]) -> None:
    """Each process for itself, from the files' own pages, which are read as they are used."""
    for file in {file_of(key)[0] for key in held}:
        for name, page in tensors.each(path / file):
            wanted = held.get(f"{file}/{current_name(name)}")
            if wanted is not None:
                for piece in wanted.geometry.chunks:
                    piece.of(wanted.tensor).copy_(piece.cut(page))
