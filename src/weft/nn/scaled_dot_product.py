"""Attention(Q, K, V) = softmax(QKᵀ/√d_k)V, by the formula (Vaswani et al. 2017, §3.2.1).

`attention_paths` gives the same result through fused kernels, and is tested against this.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.nn.activations import capped


class QKV(NamedTuple):
    """q (batch, heads, time, d_head); k and v (batch, kv_heads, source time, d_head).

    Each head of keys and values is shared by heads / kv_heads heads of queries.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def pairs(self) -> int:
        """Queries times keys."""
        return self.q.shape[2] * self.k.shape[2]

    @property
    def grouped(self) -> bool:
        """Several heads of queries share one of keys and values."""
        return self.q.shape[1] != self.k.shape[1]

    def repeated(self) -> "QKV":
        """The same with a head of keys and values for each of queries."""
        if not self.grouped:
            return self
        repeats = self.q.shape[1] // self.k.shape[1]
        return QKV(self.q, *(x.repeat_interleave(repeats, dim=1) for x in (self.k, self.v)))

    def part(self, queries: slice, keys: slice) -> "QKV":
        return QKV(self.q[:, :, queries], self.k[:, :, keys], self.v[:, :, keys])


def reference_attention(
    qkv: QKV,
    scale: float,
    mask: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] = lambda probabilities: probabilities,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale)v and the probabilities.

    mask bool (True is seen) or float (added). → (batch, heads, time, d_head), (batch, heads, time, source time).
    A query that sees nothing gets zeros. `drop` is applied to the probabilities, `softcap` to the scores.
    """
    q, k, v = qkv.repeated()
    used = drop(masked_softmax(capped(q @ k.mT * scale, softcap), mask))
    return used @ v, used


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """softmax over the keys that `mask` leaves, (batch, heads, time, source time); zeros where it leaves none."""
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.dtype == torch.bool:
        blind = ~mask.any(dim=-1, keepdim=True)
        return scores.masked_fill(~(mask | blind), float("-inf")).softmax(dim=-1).masked_fill(blind, 0.0)
    scores = scores + mask.to(scores.dtype)
    blind = scores.isneginf().all(dim=-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)


class Probabilities(nn.Module):
    """A place where attention's probabilities can be seen or replaced. Fused kernels never hold them: they are computed
    for this while somebody watches, and only then."""

    def __init__(self) -> None:
        super().__init__()
        self.watchers: list[Callable[[Tensor], Tensor | None]] = []

    def watch(self, watcher: Callable[[Tensor], Tensor | None]) -> Callable[[], None]:
        """Show probabilities to `watcher`, which may give others in their place, until what is returned is called."""
        self.watchers.append(watcher)
        return lambda: self.watchers.remove(watcher)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, heads, time, source time), or what the watchers make of it, one after the other."""
        for watcher in self.watchers:
            found = watcher(x)
            x = x if found is None else found
        return x
