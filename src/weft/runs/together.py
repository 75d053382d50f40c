"""Checkpoints of a model that several processes hold in parts, by torch.distributed.checkpoint, in the usual files.

Each process writes its own pieces into the files of one checkpoint, side by side, and reads the pieces that it needs:
torch plans who writes what, and what of it each reads. So the files are those that one process would have written, and
a run may go on over any other mesh, or in one process; they are exported and looked at as ever.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from weft import tensors
from weft.errors import RunError
from weft.models.renamed import current_name
from weft.parallel.apply import Split
from weft.parallel.pieces import Geometry, Piece
from weft.parallel.ranks import Ranks
from weft.runs import checkpoint
from weft.runs.snapshot import random_state, restore_random_state
from weft.runs.storage import MOMENTS, WEIGHTS, Reader, Writer, file_of
from weft.safetensors_header import read_header


@dataclass(frozen=True)
class Held:
    """What a process holds of a tensor of the whole: its own part, and where the pieces of it lie."""

    tensor: Tensor
    geometry: Geometry

    @cached_property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The pieces, as torch's planners describe them."""
        pieces = self.geometry.pieces
        return [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in pieces]

    def piece(self, offsets: Sequence[int] | None) -> Tensor:
        """The piece that begins at `offsets`."""
        found = next(piece for piece in self.geometry.pieces if piece.offsets == tuple(offsets or ()))
        return found.of(self.tensor)


@dataclass(frozen=True)
class Part:
    """This process's part of everything resumable, in the host's memory; by file and name."""

    step: int
    held: dict[str, Held]
    random: dict[str, Tensor]
    state: str  # JSON


# ---- what a process has


def part(step: int, parallel: Split, optimizer: optim.Optimizer, notes: Mapping[str, Any]) -> Part:
    """Copy this process's weights and moments, random generators and `notes`."""
    held = {
        key: Held(torch.empty(found.tensor.shape, dtype=found.tensor.dtype).copy_(found.tensor), found.geometry)
        for key, found in (_weights(parallel) | _moments(parallel, optimizer)).items()
    }
    state = {"step": step, "optimizer": type(optimizer).__name__, "notes": dict(notes)}
    return Part(step, held, random_state(), json.dumps(state, indent=1))


def _weights(parallel: Split) -> dict[str, Held]:
    learned = [name for name, parameter in parallel.model.named_parameters() if parameter.requires_grad]
    return {f"{WEIGHTS}/{name}": Held(parallel.local[name], parallel.geometries[name]) for name in learned}


def _moments(parallel: Split, optimizer: optim.Optimizer) -> dict[str, Held]:
    names = {tensor: name for name, tensor in parallel.local.items()}
    found = {}
    for of, values in optimizer.state.items():
        name: str = names[of] if isinstance(of, Tensor) else of
        for key, value in values.items():
            if isinstance(value, Tensor):
                found[f"{MOMENTS}/{key}/{name}"] = Held(value, _geometry(parallel, name, value))
    return found


def _geometry(parallel: Split, name: str, value: Tensor) -> Geometry:
    """A moment lies as its parameter does; a number of its own, or what belongs to no parameter, is the same to all."""
    if name in parallel.local and value.shape == parallel.local[name].shape and value.dim():
        return parallel.geometries[name]
    return Geometry(value.shape, (Piece(slice(None), (0,) * value.dim(), tuple(value.shape)),))


def size(parallel: Split, optimizer: optim.Optimizer) -> int:
    """About how many bytes a checkpoint takes on the disk, over all processes."""
    every = [*_weights(parallel).values(), *_moments(parallel, optimizer).values()]
    return sum(held.tensor.element_size() * held.geometry.shape.numel() for held in every)


# ---- writing


def write(folder: Path, copy: Part, keep: int, interrupted: bool, ranks: Ranks) -> Path:
    """Write a checkpoint together with the other processes of `ranks`, which all call this.

    The first of them names the place beside, and renames it when all pieces are there: should one process be lost
    before, the checkpoints that stand are untouched.
    """
    name = checkpoint.checkpoint_name(copy.step, interrupted)
    with ranks.reaching(f"while the checkpoint of step {copy.step} was being written"):
        if ranks.least(copy.step) != ranks.most(copy.step):  # pieces of two steps must not end in one checkpoint
            raise RunError(f"{folder / name}: cannot be written: the other processes write that of another step")
        return (_lead if ranks.leads else _follow)(folder, name, copy, keep, ranks)


def _follow(folder: Path, name: str, copy: Part, keep: int, ranks: Ranks) -> Path:
    beside = ranks.share(str)
    if beside:
        with suppress(OSError, _UnwrittenError):  # the first one hears of it as well, and says why
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
    try:
        dcp.save({}, storage_writer=Writer(folder), planner=_SavePlanner(copy.held), process_group=ranks.group)
    except dcp.CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise (
            first if isinstance(first, OSError) else _UnwrittenError(f"{folder}: cannot be written: {first}")
        ) from None


class _UnwrittenError(RunError):
    """One of the processes could not write its pieces."""


class _SavePlanner(DefaultSavePlanner):
    """Plans from what a process holds."""

    def __init__(self, held: Mapping[str, Held]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.held = held

    def create_local_plan(self) -> SavePlan:
        """Every piece is an item; of those that several processes hold, torch has one of them write it."""
        self.plan = SavePlan([_item(key, held, chunk) for key, held in self.held.items() for chunk in held.chunks])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The piece that an item names."""
        return self.held[index.fqn].piece(index.offset)


def _item(key: str, held: Held, chunk: ChunkStorageMetadata) -> WriteItem:
    properties = TensorProperties(dtype=held.tensor.dtype)
    data = TensorWriteData(chunk, properties, held.geometry.shape)
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


# ---- reading


def load(path: Path, parallel: Split, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Put back weights, moments and random generators on this mesh, whatever mesh they were saved on; the notes.

    The checkpoint was verified before; every process calls this.
    """
    state = json.loads((path / "state/state.json").read_text(encoding="utf-8"))
    kind, own = state.get("optimizer"), type(optimizer).__name__
    if kind is not None and kind != own:
        raise RunError(f"{path}: saved by {kind}, whose state {own} can't use; change optimizer.kind back")
    wanted = _weights(parallel)
    _check(path, wanted)
    moments = _room(path, parallel)
    _read(path, wanted | {key: held for key, (_, _, held) in moments.items()})
    optimizer.state.clear()
    for of, moment, held in moments.values():
        optimizer.state[of][moment] = held.tensor
    restore_random_state(tensors.load(path / "state/random.safetensors"))
    return dict(state["notes"])


def load_weights(path: Path, parallel: Split) -> None:
    """Put back the weights alone."""
    wanted = _weights(parallel)
    _check(path, wanted)
    _read(path, wanted)


def _check(path: Path, wanted: Mapping[str, Held]) -> None:
    """Refuse the weights of another model."""
    there = {current_name(name): place.shape for name, place in read_header(path / WEIGHTS).tensors.items()}
    for key, held in wanted.items():
        name = file_of(key)[1]
        shape = tuple(held.geometry.shape)
        if there.get(name) != shape:
            found = "which is missing" if name not in there else f"which is {there[name]} there"
            raise RunError(f"{path}: the weights do not fit the model in config.toml: {name} {shape}, {found}")


def _room(path: Path, parallel: Split) -> dict[str, tuple[Any, str, Held]]:
    """For each moment in a checkpoint what it belongs to, its kind, and memory for this process's part of it."""
    found: dict[str, tuple[Any, str, Held]] = {}
    for stored, place in read_header(path / MOMENTS).tensors.items():
        moment, _, name = current_name(stored).partition("/")
        anywhere = next(iter(parallel.local.values()))
        of: Any = parallel.local.get(name, name)
        like = isinstance(of, Tensor) and place.shape == tuple(parallel.geometries[name].shape)
        dtype = tensors.DTYPES[place.dtype]
        if isinstance(of, str) and name in parallel.elsewhere:
            continue
        if like and place.shape:
            held = Held(torch.zeros_like(of, dtype=dtype), parallel.geometries[name])
        else:
            whole = torch.zeros(place.shape, dtype=dtype, device=anywhere.device)
            held = Held(whole, _geometry(parallel, "", whole))
        found[f"{MOMENTS}/{moment}/{name}"] = of, moment, held
    return found


def _read(path: Path, held: Mapping[str, Held]) -> None:
    """Each process for itself: nobody has to know what the others read."""
    reader, planner = Reader(path, {file_of(key)[0] for key in held}), _LoadPlanner(held)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is not: nobody is asked
        dcp.load({}, storage_reader=reader, planner=planner, no_dist=True)


class _LoadPlanner(DefaultLoadPlanner):
    """Plans from what a process holds."""

    def __init__(self, held: Mapping[str, Held]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.held = held

    def create_local_plan(self) -> LoadPlan:
        """What this process's pieces are made of."""
        assert self.metadata is not None
        there = self.metadata.state_dict_metadata
        items = [item for key, held in self.held.items() for item in _items(key, there[key], held)]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The piece that an item fills."""
        return self.held[index.fqn].piece(index.offset)


def _items(key: str, there: Any, held: Held) -> list[Any]:
    return create_read_items_for_chunk_list(key, there, held.chunks) if held.chunks else []
