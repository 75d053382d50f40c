"""Tensor parallelism: a model's matrices sharded over the processes of the tensor axis, with torch's DTensor.

A block needs one all-reduce in each pass (Shoeybi et al. 2019, §3): queries, keys, values and the up projection are
sharded by columns, so that heads and nonlinearities stay local; the output and down projections by rows, and their
products are summed. Embeddings are sharded by the vocabulary. A recurrence (Elman, LSTM, GRU, Bahdanau) would need a
sum at every token, so its cells are replicated and only the embeddings, most of such a model's weights, are sharded.

Between the sharded matrices activations are plain tensors: equal on every process or, with `sequence`, this process's
tokens of a row. The model's code is that of one process, with fewer heads and a part of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp
from torch.nn import functional as F

from weft.config import Config
from weft.data.batch import Source
from weft.errors import ConfigError
from weft.layout import Layout
from weft.models import config as models
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel
from weft.models.bengio import Bengio
from weft.models.elmo import ELMo
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
from weft.parallel.ranks import Ranks
from weft.parallel.sharding import local_part

Placement = Literal["column", "row", "vocabulary"]

BY_COLUMN = ("*.attention.qkv", "*.cross.q", "*.cross.kv", "*.feedforward.up", "*.feedforward.gate_up")
BY_ROW = ("*.attention.out", "*.cross.out", "*.feedforward.down")
BLOCKS: dict[str, Placement] = {**dict.fromkeys(BY_COLUMN, "column"), **dict.fromkeys(BY_ROW, "row")}
EMBEDDINGS: dict[str, Placement] = {"embedding": "vocabulary", "source_embedding": "vocabulary"}
# replicated parameters that act on the local heads alone, so that each process has a part of their gradients
BY_HEAD = ("*.q_norm.*", "*.k_norm.*", "*.relative_keys", "*.relative_values", "*.position.weight")
# replicated parameters that, with `sequence`, act on the local tokens alone
BY_TOKEN = ("*_skip.norm.*", "*_skip.norm_out.*", "encoder.norm.*", "decoder.norm.*")
OUTPUT = ("output", "output_bias", "output.weight", "output.bias", "output.words.weight", "output.words.bias")


def plan(model: Config) -> dict[str, Placement]:
    """Return the placements of a model's sharded modules, by patterns of their names."""
    match model:
        case models.TransformerConfig():
            return {**EMBEDDINGS, **BLOCKS}
        case models.Recurrent() | models.Bengio() | models.ELMo() | models.Bahdanau():
            return EMBEDDINGS
        case _:
            raise ConfigError("parallel: an n-gram model is counted by one process; start one")


def placement(name: str, patterns: dict[str, Placement]) -> Placement | None:
    """Return the placement of the module with this name; None if it is replicated."""
    return next((placed for pattern, placed in patterns.items() if fnmatchcase(name, pattern)), None)


def is_partial(name: str, layout: Layout, biases: bool) -> bool:
    """Return whether a replicated parameter's gradient must be summed over the tensor axis. `biases`: positions add to
    the scores of each head, which then read `position.weight`."""
    patterns = BY_HEAD if biases else BY_HEAD[:-1]
    return any(fnmatchcase(name, pattern) for pattern in (*patterns, *(BY_TOKEN if layout.sequence else ())))


def shard(model: LanguageModel, layout: Layout, mesh: DeviceMesh) -> None:
    """Shard the model's matrices over the processes of `mesh`, the tensor axis, and adapt its modules to their part."""
    patterns = plan(model.config)
    names = [name for name, module in model.named_modules() if placement(name, patterns)]
    styles = {name: _style(name, placement(name, patterns), layout) for name in names}
    for name, module in model.named_modules():
        if isinstance(module, Stack):
            _shard_stack(module, layout, mesh)
            styles |= _sequence_styles(name, module, model) if layout.sequence else {}
    tp.parallelize_module(model, mesh, styles, src_data_rank=None)
    _shard_vocabulary(model, mesh)


def _style(name: str, placed: Placement | None, layout: Layout) -> tp.ParallelStyle:
    between = Shard(1) if layout.sequence else Replicate()
    if placed == "column":
        # a decoder reads all tokens of its source
        return tp.ColwiseParallel(input_layouts=Replicate() if name.endswith(".kv") else between)
    options = {"output_layouts": between} if placed == "row" else {"input_layouts": Replicate()}
    return tp.RowwiseParallel(**options)


def _sequence_styles(name: str, stack: Stack, model: LanguageModel) -> dict[str, tp.ParallelStyle]:
    """Return the styles that divide tokens before a stack's first layer and gather them after its last, if here."""
    here = {key for key, _ in stack.blocks.named_children()}
    layers = (getattr(model.config, "encoder_layers", None) if name == "encoder" else None) or model.config.layers  # type: ignore[attr-defined]
    styles: dict[str, tp.ParallelStyle] = {}
    if "0" in here:
        styles[f"{name}.blocks.0"] = tp.PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
    if str(layers - 1) in here:
        styles[name] = tp.PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    return styles


def padded(features: Callable[..., Tensor], shards: int) -> Callable[..., Tensor]:
    """Wrap `features` to pad rows of any length on the right to a multiple of `shards` tokens."""

    def pad(tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        extra = -tokens.shape[1] % shards
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        return F.pad(tokens, (0, extra)), F.pad(real, (0, extra))

    def padded_features(tokens: Tensor, **inputs: Any) -> Tensor:
        source = inputs.get("source")
        if source is not None and source.tokens.shape[1] % shards:
            inputs["source"] = Source(*pad(source.tokens, source.mask))
        time, extra = tokens.shape[1], -tokens.shape[1] % shards
        if not extra:
            return features(tokens, **inputs)
        tokens, mask = pad(tokens, inputs.get("mask"))
        for name in ("positions", "segments", "documents"):
            if inputs.get(name) is not None:
                inputs[name] = F.pad(inputs[name], (0, extra))
        return features(tokens, **{**inputs, "mask": mask})[:, :time]

    return padded_features


def _shard_stack(stack: Stack, layout: Layout, mesh: DeviceMesh) -> None:
    """Give a stack its local heads, and dropouts that know which part of an activation they see."""
    rank, shards = mesh.get_local_rank(), mesh.size()
    for module in stack.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            module.heads //= shards
            module.kv_heads //= shards
            module.first_head = rank * module.heads
        if isinstance(module, SelfAttention):
            module.widths = [width // shards for width in module.widths]
        if isinstance(module, Plain | Gated):
            module.dropout.shard = AxisShard(-1, rank, shards)
        if isinstance(module, Gated):
            module.swiglu = None  # its gradient needs the full matrix
        if isinstance(module, Sublayer) and layout.sequence:
            module.dropout.shard = AxisShard(1, rank, shards)
    if stack.position.biases and len(stack.blocks):
        heads = next(block.attention.heads for block in stack.blocks if isinstance(block, Block))
        stack.position.heads_here = slice(rank * heads, (rank + 1) * heads)


@dataclass(frozen=True)
class VocabParallel:
    """Processes that shard the vocabulary (`nn.loss.VocabShard`), `tokens` each; the last may have fewer."""

    group: Any
    rank: int
    shards: int
    vocab_size: int

    @property
    def tokens(self) -> int:
        return -(-self.vocab_size // self.shards)

    @property
    def first(self) -> int:
        return self.rank * self.tokens

    def sum_(self, tensor: Tensor) -> None:
        distributed.all_reduce(tensor, group=self.group)

    def max_(self, tensor: Tensor) -> None:
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=self.group)

    def local(self, table: Tensor) -> Tensor:
        return local_part(table)

    def gather(self, logits: Tensor) -> Tensor:
        """Gather local logits (…, local tokens) → (…, vocab_size) on every process."""
        local = F.pad(logits, (0, self.tokens - logits.shape[-1])).movedim(-1, 0).contiguous()
        if torch.is_grad_enabled():
            gathered = differentiable_gather(local, 0, self.group)
        else:  # torch 2.11 has no such operation in inference mode
            parts = [torch.empty_like(local) for _ in range(self.shards)]
            distributed.all_gather(parts, local, group=self.group)
            gathered = torch.cat(parts)
        return gathered.movedim(0, -1)[..., : self.vocab_size]


def _shard_vocabulary(model: LanguageModel, mesh: DeviceMesh) -> None:
    for name, parameter in list(model.named_parameters()):
        if name in OUTPUT and not isinstance(parameter, DTensor):
            owner, _, last = name.rpartition(".")
            table = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            model.get_submodule(owner).register_parameter(last, nn.Parameter(table, parameter.requires_grad))
    vocab_size = model.config.vocab_size  # type: ignore[attr-defined]
    across = VocabParallel(mesh.get_group(), mesh.get_local_rank(), shards=mesh.size(), vocab_size=vocab_size)
    if isinstance(model, Transformer):
        if model.token_head is not None:
            model.token_head.vocab_shard = across
    else:
        assert isinstance(model, Recurrent | Bengio | ELMo | Bahdanau)
        model.vocab_shard = across


# ---- inference with a sharded model
#
# DTensor plans the communication of every product, on which a step of one token would spend most of its time. Without
# gradients the plan is fixed once the model is sharded: the local part of each matrix, and what to sum.


def keep_local(model: LanguageModel, mesh: Mesh) -> None:
    """Replace the DTensors of a model that `shard` has sharded by their local parts, once it has its weights.

    All processes continue with rank 0's tokens: logits are equal to the bit, but a GPU's sums of probabilities vary.
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
            case "vocabulary", nn.Embedding():
                model.set_submodule(name, VocabEmbedding(module, ranks))
    model.peers = mesh.world


class LocalLinear(Linear):
    """A linear layer over the same weights, without the hooks that torch has added to it."""

    def __init__(self, linear: Linear):
        with empty_weights():
            super().__init__(linear.in_features, *linear.heights, bias=linear.bias is not None)
        self.weight, self.bias = linear.weight, linear.bias


class RowLinear(LocalLinear):
    """Linear layer sharded by rows: this process's part of inputs (…, inputs) → (…, outputs)."""

    def __init__(self, linear: Linear, ranks: Ranks):
        super().__init__(linear)
        self.ranks = ranks

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        total = F.linear(x, self.weight)
        distributed.all_reduce(total, group=self.ranks.group)
        return total if self.bias is None else total + self.bias


class VocabEmbedding(nn.Embedding):
    """Embedding sharded by the vocabulary: tokens (batch, time) → (batch, time, d_model), summed over the shards."""

    def __init__(self, table: nn.Embedding, ranks: Ranks):
        with empty_weights():
            super().__init__(table.num_embeddings, table.embedding_dim)
        self.weight, self.ranks = table.weight, ranks
        self.first = ranks.rank * -(-table.num_embeddings // ranks.ranks)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens - self.first
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        vectors = F.embedding(rows.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        distributed.all_reduce(vectors, group=self.ranks.group)
        return vectors
