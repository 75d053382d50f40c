"""The loss that a model was trained for, on data that it wasn't trained on."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from weft.data.batch import Batch
from weft.models.base import LanguageModel

Objective = Callable[[LanguageModel, Batch], tuple[Tensor, Tensor | int, Mapping[str, Tensor]]]


@torch.no_grad()
def mean_loss(objective: Objective, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, float]:
    """`loss`, the mean −log p of a target where the objective tells it, else the mean of what is minimised.

    Where batches ask whether sentences follow each other, `next_accuracy` is the share of right answers.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.eval()
    total, targets, right, asked = 0.0, 0, 0, 0
    try:
        for batch in batches:
            loss, _, extras = objective(model, batch.to(device))
            total += float(extras.get("nll", loss))
            targets += batch.count
            if "next_correct" in extras:
                right += int(extras["next_correct"])
                asked += len(batch.tokens)
    finally:
        model.train(was_training)
    figures = {"loss": total / max(1, targets)}
    return figures | ({"next_accuracy": right / asked} if asked else {})
