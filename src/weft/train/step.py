"""One optimisation step, from tokens to changed weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim

from weft.data.batch import Batch
from weft.models.base import LanguageModel
from weft.train.config import Precision
from weft.train.objective import Objective
from weft.train.optimizer import set_rate
from weft.train.precision import autocast


@dataclass(frozen=True)
class StepResult:
    """What a step found out. The tensors stay on the device until someone reads them: reading waits for it."""

    loss: Tensor  # mean over the step's targets, what was minimised
    nll: Tensor  # mean −log p over the same targets
    gradient_norm: Tensor  # before clipping
    tokens: int


def backward(
    model: LanguageModel, objective: Objective, parts: Sequence[Batch], precision: Precision, device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """Add up the gradient of the mean loss over all parts of a batch; the mean loss, the mean −log p and the count.

    Every part is divided by the count of targets in all of them, known from the loss masks before the first forward
    pass; so the gradient is that of the uncut batch however many targets each part holds.
    """
    count = max(1, sum(part.count for part in parts))
    loss_sum = torch.zeros((), device=device)
    nll_sum = torch.zeros((), device=device)
    for part in parts:
        with autocast(precision, device):
            loss, _, extras = objective(model, part.to(device))
        (loss / count).backward()
        loss_sum += loss.detach()
        nll_sum += extras["nll"]
    return loss_sum / count, nll_sum / count, count


def optimisation_step(
    model: LanguageModel,
    optimizer: optim.Optimizer,
    objective: Objective,
    parts: Sequence[Batch],
    lr: float,
    clip: float,
    precision: Precision,
    device: torch.device,
) -> StepResult:
    """Gradients of all parts, clipped to norm `clip` unless it is 0 (Pascanu et al. 2013), and one update."""
    loss, nll, count = backward(model, objective, parts, precision, device)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
    set_rate(optimizer, lr)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, nll, norm, count)
