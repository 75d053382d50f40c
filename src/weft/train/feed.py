"""The batches of a run, step by step: a pure function of the recipe, so that going on at any step costs nothing."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from weft.data.batch import Batch, mixture_batch, windows_batch
from weft.data.mixture import Mixture
from weft.data.sampler import Windows
from weft.data.shards import Tokens
from weft.errors import ConfigError, DataError
from weft.train.config import Recipe


class Corpus(Protocol):
    """Prepared text, as `weft.data.shards.Shards` holds it."""

    train: Tokens


@dataclass(frozen=True)
class Feed:
    """Which rows each step trains on. Steps count from 1.

    `batch` gives the rows of a step, `epochs` how often the data, or the most read part of it, was read after so many
    steps. `rows` is about how many a step holds, and `row` says in words what one is.
    """

    batch: Callable[[int], Batch]
    epochs: Callable[[int], float]
    rows: int
    row: str
    micro: int
    fingerprints: tuple[str, ...] = ()  # of the data, for the record

    def cut(self, micro: int) -> "Feed":
        """The same rows in other pieces."""
        return replace(self, micro=micro)

    def among(self, rank: int, ranks: int) -> "Feed":
        """What one of several processes takes: a contiguous part of every step's rows, in the same order."""
        if ranks == 1:
            return self

        def own(step: int) -> Batch:
            whole = self.batch(step)
            if len(whole.tokens) < ranks:
                raise DataError(
                    f"step {step} has {len(whole.tokens)} rows for {ranks} processes; raise batch.size or batch.tokens"
                )
            return whole.split(ranks)[rank]

        return replace(self, batch=own)

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


def feed(recipe: Recipe, corpus: Corpus | Sequence[Corpus], rank: int = 0, ranks: int = 1) -> Feed:
    """The windows of running text. Several corpora are mixed by the weights of `data.mixture`.

    Of `ranks` processes each takes its part of every step's rows.
    """
    size, length = recipe.batch.size, recipe.batch.length
    assert size is not None and length is not None, "the recipe is settled first"
    if size < ranks:
        raise ConfigError(f"batch.size = {size}: {ranks} processes share the rows of a step; give each at least one")
    texts = tuple(c.train for c in corpus) if isinstance(corpus, Sequence) else (corpus.train,)
    weights = tuple(part.weight for part in recipe.data.parts) if len(texts) > 1 else (1.0,)
    if len(weights) != len(texts):
        raise ConfigError(f"data.mixture names {len(weights)} texts, but {len(texts)} were prepared")
    mixture = Mixture(tuple(Windows(len(text), length, recipe.seed) for text in texts), weights)
    apart = recipe.data.document_mask

    def batch(step: int) -> Batch:
        if len(texts) == 1:
            return windows_batch(texts[0], mixture.windows[0], step - 1, size, rank, ranks, document_mask=apart)
        return mixture_batch(texts, mixture, step - 1, size, rank, ranks, document_mask=apart)

    return Feed(
        batch=batch,
        epochs=lambda step: max(mixture.epochs(step * size)),
        rows=size,
        row=f"sequence of {length} tokens",
        micro=min(pieces(recipe, size), -(-size // ranks)),
    )
