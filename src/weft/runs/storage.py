"""torch.distributed.checkpoint's storage in a checkpoint's files: pieces of tensors at their places in safetensors.

Whoever writes or reads, and however the model was divided, the files are those that one process would have written.
"""

import math
import os
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from weft import tensors
from weft.models.renamed import current_name
from weft.safetensors_header import Place, read_header

WEIGHTS, MOMENTS = "model.safetensors", "state/optimizer.safetensors"


class Writer(StorageWriter):
    """Pieces into safetensors files that lie ready for them."""

    def __init__(self, folder: Path):
        self.folder = folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer, one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **given: Any) -> None:
        """Nothing to do before the plan is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The first process lays the files out, before anybody writes."""
        wanted: dict[str, dict[str, tuple[torch.dtype, torch.Size]]] = {WEIGHTS: {}, MOMENTS: {}}
        for item in (item for plan in plans for item in plan.items):
            file, name = file_of(item.index.fqn)
            assert item.tensor_data is not None
            wanted.setdefault(file, {})[name] = item.tensor_data.properties.dtype, item.tensor_data.size
        for file, names in wanted.items():
            tensors.reserve(self.folder / file, names)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This process's pieces, each at its place, synced."""
        future: Future[list[WriteResult]] = Future()
        headers = {
            file: read_header(self.folder / file).tensors for file in {file_of(i.index.fqn)[0] for i in plan.items}
        }
        handles = {file: os.open(self.folder / file, os.O_WRONLY) for file in headers}
        results = []
        try:
            for item in plan.items:
                file, name = file_of(item.index.fqn)
                value: Tensor = planner.resolve_data(item)  # type: ignore[assignment]
                _put(handles[file], headers[file][name], item.index.offset or (), value)
                results.append(WriteResult(item.index, value.nbytes, None))
            for handle in handles.values():
                os.fsync(handle)
        finally:
            for handle in handles.values():
                os.close(handle)
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The files' own headers say all that is needed to read them."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No ids are used."""
        return True


def file_of(key: str) -> tuple[str, str]:
    """model.safetensors/decoder.norm.weight → the file, and the name in it."""
    file = next(file for file in (WEIGHTS, MOMENTS) if key.startswith(f"{file}/"))
    return file, key.removeprefix(f"{file}/")


def _put(handle: int, place: Place, offsets: Sequence[int], value: Tensor) -> None:
    """Write a block of a tensor (row-major) that begins at `offsets`: one run of bytes for each row that it cuts."""
    shape, sizes, width = place.shape, tuple(value.shape), value.element_size()
    cut = max((axis for axis in range(len(shape)) if sizes[axis] != shape[axis]), default=0)
    strides = [width] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    rows = memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    run = len(rows) // max(1, math.prod(sizes[:cut]))
    for number, index in enumerate(product(*(range(size) for size in sizes[:cut]))):
        begin = place.begin + sum(o * s for o, s in zip(offsets, strides, strict=True))
        begin += sum(i * s for i, s in zip(index, strides, strict=False))
        _write_all(handle, rows[number * run : (number + 1) * run], begin)


def _write_all(handle: int, data: memoryview, begin: int) -> None:
    while data:
        done = os.pwrite(handle, data, begin)
        data, begin = data[done:], begin + done


class Reader(StorageReader):
    """Pieces out of safetensors files, whose pages are read as they are used."""

    def __init__(self, folder: Path, names: set[str]):
        self.folder, self.names = folder, names

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One reader, one checkpoint."""

    def read_metadata(self, *args: Any, **given: Any) -> Metadata:
        """Every tensor is one chunk."""
        found: dict[str, Any] = {}
        for key, place in self._places():
            shape = torch.Size(place.shape)
            whole = [ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)]
            found[key] = TensorStorageMetadata(TensorProperties(dtype=tensors.DTYPES[place.dtype]), shape, whole)
        return Metadata(found)

    def _places(self) -> Iterator[tuple[str, Place]]:
        for file in self.names:
            for name, place in read_header(self.folder / file).tensors.items():
                yield f"{file}/{current_name(name)}", place

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **given: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Fill every piece."""
        pages = {
            f"{file}/{current_name(name)}": tensor
            for file in self.names
            for name, tensor in tensors.each(self.folder / file)
        }
        for item in plan.items:
            target = planner.resolve_tensor(item)
            source = pages[item.storage_index.fqn]
            for axis, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(axis, offset, length)
            target.copy_(source)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No ids are used."""
        return True
