"""A model's matrices split over the processes of the tensor axis, by torch's DTensor.

A block needs one sum over the processes in each pass (Shoeybi et al. 2019, §3): queries, keys, values and the way up
are split by columns, so that heads and nonlinearities stay local; the projections back by rows, whose products are
summed. The tables of words are split by words. What recurs (Elman, LSTM, GRU, Bahdanau) would have to be summed at
every token, so its cells are whole everywhere, and the tables of words, most of such a model, are split alone.

Between the split matrices activations are plain tensors: the same on every process, or with `sequence` each process's
own tokens of a row. The model's code is that of one process; it has fewer heads here, and a part of the words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, distributed, nn
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
from torch.nn import functional as F

from weft.config import Config
from weft.errors import ConfigError
from weft.layout import Layout
from weft.models import config as models
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel
from weft.models.recurrent import Recurrent
from weft.models.stack import Stack
from weft.models.transformer import Transformer
from weft.nn.attention import CrossAttention, SelfAttention
from weft.nn.block import Block, Sublayer
from weft.nn.dropout import AxisShard, RowRng
from weft.nn.feedforward import Gated, Plain
from weft.nn.init import empty_weights
from weft.nn.linear import Linear
from weft.parallel.context import differentiable_gather
from weft.parallel.mesh import Mesh
from weft.parallel.pieces import local_part
from weft.parallel.ranks import Ranks

Placement = Literal["column", "row", "word"]

BLOCKS: dict[str, Placement] = {
    "*.attention.qkv": "column",
    "*.attention.out": "row",
    "*.cross.q": "column",
    "*.cross.kv": "column",
    "*.cross.out": "row",
    "*.feedforward.up": "column",
    "*.feedforward.gate_up": "column",
    "*.feedforward.down": "row",
}
TABLES: dict[str, Placement] = {"embedding": "word", "source_embedding": "word"}
# whole everywhere, but a process sees only its own heads of what they act on: their gradients are sums
OF_HEADS = ("*.q_norm.*", "*.k_norm.*", "*.relative_keys", "*.relative_values", "*.position.weight")
# the same where a process has only its own tokens between the split matrices
OF_TOKENS = ("*_skip.norm.*", "*_skip.norm_out.*", "encoder.norm.*", "decoder.norm.*")
OUTPUT = ("output", "output_bias", "output.weight", "output.bias", "output.words.weight", "output.words.bias")


def plan(model: Config) -> dict[str, Placement]:
    """The placement of each module of a model, by the patterns of their names."""
    match model:
        case models.TransformerConfig():
            return {**TABLES, **BLOCKS}
        case models.Recurrent() | models.Bahdanau():
            return TABLES
        case _:
            raise ConfigError("parallel: an n-gram model is counted, by one process; start one")


def placement(name: str, patterns: dict[str, Placement]) -> Placement | None:
    """The placement of the module with this name, if it is split."""
    return next((placed for pattern, placed in patterns.items() if fnmatchcase(name, pattern)), None)


def is_sum(name: str, layout: Layout, biases: bool) -> bool:
    """Whether the gradient of a parameter that is whole everywhere is a sum over the processes of the tensor axis.
    `biases`: the model's positions add to the scores of each head (their table is then read by heads)."""
    names = OF_HEADS if biases else OF_HEADS[:-1]
    return any(fnmatchcase(name, pattern) for pattern in (*names, *(OF_TOKENS if layout.sequence else ())))


def split(model: LanguageModel, layout: Layout, mesh: DeviceMesh) -> None:
    """Split the model's matrices over the processes of `mesh`, the tensor axis, and tell its parts what they have."""
    patterns = plan(model.config)
    names = [name for name, module in model.named_modules() if placement(name, patterns)]
    styles = {name: _style(name, placement(name, patterns), layout) for name in names}
    for name, module in model.named_modules():
        if isinstance(module, Stack):
            _split_stack(module, layout, mesh)
            styles |= _dividing_tokens(name, module, model) if layout.sequence else {}
    parallelize_module(model, mesh, styles, src_data_rank=None)
    _split_words(model, mesh)


def _style(name: str, placed: Placement | None, layout: Layout) -> ParallelStyle:
    between = Shard(1) if layout.sequence else Replicate()
    if placed == "column":
        # a decoder reads its source whole
        return ColwiseParallel(input_layouts=Replicate() if name.endswith(".kv") else between)
    return RowwiseParallel(output_layouts=between) if placed == "row" else RowwiseParallel(input_layouts=Replicate())


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
                given[name] = F.pad(given[name], (0, extra))
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
    return F.pad(tokens, (0, extra)), F.pad(real, (0, extra))


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
            module.dropout.shard = AxisShard(-1, rank, parts)
        if isinstance(module, Gated):
            module.swiglu = None  # its gradient needs the whole matrix
        if isinstance(module, Sublayer) and layout.sequence:
            module.dropout.shard = AxisShard(1, rank, parts)
    if stack.position.biases and len(stack.blocks):
        heads = next(block.attention.heads for block in stack.blocks if isinstance(block, Block))
        stack.position.heads_here = slice(rank * heads, (rank + 1) * heads)


@dataclass(frozen=True)
class Across:
    """The processes that divide the words (`nn.loss.VocabShard`): each has `own` of them, the last perhaps fewer."""

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
        return local_part(table)

    def gather(self, logits: Tensor) -> Tensor:
        own = F.pad(logits, (0, self.own - logits.shape[-1])).movedim(-1, 0).contiguous()
        if torch.is_grad_enabled():
            gathered = differentiable_gather(own, 0, self.group)
        else:  # torch 2.11 has no such operation in inference mode
            pieces = [torch.empty_like(own) for _ in range(self.parts)]
            distributed.all_gather(pieces, own, group=self.group)
            gathered = torch.cat(pieces)
        return gathered.movedim(0, -1)[..., : self.vocab_size]


def _split_words(model: LanguageModel, mesh: DeviceMesh) -> None:
    for name, parameter in list(model.named_parameters()):
        if name in OUTPUT and not isinstance(parameter, DTensor):
            owner, _, last = name.rpartition(".")
            table = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            model.get_submodule(owner).register_parameter(last, nn.Parameter(table, parameter.requires_grad))
    across = Across(mesh.get_group(), mesh.get_local_rank(), mesh.size(), model.config.vocab_size)  # type: ignore[attr-defined]
    if isinstance(model, Transformer):
        if model.token_head is not None:
            model.token_head.vocab_shard = across
    else:
        assert isinstance(model, Recurrent | Bahdanau)
        model.vocab_shard = across


# ---- a split model that is only used from here on
#
# DTensor works out at every product what has to travel, and a step of one token would spend most of its time on that.
# Without gradients it is known once the model is split: this process's part of each matrix, and what to sum.


def keep_local(model: LanguageModel, mesh: Mesh) -> None:
    """Let a model that `tensor.split` has split over a mesh's tensor axis go without DTensor, once it has its weights.

    Its processes then have to choose the same tokens. They get the same logits, to the bit, but a GPU adds up
    probabilities in an order of its own each time: what the first process chooses is what all go on with.
    """
    ranks, patterns = mesh.axis("tensor"), plan(model.config)
    for name, module in list(model.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(local_part(parameter).detach(), requires_grad=False))
        match placement(name, patterns), module:
            case "column", Linear():
                model.set_submodule(name, LocalLinear(module))
            case "row", Linear():
                model.set_submodule(name, RowLinear(module, ranks))
            case "word", nn.Embedding():
                model.set_submodule(name, WordEmbedding(module, ranks))
    model.peers = mesh.world


class LocalLinear(Linear):
    """A linear layer over the same weights, without what torch has hung around it."""

    def __init__(self, linear: Linear):
        with empty_weights():
            super().__init__(linear.in_features, *linear.heights, bias=linear.bias is not None)
        self.weight, self.bias = linear.weight, linear.bias


class RowLinear(LocalLinear):
    """(…, inputs) of which this process has a part → (…, outputs)."""

    def __init__(self, linear: Linear, ranks: Ranks):
        super().__init__(linear)
        self.ranks = ranks

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        total = F.linear(x, self.weight)
        distributed.all_reduce(total, group=self.ranks.group)
        return total if self.bias is None else total + self.bias


class WordEmbedding(nn.Embedding):
    """tokens (batch, time) → (batch, time, d_model); each token's row is in one process, and the others add zeros."""

    def __init__(self, table: nn.Embedding, ranks: Ranks):
        with empty_weights():
            super().__init__(table.num_embeddings, table.embedding_dim)
        self.weight, self.ranks = table.weight, ranks
        self.first = ranks.rank * -(-table.num_embeddings // ranks.ranks)

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.first
        elsewhere = (own < 0) | (own >= self.weight.shape[0])
        found = F.embedding(own.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        distributed.all_reduce(found, group=self.ranks.group)
        return found
