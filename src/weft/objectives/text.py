"""What objectives share that learn from running text: documents become shards of tokens, read in windows."""

import shutil
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from weft.data.batch import Batch, evaluation_batches, windows_batch
from weft.data.prepare import prepare as prepare_shards
from weft.data.sampler import Mixture, Windows, rank_samples
from weft.data.shards import Shards, Side, Tokens
from weft.errors import DataError, RunError
from weft.models.base import LanguageModel
from weft.objectives.frame import began_early
from weft.progress import Log
from weft.recipe.objective import ObjectiveConfig
from weft.recipe.settle import Facts
from weft.training.loader import Loader, steps_of
from weft.training.objective import EVALUATED_TOKENS, Objective, Results

SEARCHED_TOKENS = 4096  # at the beginning of a text, for a document that is long enough to be shown
S = TypeVar("S", bound=ObjectiveConfig)


class TextObjective(Objective[S]):
    """Documents, part by part of the recipe's data."""

    def prepare(self, log: Log) -> Facts:
        data = self.recipe.data
        if (self.folder.data / "plan.json").exists():  # from a start that was killed; it may have been of another text
            shutil.rmtree(self.folder.data)
        for part in data.parts:
            if part.prepared is not None and Shards.open(part.prepared).index.tokenizer != self.tokenizer.fingerprint:
                raise DataError(
                    f"{part.prepared}: prepared with another tokenizer than this run's; "
                    f'set tokenizer={{kind="pretrained", path="{part.prepared}"}}'
                )
        for part, place in zip(data.parts, self._places(), strict=True):
            if part.prepared is None:
                text = replace(data.text(part), frame=self.stored_frame, separate_sections=began_early(self.folder))
                prepare_shards(text, place, self.tokenizer)
        return self.facts(sum(text.bytes for text in self.tokens("train")))

    @property
    def stored_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The ids around each document where they are others than in training."""
        return None

    def _places(self) -> list[Path]:
        """Where each part's tokens are: the prepared folder it names, or one inside the run."""
        parts, own = self.recipe.data.parts, self.folder.data
        inside = [own] if len(parts) == 1 else [own / f"part-{n}" for n in range(1, len(parts) + 1)]
        return [Path(part.prepared or place) for part, place in zip(parts, inside, strict=True)]

    @cached_property
    def corpora(self) -> list[Shards]:
        """The prepared text, part by part, verified."""
        found: list[Shards] = []
        for part, place in zip(self.recipe.data.parts, self._places(), strict=True):
            try:
                found.append(Shards.open(place))
                found[-1].verify()
            except DataError as error:
                cure = self.prepared_again if part.prepared is None else "run the same `weft prepare` again"
                raise RunError(f"{self.folder.path}: its text can't be read: {error}; {cure}") from None
        for shards in found:
            self.check_tokenizer({"tokenizer": shards.index.tokenizer})
        return found

    def tokens(self, side: Side) -> list[Tokens]:
        if side == "train":
            most = self.recipe.data.tokens
            texts = [shards.train for shards in self.corpora]
            return texts if most is None else [text.first(most) for text in texts]
        return [shards.validation for shards in self.corpora if shards.validation is not None]

    def excerpt(self, side: Side, tokens: int) -> str:
        """The beginning of the first document that is so long, or else of the longest of the first ones."""
        for shards in map(Shards.open, self._places()[:1]):  # not verified: whoever only looks writes no note of it
            self.check_tokenizer({"tokenizer": shards.index.tokenizer})
            text = shards.tokens(side)
            size = min(len(text), SEARCHED_TOKENS)
            numbered = zip(text.documents(0, size).tolist(), text.read(0, size).tolist(), strict=True)
            documents = [[id for _, id in group] for _, group in groupby(numbered, key=itemgetter(0))]
            best = max(documents, key=lambda ids: min(len(ids), tokens), default=[])
            return "".join(map(self.tokenizer.stream().push, best[:tokens]))  # without a character that is cut
        return ""

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(shards.fingerprint for shards in self.corpora)

    @property
    def holds_out(self) -> bool:
        return bool(self.tokens("validation"))

    def windows(self, length: int) -> Loader:
        """Windows of `length` tokens. Several parts are mixed by the weights of `data.mixture`."""
        recipe, texts, size = self.recipe, self.tokens("train"), self.recipe.batch.size or 1
        apart = recipe.data.document_mask
        weights = tuple(part.weight for part in recipe.data.parts) if len(texts) > 1 else (1.0,)
        mixture = Mixture(tuple(Windows(len(text), length, recipe.seed) for text in texts), weights)

        def make(step: int, rank: int, ranks: int) -> Batch:
            return windows_batch(
                texts, mixture, rank_samples(step - 1, size, rank=rank, ranks=ranks), document_mask=apart
            )

        return steps_of(recipe.batch, make, lambda step: max(mixture.epochs(step * size)), "sequence")


class CorruptedTextObjective(TextObjective[S]):
    """Windows of text, in which words are masked or from which spans are cut as they are read."""

    @property
    @abstractmethod
    def added(self) -> int:
        """How many tokens a window gains when it is corrupted."""

    @abstractmethod
    def corrupt(self, batch: Batch, numbers: Sequence[int], seed: int) -> Batch:
        """Windows of text with their numbers → what is read, and what should be predicted."""

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

    def evaluate(self, model: LanguageModel) -> dict[str, float]:
        return self.mean_loss(model, self._batches("validation", self.recipe.evaluate.tokens))

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        return Results(dict(self.mean_loss(model, self._batches(side, None))))

    def _batches(self, side: Side, most: int | None) -> Iterator[Batch]:
        """Text that is corrupted the same way each time, by a seed of its own, so that evaluations compare."""
        length, few, read = self.length - self.added, max(1, EVALUATED_TOKENS // self.length), 0
        for text in self.tokens(side):
            for batch in evaluation_batches(text, length, few):
                if batch.tokens.shape[1] < length or (most is not None and read >= most):
                    break
                yield self.corrupt(batch, range(read, read + len(batch.tokens)), self.recipe.seed + 1)
                read += batch.tokens.numel()
