"""An optimisation step captured as CUDA graphs, from tokens to updated weights.

A small model's step is hundreds or thousands of kernels, which a GPU finishes faster than the host can launch them. A
graph launches them in one call. There is one graph for each shape of a batch; all of them share one pool of memory.
The first step of a shape runs without a graph, and compiles the kernels that the graph needs. Both paths run the same
kernels on the same values, so that a resumed run, which captures at other steps, has the same bits.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from weft.data.batch import Batch
from weft.errors import out_of_memory
from weft.training.optimizer import parameters
from weft.training.step import OptimisationStep, StepResult

MAX_STEP_FLOPS = 5e13  # of a step, above which a GPU works for longer than the host takes to launch its kernels
MAX_GRAPHS = 512  # shapes captured; a batch of another shape runs without a graph


@dataclass(frozen=True)
class CapturedBatch:
    """A graph of the step of one batch, the batch that it reads, and the measurements that it writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    measured: tuple[Tensor, ...]


@dataclass
class CapturedStep:
    """An optimisation step of a model that one process trains on a GPU. Steps of several micro-batches, and steps in
    fp16, whose loss scale changes, are not captured."""

    step: OptimisationStep
    lr: Tensor  # (): the learning rate that graphs read, as they do the count of targets () and the limits (2,)
    count: Tensor
    limits: Tensor
    pool: Any  # handle of the memory that the graphs share
    graphs: dict[tuple[torch.Size, ...], CapturedBatch | None] = field(default_factory=dict)  # None: not yet captured
    max_graphs: int = MAX_GRAPHS
    addresses: list[int] = field(default_factory=list)  # of the weights that the graphs read and update

    @classmethod
    def of(cls, step: OptimisationStep) -> Self:
        """Return a step that captures what `step` does."""
        for group in step.optimizer.param_groups:
            group["capturable"] = True
        zeros = torch.zeros(4, device=step.device).split([1, 1, 2])
        return cls(step, zeros[0].view(()), zeros[1].view(()), zeros[2], pool=torch.cuda.graph_pool_handle())

    def __call__(self, parts: list[Batch], lr: float, limits: Tensor) -> StepResult:
        """Take a step with learning rate `lr`; see `OptimisationStep`."""
        if len(parts) > 1 or self.step.precision == "fp16":
            return self.step(parts, lr, limits)
        (batch,) = parts
        targets, read = batch.count, batch.read
        self.lr.fill_(lr)
        self.count.fill_(max(1, targets))
        self.limits.copy_(limits)
        loss, nll, norm, *others = self._compute(batch)
        return StepResult(loss, nll, norm, targets, read, *others)

    def _compute(self, batch: Batch) -> tuple[Tensor, ...]:
        shapes = tuple(tensor.shape for tensor in batch.tensors())
        addresses = [p.data_ptr() for p in parameters(self.step.optimizer)]
        if addresses != self.addresses:  # cuDNN's weights move when they are first read
            self.graphs.clear()
            self.addresses = addresses
        if shapes not in self.graphs:
            if len(self.graphs) < self.max_graphs:
                self.graphs[shapes] = None
            return self._run(batch.to(self.step.device))
        captured = self.graphs[shapes]
        if captured is None:
            try:
                captured = self.graphs[shapes] = self._capture(batch.to(self.step.device))
            except Exception as error:
                if not out_of_memory(error):
                    raise
                del self.graphs[shapes]  # captured graphs stay; other shapes run without
                self.max_graphs = len(self.graphs)
                self.step.optimizer.zero_grad(set_to_none=True)
                return self._run(batch.to(self.step.device))
        else:
            for ours, new in zip(captured.batch.tensors(), batch.tensors(), strict=True):
                ours.copy_(new, non_blocking=True)
        captured.graph.replay()
        return tuple(value.clone() for value in captured.measured)  # the next replay overwrites them

    def _capture(self, batch: Batch) -> CapturedBatch:
        """Capture the step of a batch on the device, without running it."""
        graph = torch.cuda.CUDAGraph()
        # the loader's thread allocates pinned memory meanwhile, which the default error mode would not allow
        with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
            measured = self._run(batch)
        return CapturedBatch(graph, batch, measured)

    def _run(self, batch: Batch) -> tuple[Tensor, ...]:
        measured = self.step.compute([batch], self.count, lr=self.lr, limits=self.limits)
        return tuple(value for value in measured if value is not None)
