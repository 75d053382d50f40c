"""What a run surely needs of a device's memory, against what there is: refused before it is allocated.

A processor's memory gives no error when it is full; the system ends the process. So the least that the settings call
for (`weft plan` counts it) is compared with what the machine has. Measured on a CPU, a step takes 1.0 to 2.5 times
as much, so nothing that would fit is refused.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch

from weft.costs.memory import Memory, Workload, training_memory
from weft.costs.units import byte_size
from weft.data.batch import Batch
from weft.errors import RunError
from weft.layout import Layout
from weft.recipe.config import SettledRecipe

SURE = 0.9  # of what is planned: what two layers need may share memory
WHOLE = Layout()  # one process has all
TOKEN = 16  # bytes of a token and its target, before they are read


def check_model(recipe: SettledRecipe, device: torch.device, layout: Layout = WHOLE) -> None:
    """Refuse a model whose weights, gradients and moments alone can't fit, and a batch whose tokens can't."""
    batch, there = recipe.batch, total_memory(device)
    fixed = _planned(recipe, 1, 1, layout).fixed
    if SURE * fixed > there:
        raise RunError(
            f"this model needs at least {byte_size(fixed)} for weights, gradients and moments, and {place(device)} has "
            f"{byte_size(there)} of memory; lower model.layers, model.d_model or the vocabulary, or choose a smaller "
            "preset"
        )
    # rows of text are as long as they are set to; those of a table are bounded by its size
    tokens = (batch.size or 0) * batch.length if recipe.objective.reads == "text" else 0
    host = total_memory(torch.device("cpu"))
    if TOKEN * tokens > host:
        raise RunError(
            f"batch.size = {batch.size} × batch.length = {batch.length}: the tokens of a step alone take "
            f"{byte_size(TOKEN * tokens)}, and this machine has {byte_size(host)} of memory; lower one of them"
        )


class Need:
    """The least that reading so many rows of a step at a time takes, in bytes, weights and moments included."""

    def __init__(self, recipe: SettledRecipe, first: Callable[[], Batch], layout: Layout = WHOLE):
        """`first` gives the first step's batch, which is asked for only where rows differ in length."""
        self.recipe, self.first, self.layout = recipe, first, layout

    def __call__(self, rows: int) -> int:
        rows, length = min(rows, self._shape[0]), self._shape[1]
        need = _planned(self.recipe, rows, length, self.layout)
        # what is kept of a token is split over some axes: at the least, over all of them
        shared = self.layout.tensor * self.layout.context * self.layout.pipeline
        kept = (need.total(self.recipe.batch.recompute) - need.logits - need.fixed) / shared
        # gradients come as activations go, unless those of the rows before are there already
        whole = rows == self._shape[0]
        held = max(kept, need.gradients) if whole else kept + need.gradients
        return round(SURE * (need.fixed - need.gradients + held))

    @cached_property
    def _shape(self) -> tuple[int, int]:
        """Rows and tokens of a row, at the least."""
        batch = self.recipe.batch
        if self.recipe.objective.reads == "text" and not self.recipe.objective.has_source and batch.size is not None:
            return batch.size, batch.length
        made = self.first()
        rows, length = made.tokens.shape
        return rows, length if made.source is None else min(length, made.source.tokens.shape[1])


def _planned(recipe: SettledRecipe, rows: int, length: int, layout: Layout) -> Memory:
    shards = layout.shard * layout.context * layout.tensor * layout.pipeline
    work = Workload(rows, length, recipe.precision, recipe.optimizer.kind, shards)
    return training_memory(recipe.model, work, recipe.adapter)


# ---- what there is


def total_memory(device: torch.device) -> int:
    """The bytes of a device's memory; of a processor's, swap space included, as much as this process may have."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [*_cgroup_limits()]
    with suppress(AttributeError, ValueError, OSError):  # Windows
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _swap())
    return min(limits, default=1 << 62)


def place(device: torch.device) -> str:
    """A device as a message calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"


def free_memory(device: torch.device) -> int:
    """The bytes that nobody uses now; of a processor's memory no more than this process may have."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    total = total_memory(device)
    return min(_noted("MemAvailable:") or total // 2, total)


def _swap() -> int:
    return _noted("SwapTotal:")


def _noted(name: str) -> int:
    """The bytes that Linux notes under a name."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
    return 0


def _cgroup_limits() -> Iterator[int]:
    """What a container may have: version 2 and version 1, of the process's own group and those above it."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            root = Path("/sys/fs/cgroup", controllers)
            group = root / name.lstrip("/")
            for folder in (group, *group.parents):
                if folder != root and root not in folder.parents:
                    break
                with suppress(OSError, ValueError):  # "max" is no limit
                    yield int((folder / file).read_text())
