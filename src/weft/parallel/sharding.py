"""The part of a sharded tensor that a process holds, which initialisation and checkpoints slice the full tensor by.

A parameter may be sharded over the shard axis, the tensor axis, or both (torch's DTensor says how). A fused matrix
(`Linear.heights`: queries, keys and values, one above the other) is sharded so that each process has the same rows of
each matrix in it; the local rows are then several ranges of rows of the full tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class TensorChunk:
    """Rows `local` of this process's tensor: the block of the full tensor that begins at `offsets`."""

    local: slice
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of the chunk in this process's tensor."""
        return tensor[self.local] if tensor.dim() else tensor

    def cut(self, full: Tensor) -> Tensor:
        """Return a view of the chunk in the full tensor."""
        for axis, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            full = full.narrow(axis, offset, size)
        return full


@dataclass(frozen=True)
class Geometry:
    """The shape of a full tensor, and the chunks of it that this process holds."""

    shape: torch.Size
    chunks: tuple[TensorChunk, ...]

    @classmethod
    def full(cls, tensor: Tensor) -> "Geometry":
        """Return the geometry of a tensor that this process holds in full."""
        return cls(tensor.shape, (TensorChunk(slice(None), (0,) * tensor.dim(), tuple(tensor.shape)),))


def geometry(parameter: Tensor, heights: Sequence[int] = (), shards: int = 1) -> Geometry:
    """Return the geometry of a parameter; each of the matrices in it, of `heights` rows, has `shards` shards."""
    if not isinstance(parameter, DTensor):
        return Geometry.full(parameter)
    shape, mesh = parameter.shape, parameter.device_mesh
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, parameter.placements)
    if not all(sizes):
        return Geometry(shape, ())  # fewer rows than processes
    chunks = []
    for first, begin, rows in _row_ranges(heights or [shape[0]], shards):
        low, high = max(first, offsets[0]), min(first + rows, offsets[0] + sizes[0])
        if low < high:
            local = slice(low - offsets[0], high - offsets[0])
            chunks.append(TensorChunk(local, (begin + low - first, *offsets[1:]), (high - low, *sizes[1:])))
    return Geometry(shape, tuple(chunks))


def _row_ranges(heights: Sequence[int], shards: int) -> list[tuple[int, int, int]]:
    """Return (first row in the order of shards, first row of the full tensor, rows) of each contiguous range."""
    if len(heights) == 1:
        return [(0, 0, heights[0])]
    ranges, first = [], 0
    for shard in range(shards):
        above = 0
        for height in heights:
            rows = height // shards
            ranges.append((first, above + shard * rows, rows))
            first += rows
            above += height
    return ranges
