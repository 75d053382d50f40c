"""The contract of an objective: its data, its loss, its metrics and its predictions. `weft.objectives` has them."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from weft.data.batch import Batch
from weft.data.shards import Side
from weft.errors import ConfigError, quoted
from weft.models.base import LanguageModel, evaluating
from weft.recipe.objective import ObjectiveConfig
from weft.training.run_data import RunData

Loss = tuple[Tensor, Tensor | int, dict[str, Tensor]]
S = TypeVar("S", bound=ObjectiveConfig)
EVALUATION_BATCH_TOKENS = 8192  # tokens of a batch during evaluation, padding included


@dataclass(frozen=True)
class Results:
    """The results of an evaluation."""

    metrics: dict[str, Any] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)  # texts that the model wrote
    table: list[list[str]] = field(default_factory=list)  # examples for the report, under a row of column names


class Prediction(NamedTuple):
    """A model's prediction for a text: as a line to print, and as a record for JSON."""

    line: str
    record: dict[str, Any]


class Objective(RunData[S]):
    """A training objective: the loss of a batch, and the evaluation and use of the trained model."""

    usage: ClassVar[str]  # the command that uses such a run
    one_shape: ClassVar[bool] = True  # whether the loss computes tensors of one shape for all batches of one shape

    @abstractmethod
    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        """Return the summed loss of a batch with these features, the count of its targets, and extras.

        The trainer divides by the count of the whole step, over all micro-batches and ranks, so that dividing a batch
        never changes the gradient. Extras are sums without a gradient: `nll` is logged as −log p.
        """

    def evaluate(self, model: LanguageModel, max_tokens: int | None = None) -> dict[str, float]:
        """Return metrics during training, on up to `evaluate.tokens` held-out tokens, or `max_tokens` if fewer."""
        limits = [limit for limit in (self.recipe.evaluate.tokens, max_tokens) if limit is not None]
        return self.validation_metrics(model, min(limits, default=None))

    @abstractmethod
    def validation_metrics(self, model: LanguageModel, max_tokens: int | None) -> dict[str, float]:
        """Return the metrics that are logged during training, on up to `max_tokens` held-out tokens."""

    @abstractmethod
    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        """Return all metrics, over all data of a split."""

    def final_evaluation(self, model: LanguageModel) -> Results:
        """Return the results that a finished run reports: by default all metrics on the held-out split."""
        return self.measure(model) if self.holds_out else Results()

    def sample(self, model: LanguageModel) -> list[str]:
        """Generate a few texts, if the model can, without changing torch's global random-number generators."""
        return []

    def predictions(
        self, model: LanguageModel, file: str, column: str | None = None, *, second: str | None = None
    ) -> Iterator[Prediction]:
        """Yield the model's prediction for each text of a file, from other columns than those of training if named."""
        raise self.cannot("classify")

    def check_continues(self, verb: str) -> None:
        """Refuse what only a model that continues texts can do."""
        if not self.recipe.objective.continues:
            raise self.cannot(verb)

    def cannot(self, verb: str) -> ConfigError:
        """Return the error for something that a run with this objective was not trained for."""
        path = self.folder.path
        use = self.usage.format(run=quoted(path))
        return ConfigError(f"{path}: this run is {self.settings.makes}; it can't {verb}; use it with {use}")


class BatchObjective(Objective[S]):
    """An objective whose metrics are computed batch by batch."""

    @abstractmethod
    def batches(self, side: Side, max_tokens: int | None = None) -> Iterator[Batch]:
        """Yield the data of a split for evaluation, or about `max_tokens` tokens of it."""

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        """Return the metrics of a model; those that are floats are logged during training, the others at the end."""
        return {"loss": mean_loss(self, model, batches)}

    def validation_metrics(self, model: LanguageModel, max_tokens: int | None) -> dict[str, float]:
        metrics = self.metrics(model, self.batches("validation", max_tokens))
        return {key: value for key, value in metrics.items() if isinstance(value, float)}

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        return Results(self.metrics(model, self.batches(side)))


@torch.no_grad()
def loss_extras(
    objective: Objective[Any], model: LanguageModel, batches: Iterable[Batch]
) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
    """Yield each batch with the extras of its loss, on the model's device, without dropout."""
    with evaluating(model) as device:
        for batch in batches:
            local = batch.to(device)
            _, _, extras = objective.loss(model, model.read(local), local)
            yield batch, extras


def mean_loss(objective: Objective[Any], model: LanguageModel, batches: Iterable[Batch]) -> float:
    """Return the mean −log p of a target."""
    total, targets = 0.0, 0
    for batch, extras in loss_extras(objective, model, batches):
        total += float(extras["nll"])
        targets += batch.count
    return total / max(1, targets)
