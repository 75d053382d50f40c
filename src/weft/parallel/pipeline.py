"""A Transformer's layers divided into stages, one a process of the pipeline axis (Huang et al. 2019).

A step's batch goes through the stages in parts. torch's 1F1B schedule has a stage pass one part forward and one back
in turn, so that it never keeps more parts in memory than there are stages ahead (Narayanan et al. 2019). Every stage
has all of a part's tokens, masks and positions: only hidden states, and their gradients on the way back, travel.

The model's own code runs on every stage. `stages.cut` leaves it the layers of its stage; `Pipeline` has it begin with
what came from the stage before, and stop where the next one takes over. An objective's loss is asked of every stage,
since it knows what the model reads of a batch; it is computed on the last one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from weft.data.batch import Batch
from weft.errors import ConfigError, ModelError
from weft.models.base import LanguageModel, Source, device_of
from weft.models.transformer import SourceCache, Transformer
from weft.nn.dropout import following
from weft.parallel.mesh import Mesh
from weft.parallel.ranks import Ranks
from weft.parallel.stages import Stage

LossSum = Callable[[LanguageModel, Batch], tuple[Tensor, Tensor | int, dict[str, Tensor]]]


class _Passed(Exception):  # noqa: N818 — nothing is wrong: the stage's part of a pass is done
    """What goes on to the next stage. It ends an objective's loss where its features would begin."""

    def __init__(self, outputs: tuple[Tensor, ...]):
        super().__init__()
        self.outputs = outputs


@dataclass(frozen=True)
class _Work:
    """A step's parts, and what is done with each of them."""

    parts: Sequence[Batch]
    loss: LossSum
    share: Callable[[Tensor], Tensor]
    scope: Callable[[], AbstractContextManager[Any]]
    sums: tuple[Tensor, Tensor]  # of losses and of −log p


class Pipeline:
    """One stage of a model that `cut` has divided, and its way of training and evaluating with the others.

    Made by all processes together, after the tensor axis has split what is here.
    """

    def __init__(self, model: LanguageModel, mesh: Mesh, stage: Stage):
        assert isinstance(model, Transformer)
        self.model, self.mesh, self.stage = model, mesh, stage
        self.line = mesh.axis("pipeline")
        self._shared = self._groups()
        self._head: list[tuple[str, torch.Size, torch.dtype]] | None = None
        self._kind: Any = None
        self._schedule: Schedule1F1B | ScheduleGPipe | None = None
        self._layers = _Layers(self)
        self._work: _Work | None = None
        self._part: Batch | None = None  # that is being passed forward; none in evaluation
        self._received: tuple[Tensor, ...] = ()
        self._encoded: Tensor | None = None
        self._reading = "decoder" if "decoder" in stage.spans else "encoder"
        model.features, model.embed = self._features, self._embed  # type: ignore[method-assign]
        model.start = _refuse  # type: ignore[method-assign]
        if len(stage.spans) == 2:
            model.encode = self._encode  # type: ignore[method-assign]
            assert model.encoder is not None
            # after the hooks of the tensor axis: what it gives is whole
            model.encoder.register_forward_hook(lambda module, given, encoded: setattr(self, "_encoded", encoded))

    # ---- training

    def backward(
        self,
        parts: Sequence[Batch],
        loss: LossSum,
        share: Callable[[Tensor], Tensor],
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> tuple[Tensor, Tensor]:
        """Add up the gradients of all parts of a batch, of what `share` makes of each one's loss.

        All stages are given the same parts, on the device. `scope` is entered around every forward pass. The sums of
        the losses and of −log p, () each, are those of the last stage; on the others they are 0.
        """
        shapes = {_shapes(part) for part in parts}
        if len(shapes) > 1:
            rows = sorted({len(part.tokens) for part in parts})
            raise ConfigError(
                f"parallel.pipeline = {self.stage.of}: the parts of a batch go through the stages at one size; these "
                f"have {' and '.join(map(str, rows))} rows; choose a batch.micro that divides the rows of a process "
                "(batch.size over the processes that read different rows)"
            )
        device = parts[0].tokens.device
        with scope():
            dtype = self._dtype(device)
        kind = len(parts), *shapes, dtype
        if kind != self._kind:
            self._kind, self._schedule = kind, self._scheduled(parts, dtype)
        assert self._schedule is not None
        sums = torch.zeros((), device=device), torch.zeros((), device=device)
        self._work = _Work(parts, loss, share, scope, sums)
        try:
            # the last stage's output is the loss already; torch asks for targets all the same
            self._schedule.step(target=torch.zeros(len(parts)), return_outputs=False)
        except BaseException:
            self._kind = self._schedule = None  # what was on its way is lost
            raise
        finally:
            self._work = None
        return sums

    def _scheduled(self, parts: Sequence[Batch], dtype: torch.dtype) -> Schedule1F1B | ScheduleGPipe:
        """torch's engine for so many parts of this size; what is received has its memory there."""
        part, last = parts[0], self.stage.is_last
        arriving = self._boundary(self.stage.layers.start, part.tokens, part.source)
        leaving = [()] if last else self._boundary(self.stage.layers.stop, part.tokens, part.source)
        stage = _TorchStage(
            self,
            _like(arriving, dtype),
            _like(leaving, torch.float32 if last else dtype),
            part.tokens.device,
        )
        # fewer parts than stages never fill the pipeline; then both schedules do the same, and torch has it so
        schedule = Schedule1F1B if len(parts) >= self.stage.of else ScheduleGPipe
        return schedule(stage, len(parts), loss_fn=lambda loss, target: loss, scale_grads=False)

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        """One part through this stage: what the next one receives, or on the last stage its share of the loss."""
        work, part = self._work, self._part
        assert work is not None and part is not None
        self._received = received
        try:
            with work.scope():
                loss, _, extras = work.loss(self.model, part)
        except _Passed as passed:
            return passed.outputs
        finally:
            self._received, self._encoded = (), None
        work.sums[0].add_(loss.detach())
        work.sums[1].add_(extras["nll"].detach())
        return work.share(loss).float()

    @contextmanager
    def passing(self, number: int, forward: bool) -> Iterator[None]:
        """Inside, a part of the step goes forward or back; blocks that run again drop the same numbers."""
        assert self._work is not None
        part = self._work.parts[number]
        self._part = part if forward else None
        try:
            with following(part.keys):
                yield
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch wraps what went wrong
        finally:
            self._part = None

    def collect(self, local: Mapping[str, Tensor]) -> None:
        """After a step's last pass: sum gradients over those that read other rows, and over stages that hold the same.

        `local` are the parameters' parts that are here, with their gradients.
        """
        self.mesh.readers.sum_([part.grad for part in local.values() if part.grad is not None])
        for ranks, names in self._shared:
            trained = [local[name] for name in names if self.model.get_parameter(name).requires_grad]
            for part in trained:
                part.grad = torch.zeros_like(part) if part.grad is None else part.grad
            ranks.sum_([part.grad for part in trained if part.grad is not None])

    def _groups(self) -> list[tuple[Ranks, list[str]]]:
        """What this stage holds together with others, and with which."""
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

    # ---- what the model's own code finds in place of its methods

    def _features(self, tokens: Tensor, **given: Any) -> Tensor:
        """`Transformer.features`, from where the stage before came to; on all stages together outside of training."""
        if self._part is None:
            return self._evaluated(tokens, given)
        outputs = self._through(tokens, given)
        if self.stage.is_last:
            return outputs[0]
        dtype = self._dtype(tokens.device)
        raise _Passed(tuple(output.to(dtype).contiguous() for output in outputs))

    def _through(self, tokens: Tensor, given: dict[str, Any]) -> tuple[Tensor, ...]:
        """What the next stage goes on with; features (batch, time, d_model) on the last one."""
        model, stage = self.model, self.stage
        if "decoder" in stage.spans and not stage.within("decoder"):
            model.encode(model._given(given.get("source")))
            assert self._encoded is not None
            return (self._encoded,)
        x = Transformer.features(model, tokens, **given)
        return (x,) if self._encoded is None or stage.is_last else (self._encoded, x)

    def _embed(self, tokens: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        """Embedded tokens where a stack begins, else the hidden states that came (batch, time, d_model).

        They are as wide as embeddings again, whose type decides that of angles; a stack narrows them as it does those.
        """
        if self.stage.begins(self._reading):
            return Transformer.embed(self.model, tokens, table, segments)
        return self._received[-1].to(self._wide)

    def _encode(self, source: Source) -> SourceCache:
        """Keys and values of the source for this stage's layers."""
        model = self.model
        assert model.encoder is not None and model.decoder is not None
        if self.stage.within("encoder"):
            self._reading = "encoder"
            try:
                return Transformer.encode(model, source)
            finally:
                self._reading = "decoder"
        self._encoded = encoded = model.encoder.dropout(self._received[0])
        return [block.cross.keys_values(encoded) for block in model.decoder.blocks]  # type: ignore[operator,union-attr]

    # ---- evaluation

    @torch.no_grad()
    def _evaluated(self, tokens: Tensor, given: dict[str, Any]) -> Tensor:
        """Features (batch, time, d_model) on every process, stage after stage."""
        stage, group, device = self.stage, self.line.group, tokens.device
        dtype = self._dtype(device)
        shapes = self._boundary(stage.layers.start, tokens, given.get("source"))
        self._received = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        for tensor in self._received:
            distributed.recv(tensor, group=group, group_src=stage.number - 1)
        try:
            outputs = self._through(tokens, given)
        finally:
            self._received, self._encoded = (), None
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
            parts = {name: _local(own[name]) for name in names} if self.stage.is_last else {}
            told = [[(name, part.shape, part.dtype) for name, part in parts.items()]]
            distributed.broadcast_object_list(told, group=self.line.group, group_src=last, device=torch.device("cpu"))
            self._head = told[0]
        lent = []
        for name, shape, dtype in self._head:
            whole = _local(own[name]).detach() if name in own else torch.empty(shape, dtype=dtype, device=device)
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

    # ---- what travels

    @property
    def _wide(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def _dtype(self, device: torch.device) -> torch.dtype:
        """That of hidden states, which are bf16 where products are."""
        kind = device.type
        narrow = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
        return torch.bfloat16 if narrow else self._wide

    def _boundary(self, layer: int, tokens: Tensor, source: Source | None) -> list[tuple[int, ...]]:
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


class _Layers(nn.Module):
    """The stage as torch's engine calls it."""

    def __init__(self, pipeline: Pipeline):
        super().__init__()
        self.model, self.pipeline = pipeline.model, pipeline

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        """See `Pipeline.forward`."""
        return self.pipeline.forward(*received)


class _TorchStage(PipelineStage):
    """torch's stage, which tells which part is on its way."""

    def __init__(
        self, pipeline: Pipeline, arriving: tuple[Tensor, ...], leaving: tuple[Tensor, ...], device: torch.device
    ):
        own = pipeline.stage
        super().__init__(
            pipeline._layers,
            own.number,
            own.of,
            device,
            input_args=arriving,
            output_args=leaving,
            group=pipeline.line.group,
        )
        self.pipeline = pipeline

    def forward_one_chunk(self, fwd_chunk_id: int, *given: Any, **named: Any) -> Any:
        """Part `fwd_chunk_id` forward."""
        with self.pipeline.passing(fwd_chunk_id, forward=True):
            return super().forward_one_chunk(fwd_chunk_id, *given, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *given: Any, **named: Any) -> None:
        """Part `bwd_chunk_id` back."""
        with self.pipeline.passing(bwd_chunk_id, forward=False):
            super().backward_one_chunk(bwd_chunk_id, *given, **named)


def _like(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes)


def _shapes(part: Batch) -> tuple[torch.Size, ...]:
    return part.tokens.shape, *(() if part.source is None else (part.source.tokens.shape,))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, distributed.tensor.DTensor) else parameter


def _refuse(*given: Any, **named: Any) -> NoReturn:
    raise ModelError("a model whose layers are divided into stages can't generate; load its checkpoint on one process")
