"""One optimisation step, from tokens to changed weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim

from weft.data.batch import Batch
from weft.models.base import LanguageModel
from weft.models.transformer import Stack
from weft.objectives.losses import Objective
from weft.parallel.ranks import ALONE, Ranks
from weft.recipe.config import Precision, Recipe
from weft.training.optimizer import gradients, set_rate, update
from weft.training.precision import autocast, check_precision, use_eight_bits

# The loss scale of fp16: where it starts, and after how many steps without overflow it doubles.
FIRST_SCALE = 2.0**16
CALM = 2000


@dataclass(frozen=True)
class StepResult:
    """What a step found out. The tensors stay on the device until someone reads them: reading waits for it."""

    loss: Tensor  # mean over the step's targets, in all processes; what was minimised
    nll: Tensor  # mean −log p over the same targets
    gradient_norm: Tensor  # before clipping; 0 where fp16 overflowed and the step was skipped
    targets: int  # of this process
    tokens: int  # that this process read
    discarded: Tensor | None = None  # 1 where a limit held the update back, else 0; None where there were no limits


def fit(model: LanguageModel, recipe: Recipe, device: torch.device) -> None:
    """Make `model` ready to train as the recipe says: eight-bit products, blocks that run again in the backward pass.

    Called once, before the first step. A precision that the device doesn't have is refused.
    """
    assert recipe.precision is not None
    check_precision(recipe.precision, device)
    if recipe.precision == "fp8":
        use_eight_bits(model)
    for module in model.modules():
        if isinstance(module, Stack):
            module.recompute = recipe.batch.recompute


def backward(
    model: LanguageModel,
    objective: Objective,
    parts: Sequence[Batch],
    precision: Precision,
    device: torch.device,
    scale: Tensor | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Tensor, int]:
    """Add up the gradient of the mean loss over all parts of a batch; the mean loss, the mean −log p, and the count of
    this process's targets.

    Every part is divided by the count of targets in all of them and in all processes, known from the loss masks before
    the first forward pass; so the gradient is that of the uncut batch however many targets each part holds. After the
    last part gradients and losses are summed over the processes. `scale` () multiplies the gradients.
    """
    own = sum(part.count for part in parts)
    everywhere = ranks.total(own, device)
    count = max(1, everywhere) if isinstance(everywhere, int) else everywhere.clamp(min=1)
    loss_sum = torch.zeros((), device=device)
    nll_sum = torch.zeros((), device=device)
    for part in parts:
        with autocast(precision, device):
            loss, _, extras = objective(model, part.to(device))
        share = loss / count
        (share if scale is None else share * scale).backward()
        loss_sum += loss.detach()
        nll_sum += extras["nll"]
    ranks.sum_([*(p.grad for p in model.parameters() if p.grad is not None), loss_sum, nll_sum])
    return loss_sum / count, nll_sum / count, own


def optimisation_step(
    model: LanguageModel,
    optimizer: optim.Optimizer,
    objective: Objective,
    parts: Sequence[Batch],
    lr: float,
    clip: float,
    precision: Precision,
    device: torch.device,
    limits: Tensor | None = None,
    ranks: Ranks = ALONE,
) -> StepResult:
    """Gradients of all parts, clipped to norm `clip` unless it is 0 (Pascanu et al. 2013), and one update.

    limits (2,), on the device: where the loss is above the first, the gradient norm above the second, or either is no
    number, the update is held back, and weights and moments stay as they are (`training/guard.py` sets the limits).
    """
    set_rate(optimizer, lr)
    if precision == "fp16":
        return _scaled_step(model, optimizer, objective, parts, clip, device, limits, ranks)
    loss, nll, count = backward(model, objective, parts, precision, device, ranks=ranks)
    norm = nn.utils.get_total_norm(gradients(optimizer))
    discarded = None if limits is None else _above(loss, norm, limits)
    update(optimizer, _excess(norm, clip) if clip else None, discarded)
    return StepResult(loss, nll, norm, count, sum(part.read for part in parts), discarded)


def _above(loss: Tensor, norm: Tensor, limits: Tensor) -> Tensor:
    """1 where a limit is exceeded, else 0. NaN is below nothing."""
    return (~(torch.stack([loss, norm]) <= limits).all()).float()


def _excess(norm: Tensor, clip: float) -> Tensor:
    """How many times too long the gradient is; 1 where it isn't."""
    return ((norm + 1e-6) / clip).clamp(min=1.0)


def _scaled_step(
    model: LanguageModel,
    optimizer: optim.Optimizer,
    objective: Objective,
    parts: Sequence[Batch],
    clip: float,
    device: torch.device,
    limits: Tensor | None,
    ranks: Ranks,
) -> StepResult:
    """A step in fp16: gradients are found for a loss so many times larger that small ones don't round to zero.

    Where one of them overflows the step is skipped and the scale halved; after long calm it doubles (Micikevicius et
    al. 2018, §3.2). The scale is part of the optimizer's state, and saved with it.
    """
    state = optimizer.state["loss"]  # type: ignore[index]
    if not state:
        state["scale"] = torch.full((), FIRST_SCALE, device=device)
        state["calm"] = torch.zeros((), device=device)
    scale, calm = state["scale"], state["calm"]
    loss, nll, count = backward(model, objective, parts, "fp16", device, scale, ranks)
    norm = nn.utils.get_total_norm(gradients(optimizer)) / scale
    finite = norm.isfinite()
    # an overflow is in order while there is scale to give up; below 1 something else is wrong, and should be seen
    shown = torch.where(finite | (scale < 1.0), norm, 0.0)
    discarded = None if limits is None else _above(loss, shown, limits)
    held = (~finite).float() if discarded is None else torch.maximum((~finite).float(), discarded)
    update(optimizer, _excess(norm, clip) * scale if clip else scale, held)
    calm = torch.where(finite, calm + 1.0, 0.0)
    state["scale"] = scale * torch.where(finite, torch.where(calm < CALM, 1.0, 2.0), 0.5)
    state["calm"] = torch.where(calm < CALM, calm, 0.0)
    return StepResult(loss, nll, shown, count, sum(part.read for part in parts), discarded)
