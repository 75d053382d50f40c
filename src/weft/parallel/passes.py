"""Forward and backward passes in one process, or in several replicas that read different rows of a batch."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from weft.data.batch import Batch
from weft.models.base import LanguageModel
from weft.nn import config
from weft.nn.experts import Router, RoutingSums
from weft.nn.recurrent import CarriedState
from weft.parallel.mesh import SINGLE, Mesh

T = TypeVar("T")
Context = AbstractContextManager[object]
States = Sequence[CarriedState | None]
LossFunction = Callable[[LanguageModel, Tensor, Batch], tuple[Tensor, Tensor | int, dict[str, Tensor]]]


class Root(nn.Module):
    """The forward pass that DDP and FSDP2 hook into: any function of the model."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[LanguageModel], T]) -> T:
        return function(self.model)


@dataclass
class Parallel:
    """A model that this process holds in full and trains alone; subclasses distribute it."""

    model: LanguageModel
    mesh: Mesh = SINGLE

    @cached_property
    def local(self) -> dict[str, Tensor]:
        """The local part of each parameter, which the optimizer updates, and each buffer."""
        return dict(self.model.named_parameters()) | dict(self.model.named_buffers())

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Numbers of parameters of the full model, and of those that are trained."""
        parameters = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        return sum(size for size, _ in parameters), sum(size for size, trained in parameters if trained)

    def shard_batch(self, batch: Batch) -> Batch:
        """Return the tokens that this process reads of its rows of a batch."""
        return batch

    def backward(
        self, parts: Sequence[Batch], loss: LossFunction, gradient: Tensor, *, autocast: Context, carried: States = ()
    ) -> tuple[Tensor, ...]:
        """Accumulate the gradients of a step's micro-batches; return the sums of the loss and of −log p, () each, and
        those of routers if the model has any, (layers, …) as in `RoutingSums`.

        Backward passes of the summed losses begin with `gradient` (): 1 / targets of the step, times a loss scale.
        `autocast` is entered for each forward pass. A recurrent model updates the states in `carried`, one per part.
        The auxiliary loss of routers is that of a micro-batch's tokens on all ranks, weighted by its targets.
        """
        device = parts[0].tokens.device
        loss_sum, nll_sum = torch.zeros((), device=device), torch.zeros((), device=device)
        experts, routed = routing_settings(self.model), list[Tensor]()
        for number, part in enumerate(parts):
            state = carried[number] if carried else None

            def losses(
                model: LanguageModel, part: Batch = part, state: CarriedState | None = state
            ) -> tuple[Tensor, ...]:
                if experts is None:
                    total, _, extras = loss(model, model.read(part, state), part)
                    return total, extras["nll"]
                routing: list[Tensor] = []
                total, count, extras = loss(model, model.read(part, state, routing), part)
                layers = torch.stack(routing)
                targets, everywhere = layers.new_full((), 0.0) + count, layers.detach().clone()
                self.mesh.counters.sum_([targets, everywhere])
                sums, all_sums = RoutingSums.stacked(layers), RoutingSums.stacked(everywhere)
                total = total + targets * sums.auxiliary_loss(experts, all_sums)
                return total, extras["nll"], layers.detach()

            with self.grad_sync(last=number == len(parts) - 1):
                with autocast:
                    total, nll, *layers = self.forward(losses)
                total.backward(gradient)
            loss_sum += total.detach()
            nll_sum += nll
            routed = [a + b for a, b in zip(routed, layers, strict=True)] if routed else layers
        return loss_sum, nll_sum, *routed

    def forward(self, function: Callable[[LanguageModel], T]) -> T:
        """Return `function(model)`, computed as a forward pass."""
        return function(self.model)

    def grad_sync(self, last: bool) -> Context:
        """Context of a micro-batch's passes: gradients are synchronised in the `last` backward pass of a step."""
        return nullcontext()

    def finish_gradients(self) -> None:
        """Complete the gradients after a step's last backward pass, and store each where the optimizer reads it."""

    def gradient_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the norm of all gradients of `parameters`, ()."""
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def zero_grad(self) -> None:
        """Release gradients that the optimizer does not know of."""

    def with_full_weights(self, function: Callable[[LanguageModel], T]) -> T:
        """Return `function(model)`; if the model is sharded, all processes call this at the same time."""
        return function(self.model)

    def once(self, function: Callable[[], object]) -> None:
        """Call `function` once per folder: if processes share one, when all are here and on rank 0 alone."""
        function()


def routing_settings(model: LanguageModel) -> config.Experts | None:
    """Return the settings of a model's experts; None if it has none, as when every layer is dense."""
    return next((part.settings for part in model.modules() if isinstance(part, Router)), None)


class Replicas(Parallel):
    """Replicas of a model, whose gradients are all-reduced during the backward pass (Li et al. 2020)."""

    def __init__(self, model: LanguageModel, mesh: Mesh):
        super().__init__(model, mesh)
        # All replicas have drawn the same weights, so nothing is sent before the first step. With
        # find_unused_parameters DDP keeps its buckets; otherwise it rebuilds them after a process's first step, and
        # sums over other buckets have other last bits: a resumed run would differ from one that was never stopped.
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        self.root = DistributedDataParallel(
            Root(model), init_sync=False, gradient_as_bucket_view=True, find_unused_parameters=True
        )
        self.root.register_comm_hook(None, _all_reduce)

    def forward(self, function: Callable[[LanguageModel], T]) -> T:
        return self.root(function)

    def grad_sync(self, last: bool) -> Context:
        return nullcontext() if last else self.root.no_sync()


def _all_reduce(state: object, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients; DDP's default takes the mean, but the loss is divided by the count already."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])
