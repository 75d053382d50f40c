"""Context parallelism: the tokens of every row divided over processes, for rows too long for one of them.

Everything but attention acts on one token at a time and needs no communication. In attention a process has the queries
of its tokens and all-gathers the keys and values of whole rows, layer by layer; in the backward pass their gradients
are reduce-scattered (Dubey et al. 2024, §3.3.2). So every mask, position and kernel works as in one process. Ring
attention (Liu et al. 2023) would never hold all keys of a row, but torch's, still experimental, supports only the
causal mask and all-gathers for every other one. With grouped queries the keys are the smaller part of activations.

Under a causal mask later tokens attend to more keys. So a row is cut into two chunks per process, and process i of n
reads chunks i and 2n − 1 − i: each has the same work.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as comms
from torch.nn import functional as F

from weft.config import Config
from weft.data.batch import Batch
from weft.errors import ConfigError
from weft.layout import Layout
from weft.models.config import Decoder, Encoder
from weft.nn.cache import stack_padded
from weft.nn.config import Experts
from weft.nn.mask import Ranges, select_ranges
from weft.parallel.mesh import Mesh
from weft.parallel.ranks import Ranks

BY_TOKEN = ("next-token", "chat", "masked", "tag")  # objectives whose targets belong to tokens, not to whole rows


def check_context(layout: Layout, model: Config, objective: str, *, length: int) -> None:
    """Refuse a model, a kind of objective, or rows of up to `length` tokens that can't be divided along the tokens."""
    context = f"parallel.context = {layout.context}"
    if layout.context == 1:
        return
    if not isinstance(model, Decoder | Encoder):
        kind = getattr(model, "kind", "")
        raise ConfigError(f"{context}: the rows of a '{kind}' model can't be divided; only an encoder's or a decoder's")
    if model.attention.global_tokens is not None:
        raise ConfigError(f"{context}: rows with model.attention.global_tokens can't be divided")
    if isinstance(model.feedforward, Experts):
        raise ConfigError(f"{context}: a mixture of experts reads whole rows; set it to 1")
    if objective not in BY_TOKEN:
        others = f"objectives with a target per token are {', '.join(BY_TOKEN)}"
        raise ConfigError(f"{context}: objective '{objective}' looks at whole rows, which can't be divided; {others}")
    if length % layout.row_unit:
        raise ConfigError(_indivisible(layout, length))


def _indivisible(layout: Layout, length: int) -> str:
    unit = layout.row_unit
    near = f"{length // unit * unit} or {-(-length // unit) * unit}" if length > unit else str(unit)
    needed = f"with parallel.context = {layout.context} rows need a multiple of {unit} tokens"
    return f"batch.length = {length}: {needed}; choose {near}"


def shard_rows(batch: Batch, mesh: Mesh) -> Batch:
    """Return this process's tokens of every row; positions, documents and mask stay those of whole rows. Rows with a
    mask are padded to a divisible length. Called on the host, after `Batch.split`."""
    layout, ranks = mesh.layout, mesh.context
    if ranks.alone:
        return batch
    assert batch.source is None and batch.next_sentence is None and batch.targets.dim() == 2, "objectives were checked"
    length = batch.tokens.shape[1]
    extra = -length % layout.row_unit
    if extra and batch.mask is None:
        raise ConfigError(_indivisible(layout, length))
    if extra:  # padding is masked out and counts for nothing; the 1-dimensional dropout keys belong to rows
        counts = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.loss_mask is None else batch.loss_mask
        batch = replace(batch, loss_mask=counts)
        batch = batch.map_tensors(lambda rows: F.pad(rows, (0, extra)) if rows.dim() == 2 else rows)
    ranges = token_ranges(length + extra, ranks.rank, ranks.ranks)
    positions = torch.arange(length + extra, device=batch.tokens.device)[None]
    return replace(
        batch,
        tokens=select_ranges(batch.tokens, ranges),
        targets=select_ranges(batch.targets, ranges),
        loss_mask=None if batch.loss_mask is None else select_ranges(batch.loss_mask, ranges),
        segments=None if batch.segments is None else select_ranges(batch.segments, ranges),
        positions=positions if batch.positions is None else batch.positions,
        ranges=ranges,
        counted=None,
    )


def token_ranges(length: int, rank: int, ranks: int) -> Ranges:
    """Return the positions of a row that a process reads: chunks `rank` and 2 · ranks − 1 − rank of 2 · ranks."""
    chunk = length // (2 * ranks)
    early, late = rank * chunk, (2 * ranks - 1 - rank) * chunk
    if early + chunk == late:
        return (range(early, late + chunk),)
    return range(early, early + chunk), range(late, late + chunk)


# an all-gather whose backward pass is a reduce-scatter; torch 2.13 renamed it
differentiable_gather = getattr(comms, "all_gather_single_autograd", None) or comms.all_gather_tensor_autograd


@dataclass(frozen=True)
class Gathered:
    """Keys and values of whole rows, gathered from the processes that divide them: a `Past` of every layer."""

    ranks: Ranks

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values (batch, kv_heads, local tokens, d_head) → (batch, kv_heads, time, d_head)."""
        both = stack_padded(keys, values)[None]  # one message
        early, late = differentiable_gather(both, 0, self.ranks.group).chunk(2, dim=-2)
        k, v = torch.cat([*early.unbind(), *reversed(late.unbind())], dim=-2).unbind()
        return k[..., : keys.shape[-1]], v[..., : values.shape[-1]]
