"""The batches of a run, step by step: a pure function of the recipe, so that going on at any step costs nothing."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from weft.data.batch import Batch, mixture_batch, windows_batch
from weft.data.mixture import Mixture
from weft.data.sampler import Windows
from weft.data.shards import Tokens
from weft.errors import ConfigError
from weft.train.config import Recipe


class Corpus(Protocol):
    """Prepared text, as `weft.data.shards.Shards` holds it."""

    train: Tokens


@dataclass(frozen=True)
class Feed:
    """Which rows each step trains on, drawn from one text or from several by weight. Steps count from 1."""

    texts: tuple[Tokens, ...]
    mixture: Mixture
    size: int
    micro: int
    document_mask: bool

    def cut(self, micro: int) -> "Feed":
        """The same rows in other pieces."""
        return replace(self, micro=micro)

    def parts(self, step: int) -> list[Batch]:
        """The batch of a step, cut into pieces of at most `micro` rows."""
        if len(self.texts) == 1:
            batch = windows_batch(
                self.texts[0], self.mixture.windows[0], step - 1, self.size, document_mask=self.document_mask
            )
        else:
            batch = mixture_batch(self.texts, self.mixture, step - 1, self.size, document_mask=self.document_mask)
        return batch.split(-(-self.size // self.micro))

    def epoch(self, step: int) -> float:
        """How often the text, or the most read of several, has been read after this many steps."""
        return max(self.mixture.epochs(step * self.size))

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


def feed(recipe: Recipe, corpus: Corpus | Sequence[Corpus]) -> Feed:
    """The feed of a settled recipe. Several corpora are mixed by the weights of `data.mixture`."""
    size, length = recipe.batch.size, recipe.batch.length
    assert size is not None and length is not None, "the recipe is settled first"
    texts = tuple(c.train for c in corpus) if isinstance(corpus, Sequence) else (corpus.train,)
    weights = tuple(part.weight for part in recipe.data.parts) if len(texts) > 1 else (1.0,)
    if len(weights) != len(texts):
        raise ConfigError(f"data.mixture names {len(weights)} texts, but {len(texts)} were prepared")
    windows = tuple(Windows(len(text), length, recipe.seed) for text in texts)
    # "auto" starts from the whole batch, and the pre-flight cuts it where it must
    micro = recipe.batch.micro if isinstance(recipe.batch.micro, int) else size
    return Feed(texts, Mixture(windows, weights), size, micro, recipe.data.document_mask)
