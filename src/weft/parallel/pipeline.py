"""A Transformer's layers divided into stages, one a process of the pipeline axis (Huang et al. 2019).

A step's batch goes through the stages in parts. torch's 1F1B schedule has a stage pass one part forward and one back
in turn, so that it never keeps more parts in memory than there are stages ahead (Narayanan et al. 2019). Every stage
has all of a part's tokens, masks and positions: only hidden states, and their gradients on the way back, travel.

The model's own code runs on every stage. `stages.cut` leaves it the layers of its stage; `Pipeline` gives it the hidden
states that came from the stage before, and sends on what it makes of them. The last stage computes the loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from weft.data.batch import Batch
from weft.errors import ConfigError
from weft.models.base import EncoderInput, LanguageModel, device_of, inputs
from weft.models.transformer import RowInputs, Transformer
from weft.parallel.mesh import Mesh
from weft.parallel.passes import Work
from weft.parallel.pieces import local_part
from weft.parallel.ranks import Ranks
from weft.parallel.stages import Stage


@dataclass(frozen=True)
class _Step:
    """A step's parts, what is done with each of them, and the sums of losses and of −log p."""

    parts: Sequence[Batch]
    work: Work
    sums: tuple[Tensor, Tensor]


class Pipeline(nn.Module):
    """One stage of a model that `cut` has divided, and its way of training and evaluating with the others.

    Made by all processes together, after the tensor axis has split what is here.
    """

    def __init__(self, model: LanguageModel, mesh: Mesh, stage: Stage):
        super().__init__()
        assert isinstance(model, Transformer)
        self.model, self.mesh, self.stage = model, mesh, stage
        self.line = mesh.axis("pipeline")
        self._shared = self._groups()
        self._head: list[tuple[str, torch.Size, torch.dtype]] | None = None
        self._kind: Any = None
        self._schedule: Schedule1F1B | ScheduleGPipe | None = None
        self._step: _Step | None = None
        model.wrap(lambda features: self._evaluated)  # training goes through `backward`

    def backward(self, parts: Sequence[Batch], work: Work) -> tuple[Tensor, Tensor]:
        """Add up the gradients of all parts of a batch. All stages are given the same parts, on the device. The sums of
        the losses and of −log p, () each, are those of the last stage; on the others they are 0."""
        shapes = {(part.tokens.shape, None if part.source is None else part.source.tokens.shape) for part in parts}
        if len(shapes) > 1:
            rows = sorted({len(part.tokens) for part in parts})
            raise ConfigError(
                f"parallel.pipeline = {self.stage.of}: the parts of a batch go through the stages at one size; these "
                f"have {' and '.join(map(str, rows))} rows; choose a batch.micro that divides the rows of a process "
                "(batch.size over the processes that read different rows)"
            )
        device = parts[0].tokens.device
        with work.forward():
            dtype = self._dtype(device)
        kind = len(parts), *shapes, dtype
        if kind != self._kind:
            self._kind, self._schedule = kind, self._scheduled(parts, dtype)
        assert self._schedule is not None
        sums = torch.zeros((), device=device), torch.zeros((), device=device)
        self._step = _Step(parts, work, sums)
        try:
            # the last stage's output is the loss already; torch asks for targets all the same
            self._schedule.step(target=torch.zeros(len(parts)), return_outputs=False)
        except BaseException:
            self._kind = self._schedule = None  # what was on its way is lost
            raise
        finally:
            self._step = None
        return sums

    def _scheduled(self, parts: Sequence[Batch], dtype: torch.dtype) -> Schedule1F1B | ScheduleGPipe:
        """torch's engine for so many parts of this size; what is received has its memory there."""
        part, last = parts[0], self.stage.is_last
        arriving = self._boundary(self.stage.layers.start, part.tokens, part.source)
        leaving = [()] if last else self._boundary(self.stage.layers.stop, part.tokens, part.source)
        received, sent = _like(arriving, dtype), _like(leaving, torch.float32 if last else dtype)
        own = self.stage.number, self.stage.of, part.tokens.device
        stage = _TorchStage(self, *own, input_args=received, output_args=sent, group=self.line.group)
        # fewer parts than stages never fill the pipeline; then both schedules do the same, and torch has it so
        schedule = Schedule1F1B if len(parts) >= self.stage.of else ScheduleGPipe
        return schedule(stage, len(parts), loss_fn=lambda loss, target: loss, scale_grads=False)

    def forward(self, *received: Tensor, number: int) -> Tensor | tuple[Tensor, ...]:
        """A part of the step through this stage: what the next one receives, or the last one's share of the loss."""
        assert self._step is not None
        part, work = self._step.parts[number], self._step.work
        with work.forward():
            outputs = self._through(part.tokens, inputs(part), received)
            if not self.stage.is_last:
                dtype = self._dtype(part.tokens.device)
                return tuple(output.to(dtype).contiguous() for output in outputs)
            loss, _, extras = work.loss(self.model, outputs[0], part)
        self._step.sums[0].add_(loss.detach())
        self._step.sums[1].add_(extras["nll"].detach())
        return work.share(loss).float()

    def collect(self, local: Mapping[str, Tensor]) -> None:
        """After a step's last pass: sum gradients over those that read other rows, and over stages that hold the same.
        `local` are the parameters' parts that are here, with their gradients."""
        self.mesh.readers.sum_([part.grad for part in local.values() if part.grad is not None])
        for ranks, names in self._shared:
            trained = [local[name] for name in names if self.model.get_parameter(name).requires_grad]
            for part in trained:
                part.grad = torch.zeros_like(part) if part.grad is None else part.grad
            ranks.sum_([part.grad for part in trained if part.grad is not None])

    def _groups(self) -> list[tuple[Ranks, list[str]]]:
        assert self.mesh.devices is not None
        several = {held for held in self.stage.holders.values() if len(held) > 1}
        found = []
        for held in sorted(several):  # every process makes every group, in one order
            if len(held) == self.stage.of:
                group = self.line.group
            else:
                lines = self.mesh.devices.mesh[list(held)].flatten(1).T.tolist()
                group, _ = distributed.new_subgroups_by_enumeration(lines)
            if self.stage.number in held:
                names = [name for name, stages in self.stage.holders.items() if stages == held]
                found.append((Ranks(held.index(self.stage.number), len(held), group), names))
        return found

    def _through(self, tokens: Tensor, given: Mapping[str, Any], received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the next stage goes on with; features (batch, time, d_model) on the last one.

        Hidden states that came are made as wide as embeddings again, whose type decides that of angles; a stack narrows
        them as it does those.
        """
        model, stage, rows = self.model, self.stage, RowInputs(**given)
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
    def _evaluated(self, tokens: Tensor, **given: Any) -> Tensor:
        """Features (batch, time, d_model) on every process, stage after stage."""
        stage, group, device = self.stage, self.line.group, tokens.device
        dtype = self._dtype(device)
        shapes = self._boundary(stage.layers.start, tokens, given.get("source"))
        received = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        for tensor in received:
            distributed.recv(tensor, group=group, group_src=stage.number - 1)
        outputs = self._through(tokens, given, received)
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
    def whole_head(self) -> Iterator[None]:
        """Inside, every stage has the last one's head, and so the same outputs. All processes enter it together."""
        last, device = self.stage.of - 1, device_of(self.model)
        own = dict(self.model.named_parameters())
        tables = ["embedding.weight"] if self.stage.tied else []
        names = [name for name in self.stage.holders if name.startswith("output.")] + tables
        if self._head is None:
            parts = {name: local_part(own[name]) for name in names} if self.stage.is_last else {}
            told = [[(name, part.shape, part.dtype) for name, part in parts.items()]]
            distributed.broadcast_object_list(told, group=self.line.group, group_src=last, device=torch.device("cpu"))
            self._head = told[0]
        lent = []
        for name, shape, dtype in self._head:
            whole = local_part(own[name]).detach() if name in own else torch.empty(shape, dtype=dtype, device=device)
            distributed.broadcast(whole, group=self.line.group, group_src=last)
            if name not in own:
                owner, _, kind = name.rpartition(".")
                module = self.model.get_submodule(owner)
                module.register_parameter(kind, nn.Parameter(whole, requires_grad=False))
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
        """That of hidden states, which are bf16 where products are."""
        on, kind = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        return torch.bfloat16 if on and kind == torch.bfloat16 else self._wide

    def _boundary(self, layer: int, tokens: Tensor, source: EncoderInput | None) -> list[tuple[int, ...]]:
        """Shapes of what passes before a layer: an encoded source, and hidden states, of this process's tokens alone
        where the tensor axis divides them."""
        width, spans = self.model.config.d_model, self.stage.spans
        if layer == 0:
            return []
        if len(spans) == 1:
            return [(*self._own(tokens), width)]
        assert source is not None
        if layer < spans["decoder"].start:
            return [(*self._own(source.tokens), width)]
        encoded = *source.tokens.shape, width
        return [encoded] if layer == spans["decoder"].start else [encoded, (*self._own(tokens), width)]

    def _own(self, tokens: Tensor) -> tuple[int, int]:
        rows, time = tokens.shape
        return rows, time // self.mesh.layout.tensor if self.mesh.layout.sequence else time


class _TorchStage(PipelineStage):
    """torch's stage, which tells its layers which part is on its way."""

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *given: Any, **named: Any
    ) -> Any:
        with _unwrapped_errors():
            return super().forward_one_chunk(fwd_chunk_id, args, {"number": fwd_chunk_id}, *given, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *given: Any, **named: Any) -> None:
        with _unwrapped_errors():
            super().backward_one_chunk(bwd_chunk_id, *given, **named)


@contextmanager
def _unwrapped_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None  # torch wraps what went wrong


def _like(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes)
