"""A model laid out over a mesh: tensor axis first, then activation checkpointing, compilation, FSDP2, on empty weights.

What comes out is trained as the model of one process is. `Parallel` holds what differs: whose gradients are summed with
whose and when, and which part of each parameter is here.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from weft.models.base import LanguageModel
from weft.models.transformer import Stack
from weft.nn.attention import CrossAttention
from weft.nn.linear import Linear
from weft.parallel import tensor
from weft.parallel.mesh import SINGLE, Mesh
from weft.parallel.pieces import Geometry, geometry
from weft.parallel.plan import is_sum


class Passes(nn.Module):
    """A model's loss as the forward pass of a module: what DDP and FSDP2 hook into."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, loss: Callable[..., Any], batch: Any) -> Any:
        """What `loss` makes of the model and a batch."""
        return loss(self.model, batch)


@dataclass
class Parallel:
    """A model over a mesh. `root` is what passes go through; one process needs none."""

    model: LanguageModel
    mesh: Mesh = SINGLE
    root: nn.Module | None = None
    sums: list[str] = field(default_factory=list)  # whose gradients are summed over the tensor axis
    fused: dict[str, list[int]] = field(default_factory=dict)  # heights of what lies in a split matrix

    # ---- what is here of each parameter

    @cached_property
    def local(self) -> dict[str, Tensor]:
        """This process's part of each parameter: what the optimizer changes."""
        parts = self.model.named_parameters()
        return {name: p.to_local().detach() if isinstance(p, DTensor) else p for name, p in parts}

    @cached_property
    def geometries(self) -> dict[str, Geometry]:
        """Where each part lies in the whole."""
        tensors = self.mesh.layout.tensor
        return {name: geometry(p, self.fused.get(name, ()), tensors) for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def fill(self, whole: Iterable[tuple[str, Tensor]]) -> None:
        """Give each parameter its part of a whole one."""
        for name, values in whole:
            for piece in self.geometries[name].pieces:
                piece.of(self.local[name]).copy_(piece.cut(values))

    # ---- passes

    def __call__(self, loss: Callable[..., Any], batch: Any) -> Any:
        """The loss of a batch, by the model."""
        return loss(self.model, batch) if self.root is None else self.root(loss, batch)

    @contextmanager
    def adding(self, last: bool) -> Iterator[None]:
        """Inside, a part of a batch is passed forward and back. Replicas sum their gradients after the last one."""
        if isinstance(self.root, DistributedDataParallel) and not last:
            with self.root.no_sync():
                yield
        else:
            yield

    @torch.no_grad()
    def collect(self) -> None:
        """After a step's last pass: complete the gradients, and put each where the optimizer reads it."""
        if not self.mesh.splits:
            return
        for name, parameter in self.model.named_parameters():
            local = self.local[name]
            if parameter.grad is None or local is parameter:
                continue
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                if gradient.placements != parameter.placements:  # a sum that is still due
                    gradient = gradient.redistribute(placements=parameter.placements)
                gradient = gradient.to_local()
            local.grad = gradient
        due = [self.local[name].grad for name in self.sums]
        self.mesh.axis("tensor").sum_([gradient for gradient in due if gradient is not None])

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """The norm of all gradients of `parameters`, wherever their parts are; ()."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not self.mesh.splits:
            return nn.utils.get_total_norm(gradients)
        copies = [self.copies[p] for p in parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)).float()
        total = (norms.square() / torch.tensor(copies, device=norms.device)).sum()
        self.mesh.world.sum_([total])
        return total.sqrt()

    @cached_property
    def copies(self) -> dict[Tensor, float]:
        """How many processes hold the same part of a parameter."""
        return {self.local[name]: _copies(p, self.mesh.world.ranks) for name, p in self.model.named_parameters()}

    def clear(self) -> None:
        """Forget the gradients."""
        if self.mesh.splits:
            self.model.zero_grad(set_to_none=True)


def _copies(parameter: Tensor, processes: int) -> int:
    if not isinstance(parameter, DTensor):
        return processes
    placed = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return processes // math.prod(size for size, placement in placed if not placement.is_replicate())


# ---- laying a model out


def replicated(model: LanguageModel, mesh: Mesh) -> Parallel:
    """A model that every process holds whole. Gradients are summed while the backward pass goes on (Li et al. 2020)."""
    if mesh.world.alone:
        return Parallel(model, mesh)
    root = DistributedDataParallel(
        Passes(model),
        broadcast_buffers=False,
        init_sync=False,  # all have drawn the same weights
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )
    root.register_comm_hook(None, _sum)
    return Parallel(model, mesh, root)


def _sum(state: object, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own hook would divide by the number of processes; the loss is divided by the count of targets already."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])


def lay_out(model: LanguageModel, mesh: Mesh, precision: str, compile_: bool) -> Parallel:
    """Split a model with empty weights over the mesh. `to_empty` gives it memory afterwards, and `fill` weights."""
    layout = mesh.layout
    heights = {f"{name}.{kind}": module.heights for name, module in model.named_modules()
               if isinstance(module, Linear) and len(module.heights) > 1 for kind in ("weight", "bias")}  # fmt: skip
    fused = heights if layout.tensor > 1 else {}
    sums = []
    if layout.tensor > 1:
        biases = any(isinstance(module, Stack) and module.position.biases for module in model.modules())
        tensor.split(model, layout, mesh.part("tensor"))
        sums = [name for name, _ in model.named_parameters() if is_sum(name, layout, biases)]
    if compile_:
        for block in _blocks(model):
            block.compile()
    if layout.readers * layout.context == 1:
        return Parallel(model, mesh, Passes(model), sums, fused)
    return Parallel(model, mesh, _sharded(model, mesh, precision), sums, fused)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    return (block for module in model.modules() if isinstance(module, Stack) for block in module.blocks)


def _sharded(model: LanguageModel, mesh: Mesh, precision: str) -> nn.Module:
    """FSDP2 (Zhao et al. 2023): weights are gathered block by block, gradients summed and split again."""
    narrow = precision == "bf16" and mesh.part("shard").device_type == "cuda"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if narrow else None, reduce_dtype=torch.float32)
    given: dict[str, Any] = {"mesh": mesh.part("replicate", "shard"), "mp_policy": policy}
    for block in _blocks(model):
        for module in block.modules():
            if isinstance(module, CrossAttention):  # a source's keys are made outside of the block
                fully_shard([module.kv] if module.k_norm is None else [module.kv, module.k_norm], **given)
        fully_shard(block, **given)
    root = Passes(model)
    fully_shard(root, **given)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # sums: the loss is divided by the count of targets already
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root
