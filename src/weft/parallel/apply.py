"""A model laid out over a mesh: tensor axis first, then activation checkpointing, compilation, FSDP2, on empty weights.

What comes out is trained as the model of one process is. `Split` holds what differs: whose gradients are summed with
whose and when, and which part of each parameter is here.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from weft.data.batch import Batch
from weft.models.base import LanguageModel, device_of
from weft.models.stack import Stack
from weft.nn.attention import CrossAttention
from weft.nn.linear import Linear
from weft.parallel import context, tensor
from weft.parallel.mesh import Mesh
from weft.parallel.passes import Parallel, Root, T, Work
from weft.parallel.pieces import Geometry, geometry
from weft.parallel.pipeline import Pipeline
from weft.parallel.stages import cut

UNIT = 1 << 25  # parameters that FSDP2 gathers at a time, at least: a unit costs the host about a millisecond a step


@dataclass(kw_only=True)
class Split(Parallel):
    """A model over a mesh, of which this process has a part. Passes go through `root`."""

    root: nn.Module
    sums: list[str]  # whose gradients are summed over the tensor axis
    fused: dict[str, list[int]]  # heights of what lies in a split matrix
    pipeline: Pipeline | None = None

    @property
    def elsewhere(self) -> set[str]:
        """The names of parameters that other stages have."""
        stage = None if self.pipeline is None else self.pipeline.stage
        return set() if stage is None else {name for name, held in stage.holders.items() if stage.number not in held}

    @cached_property
    def local(self) -> dict[str, Tensor]:
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
        elsewhere = self.elsewhere
        for name, values in whole:
            for piece in self.geometries[name].pieces if name not in elsewhere else ():
                piece.of(self.local[name]).copy_(piece.cut(values))

    def own(self, batch: Batch) -> Batch:
        return context.divided(batch, self.mesh)

    def forward(self, work: Callable[[LanguageModel], T]) -> T:
        return self.root(work)

    def backward(self, parts: Sequence[Batch], work: Work) -> tuple[Tensor, Tensor]:
        return super().backward(parts, work) if self.pipeline is None else self.pipeline.backward(parts, work)

    @torch.no_grad()
    def collect(self) -> None:
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
        if self.pipeline is not None:
            self.pipeline.collect(self.local)

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        trained = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in trained if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)).float()
        total = (norms.square() * torch.stack([self.shares[p] for p in trained])).sum()
        self.mesh.world.sum_([total])
        return total.sqrt()

    @cached_property
    def shares(self) -> dict[Tensor, Tensor]:
        """1 / how many processes hold the same part of a parameter; () each, on the device, which nobody waits for."""
        stage = None if self.pipeline is None else self.pipeline.stage
        of = {}
        for name, p in self.model.named_parameters():
            copies, held = self.mesh.world.ranks, 1.0 if stage is None else len(stage.holders[name]) / stage.of
            if isinstance(p, DTensor):
                placed = zip(p.device_mesh.shape, p.placements, strict=True)
                copies //= math.prod(size for size, each in placed if not each.is_replicate())
            of[name] = 1.0 / (copies * held)
        values = {share: torch.full((), share, device=device_of(self.model)) for share in set(of.values())}
        return {self.local[name]: values[share] for name, share in of.items()}

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def within(self, work: Callable[[LanguageModel], T]) -> T:
        if self.pipeline is not None:
            with self.pipeline.whole_head():
                return work(self.model)
        if not isinstance(self.root, FSDPModule):  # which gathers weights
            return work(self.model)
        errors: list[BaseException] = []

        def kept(model: LanguageModel) -> T | None:
            try:
                return work(model)
            except BaseException as error:  # FSDP2 has to see the pass end: else it would hold on to these weights
                errors.append(error)
                return None

        found: Any = self.root(kept)
        for module in self.root.modules():
            if isinstance(module, FSDPModule):  # else the next pass would read weights from before
                module.reshard()
        if errors:
            raise errors[0]
        return cast(T, found)

    def once(self, work: Callable[[], object]) -> None:
        self.mesh.world.wait()
        if self.mesh.world.leads:
            work()
        self.mesh.world.wait()


def lay_out(model: LanguageModel, mesh: Mesh, precision: str, compile_: bool) -> Split:
    """Split a model with empty weights over the mesh. The root's `to_empty` gives it memory then, `fill` weights."""
    layout, sizes = mesh.layout, Parallel(model).sizes
    stage = cut(model, mesh) if layout.pipeline > 1 else None
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    heights = {f"{name}.{kind}": module.heights for name, module in model.named_modules()
               if isinstance(module, Linear) and len(module.heights) > 1 for kind in ("weight", "bias")}  # fmt: skip
    sums = []
    if layout.tensor > 1:
        biases = any(stack.position.biases for stack in stacks)
        tensor.split(model, layout, mesh.part("tensor"))
        sums = [name for name, _ in model.named_parameters() if tensor.is_sum(name, layout, biases)]
    if layout.context > 1:
        context.install(model, mesh.context)
    if compile_:
        for stack in stacks:
            for block in stack.blocks:
                block.compile()
    pipeline = None if stage is None else Pipeline(model, mesh, stage)
    if layout.sequence:
        model.wrap(lambda features: tensor.padded(features, layout.tensor))
    whole = stage is not None or layout.readers * layout.context == 1
    root = Root(model) if whole else _sharded(model, stacks, mesh, precision)
    fused = heights if layout.tensor > 1 else {}
    parallel = Split(model=model, mesh=mesh, root=root, sums=sums, fused=fused, pipeline=pipeline)
    parallel.sizes = sizes
    return parallel


def _sharded(model: LanguageModel, stacks: Sequence[Stack], mesh: Mesh, precision: str) -> nn.Module:
    """FSDP2 (Zhao et al. 2023): weights are gathered block by block, gradients summed and split again."""
    # keys and values are views of what a source's product gives; nothing changes them in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    narrow = precision == "bf16" and mesh.part("shard").device_type == "cuda"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if narrow else None, reduce_dtype=torch.float32)
    given: dict[str, Any] = {"mesh": mesh.part("replicate", "shard"), "mp_policy": policy}
    if narrow:
        here = 2 * sum(p.numel() for p in model.parameters()) / mesh.layout.tensor
        there = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if here < there / 20:  # weights stay after the forward pass, and the backward pass doesn't gather them again
            given["reshard_after_forward"] = False
    for module in model.modules():
        if isinstance(module, CrossAttention):  # a source's keys are made outside of the block
            fully_shard([module.kv] if module.k_norm is None else [module.kv, module.k_norm], **given)
    for stack in stacks:
        unit: list[nn.Module] = []
        for number, block in enumerate(stack.blocks, start=1):
            unit.append(block)
            if sum(p.numel() for part in unit for p in part.parameters()) >= UNIT or number == len(stack.blocks):
                fully_shard(unit, **given)
                unit = []
    root = Root(model)
    fully_shard(root, **given)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # sums: the loss is divided by the count of targets already
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root
