"""Which part of a whole tensor a process holds, wherever it is split: what initialisation and checkpoints are cut by.

A parameter may be split over the shard axis, the tensor axis, or both (torch's DTensor says how). A matrix that holds
several, one above the other (`Linear.heights`: queries, keys and values), is split so that each process has the same
rows of each of them; its rows here then are several runs of rows of the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Piece:
    """Rows `local` of this process's tensor are the block of the whole that begins at `offsets`."""

    local: slice
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of this process's tensor, a view."""
        return tensor[self.local] if tensor.dim() else tensor

    def cut(self, whole: Tensor) -> Tensor:
        """The piece of the whole tensor, a view."""
        for axis, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(axis, offset, size)
        return whole


@dataclass(frozen=True)
class Geometry:
    """A whole tensor's shape, and the pieces of it that this process holds."""

    shape: torch.Size
    pieces: tuple[Piece, ...]


def geometry(parameter: Tensor, heights: Sequence[int] = (), parts: int = 1) -> Geometry:
    """Of a parameter; `heights` of the matrices in it, each of which is split over `parts` processes."""
    if not isinstance(parameter, DTensor):
        whole = Piece(slice(None), (0,) * parameter.dim(), tuple(parameter.shape))
        return Geometry(parameter.shape, (whole,))
    shape, mesh = parameter.shape, parameter.device_mesh
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, parameter.placements)
    if not all(sizes):
        return Geometry(parameter.shape, ())  # fewer rows than processes
    pieces = []
    for first, begin, rows in _runs(heights or [parameter.shape[0]], parts):
        low, high = max(first, offsets[0]), min(first + rows, offsets[0] + sizes[0])
        if low < high:
            local = slice(low - offsets[0], high - offsets[0])
            pieces.append(Piece(local, (begin + low - first, *offsets[1:]), (high - low, *sizes[1:])))
    return Geometry(parameter.shape, tuple(pieces))


def _runs(heights: Sequence[int], parts: int) -> list[tuple[int, int, int]]:
    """(first row as it is split, first row of the whole, rows) of each run that stays together."""
    if len(heights) == 1:
        return [(0, 0, heights[0])]
    runs, first = [], 0
    for part in range(parts):
        above = 0
        for height in heights:
            rows = height // parts
            runs.append((first, above + part * rows, rows))
            first += rows
            above += height
    return runs
