"""Regression: a number for a text, or for a pair of texts."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.batch import Batch
from weft.errors import WeftError
from weft.evaluate.agreement import correlations
from weft.models.base import LanguageModel
from weft.objectives.classify import SequenceObjective
from weft.objectives.rows import head_outputs
from weft.recipe import objective as config
from weft.training.objective import Prediction


class Regress(SequenceObjective[config.Regress]):
    """Squared error of each row's number."""

    answer, answer_kind = "score", "number"

    def output_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return F.mse_loss(outputs[:, 0], batch.targets.float(), reduction="sum")

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        pairs = [(batch.targets, outputs[:, 0]) for outputs, batch in head_outputs(model, batches)]
        truth, predicted = (torch.cat(values).double().numpy() for values in zip(*pairs, strict=True))
        error = float(np.mean((truth - predicted) ** 2))
        return {"loss": error} | (correlations(truth, predicted) if len(truth) > 1 else {})

    def predict(self, model: LanguageModel, texts: Sequence[str], second: Sequence[str] | None = None) -> list[float]:
        return [float(row[0]) for row in self.outputs(model, texts, second)]

    def score_range(self) -> tuple[float, float] | None:
        """Return the smallest and the largest number of the training rows; None if they are not here."""
        with suppress(WeftError):
            if (examples := self.open_examples("train")) is not None:
                scores = examples.values("score")
                return float(scores.min()), float(scores.max())
        return None

    def present(self, text: str, prediction: float) -> Prediction:
        return Prediction(f"{prediction:.4f}\t{text}", {"text": text, "score": prediction})
