"""A Transformer's matrices split over the processes of the tensor axis, by torch's DTensor (`plan.py` says which).

Between the split matrices activations are plain tensors: the same on every process, or with `sequence` each process's
own tokens of a row. The model's code is that of one process; it has fewer heads here, and a part of the words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from weft.layout import Layout
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel
from weft.models.recurrent import Recurrent
from weft.models.transformer import Stack, Transformer
from weft.nn.attention import CrossAttention, SelfAttention
from weft.nn.block import Block, Sublayer
from weft.nn.dropout import Part
from weft.nn.feedforward import Gated, Plain
from weft.parallel.plan import Placement, placement, plan

# with a gradient; torch 2.13 has renamed it
_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
OUTPUT = ("output", "output_bias", "output.weight", "output.bias", "output.words.weight", "output.words.bias")


def split(model: LanguageModel, layout: Layout, mesh: DeviceMesh) -> None:
    """Split the model's matrices over the processes of `mesh`, the tensor axis, and tell its parts what they have."""
    patterns = plan(model.config)
    names = [name for name, module in model.named_modules() if placement(name, patterns)]
    styles = {name: _style(name, placement(name, patterns), layout) for name in names}
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        _split_stack(stack, layout, mesh)
    if layout.sequence:
        for name, module in model.named_modules():
            if isinstance(module, Stack):
                styles |= _dividing_tokens(name, module, model)
    parallelize_module(model, mesh, styles, src_data_rank=None)
    _split_words(model, mesh)


def _style(name: str, placed: Placement | None, layout: Layout) -> ParallelStyle:
    """What torch does around a split module."""
    between = Shard(1) if layout.sequence else Replicate()
    if placed == "column":
        # a decoder reads its source whole
        return ColwiseParallel(input_layouts=Replicate() if name.endswith(".kv") else between)
    if placed == "row":
        return RowwiseParallel(output_layouts=between)
    return RowwiseParallel(input_layouts=Replicate())


def _dividing_tokens(name: str, stack: Stack, model: LanguageModel) -> dict[str, ParallelStyle]:
    """Tokens are divided before a stack's first layer and gathered after its last, where these are here."""
    here = {key for key, _ in stack.blocks.named_children()}
    layers = (getattr(model.config, "encoder_layers", None) if name == "encoder" else None) or model.config.layers  # type: ignore[attr-defined]
    styles: dict[str, ParallelStyle] = {}
    if "0" in here:
        styles[f"{name}.blocks.0"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
    if str(layers - 1) in here:
        styles[name] = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    return styles


def padded(features: Callable[..., Tensor], parts: int) -> Callable[..., Tensor]:
    """`features` for rows of any length, which are filled up on the right so that `parts` processes can divide them."""

    def whole(tokens: Tensor, **given: Any) -> Tensor:
        source = given.get("source")
        if source is not None:
            given["source"] = _Source(*_filled(source.tokens, source.mask, parts))
        time, extra = tokens.shape[1], -tokens.shape[1] % parts
        if not extra:
            return features(tokens, **given)
        tokens, mask = _filled(tokens, given.get("mask"), parts)
        for name in ("positions", "segments", "documents"):
            if given.get(name) is not None:
                given[name] = nn.functional.pad(given[name], (0, extra))
        return features(tokens, **{**given, "mask": mask})[:, :time]

    return whole


class _Source(NamedTuple):
    tokens: Tensor
    mask: Tensor | None


def _filled(tokens: Tensor, mask: Tensor | None, parts: int) -> tuple[Tensor, Tensor | None]:
    extra = -tokens.shape[1] % parts
    if not extra:
        return tokens, mask
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    return nn.functional.pad(tokens, (0, extra)), nn.functional.pad(real, (0, extra))


def _split_stack(stack: Stack, layout: Layout, mesh: DeviceMesh) -> None:
    """Fewer heads, and dropouts that know which part of the whole they see."""
    rank, parts = mesh.get_local_rank(), mesh.size()
    for module in stack.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            module.heads //= parts
            module.kv_heads //= parts
            module.first_head = rank * module.heads
        if isinstance(module, SelfAttention):
            module.widths = [width // parts for width in module.widths]
        if isinstance(module, Plain | Gated):
            module.dropout.part = Part(-1, rank, parts)
        if isinstance(module, Gated):
            module.swiglu = None  # its gradient needs the whole matrix
        if isinstance(module, Sublayer) and layout.sequence:
            module.dropout.part = Part(1, rank, parts)
    if stack.position.biases and len(stack.blocks):
        heads = next(block.attention.heads for block in stack.blocks if isinstance(block, Block))
        stack.position.heads_here = slice(rank * heads, (rank + 1) * heads)


# ---- words


@dataclass(frozen=True)
class Across:
    """The processes that divide the words (`nn.loss.Across`): each has `own` of them, the last one perhaps fewer."""

    group: Any
    rank: int
    parts: int
    vocab_size: int

    @property
    def own(self) -> int:
        return -(-self.vocab_size // self.parts)

    @property
    def first(self) -> int:
        return self.rank * self.own

    def sum_(self, tensor: Tensor) -> None:
        distributed.all_reduce(tensor, group=self.group)

    def max_(self, tensor: Tensor) -> None:
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=self.group)

    def local(self, table: Tensor) -> Tensor:
        return table.to_local() if isinstance(table, DTensor) else table

    def gather(self, logits: Tensor) -> Tensor:
        own = nn.functional.pad(logits, (0, self.own - logits.shape[-1])).movedim(-1, 0).contiguous()
        if torch.is_grad_enabled():
            gathered = _gather(own, 0, self.group)
        else:  # torch 2.11 has no such operation in inference mode
            pieces = [torch.empty_like(own) for _ in range(self.parts)]
            distributed.all_gather(pieces, own, group=self.group)
            gathered = torch.cat(pieces)
        return gathered.movedim(0, -1)[..., : self.vocab_size]


def _split_words(model: LanguageModel, mesh: DeviceMesh) -> None:
    """The tables that logits are made with, and what is made of them."""
    for name, parameter in list(model.named_parameters()):
        if name in OUTPUT and not isinstance(parameter, DTensor):
            owner, _, last = name.rpartition(".")
            table = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            model.get_submodule(owner).register_parameter(last, nn.Parameter(table, parameter.requires_grad))
    across = Across(mesh.get_group(), mesh.get_local_rank(), mesh.size(), model.config.vocab_size)  # type: ignore[attr-defined]
    if isinstance(model, Transformer):
        if model.token_head is not None:
            model.token_head.across = across
    else:
        assert isinstance(model, Recurrent | Bahdanau)
        model.across = across
