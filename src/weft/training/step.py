"""One optimisation step, from tokens to updated weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, optim

from weft.data.batch import Batch
from weft.nn.experts import Router, RoutingSums
from weft.nn.recurrent import CarriedState
from weft.parallel.passes import LossFunction, Parallel
from weft.recipe.config import Precision
from weft.training.optimizer import parameters, set_rate, update
from weft.training.precision import autocast

FIRST_SCALE = 2.0**16  # loss scale of the first step in fp16


@dataclass(frozen=True)
class StepResult:
    """Measurements of a step. The tensors stay on the device; reading them waits for it."""

    loss: Tensor  # mean over the step's targets on all ranks; what was minimised
    nll: Tensor  # mean −log p over the same targets
    gradient_norm: Tensor  # before clipping; 0 if fp16 overflowed and the step was skipped
    targets: int  # on this rank
    tokens: int  # read by this rank
    discarded: Tensor | None = None  # 1 if the update was discarded, else 0; None without limits
    routing: Tensor | None = None  # (4,), `RoutingSums.metrics` of a model with experts


@dataclass
class StepState:
    """State that a step leaves for the next besides weights and moments; checkpoints store it with the moments."""

    scale: Tensor | None = None  # loss scale of fp16, ()
    calm: Tensor | None = None  # steps since the scale last changed, ()
    carried: Tensor | None = None  # recurrent states at the ends of the rows (parts, layers, lanes, d_model)
    names: ClassVar = {"scale": "scale/loss", "calm": "calm/loss", "carried": "states/carried"}  # in a checkpoint

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their names in a checkpoint."""
        return {name: tensor for key, name in self.names.items() if (tensor := getattr(self, key)) is not None}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the state by that of a checkpoint, or by an empty one."""
        for key, name in self.names.items():
            setattr(self, key, tensors.get(name))


@dataclass(frozen=True)
class OptimisationStep:
    """Gradients of a batch, clipped to norm `clip` unless it is 0 (Pascanu et al. 2013), and one update."""

    parallel: Parallel
    optimizer: optim.Optimizer
    loss: LossFunction
    device: torch.device
    precision: Precision = "fp32"
    clip: float = 0.0
    lanes: int = 0  # rows of a step on all ranks, if they continue those of the step before
    growth_interval: int = 2000  # steps without overflow after which the loss scale of fp16 doubles
    state: StepState = field(default_factory=StepState)

    def __call__(self, parts: Sequence[Batch], lr: float, limits: Tensor | None = None) -> StepResult:
        """Take a step with learning rate `lr`.

        limits (2,), on the device: if the loss is above the first, the gradient norm above the second, or either is
        not finite, the update is discarded, and weights and moments are unchanged (`training/guard.py` sets them).
        """
        parts = [self.parallel.shard_batch(part) for part in parts]
        targets, read = sum(part.count for part in parts), sum(part.read for part in parts)
        total = self.parallel.mesh.counters.total(targets, self.device)
        count = max(1, total) if isinstance(total, int) else total.clamp(min=1)
        loss, nll, norm, *others = self.compute([part.to(self.device) for part in parts], count, lr=lr, limits=limits)
        return StepResult(loss, nll, norm, targets, read, *others)

    def compute(
        self, parts: Sequence[Batch], count: int | Tensor, *, lr: float | Tensor, limits: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Update the weights from parts on the device with `count` targets on all ranks, without waiting for the
        device; return the measurements of a `StepResult`: loss, −log p, gradient norm, discarded, routing."""
        set_rate(self.optimizer, lr)
        if self.precision == "fp16":
            return self._scaled_step(parts, count, limits)
        loss, nll, *routed = self.backward(parts, count)
        norm = self.parallel.gradient_norm(parameters(self.optimizer))
        discarded = None if limits is None else _above(loss, norm, limits)
        update(self.optimizer, self._excess(norm) if self.clip else None, discarded)
        self.parallel.zero_grad()
        return loss, nll, norm, discarded, self._balance(routed, discarded)

    def _balance(self, routed: Sequence[Tensor], skipped: Tensor | None) -> Tensor | None:
        """Update the biases for the choice of experts unless the step is `skipped`; return the metrics of routing."""
        if not routed:
            return None
        sums = RoutingSums.stacked(routed[0])
        routers = [module for module in self.parallel.model.modules() if isinstance(module, Router)]
        for router, assigned in zip(routers, sums.assigned, strict=True):
            router.balance(assigned, 1.0 if skipped is None else 1.0 - skipped)
        return sums.metrics()

    def backward(self, parts: Sequence[Batch], count: int | Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        """Accumulate the gradient of the mean loss; return the mean loss, the mean −log p, and routers' sums if any.

        Each summed loss is divided by `count`, the targets of the whole step on all ranks, known from the loss masks
        before the first forward pass: the gradient does not depend on how a batch is divided. `scale` () multiplies the
        gradients.
        """
        mesh = self.parallel.mesh
        gradient = (torch.ones((), device=self.device) if scale is None else scale) / count
        carried, context = [self._carried(part) for part in parts], autocast(self.precision, self.device)
        sums = self.parallel.backward(parts, self.loss, gradient, autocast=context, carried=carried)
        self._keep_states(parts, carried)
        self.parallel.finish_gradients()
        mesh.counters.sum_(sums)
        mesh.axis("pipeline").sum_(sums)  # the last stage has them
        return sums[0] / count, sums[1] / count, *sums[2:]

    def _carried(self, part: Batch) -> CarriedState | None:
        """Return the recurrent state that a micro-batch continues from; None unless rows continue those before."""
        if part.lanes is None or part.begins is None:
            return None
        states = self.state.carried
        return CarriedState(None if states is None else states[:, :, part.lanes].masked_fill(part.begins[:, None], 0.0))

    def _keep_states(self, parts: Sequence[Batch], carried: Sequence[CarriedState | None]) -> None:
        """Store the states that the rows ended with, on every rank: rank 0 writes the checkpoint."""
        if parts[0].lanes is None:
            return
        for part, ended in zip(parts, carried, strict=True):
            assert ended is not None and ended.state is not None, "a recurrent model was read"
            states = ended.state.float()
            states = torch.where(states.isfinite().all(-1, keepdim=True), states, 0.0)  # restart a diverged state
            if self.state.carried is None:
                self.state.carried = states.new_zeros(*states.shape[:2], self.lanes, states.shape[3])
            self.state.carried[:, :, part.lanes] = states
        readers = self.parallel.mesh.readers
        if not readers.alone and self.state.carried is not None:
            local = torch.cat([part.lanes for part in parts if part.lanes is not None])
            shared = torch.zeros_like(self.state.carried)
            shared[:, :, local] = self.state.carried[:, :, local]
            readers.sum_([shared])
            self.state.carried = shared

    def _scaled_step(
        self, parts: Sequence[Batch], count: int | Tensor, limits: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Take a step in fp16: the loss is scaled so that small gradients do not round to zero.

        If a gradient overflows, the step is skipped and the scale halved; after `growth_interval` steps without
        overflow it doubles (Micikevicius et al. 2018, §3.2).
        """
        state = self.state
        scale = torch.full((), FIRST_SCALE, device=self.device) if state.scale is None else state.scale
        calm = torch.zeros((), device=self.device) if state.calm is None else state.calm
        loss, nll, *routed = self.backward(parts, count, scale)
        norm = self.parallel.gradient_norm(parameters(self.optimizer)) / scale
        finite = norm.isfinite()
        # an overflow is normal while the scale can be lowered; below 1 something else is wrong, and must be reported
        reported = torch.where(finite | (scale < 1.0), norm, 0.0)
        discarded = None if limits is None else _above(loss, reported, limits)
        skipped = (~finite).float() if discarded is None else torch.maximum((~finite).float(), discarded)
        update(self.optimizer, self._excess(norm) * scale if self.clip else scale, skipped)
        self.parallel.zero_grad()
        calm = torch.where(finite, calm + 1.0, 0.0)
        state.scale = scale * torch.where(finite, torch.where(calm < self.growth_interval, 1.0, 2.0), 0.5)
        state.calm = torch.where(calm < self.growth_interval, calm, 0.0)
        return loss, nll, reported, discarded, self._balance(routed, skipped)

    def _excess(self, norm: Tensor) -> Tensor:
        return ((norm + 1e-6) / self.clip).clamp(min=1.0)


def _above(loss: Tensor, norm: Tensor, limits: Tensor) -> Tensor:
    """Return 1 if a limit is exceeded or a value is NaN, else 0."""
    return (~(torch.stack([loss, norm]) <= limits).all()).float()
