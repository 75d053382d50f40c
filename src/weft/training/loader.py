"""The batches of a run, step by step: a pure function of the recipe, so that training can resume at any step."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from weft.data.batch import Batch
from weft.errors import ConfigError
from weft.nn.dropout import row_keys
from weft.parallel.ranks import Ranks
from weft.recipe.config import BatchConfig, SettledRecipe


@dataclass(frozen=True)
class Loader:
    """The rows that each step trains on. Steps count from 1."""

    make: Callable[[int, int, int], Batch]  # (step, rank, ranks): a rank's contiguous part of the rows of a step
    rows: Callable[[int], int]  # rows of a step, on all ranks
    epochs: Callable[[int], float]  # times that the data, or its most-read part, was read after this many steps
    min_rows: int  # smallest number of rows in a step, on all ranks
    row: str  # a row, in the words of a message
    micro: int  # largest number of rows in a micro-batch
    even: bool = False  # whether all steps have one shape
    shares_masks: bool = False  # whether the rows of a step share dropout masks (`RowRng.of_step`)
    bucketed: bool = False  # whether `stream` pads micro-batches to few shapes (`Batch.bucketed`)
    rank: int = 0
    ranks: int = 1
    seed: int = 0

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of a step, with dropout keys derived from the seed, the step and the row."""
        batch = self.make(step, self.rank, self.ranks)
        first = self.rank * self.rows(step) // self.ranks
        mixed = hashlib.blake2b(f"{self.seed} {step}".encode(), digest_size=4).digest()
        base = int.from_bytes(mixed, "little", signed=True)
        rows = torch.arange(first, first + len(batch.tokens))
        step_key = torch.full_like(rows, base, dtype=torch.int32) if self.shares_masks else None
        return replace(batch, keys=row_keys(base, rows), step_key=step_key)

    def parts(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step, of at most `micro` rows."""
        batch = self.batch(step)
        return batch.split(-(-len(batch.tokens) // self.micro))

    def stream(self, first: int, last: int, device: torch.device) -> Iterator[list[Batch]]:
        """Yield the micro-batches of steps first … last. For a GPU the next step is prepared while this one runs."""
        if device.type != "cuda":
            for step in range(first, last + 1):
                yield self.parts(step)
            return

        def pinned(step: int) -> list[Batch]:
            return [(part.bucketed() if self.bucketed else part).pin() for part in self.parts(step)]

        with ThreadPoolExecutor(1, "loader") as thread:
            coming = thread.submit(pinned, first)
            for step in range(first, last + 1):
                parts = coming.result()
                if step < last:
                    coming = thread.submit(pinned, step + 1)
                yield parts


def micro_rows(batch: BatchConfig, rows: int) -> int:
    """Return the rows of a micro-batch. "auto" starts with all `rows`, and the pre-flight divides them if it must."""
    return batch.micro if isinstance(batch.micro, int) else rows


def even_loader(
    batch: BatchConfig, make: Callable[[int, int, int], Batch], epochs: Callable[[int], float], *, row: str
) -> Loader:
    """Return a loader of `batch.size` rows of `batch.length` tokens in every step."""
    size, row, micro = batch.size or 1, f"{row} of {batch.length} tokens", micro_rows(batch, batch.size or 1)
    return Loader(make, lambda step: size, epochs, min_rows=size, row=row, micro=micro, even=True)


def shard_loader(loader: Loader, recipe: SettledRecipe, ranks: Ranks) -> Loader:
    """Return the loader of this rank's rows, among those of `ranks`, which read different ones."""
    batch, objective = recipe.batch, recipe.objective
    if not ranks.alone and not objective.divisible:
        raise ConfigError(
            f"objective.kind = '{objective.kind}': the rows of a batch are compared with each other, so "
            f"{ranks.ranks} processes can't share it; start one"
        )
    if loader.min_rows < ranks.ranks:
        setting = f"batch.size = {batch.size}" if batch.tokens is None else f"batch.tokens = {batch.tokens}"
        raise ConfigError(
            f"{setting}: {ranks.ranks} processes share the rows of a step, and some steps have only "
            f"{loader.min_rows}; raise it, or start fewer processes"
        )
    local = replace(loader, rank=ranks.rank, ranks=ranks.ranks, seed=recipe.seed)
    return local if batch.size is None else replace(local, micro=min(local.micro, -(-batch.size // ranks.ranks)))
