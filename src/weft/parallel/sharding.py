"""The part of a sharded tensor that a process holds, which initialisation and checkpoints slice the full tensor by.

A parameter may be sharded over the shard axis, the tensor axis, or both (torch's DTensor says how). A fused matrix
(`Linear.heights`: queries, keys and values, one above the other) is sharded so that each process has the same rows of
each matrix in it; the local rows are then several ranges of rows of the full tensor.

To compute on whole matrices, the processes of a pipeline stage divide them among themselves (`MatrixExchange`),
round-robin in order of size: each receives the parts of its own matrices in one all-to-all, and returns the parts of
the results in another. Every element is sent once to the process that computes on it, and once to each that holds it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weft.parallel.ranks import Ranks


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


ROUND_ELEMENTS = 1 << 26  # elements of the matrices that a process receives at a time, unless one alone is larger


@dataclass
class MatrixPart:
    """Block of matrix `number`, and the ranks that hold it. Its rows are `chunk.local` of the tensor on this rank."""

    number: int
    chunk: TensorChunk
    holders: list[int]

    def sender(self, owner: int) -> int:
        """Return the rank that sends this part to the owner of its matrix; those that hold the same part alternate."""
        return owner if owner in self.holders else self.holders[owner % len(self.holders)]


class MatrixExchange:
    """The routes of matrices between `ranks`, all of which hold parts of the same matrices and construct this."""

    def __init__(self, ranks: Ranks, geometries: Sequence[Geometry], device: torch.device):
        self.ranks, self.shapes = ranks, [geometry.shape for geometry in geometries]
        self.empty = torch.empty(0, device=device)  # of a rank that has nothing to send
        here = {(n, chunk.offsets): chunk for n, geometry in enumerate(geometries) for chunk in geometry.chunks}
        self.parts: list[list[MatrixPart]] = [[] for _ in geometries]
        found: dict[tuple[int, tuple[int, ...]], MatrixPart] = {}
        held: list[list[Any]] = [[*key, chunk.sizes] for key, chunk in here.items()]
        for rank, others in enumerate(ranks.gather(held)):
            for number, offsets, sizes in others:
                key = number, tuple(offsets)
                if key not in found:
                    chunk = here.get(key) or TensorChunk(slice(0), tuple(offsets), tuple(sizes))
                    found[key] = MatrixPart(number, chunk, [])
                    self.parts[number].append(found[key])
                found[key].holders.append(rank)

    def map(self, local: Sequence[Tensor], function: Callable[[dict[int, Tensor]], dict[int, Tensor]]) -> list[Tensor]:
        """Return this rank's parts of `function` of whole matrices, by number, given its parts of them; in fp32."""
        results, me = [torch.empty_like(part, dtype=torch.float32) for part in local], self.ranks.rank
        for numbers in rounds([shape.numel() for shape in self.shapes], self.ranks.ranks):
            owners = {number: position % self.ranks.ranks for position, number in enumerate(numbers)}
            whole = {n: results[n].new_empty(self.shapes[n]) for n, owner in owners.items() if owner == me}
            parts = [part for number in numbers for part in self.parts[number]]
            collect = [(part, part.sender(owners[part.number]), owners[part.number]) for part in parts]
            self._send(collect, lambda part: part.chunk.of(local[part.number]), _cut_from(whole))
            new = function(whole)
            spread = [(part, owners[part.number], holder) for part in parts for holder in part.holders]
            self._send(spread, _cut_from(new), lambda part: part.chunk.of(results[part.number]))
        return results

    def _send(
        self,
        routes: Iterable[tuple[MatrixPart, int, int]],
        source: Callable[[MatrixPart], Tensor],
        target: Callable[[MatrixPart], Tensor],
    ) -> None:
        """Copy each part from one rank to another: from its view in `source` there to its view in `target` here."""
        sent: list[list[Tensor]] = [[] for _ in range(self.ranks.ranks)]
        received: list[list[Tensor]] = [[] for _ in range(self.ranks.ranks)]
        for part, sender, receiver in routes:
            if sender == self.ranks.rank:
                sent[receiver].append(source(part))
            if receiver == self.ranks.rank:
                received[sender].append(target(part))
        flat = torch.cat([self.empty, *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
        sizes = [[sum(tensor.numel() for tensor in tensors) for tensors in way] for way in (sent, received)]
        arrived = self.ranks.all_to_all(flat, *sizes)
        targets = [tensor for tensors in received for tensor in tensors]
        parts = arrived.split([tensor.numel() for tensor in targets])
        if targets:
            torch._foreach_copy_(targets, [part.view_as(target) for part, target in zip(parts, targets, strict=True)])


def _cut_from(whole: dict[int, Tensor]) -> Callable[[MatrixPart], Tensor]:
    return lambda part: part.chunk.cut(whole[part.number])


def rounds(sizes: Sequence[int], ranks: int) -> Iterator[list[int]]:
    """Yield the numbers of matrices of these sizes, the largest first, as many at a time as all ranks have room for."""
    order, begin = sorted(range(len(sizes)), key=lambda number: -sizes[number]), 0
    while begin < len(order):
        end = begin + ranks * max(1, ROUND_ELEMENTS // sizes[order[begin]])
        yield order[begin:end]
        begin = end
