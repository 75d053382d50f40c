"""The data of a run: its recipe, its folder with the prepared data, and its tokenizers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, cast

from weft.data.amount import amount
from weft.data.shards import Shards, Side
from weft.data.split import train_texts
from weft.errors import RunError, quoted
from weft.progress import Log
from weft.recipe.config import Recipe
from weft.recipe.objective import ObjectiveConfig
from weft.recipe.settle import Facts
from weft.runs.folder import RunFolder
from weft.text.tokenizer import FILE, Tokenizer
from weft.training.loader import Loader

S = TypeVar("S", bound=ObjectiveConfig)


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizer of the text that a model writes, and that of its source, which may be the same one."""

    target: Tokenizer
    source: Tokenizer


class RunData(ABC, Generic[S]):
    """Prepares and reads the data of a run for one kind of objective."""

    def __init__(self, recipe: Recipe, folder: RunFolder, tokenizers: Tokenizers | None = None):
        """Before `prepare` the recipe may have gaps; afterwards it is settled. Nothing is read yet."""
        self.recipe, self.folder = recipe, folder
        self.settings = cast(S, recipe.objective)
        if tokenizers is not None:
            self.tokenizers = tokenizers

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """The tokenizers in the run's folder, unless others were passed."""
        target, separate = Tokenizer.load(self.folder.path), self.recipe.source_tokenizer is not None
        return Tokenizers(target, Tokenizer.load(self.folder.source_tokenizer) if separate else target)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text that the model writes."""
        return self.tokenizers.target

    @property
    def length(self) -> int:
        """The largest number of tokens in a row."""
        assert self.recipe.batch.length is not None, "trained and imported runs have it"
        return self.recipe.batch.length

    def check_tokenizer(self, noted: Mapping[str, Any]) -> None:
        """Refuse a tokenizer in the run's folder other than the `noted` one, which made the run's tokens."""
        target, source = self.tokenizers.target.fingerprint, self.tokenizers.source.fingerprint
        if noted.get("tokenizer", target) != target or noted.get("source_tokenizer", source) != source:
            of_source = noted.get("tokenizer", target) == target and (self.folder.source_tokenizer / FILE).is_file()
            file = (self.folder.source_tokenizer if of_source else self.folder.path) / FILE
            raise RunError(f"{file}: not the tokenizer that this run's text was tokenized with; put that one back")

    @property
    def repair_hint(self) -> str:
        """Instructions to repair the prepared data in the run's folder, for an error message."""
        run = self.folder
        return f"remove {run.data}, and `weft train --resume {quoted(run.path)}` prepares it again from its sources"

    def amount(self) -> int:
        """Estimate the bytes of training text from the sizes of the files, without the held-out split."""
        data = self.recipe.data
        read = amount([source for part in data.parts for source in part.sources], [data.column], data.encoding).bytes
        folders = [part.prepared for part in data.parts if part.prepared is not None]
        return round(read * data.training_share) + sum(Shards.open(folder).train.bytes for folder in folders)

    def texts(self, side: Literal["target", "source"] | None = None) -> Iterator[str]:
        """Yield the training text to train a tokenizer on: targets, sources, or both."""
        data = self.recipe.data
        return (text for part in data.parts for text in train_texts(data.text(part)))

    @abstractmethod
    def prepare(self, log: Log) -> Facts:
        """Write the data into the run's folder as tokens, in one pass; return what is known about it."""

    def facts(self, bytes_: int, rows: int | None = None, labels: tuple[str, ...] | None = None) -> Facts:
        """Return what is known about prepared data, with the sizes of the vocabularies."""
        source = None if self.recipe.source_tokenizer is None else self.tokenizers.source.vocab_size
        return Facts(bytes_, self.tokenizer.vocab_size, source, rows, labels)

    @property
    @abstractmethod
    def fingerprints(self) -> tuple[str, ...]:
        """Hashes of the prepared data."""

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Name, tokens and weight of each part of a mixture of texts; empty if there is only one."""
        return []

    @property
    @abstractmethod
    def loader(self) -> Loader:
        """The batches to train on."""

    @abstractmethod
    def excerpt(self, side: Side, tokens: int) -> str:
        """Return an example text of a split, of about `tokens` tokens; empty if there is none."""

    @property
    def holds_out(self) -> bool:
        """Whether there is held-out data to evaluate on."""
        return self.recipe.data.validation.kind != "none"
