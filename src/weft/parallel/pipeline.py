"""Pipeline parallelism: a Transformer's layers in stages, one per process of the pipeline axis (Huang et al. 2019).

Stages are contiguous ranges of layers, in the order in which they run, of about equal size. What precedes the first
layer of a stack is on that layer's stage, and what follows the last layer on that one's. A table that several stages
read, such as an embedding tied to the LM head, is on each of them.

A step's micro-batches flow through the stages. In torch's 1F1B schedule a stage alternates forward and backward passes,
so that it never holds more micro-batches than there are stages after it (Narayanan et al. 2019). Every stage has all
tokens, masks and positions of a micro-batch: only hidden states, and their gradients on the way back, are sent.

The model's code runs on every stage. `keep_stage` leaves it the layers of its stage; `Pipeline` passes it the hidden
states received from the previous stage, and sends its output to the next. The last stage computes the loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from weft.config import Config
from weft.data.batch import Batch
from weft.errors import ConfigError
from weft.layout import Layout
from weft.models.base import EncoderInput, LanguageModel, device_of, inputs
from weft.models.config import EncoderDecoder, TransformerConfig
from weft.models.head_config import EmbeddingHead
from weft.models.heads import TokenHead
from weft.models.stack import Stack
from weft.models.transformer import RowInputs, Transformer
from weft.nn.config import Experts
from weft.parallel.mesh import Mesh
from weft.parallel.passes import Context, LossFunction
from weft.parallel.ranks import Ranks
from weft.parallel.sharding import local_part


def check_stages(model: Config, layout: Layout) -> None:
    """Refuse a model that can't be divided into these stages, or a layout that excludes a pipeline."""
    stages = layout.pipeline
    if stages == 1:
        return
    assert isinstance(model, TransformerConfig), "a recipe refuses others"
    layers = max(span.stop for span in _spans(model).values())
    if layers < stages:
        raise ConfigError(f"parallel.pipeline = {stages}: the model has {layers} layers, fewer than stages; lower it")
    if isinstance(getattr(model, "head", None), EmbeddingHead):
        reason = "a loss that compares the rows of a batch can't be computed in parts; set parallel.pipeline = 1"
        raise ConfigError(f"parallel.pipeline = {stages}: {reason}")
    if isinstance(model.feedforward, Experts):
        reason = "the losses of a mixture's routers can't be summed over stages; set parallel.pipeline = 1"
        raise ConfigError(f"parallel.pipeline = {stages}: {reason}")
    for axis in (axis for axis in ("shard", "context") if getattr(layout, axis) > 1):
        reason = f"can't be combined with parallel.{axis} = {getattr(layout, axis)}"
        cure = "set one of them to 1 (replicate and tensor can be combined with both)"
        raise ConfigError(f"parallel.pipeline = {stages}: {reason}; {cure}")


def _spans(settings: TransformerConfig) -> dict[str, range]:
    """Return the layers of each stack, numbered in the order in which they run, an encoder's before a decoder's."""
    if isinstance(settings, EncoderDecoder):
        encoders = settings.encoder_layers or settings.layers
        return {"encoder": range(encoders), "decoder": range(encoders, encoders + settings.layers)}
    return {"encoder" if settings.kind == "encoder" else "decoder": range(settings.layers)}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Stage:
    """Stage `number` of `of`: its `layers` of all those in `spans`; `holders` are the stages that hold a parameter."""

    number: int
    of: int
    layers: range
    spans: dict[str, range]
    holders: dict[str, tuple[int, ...]]
    tied: bool  # whether the LM head shares the embedding

    @property
    def is_last(self) -> bool:
        return self.number == self.of - 1

    def begins(self, stack: str) -> bool:
        """Return whether a stack's first layer is here."""
        return self.spans[stack].start in self.layers

    def ends(self, stack: str) -> bool:
        """Return whether a stack's last layer is here."""
        return self.spans[stack].stop - 1 in self.layers

    def within(self, stack: str) -> list[int]:
        """Return the layers of a stack that are here, numbered within the stack."""
        span = self.spans[stack]
        return [layer - span.start for layer in span if layer in self.layers]

    def holds(self, name: str, biases: bool, shared: bool) -> bool:
        """Return whether this stage reads a parameter, given `biases` on all scores and a `shared` embedding."""
        first, _, rest = name.partition(".")
        if first in self.spans:
            part, _, below = rest.partition(".")
            match part:
                case "blocks":
                    return int(below.partition(".")[0]) in self.within(first)
                case "norm":
                    return self.ends(first)
                case "position" if biases:
                    return bool(self.within(first))
            return self.begins(first)
        if first == "output":
            return self.is_last
        if first != "embedding":
            return self.number == 0  # segments, and a separate embedding of the source
        writes = "decoder" if "decoder" in self.spans else "encoder"
        return self.begins(writes) or (shared and self.number == 0) or (self.tied and self.is_last)


def keep_stage(model: LanguageModel, mesh: Mesh) -> Stage:
    """Remove all but this process's stage from a model with empty weights; parameters keep their names."""
    assert isinstance(model, Transformer)
    spans, of = _spans(model.config), mesh.layout.pipeline
    total = max(span.stop for span in spans.values())
    tied = any(isinstance(module, TokenHead) and module.weight is None for module in model.output.modules())
    biases = any(isinstance(module, Stack) and module.position.biases for module in model.modules())
    shared = model.source_embedding is None and len(spans) == 2
    ranges = [range(number * total // of, (number + 1) * total // of) for number in range(of)]
    stages = [Stage(number, of, layers, spans=spans, holders={}, tied=tied) for number, layers in enumerate(ranges)]
    names = [name for name, _ in model.named_parameters()]
    holders = {name: tuple(stage.number for stage in stages if stage.holds(name, biases, shared)) for name in names}
    here = stages[mesh.axis("pipeline").rank]
    for name in names:
        if here.number not in holders[name]:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).register_parameter(last, None)
    for name in spans:
        stack, blocks = model.get_submodule(name), nn.ModuleList()
        assert isinstance(stack, Stack)
        for layer in here.within(name):
            blocks.add_module(str(layer), stack.blocks[layer])
        stack.blocks = blocks
        if not here.ends(name):
            stack.norm = None
    return replace(here, holders=holders)


@dataclass(frozen=True)
class PipelineStep:
    """The step in progress: its micro-batches, what is computed of each, and the sums of the loss and of −log p."""

    parts: Sequence[Batch]
    loss: LossFunction
    gradient: Tensor
    autocast: Context
    sums: tuple[Tensor, Tensor]


class Pipeline(nn.Module):
    """One stage of a model, and its steps with the other stages. All processes create it, after tensor parallelism."""

    def __init__(self, model: LanguageModel, mesh: Mesh, stage: Stage):
        super().__init__()
        assert isinstance(model, Transformer)
        self.model, self.mesh, self.stage = model, mesh, stage
        self.line = mesh.axis("pipeline")
        self._shared = self._shared_parameters()
        self._head: list[tuple[str, torch.Size, torch.dtype]] | None = None
        self._shape: Any = None  # of the steps that the schedule was built for
        self._schedule: Schedule1F1B | ScheduleGPipe | None = None
        self._step: PipelineStep | None = None
        model.wrap(lambda features: self._evaluate)  # training goes through `backward`

    def backward(
        self, parts: Sequence[Batch], loss: LossFunction, gradient: Tensor, *, autocast: Context
    ) -> tuple[Tensor, Tensor]:
        """Accumulate the gradients of a step's micro-batches, as `Parallel.backward` does. All stages pass the same
        micro-batches; the sums are those of the last stage, and 0 on the others."""
        shapes = {(part.tokens.shape, None if part.source is None else part.source.tokens.shape) for part in parts}
        if len(shapes) > 1:
            rows = sorted({len(part.tokens) for part in parts})
            raise ConfigError(
                f"parallel.pipeline = {self.stage.of}: all micro-batches of a step must have one shape; these have "
                f"{' and '.join(map(str, rows))} rows; choose a batch.micro that divides the rows of a process "
                "(batch.size over the processes that read different rows)"
            )
        device = parts[0].tokens.device
        with autocast:
            dtype = self._dtype(device)
        shape = len(parts), *shapes, dtype
        if shape != self._shape:
            self._shape, self._schedule = shape, self._build_schedule(parts, dtype)
        assert self._schedule is not None
        sums = torch.zeros((), device=device), torch.zeros((), device=device)
        self._step = PipelineStep(parts, loss, gradient, autocast=autocast, sums=sums)
        try:
            # the last stage's output is the loss itself, but torch requires targets
            self._schedule.step(target=torch.zeros(len(parts)), return_outputs=False)
        except BaseException:
            self._shape = self._schedule = None  # micro-batches in flight are lost
            raise
        finally:
            self._step = None
        return sums

    def _build_schedule(self, parts: Sequence[Batch], dtype: torch.dtype) -> Schedule1F1B | ScheduleGPipe:
        """Build torch's schedule for this many micro-batches of this shape; it allocates the receive buffers."""
        part, last = parts[0], self.stage.is_last
        arriving = self._boundary(self.stage.layers.start, part.tokens, part.source)
        leaving = [()] if last else self._boundary(self.stage.layers.stop, part.tokens, part.source)
        received, sent = _like(arriving, dtype), _like(leaving, torch.float32 if last else dtype)
        numbered = self.stage.number, self.stage.of, part.tokens.device
        stage = _NumberedStage(self, *numbered, input_args=received, output_args=sent, group=self.line.group)
        # with fewer micro-batches than stages both schedules are the same, and torch's 1F1B refuses them
        schedule = Schedule1F1B if len(parts) >= self.stage.of else ScheduleGPipe
        return schedule(stage, len(parts), loss_fn=lambda loss, target: loss, scale_grads=False)

    def forward(self, *received: Tensor, number: int) -> Tensor | tuple[Tensor, ...]:
        """Run micro-batch `number` through this stage: the tensors to send, or the last stage's share of the loss."""
        assert self._step is not None
        step, part = self._step, self._step.parts[number]
        with step.autocast:
            outputs = self._run(part.tokens, inputs(part), received)
            if not self.stage.is_last:
                dtype = self._dtype(part.tokens.device)
                return tuple(output.to(dtype).contiguous() for output in outputs)
            loss, _, extras = step.loss(self.model, outputs[0], part)
        step.sums[0].add_(loss.detach())
        step.sums[1].add_(extras["nll"].detach())
        return loss.float() * step.gradient

    def finish_gradients(self, local: Mapping[str, Tensor]) -> None:
        """Sum the gradients of `local` parameters over the readers of other rows, and over stages that share them."""
        self.mesh.readers.sum_([part.grad for part in local.values() if part.grad is not None])
        for ranks, names in self._shared:
            trained = [local[name] for name in names if self.model.get_parameter(name).requires_grad]
            for part in trained:
                part.grad = torch.zeros_like(part) if part.grad is None else part.grad
            ranks.sum_([part.grad for part in trained if part.grad is not None])

    def _shared_parameters(self) -> list[tuple[Ranks, list[str]]]:
        """Return the groups of stages that hold the same parameters with this one, and the names of these."""
        assert self.mesh.devices is not None
        groups = []
        for holders in sorted({held for held in self.stage.holders.values() if len(held) > 1}):
            if len(holders) == self.stage.of:
                group = self.line.group
            else:  # every process creates every group, in the same order
                lines = self.mesh.devices.mesh[list(holders)].flatten(1).T.tolist()
                group, _ = distributed.new_subgroups_by_enumeration(lines)
            if self.stage.number in holders:
                names = [name for name, stages in self.stage.holders.items() if stages == holders]
                rank = holders.index(self.stage.number)
                groups.append((replace(self.line, rank=rank, ranks=len(holders), group=group), names))
        return groups

    def _run(self, tokens: Tensor, arguments: Mapping[str, Any], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run this stage's layers; return what the next stage receives, or features (batch, time, d_model)."""
        model, stage, rows = self.model, self.stage, RowInputs(**arguments)
        wide = [tensor.to(self._wide) for tensor in received]
        if len(stage.spans) == 1:
            return (model.forward_rows(tokens, rows, hidden=wide[0] if wide else None),)
        if stage.within("encoder"):
            encoded = model.encode(model.require_source(rows.source), rng=rows.rng, hidden=wide[0] if wide else None)
        else:
            encoded = received[0]
        if not stage.within("decoder"):
            return (encoded,)
        hidden = None if stage.begins("decoder") else wide[1]
        x = model.forward_rows(tokens, rows, hidden=hidden, encoded=encoded)
        return (x,) if stage.is_last else (encoded, x)

    @torch.no_grad()
    def _evaluate(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Return features (batch, time, d_model) on every process, computed stage after stage."""
        stage, group, device = self.stage, self.line.group, tokens.device
        dtype = self._dtype(device)
        shapes = self._boundary(stage.layers.start, tokens, arguments.get("source"))
        received = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        for tensor in received:
            distributed.recv(tensor, group=group, group_src=stage.number - 1)
        outputs = self._run(tokens, arguments, received)
        if stage.is_last:
            features = outputs[0].to(self._wide).contiguous()
        else:
            for tensor in outputs:
                distributed.send(tensor.to(dtype).contiguous(), group=group, group_dst=stage.number + 1)
            shape = *tokens.shape, self.model.config.d_model
            features = torch.empty(shape, dtype=self._wide, device=device)
        distributed.broadcast(features, group=group, group_src=stage.of - 1)
        return features

    @contextmanager
    def shared_head(self) -> Iterator[None]:
        """Copy the last stage's head to every stage; undone on exit. All processes enter this at the same time."""
        last, device, group = self.stage.of - 1, device_of(self.model), self.line.group
        parameters = dict(self.model.named_parameters())
        tables = ["embedding.weight"] if self.stage.tied else []
        names = [name for name in self.stage.holders if name.startswith("output.")] + tables
        if self._head is None:
            parts = {name: local_part(parameters[name]) for name in names} if self.stage.is_last else {}
            message = [[(name, part.shape, part.dtype) for name, part in parts.items()]]
            distributed.broadcast_object_list(message, group=group, group_src=last, device=torch.device("cpu"))
            self._head = message[0]
        lent = []
        for name, shape, dtype in self._head:
            if name in parameters:
                values = local_part(parameters[name]).detach()
            else:
                values = torch.empty(shape, dtype=dtype, device=device)
            distributed.broadcast(values, group=group, group_src=last)
            if name not in parameters:
                owner, _, kind = name.rpartition(".")
                module = self.model.get_submodule(owner)
                module.register_parameter(kind, nn.Parameter(values, requires_grad=False))
                lent.append((module, kind))
        try:
            yield
        finally:
            for module, kind in lent:
                module.register_parameter(kind, None)

    @property
    def _wide(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def _dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of hidden states: bf16 under bf16 autocast."""
        enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        return torch.bfloat16 if enabled and dtype == torch.bfloat16 else self._wide

    def _boundary(self, layer: int, tokens: Tensor, source: EncoderInput | None) -> list[tuple[int, ...]]:
        """Return the shapes of what is sent before a layer: an encoded source, and hidden states of local tokens."""
        width, spans = self.model.config.d_model, self.stage.spans
        if layer == 0:
            return []
        if len(spans) == 1:
            return [(*self._local(tokens), width)]
        assert source is not None
        if layer < spans["decoder"].start:
            return [(*self._local(source.tokens), width)]
        encoded = *source.tokens.shape, width
        return [encoded] if layer == spans["decoder"].start else [encoded, (*self._local(tokens), width)]

    def _local(self, tokens: Tensor) -> tuple[int, int]:
        rows, time = tokens.shape
        return rows, time // self.mesh.layout.tensor if self.mesh.layout.sequence else time


class _NumberedStage(PipelineStage):
    """torch's stage, passing the micro-batch's number to its module."""

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *rest: Any, **options: Any
    ) -> Any:
        with _unwrapped_errors():
            return super().forward_one_chunk(fwd_chunk_id, args, {"number": fwd_chunk_id}, *rest, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *rest: Any, **options: Any) -> None:
        with _unwrapped_errors():
            super().backward_one_chunk(bwd_chunk_id, *rest, **options)


@contextmanager
def _unwrapped_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None  # torch wraps the error of a stage


def _like(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes)
