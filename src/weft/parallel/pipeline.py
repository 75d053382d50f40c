"""Pipeline parallelism: a Transformer's layers in stages, one per process of the pipeline axis (Huang et al. 2019).

A step's micro-batches flow through the stages. In torch's 1F1B schedule a stage alternates forward and backward passes,
so that it never holds more micro-batches than there are stages after it (Narayanan et al. 2019). Every stage has all
tokens, masks and positions of a micro-batch: only hidden states, and their gradients on the way back, are sent.

The model's code runs on every stage. `stages.keep_stage` leaves it the layers of its stage; `Pipeline` passes it the
hidden states received from the previous stage, and sends its output to the next. The last stage computes the loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from weft.data.batch import Batch
from weft.errors import ConfigError
from weft.models.base import EncoderInput, LanguageModel, device_of, inputs
from weft.models.transformer import RowInputs, Transformer
from weft.parallel.mesh import Mesh
from weft.parallel.passes import Context, LossFunction
from weft.parallel.ranks import Ranks
from weft.parallel.sharding import local_part
from weft.parallel.stages import Stage


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
        """Accumulate the gradients of the same micro-batches on all stages; the sums are the last stage's, else 0."""
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
            outputs = self._run_layers(part.tokens, inputs(part), received)
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

    def _run_layers(
        self, tokens: Tensor, arguments: Mapping[str, Any], received: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
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
        outputs = self._run_layers(tokens, arguments, received)
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
        last, device = self.stage.of - 1, device_of(self.model)
        parameters = dict(self.model.named_parameters())
        tables = ["embedding.weight"] if self.stage.tied else []
        names = [name for name in self.stage.holders if name.startswith("output.")] + tables
        if self._head is None:
            parts = {name: local_part(parameters[name]) for name in names} if self.stage.is_last else {}
            message = [[(name, part.shape, part.dtype) for name, part in parts.items()]]
            distributed.broadcast_object_list(
                message, group=self.line.group, group_src=last, device=torch.device("cpu")
            )
            self._head = message[0]
        lent = []
        for name, shape, dtype in self._head:
            if name in parameters:
                values = local_part(parameters[name]).detach()
            else:
                values = torch.empty(shape, dtype=dtype, device=device)
            distributed.broadcast(values, group=self.line.group, group_src=last)
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
