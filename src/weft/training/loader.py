"""The batches of a run, step by step: a pure function of the recipe, so training can resume at any step at once."""

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
    """Which rows each step trains on. Steps count from 1.

    `make(step, rank, ranks)` gives the rows that one of several processes takes of a step: a contiguous part of them,
    in the same order; `rows(step)` is how many all of them take. `epochs` is how often the data, or its most read part,
    has been read after so many steps. `fewest` is the smallest number of rows in a step, over all processes, and `row`
    says in words what a row is. With `even` all steps have one shape.
    """

    make: Callable[[int, int, int], Batch]
    rows: Callable[[int], int]
    epochs: Callable[[int], float]
    fewest: int
    row: str
    micro: int
    even: bool = False
    rank: int = 0
    ranks: int = 1
    seed: int = 0

    def batch(self, step: int) -> Batch:
        """This process's rows of a step, with the keys of their dropout: those of the seed, the step and the row."""
        batch = self.make(step, self.rank, self.ranks)
        first = self.rank * self.rows(step) // self.ranks
        mixed = hashlib.blake2b(f"{self.seed} {step}".encode(), digest_size=4).digest()
        base = int.from_bytes(mixed, "little", signed=True)
        return replace(batch, keys=row_keys(base, torch.arange(first, first + len(batch.tokens))))

    def parts(self, step: int) -> list[Batch]:
        """The batch of a step in parts of at most `micro` rows."""
        batch = self.batch(step)
        return batch.split(-(-len(batch.tokens) // self.micro))

    def stream(self, first: int, last: int, device: torch.device) -> Iterator[list[Batch]]:
        """The parts of steps first … last, in order. For a GPU the next step is prepared while this one runs."""
        if device.type != "cuda":
            for step in range(first, last + 1):
                yield self.parts(step)
            return

        def pinned(step: int) -> list[Batch]:
            return [part.pin() for part in self.parts(step)]

        with ThreadPoolExecutor(1, "loader") as worker:
            coming = worker.submit(pinned, first)
            for step in range(first, last + 1):
                now = coming.result()
                if step < last:
                    coming = worker.submit(pinned, step + 1)
                yield now


def micro_rows(batch: BatchConfig, rows: int) -> int:
    """Rows to read at a time. "auto" starts with the whole batch, which the pre-flight divides where it must."""
    return batch.micro if isinstance(batch.micro, int) else rows


def steps_of(
    batch: BatchConfig, make: Callable[[int, int, int], Batch], epochs: Callable[[int], float], row: str
) -> Loader:
    """A loader of `batch.size` rows in every step, `row`s of `batch.length` tokens."""
    size, row = batch.size or 1, f"{row} of {batch.length} tokens"
    return Loader(make, lambda step: size, epochs, size, row, micro_rows(batch, size), even=True)


def shared(loader: Loader, recipe: SettledRecipe, ranks: Ranks) -> Loader:
    """This process's part of every step's rows, among those of `ranks`, which read different ones."""
    batch, objective = recipe.batch, recipe.objective
    if not ranks.alone and not objective.divisible:
        raise ConfigError(
            f"objective.kind = '{objective.kind}': the rows of a batch are compared with each other, so "
            f"{ranks.ranks} processes can't share it; start one"
        )
    if loader.fewest < ranks.ranks:
        setting = f"batch.size = {batch.size}" if batch.tokens is None else f"batch.tokens = {batch.tokens}"
        raise ConfigError(
            f"{setting}: {ranks.ranks} processes share the rows of a step, of which there are only {loader.fewest} at "
            "times; raise it, or start fewer processes"
        )
    own = replace(loader, rank=ranks.rank, ranks=ranks.ranks, seed=recipe.seed)
    return own if batch.size is None else replace(own, micro=min(own.micro, -(-batch.size // ranks.ranks)))
