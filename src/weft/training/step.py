"""One optimisation step, from tokens to changed weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, optim

from weft.data.batch import Batch
from weft.models.base import LanguageModel
from weft.nn.recurrent import CarriedState
from weft.parallel.passes import Parallel, Work
from weft.recipe.config import Precision
from weft.training.objective import Loss
from weft.training.optimizer import parameters, set_rate, update
from weft.training.precision import autocast

# The loss scale of fp16: where it starts, and after how many steps without overflow it doubles.
FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


@dataclass(frozen=True)
class StepResult:
    """What a step measured. The tensors stay on the device until someone reads them, which waits for it."""

    loss: Tensor  # mean over the step's targets, in all processes; what was minimised
    nll: Tensor  # mean −log p over the same targets
    gradient_norm: Tensor  # before clipping; 0 where fp16 overflowed and the step was skipped
    targets: int  # of this process
    tokens: int  # that this process read
    discarded: Tensor | None = None  # 1 where the update was discarded, else 0; None where there were no limits


@dataclass(frozen=True)
class OptimisationStep:
    """Gradients of all parts of a batch, clipped to norm `clip` unless that is 0 (Pascanu et al. 2013); one update."""

    parallel: Parallel
    optimizer: optim.Optimizer
    loss: Callable[[LanguageModel, Tensor, Batch], Loss]
    device: torch.device
    precision: Precision = "fp32"
    clip: float = 0.0
    lanes: int = 0  # rows of a step, in all processes, where they continue each other

    def __call__(self, parts: Sequence[Batch], lr: float, limits: Tensor | None = None) -> StepResult:
        """Take a step with learning rate `lr`.

        limits (2,), on the device: where the loss is above the first, the gradient norm above the second, or either is
        not finite, the update is discarded, and weights and moments stay as they are (`training/state.py` sets them).
        """
        set_rate(self.optimizer, lr)
        parts = [self.parallel.own(part) for part in parts]
        if self.precision == "fp16":
            return self._scaled(parts, limits)
        loss, nll, count = self.backward(parts)
        norm = self.parallel.norm(parameters(self.optimizer))
        discarded = None if limits is None else _above(loss, norm, limits)
        update(self.optimizer, _excess(norm, self.clip) if self.clip else None, discarded)
        self.parallel.clear()
        return StepResult(loss, nll, norm, count, sum(part.read for part in parts), discarded)

    def backward(self, parts: Sequence[Batch], scale: Tensor | None = None) -> tuple[Tensor, Tensor, int]:
        """Add up the gradient of the mean loss over all parts of a batch; the mean loss, the mean −log p, and the count
        of this process's targets.

        Every part is divided by the count of targets in all of them and in all processes, known from the loss masks
        before the first forward pass; so the gradient is that of the whole batch however many targets each part holds.
        Gradients and losses are summed over the processes. `scale` () multiplies the gradients.
        """
        own, counters = sum(part.count for part in parts), self.parallel.mesh.counters
        everywhere = counters.total(own, self.device)
        count = max(1, everywhere) if isinstance(everywhere, int) else everywhere.clamp(min=1)
        work = Work(
            self.loss,
            lambda loss: loss / count if scale is None else loss / count * scale,
            lambda: autocast(self.precision, self.device),
            self.carried,
        )
        loss_sum, nll_sum = self.parallel.backward([part.to(self.device) for part in parts], work)
        self._share_states(parts)
        self.parallel.collect()
        counters.sum_([loss_sum, nll_sum])
        self.parallel.mesh.axis("pipeline").sum_([loss_sum, nll_sum])  # the last stage has them
        return loss_sum / count, nll_sum / count, own

    @contextmanager
    def carried(self, part: Batch) -> Iterator[CarriedState | None]:
        """What a recurrent model reads on from, if the recipe has rows continue those of the step before. The states
        belong to the optimizer's, and are saved with them: states (parts, layers, lanes, d_model)."""
        if part.lanes is None or part.begins is None:
            yield None
            return
        kept = self.optimizer.state["carried"]  # type: ignore[index]
        begun = kept["states"][:, :, part.lanes].masked_fill(part.begins[:, None], 0.0) if kept else None
        carried = CarriedState(begun)
        yield carried
        assert carried.state is not None, "a recurrent model was read"
        ended = carried.state.float()
        ended = torch.where(ended.isfinite().all(-1, keepdim=True), ended, 0.0)  # trouble must not go on from here
        if not kept:
            kept["states"] = ended.new_zeros(*ended.shape[:2], self.lanes, ended.shape[3])
        kept["states"][:, :, part.lanes] = ended

    def _share_states(self, parts: Sequence[Batch]) -> None:
        """Every process learns the states of the others' rows: one of them writes the checkpoint."""
        if parts[0].lanes is None or self.parallel.mesh.readers.alone:
            return
        kept = self.optimizer.state["carried"]  # type: ignore[index]
        mine = torch.cat([part.lanes for part in parts if part.lanes is not None]).to(self.device)
        shared = torch.zeros_like(kept["states"])
        shared[:, :, mine] = kept["states"][:, :, mine]
        self.parallel.mesh.readers.sum_([shared])
        kept["states"] = shared

    def _scaled(self, parts: Sequence[Batch], limits: Tensor | None) -> StepResult:
        """A step in fp16: the loss is multiplied so that small gradients don't round to zero.

        Where one of them overflows the step is skipped and the scale halved; after a long calm it doubles (Micikevicius
        et al. 2018, §3.2). The scale is part of the optimizer's state, and saved with it.
        """
        state = self.optimizer.state["loss"]  # type: ignore[index]
        if not state:
            state["scale"] = torch.full((), FIRST_SCALE, device=self.device)
            state["calm"] = torch.zeros((), device=self.device)
        scale, calm = state["scale"], state["calm"]
        loss, nll, count = self.backward(parts, scale)
        norm = self.parallel.norm(parameters(self.optimizer)) / scale
        finite = norm.isfinite()
        # an overflow is normal while the scale can still be lowered; below 1 something else is wrong, and must be seen
        shown = torch.where(finite | (scale < 1.0), norm, 0.0)
        discarded = None if limits is None else _above(loss, shown, limits)
        held = (~finite).float() if discarded is None else torch.maximum((~finite).float(), discarded)
        update(self.optimizer, _excess(norm, self.clip) * scale if self.clip else scale, held)
        self.parallel.clear()
        calm = torch.where(finite, calm + 1.0, 0.0)
        state["scale"] = scale * torch.where(finite, torch.where(calm < GROWTH_INTERVAL, 1.0, 2.0), 0.5)
        state["calm"] = torch.where(calm < GROWTH_INTERVAL, calm, 0.0)
        return StepResult(loss, nll, shown, count, sum(part.read for part in parts), discarded)


def _above(loss: Tensor, norm: Tensor, limits: Tensor) -> Tensor:
    """1 where a limit is exceeded, else 0. NaN is below nothing."""
    return (~(torch.stack([loss, norm]) <= limits).all()).float()


def _excess(norm: Tensor, clip: float) -> Tensor:
    return ((norm + 1e-6) / clip).clamp(min=1.0)
