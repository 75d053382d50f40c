"""A model's passes in one process, or in several that each hold all of it and read different rows of a batch."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from weft.data.batch import Batch
from weft.models.base import LanguageModel
from weft.nn.recurrent import CarriedState
from weft.parallel.mesh import SINGLE, Mesh

T = TypeVar("T")

LossFunction = Callable[[LanguageModel, Tensor, Batch], tuple[Tensor, Tensor | int, dict[str, Tensor]]]


class Root(nn.Module):
    """Something done with a model as the forward pass of a module: what DDP and FSDP2 hook into."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[LanguageModel], T]) -> T:
        """What `work` makes of the model."""
        return work(self.model)


@dataclass(frozen=True)
class Work:
    """What a step does with each part of its batch: the loss of it, and its share of the whole, whose gradient counts.

    The forward pass is made inside `forward()`; `carried(part)` is what a recurrent model reads on from.
    """

    loss: LossFunction
    share: Callable[[Tensor], Tensor]
    forward: Callable[[], AbstractContextManager[object]]
    carried: Callable[[Batch], AbstractContextManager[CarriedState | None]] = lambda part: nullcontext()

    def losses(self, model: LanguageModel, part: Batch, carried: CarriedState | None) -> tuple[Tensor, Tensor]:
        """The sums of a part's losses and of its −log p."""
        loss, _, extras = self.loss(model, model.read(part, carried), part)
        return loss, extras["nll"]


@dataclass
class Parallel:
    """A model that this process holds whole, and trains alone; others say what is different where there are more."""

    model: LanguageModel
    mesh: Mesh = SINGLE

    @cached_property
    def local(self) -> dict[str, Tensor]:
        """What this process holds of each parameter: what the optimizer changes."""
        return dict(self.model.named_parameters())

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """How many parameters the whole model has, and how many of them are trained."""
        every = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        return sum(size for size, _ in every), sum(size for size, trained in every if trained)

    def own(self, batch: Batch) -> Batch:
        """What this process reads of a batch whose rows are its own."""
        return batch

    def backward(self, parts: Sequence[Batch], work: Work) -> tuple[Tensor, Tensor]:
        """Add up the gradients of a step's parts, which are on the device; the sums of loss and −log p, () each."""
        device = parts[0].tokens.device
        loss_sum, nll_sum = torch.zeros((), device=device), torch.zeros((), device=device)
        for number, part in enumerate(parts, start=1):
            with work.carried(part) as carried, self.adding(last=number == len(parts)):
                with work.forward():
                    loss, nll = self.forward(partial(work.losses, part=part, carried=carried))
                work.share(loss).backward()
            loss_sum += loss.detach()
            nll_sum += nll
        return loss_sum, nll_sum

    def forward(self, work: Callable[[LanguageModel], T]) -> T:
        """What `work` makes of the model, in a forward pass."""
        return work(self.model)

    def adding(self, last: bool) -> AbstractContextManager[object]:
        """Inside, a part of a batch is passed forward and back, perhaps the last one of a step."""
        return nullcontext()

    def collect(self) -> None:
        """After a step's last pass: complete the gradients, and put each where the optimizer reads it."""

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """The norm of all gradients of `parameters`; ()."""
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def clear(self) -> None:
        """Forget gradients that the optimizer doesn't know of."""

    def within(self, work: Callable[[LanguageModel], T]) -> T:
        """What `work` makes of the model; where it is in parts, all processes call this at the same time."""
        return work(self.model)

    def once(self, work: Callable[[], object]) -> None:
        """Do something with a place on the disk: where processes share it one of them does, when all are here."""
        work()


class Replicas(Parallel):
    """Each of several processes holds all weights. Gradients are summed while the backward pass goes on (Li et al.
    2020)."""

    def __init__(self, model: LanguageModel, mesh: Mesh):
        super().__init__(model, mesh)
        # All have drawn the same weights: there is nothing to send before the first step. Told to look for parameters
        # without gradients, DDP keeps its buckets as they are; else it would sort them anew after a process's first
        # step. Sums of other buckets have other last bits: a resumed run would not be the one that was never stopped.
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        self.root = DistributedDataParallel(
            Root(model), init_sync=False, gradient_as_bucket_view=True, find_unused_parameters=True
        )
        self.root.register_comm_hook(None, _sum)

    def forward(self, work: Callable[[LanguageModel], T]) -> T:
        return self.root(work)

    def adding(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.root.no_sync()


def _sum(state: object, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own hook would divide by the number of processes; the loss is divided by the count of targets already."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])
