"""Attention(Q, K, V) = softmax(QKᵀ/√d_k)V, by the formula (Vaswani et al. 2017, §3.2.1).

The fused kernels of `attention_paths` are tested against it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from weft.nn.activations import apply_softcap


class QKV(NamedTuple):
    """q (batch, heads, time, d_head); k (batch, kv_heads, source time, d_head); v (batch, kv_heads, source time, d_v).
    Each head of keys and values is shared by heads / kv_heads heads of queries."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def pairs(self) -> int:
        """Number of queries times number of keys."""
        return self.q.shape[2] * self.k.shape[2]

    @property
    def equal_widths(self) -> bool:
        """Whether values are as wide as keys: d_v = d_head."""
        return self.k.shape[-1] == self.v.shape[-1]

    @property
    def grouped(self) -> bool:
        """Whether several heads of queries share one head of keys and values."""
        return self.q.shape[1] != self.k.shape[1]

    def repeat_kv(self) -> "QKV":
        """Repeat keys and values so that every head of queries has its own."""
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
    *,
    drop: Callable[[Tensor], Tensor] = lambda probabilities: probabilities,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale)v and the probabilities: (batch, heads, time, d_v), (batch, heads, time, source time).

    mask is bool (True: visible) or float (added to the scores). A query that sees no key gets zeros. `drop` is applied
    to the probabilities, `softcap` to the scores. `sinks` (heads,) are scores of no key.
    """
    q, k, v = qkv.repeat_kv()
    probabilities = drop(masked_softmax(apply_softcap(q @ k.mT * scale, softcap), mask, sinks))
    return probabilities @ v, probabilities


def masked_softmax(scores: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Softmax of scores (batch, heads, time, source time) over the visible keys; zeros where no key is visible.

    `sinks` (heads,) are scores that take their share of the probability and belong to no key.
    """
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        wider = None if mask is None else F.pad(mask, (0, 1), value=mask.dtype == torch.bool)
        return masked_softmax(torch.cat((scores, column), dim=-1), wider)[..., :-1]
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.dtype == torch.bool:
        blind = ~mask.any(dim=-1, keepdim=True)
        return scores.masked_fill(~(mask | blind), float("-inf")).softmax(dim=-1).masked_fill(blind, 0.0)
    scores = scores + mask.to(scores.dtype)
    blind = scores.isneginf().all(dim=-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)


class Probabilities(nn.Module):
    """Tap where attention probabilities can be observed or replaced, computed only while there is a watcher."""

    def __init__(self) -> None:
        super().__init__()
        self.watchers: list[Callable[[Tensor], Tensor | None]] = []

    def watch(self, watcher: Callable[[Tensor], Tensor | None]) -> Callable[[], None]:
        """Pass probabilities to `watcher`, which may return replacements. Call the returned function to stop."""
        self.watchers.append(watcher)
        return lambda: self.watchers.remove(watcher)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, heads, time, source time) after all watchers, in the order of their registration."""
        for watcher in self.watchers:
            replaced = watcher(x)
            x = x if replaced is None else replaced
        return x


def changed(replaced: Tensor, x: Tensor) -> bool:
    """Return whether a tensor put in the place of x differs in a value, or a gradient is asked for."""
    if replaced is x:
        return False
    # a mode that records operations must see those of the replacement, and its tensors may have no values
    return replaced.requires_grad or is_in_torch_dispatch_mode() or not torch.equal(replaced, x)
