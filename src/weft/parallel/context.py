"""The tokens of every row divided over the processes of the context axis: for rows too long for one of them.

Everything but attention looks at one token at a time, and needs nothing. In attention a process has its own queries,
and the keys and values of the whole row, gathered layer by layer; their gradients are summed and divided again on the
way back (Dubey et al. 2024, §3.3.2). So every mask, position and kernel works as it does in one process. Ring attention
(Liu et al. 2023) would never hold all keys of a row; torch's own, still experimental, knows no mask but the causal one,
and gathers as well for all others. Where many heads of queries share one of keys, keys are small beside the rest.

Under a causal mask later tokens have more to see. So a row is cut in two pieces a process, and process i of n has
pieces i and 2n − 1 − i: each then has the same work.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F

from weft.config import Config
from weft.data.batch import Batch
from weft.errors import ConfigError
from weft.layout import Layout
from weft.models.config import Decoder, Encoder
from weft.models.stack import Stack
from weft.nn.mask import Ranges, select_ranges
from weft.parallel.mesh import Mesh
from weft.parallel.ranks import Ranks

BY_TOKEN = ("next-token", "chat", "masked", "tag")  # objectives whose targets belong to tokens, not to whole rows


def check_context(layout: Layout, model: Config, objective: str, length: int) -> None:
    """Refuse what can't be divided along its rows: a model, a kind of objective, or rows of up to `length` tokens."""
    context = f"parallel.context = {layout.context}"
    if layout.context == 1:
        return
    if not isinstance(model, Decoder | Encoder):
        kind = getattr(model, "kind", "")
        raise ConfigError(f"{context}: the rows of a '{kind}' model can't be divided; only an encoder's or a decoder's")
    if objective not in BY_TOKEN:
        others = f"those that look at tokens are {', '.join(BY_TOKEN)}"
        raise ConfigError(f"{context}: objective '{objective}' looks at whole rows, which can't be divided; {others}")
    if length % layout.row_unit:
        raise ConfigError(_uneven(layout, length))


def _uneven(layout: Layout, length: int) -> str:
    unit = layout.row_unit
    near = f"{length // unit * unit} or {-(-length // unit) * unit}" if length > unit else str(unit)
    needed = f"with parallel.context = {layout.context} rows need a multiple of {unit} tokens"
    return f"batch.length = {length}: {needed}; choose {near}"


def divided(batch: Batch, mesh: Mesh) -> Batch:
    """This process's tokens of every row; positions, documents and mask stay those of whole rows. Rows with a mask are
    padded to a length that can be divided. It comes after `Batch.split`, on the host."""
    layout, ranks = mesh.layout, mesh.context
    if ranks.alone:
        return batch
    assert batch.source is None and batch.next_sentence is None and batch.targets.dim() == 2, "objectives were checked"
    length = batch.tokens.shape[1]
    extra = -length % layout.row_unit
    if extra and batch.mask is None:
        raise ConfigError(_uneven(layout, length))
    if extra:  # places that nobody sees and that count for nothing; keys belong to rows
        counts = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.loss_mask is None else batch.loss_mask
        whole = replace(batch, loss_mask=counts)
        batch = whole._each(lambda rows: F.pad(rows, (0, extra)) if rows.dim() == 2 else rows)
    ranges = ranges_of(length + extra, ranks.rank, ranks.ranks)
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


def ranges_of(length: int, rank: int, ranks: int) -> Ranges:
    """The places of a row that a process reads: pieces `rank` and 2 · ranks − 1 − rank of 2 · ranks."""
    piece = length // (2 * ranks)
    early, late = rank * piece, (2 * ranks - 1 - rank) * piece
    joined = (range(early, late + piece),)
    return joined if early + piece == late else (range(early, early + piece), range(late, late + piece))


# with a gradient, which is summed and divided; torch 2.13 has renamed it
differentiable_gather = (
    getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
)


@dataclass(frozen=True)
class Gathered:
    """The keys and values of whole rows, from the processes that divide them: a `Past` of every layer."""

    ranks: Ranks

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """This process's keys and values (batch, kv_heads, tokens, d_head) → all, (batch, kv_heads, time, d_head)."""
        both = torch.stack((keys, values))[None]  # one message
        pieces = differentiable_gather(both, 0, self.ranks.group).chunk(2, dim=-2)
        ordered = [*pieces[0].unbind(), *reversed(pieces[1].unbind())]
        k, v = torch.cat(ordered, dim=-2).unbind()
        return k, v


def install(model: nn.Module, ranks: Ranks) -> None:
    """Have a model's attention see whole rows where a batch has been divided; batches of whole rows go on as before."""
    for module in model.modules():
        if isinstance(module, Stack):
            module.context = Gathered(ranks)
