"""The likeliest tokens of many rows, without a copy of all their log-probabilities."""

import torch
from torch import Tensor

from weft.decode.sampling import check_logits

BLOCK = 256  # logits of which the highest is looked at first
ROWS = 16  # that are summed at a time


def likeliest(logits: Tensor, count: int, normalised: bool = False) -> tuple[Tensor, Tensor]:
    """Of each row of logits (rows, V) the `count` likeliest tokens: log p in float64, best first, and their ids.

    Logits that are `normalised` are log p already. A row of −∞ alone, which leads nowhere, gives −∞; a row that is not
    finite is refused.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    best, ids = highest(logits, min(count, logits.shape[-1]))
    dead = best[:, :1] == -torch.inf
    check_logits(best.masked_fill(dead, 0.0))
    # log p = x − log Σ eˣ, of the few that count
    log_p = best.double() if normalised else best.double() - log_total(logits).double()
    return torch.where(dead, -torch.inf, log_p), ids


def log_total(logits: Tensor) -> Tensor:
    """log Σ eˣ of each row of logits (rows, V): (rows, 1). torch copies all x for that, so on a CPU a few at a time."""
    some = logits.split(len(logits) if logits.is_cuda else ROWS)
    return torch.cat([part.logsumexp(dim=-1, keepdim=True) for part in some])


def highest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`x.topk(count)` of x (rows, V), for few of many: they stand in the blocks with the highest maxima.

    torch sorts pairs of values and places, which takes longer than a fast product with the whole vocabulary leaves.
    """
    rows, size = x.shape
    blocks = size // BLOCK
    if count * 4 > blocks:
        return x.topk(count, dim=-1)
    whole = x[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK))
    chosen = whole.amax(dim=-1).topk(count, dim=-1).indices
    places = torch.arange(BLOCK, device=x.device) + chosen.unsqueeze(-1) * BLOCK
    rest = torch.arange(blocks * BLOCK, size, device=x.device).expand(rows, -1)
    looked_at = torch.cat((places.flatten(1), rest), dim=1)
    best, where = x.gather(1, looked_at).topk(count, dim=-1)
    return best, looked_at.gather(1, where)
