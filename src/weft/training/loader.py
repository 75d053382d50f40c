"""The batches of a run, step by step: a pure function of the recipe, so that going on at any step costs nothing."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from weft.data.batch import Batch, windows_batch
from weft.data.mixture import Mixture
from weft.data.sampler import Windows, rows
from weft.data.shards import Tokens
from weft.errors import ConfigError
from weft.parallel.ranks import Ranks
from weft.recipe.config import Recipe
from weft.recipe.objective import Twins


class Corpus(Protocol):
    """Prepared text, as `weft.data.shards.Shards` holds it."""

    train: Tokens


@dataclass(frozen=True)
class Feed:
    """Which rows each step trains on. Steps count from 1.

    `make(step, rank, ranks)` gives the rows that one of several processes takes of a step: a contiguous part of them,
    in the same order. `epochs` tells how often the data, or the most read part of it, was read after so many steps.
    `fewest` is how many rows a step holds at least, in all, and `row` says in words what one is. `even` feeds give all
    steps one shape.
    """

    make: Callable[[int, int, int], Batch]
    epochs: Callable[[int], float]
    fewest: int
    row: str
    micro: int
    fingerprints: tuple[str, ...] = ()  # of the data, for the record
    even: bool = False
    rank: int = 0
    ranks: int = 1

    def cut(self, micro: int) -> "Feed":
        """The same rows in other pieces."""
        return replace(self, micro=micro)

    def among(self, rank: int, ranks: int) -> "Feed":
        """What one of several processes takes."""
        return replace(self, rank=rank, ranks=ranks)

    def batch(self, step: int) -> Batch:
        """This process's rows of a step."""
        return self.make(step, self.rank, self.ranks)

    def parts(self, step: int) -> list[Batch]:
        """The batch of a step, cut into pieces of at most `micro` rows."""
        batch = self.batch(step)
        return batch.split(-(-len(batch.tokens) // self.micro))

    def epoch(self, step: int) -> float:
        """How often the data has been read after this many steps."""
        return self.epochs(step)

    def stream(self, first: int, last: int, device: torch.device) -> Iterator[list[Batch]]:
        """The parts of steps first … last, in order. For a GPU the next step is made ready while this one runs."""
        if device.type != "cuda":
            for step in range(first, last + 1):
                yield self.parts(step)
            return

        def ready(step: int) -> list[Batch]:
            return [part.pin() for part in self.parts(step)]

        with ThreadPoolExecutor(1, "feed") as worker:
            coming = worker.submit(ready, first)
            for step in range(first, last + 1):
                now = coming.result()
                if step < last:
                    coming = worker.submit(ready, step + 1)
                yield now


def pieces(recipe: Recipe, rows: int) -> int:
    """Rows to read at a time. "auto" starts from the whole batch, and the pre-flight cuts it where it must."""
    return recipe.batch.micro if isinstance(recipe.batch.micro, int) else rows


def feed(recipe: Recipe, corpus: Corpus | Sequence[Corpus]) -> Feed:
    """The windows of running text. Several corpora are mixed by the weights of `data.mixture`."""
    size, length = recipe.batch.size, recipe.batch.length
    assert size is not None and length is not None, "the recipe is settled first"
    texts = tuple(c.train for c in corpus) if isinstance(corpus, Sequence) else (corpus.train,)
    weights = tuple(part.weight for part in recipe.data.parts) if len(texts) > 1 else (1.0,)
    if len(weights) != len(texts):
        raise ConfigError(f"data.mixture names {len(weights)} texts, but {len(texts)} were prepared")
    mixture = Mixture(tuple(Windows(len(text), length, recipe.seed) for text in texts), weights)
    apart = recipe.data.document_mask

    def make(step: int, rank: int, ranks: int) -> Batch:
        return windows_batch(texts, mixture, rows(step - 1, size, rank, ranks), document_mask=apart)

    return Feed(
        make=make,
        epochs=lambda step: max(mixture.epochs(step * size)),
        fewest=size,
        row=f"sequence of {length} tokens",
        micro=pieces(recipe, size),
        even=True,
    )


def share(recipe: Recipe, corpus: Corpus | Sequence[Corpus] | Feed, ranks: Ranks) -> Feed:
    """This process's part of every step's rows, of running text or of any feed."""
    if not ranks.alone and isinstance(recipe.objective, Twins):
        raise ConfigError(
            f"objective.kind = 'twins': the rows of a batch are each other's wrong answers, so {ranks.ranks} processes "
            "can't share it; start one"
        )
    batches = corpus if isinstance(corpus, Feed) else feed(recipe, corpus)
    size, tokens = recipe.batch.size, recipe.batch.tokens
    if batches.fewest < ranks.ranks:
        setting = f"batch.size = {size}" if tokens is None else f"batch.tokens = {tokens}"
        raise ConfigError(
            f"{setting}: {ranks.ranks} processes share the rows of a step, which are {batches.fewest} at times; "
            "raise it, or start fewer processes"
        )
    own = batches.among(ranks.rank, ranks.ranks)
    return own if size is None else own.cut(min(own.micro, -(-size // ranks.ranks)))
