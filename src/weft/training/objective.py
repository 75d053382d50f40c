"""What an objective is: its data, its loss, its metrics, and how the trained model is used. `weft.objectives` has them.

An objective belongs to a run: to its recipe, to its folder with the prepared data, and to its tokenizers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, cast, get_args

import torch
from torch import Tensor

from weft.data.amount import amount
from weft.data.batch import Batch
from weft.data.shards import Shards, Side, Tokens
from weft.data.split import train_texts
from weft.errors import ConfigError, RunError
from weft.models.base import LanguageModel, evaluating
from weft.progress import Log
from weft.recipe.config import Recipe
from weft.recipe.objective import ObjectiveConfig
from weft.recipe.settle import Facts
from weft.runs.folder import RunFolder
from weft.text.tokenizer import FILE, Tokenizer
from weft.training.loader import Loader

Loss = tuple[Tensor, Tensor | int, dict[str, Tensor]]
S = TypeVar("S", bound=ObjectiveConfig)
EVALUATED_TOKENS = 8192  # read at once during evaluation, padding included


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizer of what is written, and of what is read where that has its own."""

    target: Tokenizer
    source: Tokenizer


@dataclass(frozen=True)
class Results:
    """What an evaluation found: metrics by name, some of what the model wrote, and a table of examples for the report,
    whose first row names the columns."""

    metrics: dict[str, Any] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)


class Prediction(NamedTuple):
    """What a model predicts for a text: as a line to read, and as a record for JSON."""

    line: str
    record: dict[str, Any]


class Objective(ABC, Generic[S]):
    """One thing that can be learned, in one run."""

    declared: ClassVar[dict[type[ObjectiveConfig], type["Objective[Any]"]]] = {}
    usage: ClassVar[str]  # the command that uses such a run

    def __init_subclass__(cls) -> None:
        """An objective is found by the settings that it is declared with: `class Tag(RowObjective[config.Tag])`."""
        super().__init_subclass__()
        # the class's own bases: a variant of an objective inherits the attribute, and must not take its place
        for settings in (given for base in vars(cls).get("__orig_bases__", ()) for given in get_args(base)):
            if isinstance(settings, type):
                cls.declared[settings] = cls

    def __init__(self, recipe: Recipe, folder: RunFolder, tokenizers: Tokenizers | None = None):
        """Before `prepare` the recipe may have gaps; afterwards it is settled. Nothing is read yet."""
        self.recipe, self.folder = recipe, folder
        self.settings = cast(S, recipe.objective)
        if tokenizers is not None:
            self.tokenizers = tokenizers

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """Those in the run's folder, unless they were given."""
        target, own = Tokenizer.load(self.folder.path), self.recipe.source_tokenizer is not None
        return Tokenizers(target, Tokenizer.load(self.folder.source_tokenizer) if own else target)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of what is written."""
        return self.tokenizers.target

    @property
    def length(self) -> int:
        """How many tokens are read in one row at most."""
        assert self.recipe.batch.length is not None, "a run that was trained has it, and so has one that was imported"
        return self.recipe.batch.length

    def check_tokenizer(self, noted: Mapping[str, Any]) -> None:
        """Refuse a tokenizer in the run's folder that is not the `noted` one, which made its tokens."""
        target, source = self.tokenizers.target.fingerprint, self.tokenizers.source.fingerprint
        if noted.get("tokenizer", target) != target or noted.get("source_tokenizer", source) != source:
            own = noted.get("tokenizer", target) == target and (self.folder.source_tokenizer / FILE).is_file()
            file = (self.folder.source_tokenizer if own else self.folder.path) / FILE
            raise RunError(f"{file}: not the tokenizer that this run's text was tokenized with; put that one back")

    @property
    def prepared_again(self) -> str:
        """What mends damaged data of the run's own."""
        run = self.folder
        return f"remove {run.data}, and `weft train --resume {run.path}` prepares it again from its sources"

    def amount(self) -> int:
        """About how many bytes of training text there are, from the sizes of the files, less what is held out."""
        data = self.recipe.data
        read = amount([source for part in data.parts for source in part.sources], [data.column], data.encoding).bytes
        folders = [part.prepared for part in data.parts if part.prepared is not None]
        return round(read * data.training_share) + sum(Shards.open(folder).train.bytes for folder in folders)

    def texts(self, side: Literal["target", "source"] | None = None) -> Iterator[str]:
        """The training text, for a tokenizer to learn from: what is written, what is read, or both."""
        data = self.recipe.data
        return (text for part in data.parts for text in train_texts(data.text(part)))

    @abstractmethod
    def prepare(self, log: Log) -> Facts:
        """Write the data into the run's folder as tokens, in one pass; what is known of it then."""

    def facts(self, bytes_: int, rows: int | None = None, labels: tuple[str, ...] | None = None) -> Facts:
        """The same with the sizes of the vocabularies."""
        source = None if self.recipe.source_tokenizer is None else self.tokenizers.source.vocab_size
        return Facts(bytes_, self.tokenizer.vocab_size, source, rows, labels)

    @property
    @abstractmethod
    def fingerprints(self) -> tuple[str, ...]:
        """Hashes of the prepared data."""

    @property
    @abstractmethod
    def loader(self) -> Loader:
        """The batches to train on."""

    @property
    def training_text(self) -> Tokens:
        """The text that an n-gram model counts."""
        raise AssertionError("n-grams are counted in running text alone")

    @abstractmethod
    def excerpt(self, side: Side, tokens: int) -> str:
        """Some text of a side, of about so many tokens, to look at; empty where there is none."""

    @property
    def holds_out(self) -> bool:
        """Whether there is held-out data to evaluate on."""
        return self.recipe.data.validation.kind != "none"

    @abstractmethod
    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        """The sum of the losses of a batch of which the model has made these features, the count of its targets, and
        extras.

        Sum and count stay apart because the trainer divides by the count of the whole step, over all parts of a batch
        and all processes; so dividing a batch never changes the gradient. Extras are sums too, without a gradient:
        `nll` is what is logged as −log p.
        """

    @abstractmethod
    def evaluate(self, model: LanguageModel) -> dict[str, float]:
        """Metrics on up to `evaluate.tokens` held-out tokens: this is called again and again during training."""

    def reading_less(self, tokens: int) -> Self:
        """The same objective, whose evaluations read at most so many tokens."""
        less = copy(self)
        settings = self.recipe.evaluate
        most = tokens if settings.tokens is None else min(tokens, settings.tokens)
        less.recipe = self.recipe.model_copy(update={"evaluate": settings.model_copy(update={"tokens": most})})
        return less

    def sample(self, model: LanguageModel) -> list[str]:
        """A few texts that the model writes by now, if it writes; torch's global generators stay as they are."""
        return []

    @torch.no_grad()
    def mean_loss(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, float]:
        """`loss`, the mean −log p of a target. Where batches ask whether sentences follow each other, `next_accuracy`
        is the share of right answers."""
        total, targets, right, asked = 0.0, 0, 0, 0
        with evaluating(model) as device:
            for batch in batches:
                here = batch.to(device)
                _, _, extras = self.loss(model, model.read(here), here)
                total += float(extras["nll"])
                targets += batch.count
                if "next_correct" in extras:
                    right += int(extras["next_correct"])
                    asked += len(batch.tokens)
        return {"loss": total / max(1, targets)} | ({"next_accuracy": right / asked} if asked else {})

    @abstractmethod
    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        """All metrics, over all data of a side."""

    def final_evaluation(self, model: LanguageModel) -> Results:
        """What a finished run reports: by default all metrics over what was held out."""
        return self.measure(model) if self.holds_out else Results()

    def predictions(
        self, model: LanguageModel, file: str, column: str | None = None, second: str | None = None
    ) -> Iterator[Prediction]:
        """What the model predicts for each text of a file, if it learned to. `column` and `second` name columns other
        than those of training."""
        raise self.cannot("classify")

    def cannot(self, verb: str) -> ConfigError:
        """The error for what a run with this objective didn't learn."""
        path = self.folder.path
        use = self.usage.format(run=path)
        return ConfigError(f"{path}: this run is {self.settings.makes}; it can't {verb}; use it with {use}")
