"""A model with empty weights sharded over a mesh, by tensor parallelism, pipeline stages and FSDP2.

The sharded model is trained like that of one process. `ShardedParallel` has what differs: which gradients are summed
over which ranks and when, and which part of each parameter is here.
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
from weft.parallel import context, experts, tensor
from weft.parallel.mesh import Mesh
from weft.parallel.passes import Context, LossFunction, Parallel, Root, States, T
from weft.parallel.pipeline import Pipeline, keep_stage
from weft.parallel.sharding import Geometry, MatrixExchange, geometry

MIN_FSDP_UNIT = 1 << 25  # parameters that FSDP2 gathers at a time: each unit costs the host about a millisecond a step


@dataclass(kw_only=True)
class ShardedParallel(Parallel):
    """A model sharded over a mesh. Forward passes go through `root`."""

    root: nn.Module
    sums: dict[str, list[str]]  # parameters whose gradients are summed over an axis, or over all rows: "counters"
    fused: dict[str, list[int]]  # heights of the matrices in a sharded fused matrix
    pipeline: Pipeline | None = None

    @property
    def elsewhere(self) -> set[str]:
        """Names of the parameters that only other pipeline stages hold."""
        stage = None if self.pipeline is None else self.pipeline.stage
        return set() if stage is None else {name for name, held in stage.holders.items() if stage.number not in held}

    @cached_property
    def local(self) -> dict[str, Tensor]:
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: p.to_local().detach() if isinstance(p, DTensor) else p for name, p in tensors}

    @cached_property
    def geometries(self) -> dict[str, Geometry]:
        """The position of each local part in its full parameter."""
        shards = self.mesh.layout.tensor
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: geometry(p, self.fused.get(name, ()), shards) for name, p in tensors}

    def exchange(self, matrices: Iterable[Tensor]) -> MatrixExchange | None:
        """Return the way to the whole of some parameters; None if this process has them. All processes call this."""
        if self.mesh.stage.alone:
            return None
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        geometries = [self.geometries[names[matrix]] for matrix in matrices]
        return MatrixExchange(self.mesh.stage, geometries, device_of(self.model))

    @torch.no_grad()
    def fill(self, full: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this process's part of each full parameter, by name."""
        elsewhere = self.elsewhere
        for name, values in full:
            for chunk in self.geometries[name].chunks if name not in elsewhere else ():
                chunk.of(self.local[name]).copy_(chunk.cut(values))

    def shard_batch(self, batch: Batch) -> Batch:
        return context.shard_rows(batch, self.mesh)

    def forward(self, function: Callable[[LanguageModel], T]) -> T:
        return self.root(function)

    def backward(
        self, parts: Sequence[Batch], loss: LossFunction, gradient: Tensor, *, autocast: Context, carried: States = ()
    ) -> tuple[Tensor, ...]:
        if self.pipeline is None:
            return super().backward(parts, loss, gradient, autocast=autocast, carried=carried)
        return self.pipeline.backward(parts, loss, gradient, autocast=autocast)

    @torch.no_grad()
    def finish_gradients(self) -> None:
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
        for axis, names in self.sums.items():
            due = [self.local[name].grad for name in names]
            ranks = self.mesh.counters if axis == "counters" else self.mesh.axis(axis)
            ranks.sum_([gradient for gradient in due if gradient is not None])
        if self.pipeline is not None:
            self.pipeline.finish_gradients(self.local)

    def gradient_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        trained = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in trained if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)).float()
        total = (norms.square() * torch.stack([self.norm_weights[p] for p in trained])).sum()
        self.mesh.world.sum_([total])
        return total.sqrt()

    @cached_property
    def norm_weights(self) -> dict[Tensor, Tensor]:
        """1 / the number of processes that hold the same part of a parameter, () on the device."""
        stage = None if self.pipeline is None else self.pipeline.stage
        weights = {}
        for name, p in self.model.named_parameters():
            copies, held = self.mesh.world.ranks, 1.0 if stage is None else len(stage.holders[name]) / stage.of
            if isinstance(p, DTensor):
                axes = zip(p.device_mesh.shape, p.placements, strict=True)
                copies //= math.prod(size for size, placement in axes if not placement.is_replicate())
            weights[name] = 1.0 / (copies * held)
        tensors = {weight: torch.full((), weight, device=device_of(self.model)) for weight in set(weights.values())}
        return {self.local[name]: tensors[weight] for name, weight in weights.items()}

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def with_full_weights(self, function: Callable[[LanguageModel], T]) -> T:
        if self.pipeline is not None:
            with self.pipeline.shared_head():
                return function(self.model)
        if not isinstance(self.root, FSDPModule):
            return function(self.model)
        errors: list[BaseException] = []

        def catching(model: LanguageModel) -> T | None:
            try:
                return function(model)
            except BaseException as error:  # FSDP2 must see the pass end, or it would keep the gathered weights
                errors.append(error)
                return None

        result: Any = self.root(catching)
        for module in self.root.modules():
            if isinstance(module, FSDPModule):  # or the next pass would read stale weights
                module.reshard()
        if errors:
            raise errors[0]
        return cast(T, result)

    def once(self, function: Callable[[], object]) -> None:
        self.mesh.world.barrier()
        if self.mesh.world.leads:
            function()
        self.mesh.world.barrier()


def lay_out(model: LanguageModel, mesh: Mesh, precision: str, *, compile_: bool) -> ShardedParallel:
    """Shard a model with empty weights over the mesh; `root.to_empty` then allocates memory, `fill` sets weights."""
    layout, sizes = mesh.layout, Parallel(model).sizes
    stage = keep_stage(model, mesh) if layout.pipeline > 1 else None
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    heights = {f"{name}.{kind}": module.heights for name, module in model.named_modules()
               if isinstance(module, Linear) and len(module.heights) > 1 for kind in ("weight", "bias")}  # fmt: skip
    sums: dict[str, list[str]] = {}
    if layout.tensor > 1:
        biases = any(stack.position.biases for stack in stacks)
        tensor.shard(model, layout, mesh.submesh("tensor"))
        sums["tensor"] = [name for name, _ in model.named_parameters() if tensor.is_partial(name, layout, biases)]
    if layout.experts > 1:
        sums["replicate"] = experts.divide(model, mesh.submesh("experts"), mesh.axis("experts"))
        sums["counters"] = [name for name, _ in model.named_parameters() if name not in sums["replicate"]]
    if layout.context > 1:
        for stack in stacks:
            stack.context = context.Gathered(mesh.context)
    for block in (block for stack in stacks for block in stack.blocks) if compile_ else ():
        block.compile()
    pipeline = None if stage is None else Pipeline(model, mesh, stage)
    if layout.sequence:
        model.wrap(lambda features: tensor.padded(features, layout.tensor))
    unsharded = stage is not None or layout.experts > 1 or layout.readers * layout.context == 1
    root = Root(model) if unsharded else _fully_sharded(model, stacks, mesh, precision=precision)
    fused = heights if layout.tensor > 1 else {}
    parallel = ShardedParallel(model=model, mesh=mesh, root=root, sums=sums, fused=fused, pipeline=pipeline)
    parallel.sizes = sizes
    return parallel


def _fully_sharded(model: LanguageModel, stacks: Sequence[Stack], mesh: Mesh, *, precision: str) -> nn.Module:
    """Apply FSDP2 (Zhao et al. 2023): weights are gathered block by block, gradients reduce-scattered."""
    # keys and values are views of the source's projection, and nothing changes them in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    narrow = precision == "bf16" and mesh.submesh("shard").device_type == "cuda"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if narrow else None, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh.submesh("replicate", "shard"), "mp_policy": policy}
    if narrow:
        gathered = 2 * sum(p.numel() for p in model.parameters()) / mesh.layout.tensor
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if gathered < memory / 20:  # weights stay after the forward pass, so the backward pass need not gather them
            options["reshard_after_forward"] = False
    for module in model.modules():
        if isinstance(module, CrossAttention):  # keys of a source are computed outside the block
            fully_shard([module.kv] if module.k_norm is None else [module.kv, module.k_norm], **options)
    for stack in stacks:
        unit: list[nn.Module] = []
        for number, block in enumerate(stack.blocks, start=1):
            unit.append(block)
            size = sum(p.numel() for part in unit for p in part.parameters())
            if size >= MIN_FSDP_UNIT or number == len(stack.blocks):
                fully_shard(unit, **options)
                unit = []
    root = Root(model)
    fully_shard(root, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # sums, not means: the loss is divided by the count of targets already
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root
