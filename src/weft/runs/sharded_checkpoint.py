"""Checkpoints of a sharded model, in the same files that a single process would write.

Every rank writes its pieces into the files of one checkpoint, and reads the pieces it needs. So a run can resume on any
other mesh or in one process, and its checkpoints are exported and inspected like any others.
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
from weft.storage.safetensors_header import TensorInfo, read_header


@dataclass(frozen=True)
class TensorShard:
    """Shard of a tensor on this rank, and where its pieces are in the full tensor."""

    tensor: Tensor
    geometry: Geometry


@dataclass(frozen=True)
class ShardedSnapshot:
    """Copy of this rank's resumable state in host memory; the keys of `shards` are FILE/NAME."""

    step: int
    shards: dict[str, TensorShard]
    random: dict[str, Tensor]
    state: str  # JSON


def snapshot(
    step: int,
    parallel: ShardedParallel,
    optimizer: optim.Optimizer,
    *,
    notes: Mapping[str, Any],
    step_state: Mapping[str, Tensor],
) -> ShardedSnapshot:
    """Copy this rank's weights, optimizer state, random-number generators and `notes`; `step_state` is stored with the
    moments."""
    shards = {
        key: TensorShard(torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype).copy_(shard.tensor), shard.geometry)
        for key, shard in (_weights(parallel) | _moments(parallel, optimizer, step_state)).items()
    }
    state = {"step": step, "optimizer": type(optimizer).__name__, "notes": dict(notes)}
    return ShardedSnapshot(step, shards, random=random_state(), state=json.dumps(state, indent=1))


def _weights(parallel: ShardedParallel) -> dict[str, TensorShard]:
    learned = [name for name, parameter in parallel.model.named_parameters() if parameter.requires_grad]
    learned += [name for name, _ in parallel.model.named_buffers()]
    return {f"{WEIGHTS}/{name}": TensorShard(parallel.local[name], parallel.geometries[name]) for name in learned}


def _moments(
    parallel: ShardedParallel, optimizer: optim.Optimizer, step_state: Mapping[str, Tensor]
) -> dict[str, TensorShard]:
    names = {tensor: name for name, tensor in parallel.local.items()}
    shards = {f"{MOMENTS}/{name}": TensorShard(value, Geometry.full(value)) for name, value in step_state.items()}
    for parameter, values in optimizer.state.items():
        name = names[parameter]
        for moment, value in values.items():
            if isinstance(value, Tensor):  # sharded like its parameter, or a replicated scalar
                sharded = value.dim() and value.shape == parameter.shape
                geometry = parallel.geometries[name] if sharded else Geometry.full(value)
                shards[f"{MOMENTS}/{moment}/{name}"] = TensorShard(value, geometry)
    return shards


def size(parallel: ShardedParallel, optimizer: optim.Optimizer, step_state: Mapping[str, Tensor]) -> int:
    """Return the approximate size of a checkpoint in bytes, over all ranks."""
    shards = [*_weights(parallel).values(), *_moments(parallel, optimizer, step_state).values()]
    return sum(shard.tensor.element_size() * shard.geometry.shape.numel() for shard in shards)


def write(folder: Path, copy: ShardedSnapshot, keep: int, *, interrupted: bool, ranks: Ranks) -> Path:
    """Write a checkpoint; every rank calls this. If one dies meanwhile, the existing checkpoints stay untouched."""
    target = folder / checkpoint.checkpoint_name(copy.step, interrupted)
    with ranks.watching(f"while the checkpoint of step {copy.step} was being written"):
        if ranks.min(copy.step) != ranks.max(copy.step):  # one checkpoint must not mix pieces of two steps
            raise RunError(f"{target}: cannot be written: the other processes are at another step")
        if ranks.leads:  # rank 0 chooses the temporary folder, and renames it once all pieces are written
            return _lead(target, copy, keep, ranks=ranks)
        temporary = ranks.share(str)
        if temporary:
            with suppress(OSError):  # rank 0 is told of the failure, and reports it
                _save(Path(temporary), copy, ranks)
        if not ranks.share(bool):
            raise RunError(f"{target}: the checkpoint cannot be written")
        return target


def _lead(target: Path, copy: ShardedSnapshot, keep: int, *, ranks: Ranks) -> Path:
    """Write a checkpoint on rank 0, which shares the temporary folder, then whether the checkpoint was written."""
    is_shared = is_written = False

    def fill(temporary: Path) -> None:
        nonlocal is_shared
        (temporary / "state").mkdir()
        ranks.share(lambda: str(temporary))
        is_shared = True
        _save(temporary, copy, ranks)
        tensors.save(temporary / "state/random.safetensors", copy.random)
        (temporary / "state/state.json").write_text(copy.state, encoding="utf-8")
        checkpoint.write_manifest(temporary, copy.step, {})

    try:
        checkpoint.write_with(fill, target, keep)
        is_written = True
    finally:
        if not is_shared:
            ranks.share(str)  # "": it exists already, or can't be written; the other ranks are waiting
        ranks.share(lambda: is_written)
    return target


# key of a tensor → its dtype, its shape, and for each piece on a rank its offsets and size in bytes; as JSON has it
PieceLayout = dict[str, list[Any]]


def _save(folder: Path, copy: ShardedSnapshot, ranks: Ranks) -> None:
    """Write this rank's pieces into files that rank 0 allocates."""
    layout: PieceLayout = {}
    for key, shard in copy.shards.items():
        width, pieces = shard.tensor.element_size(), shard.geometry.chunks
        sizes = [[list(piece.offsets), width * math.prod(piece.sizes)] for piece in pieces]
        layout[key] = [tensors.NAMES[shard.tensor.dtype], list(shard.geometry.shape), sizes]
    layouts = ranks.gather(layout)
    _all_or_none(ranks, lambda: _allocate(folder, layouts) if ranks.leads else None)
    _all_or_none(ranks, lambda: write_pieces(folder, copy.shards, _assigned(layouts, ranks.rank)))


def _allocate(folder: Path, layouts: list[PieceLayout]) -> None:
    """Create the files of a checkpoint with room for all tensors."""
    contents: dict[str, dict[str, tuple[torch.dtype, torch.Size]]] = {WEIGHTS: {}, MOMENTS: {}}
    for key, (dtype, shape, _) in (item for layout in layouts for item in layout.items()):
        file, name = file_of(key)
        contents[file][name] = tensors.DTYPES[dtype], torch.Size(shape)
    for file, names in contents.items():
        tensors.reserve(folder / file, names)


def _assigned(layouts: list[PieceLayout], rank: int) -> set[tuple[str, tuple[int, ...]]]:
    """Return the pieces that a rank writes. Of the ranks that hold a piece, the one with the least to write does."""
    holders: dict[tuple[str, tuple[int, ...]], tuple[int, list[int]]] = {}
    for holder, layout in enumerate(layouts):
        for key, (_, _, pieces) in layout.items():
            for offsets, size in pieces:
                holders.setdefault((key, tuple(offsets)), (size, []))[1].append(holder)
    load, assigned = [0] * len(layouts), set()
    for piece, (size, candidates) in sorted(holders.items()):
        writer = min(candidates, key=lambda holder: load[holder])
        load[writer] += size
        if writer == rank:
            assigned.add(piece)
    return assigned


def write_pieces(folder: Path, shards: Mapping[str, TensorShard], chosen: set[tuple[str, tuple[int, ...]]]) -> None:
    """Write the chosen pieces, each at its offset, and sync the files."""
    for file in sorted({file_of(key)[0] for key, _ in chosen}):
        entries = read_header(folder / file).tensors
        handle = os.open(folder / file, os.O_WRONLY)
        try:
            for key in (key for key in shards if file_of(key)[0] == file):
                for piece in shards[key].geometry.chunks:
                    if (key, piece.offsets) in chosen:
                        _write_piece(handle, entries[file_of(key)[1]], piece, value=piece.of(shards[key].tensor))
            os.fsync(handle)
        finally:
            os.close(handle)


def _all_or_none(ranks: Ranks, write: Callable[[], None]) -> None:
    """Call `write` on every rank; if it fails to write on one, raise an OSError on all."""
    failure: OSError | None = None
    try:
        write()
    except OSError as error:
        failure = error
    if failures := [other for other in ranks.gather(failure and [failure.errno, failure.strerror]) if other]:
        raise failure or OSError(*failures[0])


def file_of(key: str) -> tuple[str, str]:
    """Split a key such as model.safetensors/decoder.norm.weight into the file and the tensor's name."""
    file = next(file for file in (WEIGHTS, MOMENTS) if key.startswith(f"{file}/"))
    return file, key.removeprefix(f"{file}/")


def _write_piece(handle: int, entry: TensorInfo, piece: TensorChunk, *, value: Tensor) -> None:
    """Write a block of a row-major tensor, one contiguous range of bytes at a time."""
    shape, sizes, width = entry.shape, tuple(value.shape), value.element_size()
    cut = max((axis for axis in range(len(shape)) if sizes[axis] != shape[axis]), default=0)  # last axis that is split
    strides = [width] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    rows = memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    length = len(rows) // max(1, math.prod(sizes[:cut]))
    for number, index in enumerate(product(*(range(size) for size in sizes[:cut]))):
        begin = entry.begin + sum(o * s for o, s in zip(piece.offsets, strides, strict=True))
        begin += sum(i * s for i, s in zip(index, strides, strict=False))
        data = rows[number * length : (number + 1) * length]
        while data:
            written = os.pwrite(handle, data, begin)
            data, begin = data[written:], begin + written


def load(path: Path, parallel: ShardedParallel, optimizer: optim.Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Restore all state on every rank, from a verified checkpoint of any mesh; return the checkpoint's notes, and the
    state of the step, which is stored with the moments."""
    notes = checkpoint.load_notes(path, optimizer)
    load_weights(path, parallel)
    moments = _empty_moments(path, parallel)
    _read(path, {key: shard for key, (_, _, shard) in moments.items()})
    optimizer.state.clear()
    step_state = {}
    for owner, moment, shard in moments.values():
        if isinstance(owner, Tensor):
            optimizer.state[owner][moment] = shard.tensor
        else:
            step_state[f"{moment}/{owner}"] = shard.tensor
    return notes, step_state


def load_weights(path: Path, parallel: ShardedParallel) -> None:
    """Restore the weights alone; weights that don't fit the model are refused."""
    shards = _weights(parallel)
    stored = {current_name(name): entry.shape for name, entry in read_header(path / WEIGHTS).tensors.items()}
    for key, shard in shards.items():
        name, shape = file_of(key)[1], tuple(shard.geometry.shape)
        if stored.get(name) != shape:
            reason = "which is missing" if name not in stored else f"which is {stored[name]} there"
            raise RunError(f"{path}: the weights do not fit the model in config.toml: {name} {shape}, {reason}")
    _read(path, shards)


def _empty_moments(path: Path, parallel: ShardedParallel) -> dict[str, tuple[Any, str, TensorShard]]:
    """Return, for all optimizer state in a checkpoint, its owner, its name, and memory for this rank's shard."""
    moments: dict[str, tuple[Any, str, TensorShard]] = {}
    default = next(iter(parallel.local.values())).device
    for stored, entry in read_header(path / MOMENTS).tensors.items():
        moment, _, name = current_name(stored).partition("/")
        owner: Any = parallel.local.get(name, name)
        dtype = tensors.DTYPES[entry.dtype]
        if isinstance(owner, str) and name in parallel.elsewhere:
            continue
        if isinstance(owner, Tensor) and entry.shape and entry.shape == tuple(parallel.geometries[name].shape):
            shard = TensorShard(torch.zeros_like(owner, dtype=dtype), parallel.geometries[name])
        else:
            full = torch.zeros(entry.shape, dtype=dtype, device=default)
            shard = TensorShard(full, Geometry.full(full))
        moments[f"{MOMENTS}/{moment}/{name}"] = owner, moment, shard
    return moments


@torch.no_grad()
def _read(path: Path, shards: Mapping[str, TensorShard]) -> None:
    """Fill this rank's shards from the memory-mapped files; only the pages it needs are read."""
    for file in {file_of(key)[0] for key in shards}:
        for name, tensor in tensors.iterate(path / file):
            if (shard := shards.get(f"{file}/{current_name(name)}")) is not None:
                for piece in shard.geometry.chunks:
                    piece.of(shard.tensor).copy_(piece.cut(tensor))
