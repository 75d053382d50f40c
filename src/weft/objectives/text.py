"""Objectives over running text: documents become shards of tokens, read in windows."""

import shutil
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from weft.data.batch import Batch, evaluation_batches, windows_batch
from weft.data.prepare import prepare as prepare_shards
from weft.data.sampler import Mixture, Windows, rank_samples
from weft.data.shards import Shards, Side, Tokens
from weft.errors import DataError, RunError
from weft.objectives.frame import began_early
from weft.progress import Log
from weft.recipe.objective import ObjectiveConfig
from weft.recipe.settle import Facts
from weft.training.loader import Loader, even_loader
from weft.training.objective import EVALUATION_BATCH_TOKENS, BatchObjective, Objective

SEARCHED_TOKENS = 4096  # first tokens of a text among which an excerpt is chosen
S = TypeVar("S", bound=ObjectiveConfig)


class TextObjective(Objective[S]):
    """Documents of the recipe's data, part by part."""

    def prepare(self, log: Log) -> Facts:
        data = self.recipe.data
        if (self.folder.data / "plan.json").exists():  # left by a killed start, perhaps with another text
            shutil.rmtree(self.folder.data)
        for part in data.parts:
            if part.prepared is not None and Shards.open(part.prepared).index.tokenizer != self.tokenizer.fingerprint:
                raise DataError(
                    f"{part.prepared}: prepared with another tokenizer than this run's; "
                    f'set tokenizer={{kind="pretrained", path="{part.prepared}"}}'
                )
        for part, folder in zip(data.parts, self._folders(), strict=True):
            if part.prepared is None:
                text = replace(data.text(part), frame=self.stored_frame, separate_sections=began_early(self.folder))
                prepare_shards(text, folder, self.tokenizer)
        return self.facts(sum(text.bytes for text in self.tokens("train")))

    @property
    def stored_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The ids before and after each document, if they differ from those of training."""
        return None

    def _folders(self) -> list[Path]:
        """Return the folder of each part's tokens: the prepared one that it names, or one inside the run."""
        parts, data = self.recipe.data.parts, self.folder.data
        inside = [data] if len(parts) == 1 else [data / f"part-{n}" for n in range(1, len(parts) + 1)]
        return [Path(part.prepared or folder) for part, folder in zip(parts, inside, strict=True)]

    @cached_property
    def corpora(self) -> list[Shards]:
        """The prepared text, part by part, verified."""
        corpora: list[Shards] = []
        for part, folder in zip(self.recipe.data.parts, self._folders(), strict=True):
            try:
                corpora.append(Shards.open(folder))
                corpora[-1].verify()
            except DataError as error:
                cure = self.repair_hint if part.prepared is None else "run the same `weft prepare` again"
                raise RunError(f"{self.folder.path}: its text can't be read: {error}; {cure}") from None
        for shards in corpora:
            self.check_tokenizer({"tokenizer": shards.index.tokenizer})
        return corpora

    def tokens(self, side: Side) -> list[Tokens]:
        """Return the texts of a split as tokens, part by part."""
        if side == "train":
            limit = self.recipe.data.tokens
            texts = [shards.train for shards in self.corpora]
            return texts if limit is None else [text.first(limit) for text in texts]
        return [shards.validation for shards in self.corpora if shards.validation is not None]

    def excerpt(self, side: Side, tokens: int) -> str:
        """Return the beginning of the first document of at least `tokens` tokens, or else of the longest found."""
        for shards in map(Shards.open, self._folders()[:1]):  # without verification, which would write a note
            self.check_tokenizer({"tokenizer": shards.index.tokenizer})
            text = shards.tokens(side)
            size = min(len(text), SEARCHED_TOKENS)
            numbered = zip(text.documents(0, size).tolist(), text.read(0, size).tolist(), strict=True)
            documents = [[id for _, id in group] for _, group in groupby(numbered, key=itemgetter(0))]
            best = max(documents, key=lambda ids: min(len(ids), tokens), default=[])
            return "".join(map(self.tokenizer.stream().push, best[:tokens]))  # without a partial character
        return ""

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(shards.fingerprint for shards in self.corpora)

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Name, tokens and weight of each part of a mixture; empty if there is only one."""
        parts = [(part.prepared or ", ".join(part.sources), part.weight) for part in self.recipe.data.parts]
        if len(parts) < 2:
            return []
        sizes = map(len, self.tokens("train"))
        return [{"name": n, "tokens": size, "weight": w} for (n, w), size in zip(parts, sizes, strict=True)]

    @property
    def holds_out(self) -> bool:
        return bool(self.tokens("validation"))

    def windows(self, length: int) -> Loader:
        """Return windows of `length` tokens. Several parts are mixed by the weights of `data.mixture`."""
        recipe, texts, size = self.recipe, self.tokens("train"), self.recipe.batch.size or 1
        apart = recipe.data.document_mask
        weights = tuple(part.weight for part in recipe.data.parts) if len(texts) > 1 else (1.0,)
        mixture = Mixture(tuple(Windows(len(text), length, recipe.seed) for text in texts), weights)

        def make(step: int, rank: int, ranks: int) -> Batch:
            return windows_batch(
                texts, mixture, rank_samples(step - 1, size, rank=rank, ranks=ranks), document_mask=apart
            )

        return even_loader(recipe.batch, make, lambda step: max(mixture.epochs(step * size)), row="sequence")


class CorruptedTextObjective(TextObjective[S], BatchObjective[S]):
    """Windows of text in which tokens are masked, or from which spans are cut, as they are read."""

    @property
    @abstractmethod
    def added(self) -> int:
        """The number of tokens that corruption adds to a window."""

    @abstractmethod
    def corrupt(self, batch: Batch, numbers: Sequence[int], seed: int) -> Batch:
        """Return the inputs and targets of windows of text with these numbers."""

    @cached_property
    def loader(self) -> Loader:
        plain, size, seed = self.windows(self.length - self.added), self.recipe.batch.size or 1, self.recipe.seed

        def make(step: int, rank: int, ranks: int) -> Batch:
            return self.corrupt(
                plain.make(step, rank, ranks), rank_samples(step - 1, size, rank=rank, ranks=ranks).tolist(), seed
            )

        return replace(plain, make=make)

    @property
    def holds_out(self) -> bool:
        return any(len(text) > self.length - self.added for text in self.tokens("validation"))

    def batches(self, side: Side, max_tokens: int | None = None) -> Iterator[Batch]:
        """Yield text corrupted with a fixed seed, so that evaluations are comparable."""
        length, size, read = self.length - self.added, max(1, EVALUATION_BATCH_TOKENS // self.length), 0
        apart = self.recipe.data.document_mask
        for text in self.tokens(side):
            for batch in evaluation_batches(text, length, size, document_mask=apart):
                if batch.tokens.shape[1] < length or (max_tokens is not None and read >= max_tokens):
                    break
                yield self.corrupt(batch, range(read, read + len(batch.tokens)), self.recipe.seed + 1)
                read += batch.tokens.numel()
