"""Cross entropy, with label smoothing and z-loss, in two forms that give the same numbers.

`cross_entropy` reads logits that exist. `linear_cross_entropy` reads features and the output table and never holds
the logits of a whole batch: it works through the rows in chunks and finds the gradient of each chunk while its logits
are there. Memory then grows with batch + vocabulary, not with their product.

For logits z of a row with target t, Z = Σ exp z, smoothing ε and z-loss weight ζ:

    loss = log Z − (1 − ε) z_t − ε mean(z) + ζ log²Z
    ∂loss/∂z = softmax(z) · (1 + 2ζ log Z) − (1 − ε) onehot(t) − ε/V
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.machine import has_triton
from weft.nn.activations import capped
from weft.nn.config import LossTerms

# Logits held at a time: few enough to be negligible, many enough for efficient products.
CPU_LOGITS = 1 << 22  # 16 MiB in fp32
GPU_SHARE = 128  # one logit for so many bytes of a GPU's memory: in 16 bits 1/64 of it, and the gradient needs no more
ALIGNED = 128  # on a GPU the table is filled up to a multiple of so many rows: odd sizes take slow products

PLAIN = LossTerms()


class Across(Protocol):
    """Processes that divide the words among them."""

    @property
    def first(self) -> int:
        """The first of this process's words."""

    @property
    def vocab_size(self) -> int:
        """How many words there are in all."""

    def sum_(self, tensor: Tensor) -> None:
        """Put the sum over the processes in its place."""

    def max_(self, tensor: Tensor) -> None:
        """Put the largest of the processes' values in its place."""

    def local(self, table: Tensor) -> Tensor:
        """This process's part of a table."""

    def gather(self, logits: Tensor) -> Tensor:
        """Logits of this process's words (…, words) → those of all, (…, vocab_size), on every process."""


class Readout(NamedTuple):
    """What the logits are a product of: features (…, D), weight (V, D) and bias (V,); with `across`, a part of V.

    With `softcap` c, the logits are c · tanh(product/c).
    """

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    across: Across | None = None
    softcap: float | None = None

    @classmethod
    def of(
        cls, features: Tensor, weight: Tensor, bias: Tensor | None, across: Across | None, softcap: float | None = None
    ) -> "Readout":
        """From whole tables, or from this process's parts of them."""
        if across is not None:
            weight, bias = across.local(weight), None if bias is None else across.local(bias)
        return cls(features, weight, bias, across, softcap)

    def logits(self) -> Tensor:
        """Those of all words, (…, vocab_size)."""
        own = capped(F.linear(self.features, self.weight, self.bias), self.softcap)
        return own if self.across is None else self.across.gather(own)


ChunkLoss = Callable[[Tensor, Tensor, Tensor, int, LossTerms], tuple[Tensor, Tensor, Tensor]]


def cross_entropy(logits: Tensor, targets: Tensor, terms: LossTerms = PLAIN) -> Tensor:
    """The loss of each row. logits (N, V), targets (N,); gives (N,) in fp32."""
    logits = logits.float()
    log_z = logits.logsumexp(-1)
    loss = log_z - (1.0 - terms.smoothing) * logits.gather(-1, targets[:, None]).squeeze(-1)
    if terms.smoothing:
        loss = loss - terms.smoothing * logits.mean(-1)
    if terms.z_loss:
        loss = loss + terms.z_loss * log_z.square()
    return loss


def chunk_loss(
    logits: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, terms: LossTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ weights · loss, Σ weights · −log p, and the first one's gradient by the logits, in their type.

    logits (N, V or more), which are overwritten; targets and weights (N,). Columns from `vocab_size` on are not words,
    and their gradient is 0. One exponential serves the loss and its gradient. `loss_kernel.py` does the same on a GPU.
    """
    smoothing = terms.smoothing
    exact = logits.float()
    words = torch.arange(logits.shape[-1], device=logits.device) < vocab_size if logits.shape[-1] > vocab_size else None
    at_target = exact.gather(-1, targets[:, None])
    mean = (exact if words is None else exact * words).sum(-1, keepdim=True) / vocab_size if smoothing else None
    if words is not None:
        exact = exact.masked_fill(~words, float("-inf"))
    top = exact.amax(-1, keepdim=True)
    powers = exact.sub_(top).exp_()
    total = powers.sum(-1, keepdim=True)
    nll, loss, slope = _terms(top, total, at_target, mean, terms)
    scale = weights[:, None]
    slope, even = slope * scale, scale * (smoothing / vocab_size)
    gradient = powers.mul_(slope)
    if smoothing:
        gradient = gradient.sub_(even if words is None else even * words)
    gradient = gradient.to(logits.dtype)
    at_target_slope = (at_target - top).exp() * slope - even - (1.0 - smoothing) * scale
    gradient.scatter_(-1, targets[:, None], at_target_slope.to(logits.dtype))
    return (loss * scale).sum(), (nll * scale).sum(), gradient


def _terms(
    top: Tensor, total: Tensor, at_target: Tensor, mean: Tensor | None, terms: LossTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """−log p, the loss, and what exp(z − top) is multiplied by in its gradient, (N, 1) each."""
    log_z = top + total.log()
    nll = log_z - at_target
    loss, slope = nll, 1.0 / total
    if terms.smoothing and mean is not None:
        loss = loss + terms.smoothing * (at_target - mean)
    if terms.z_loss:
        loss = loss + terms.z_loss * log_z.square()
        slope = slope * (1.0 + 2.0 * terms.z_loss * log_z)
    return nll, loss, slope


def divided_chunk_loss(
    logits: Tensor, targets: Tensor, weights: Tensor, across: Across, terms: LossTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """`chunk_loss` where the words are divided: logits (N, words of this process), targets among all words. Two rounds
    of agreement: the largest logit of a row, then its sums (Shoeybi et al. 2019, §3)."""
    smoothing = terms.smoothing
    exact, words = logits.float(), logits.shape[-1]
    own = (targets >= across.first) & (targets < across.first + words)
    column = (targets - across.first).clamp(0, words - 1)[:, None]
    top = exact.amax(-1, keepdim=True)
    across.max_(top)
    found = torch.where(own[:, None], exact.gather(-1, column), 0.0)
    powers = (exact - top).exp_()
    sums = torch.stack([powers.sum(-1, keepdim=True), found, exact.sum(-1, keepdim=True)])
    across.sum_(sums)
    total, at_target, mean = sums[0], sums[1], sums[2] / across.vocab_size
    nll, loss, slope = _terms(top, total, at_target, mean, terms)
    scale = weights[:, None]
    gradient = powers.mul_(slope * scale)
    if smoothing:
        gradient = gradient.sub_(scale * (smoothing / across.vocab_size))
    gradient.scatter_add_(-1, column, torch.where(own[:, None], (smoothing - 1.0) * scale, 0.0))
    return (loss * scale).sum(), (nll * scale).sum(), gradient.to(logits.dtype)


@cache
def gpu_chunk_loss() -> ChunkLoss:
    """The kernel, where there is Triton to compile it, else `chunk_loss`."""
    if not has_triton():
        return chunk_loss
    from weft.nn.kernels.loss import fused_chunk_loss

    return fused_chunk_loss


@dataclass(frozen=True)
class _Chunks:
    """What the loss needs besides the readout: targets and weights (N,), of which `rows` are read at a time."""

    targets: Tensor
    weights: Tensor
    terms: LossTerms
    rows: int
    across: Across | None = None
    softcap: float | None = None


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks; backward only scales what forward found, in place, once."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, chunks: _Chunks
    ) -> tuple[Tensor, Tensor]:
        chunk, across = gpu_chunk_loss() if features.is_cuda else chunk_loss, chunks.across
        need_features, need_weight, need_bias = ctx.needs_input_grad[:3]
        vocab_size = weight.shape[0]
        extra = _filling(vocab_size, features) if across is None else 0
        table = _filled(weight, extra, features.dtype)
        offset = None if bias is None else _filled(bias, extra, features.dtype)
        d_features = torch.empty_like(features) if need_features else None
        d_weight: Tensor | None = None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and need_bias else None
        total, plain = (features.new_zeros((), dtype=torch.float32) for _ in range(2))
        for begin in range(0, features.shape[0], chunks.rows):
            part = slice(begin, begin + chunks.rows)
            logits = F.linear(features[part], table, offset)
            slope = None
            if (cap := chunks.softcap) is not None:
                bent = logits.div_(cap).tanh_()
                slope = bent.square().neg_().add_(1.0)
                logits = bent.mul_(cap)
            given = chunks.targets[part], chunks.weights[part]
            if across is None:
                loss, nll, gradient = chunk(logits, *given, vocab_size, chunks.terms)
            else:
                loss, nll, gradient = divided_chunk_loss(logits, *given, across, chunks.terms)
            if slope is not None:
                gradient = gradient.mul_(slope)
            total += loss
            plain += nll
            if d_bias is not None:
                d_bias += gradient.sum(0, dtype=torch.float32)[:vocab_size]
            if d_features is not None:
                torch.mm(gradient, table, out=d_features[part])
            if need_weight:
                d_weight = _add_product(d_weight, gradient.T, features[part])
        if across is not None and d_features is not None:
            across.sum_(d_features)  # each process knows what its own words ask of them
        ctx.found = d_features, None if d_weight is None else d_weight[:vocab_size], d_bias
        ctx.dtypes = features.dtype, weight.dtype, bias.dtype if bias is not None else None
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.found = ctx.found, None
        assert found is not None, "the gradients were scaled in place; a second backward pass needs a second forward"
        scaled = [None if d is None else d.mul_(upstream[0]).to(t) for d, t in zip(found, ctx.dtypes, strict=True)]
        return *scaled, None


def _filling(vocab_size: int, features: Tensor) -> int:
    return -vocab_size % ALIGNED if features.is_cuda else 0


def _filled(table: Tensor, extra: int, dtype: torch.dtype) -> Tensor:
    """The table (V, …) in `dtype`, with `extra` rows of zeros below it: one pass over it, or none."""
    if not extra:
        return table.to(dtype)
    filled = table.new_empty(table.shape[0] + extra, *table.shape[1:], dtype=dtype)
    filled[: table.shape[0]] = table
    filled[table.shape[0] :] = 0.0
    return filled


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a · b in fp32, also where a and b are narrower; the total, where there is one, is used up. A processor's
    narrow products come rounded to their own type, as those of every layer's weights do."""
    if a.dtype == torch.float32:
        return a @ b if total is None else total.addmm_(a, b)
    product = torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a, b)
    return product.float() if total is None else total.add_(product)


def chunk_rows(features: Tensor, vocab_size: int) -> int:
    """How many rows of logits to hold at a time, a power of two."""
    memory = torch.cuda.get_device_properties(features.device).total_memory if features.is_cuda else 0
    held = memory // GPU_SHARE if features.is_cuda else CPU_LOGITS
    return 1 << max(0, (held // vocab_size).bit_length() - 1)


def linear_cross_entropy(
    readout: Readout, targets: Tensor, mask: Tensor | None = None, terms: LossTerms = PLAIN, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """The summed loss of the logits of `readout` where `mask` is true, and the summed plain −log p.

    features (…, D); targets (…,); mask (…,) bool. `rows` logits are held at a time. Only the first result has a
    gradient, and backward can be called on it once.
    """
    features, weight, bias, across, softcap = readout
    features, targets = features.flatten(0, -2), targets.flatten()
    device = features.device.type
    if torch.is_autocast_enabled(device):  # what a linear layer would do
        features = features.to(torch.get_autocast_dtype(device))
    weights = targets.new_ones(targets.shape, dtype=torch.float32)
    if mask is not None:
        weights = mask.flatten().float()
        features = features.masked_fill(~mask.flatten()[:, None], 0.0)  # whatever is there: 0 · inf would be NaN
    held = chunk_rows(features, weight.shape[0]) if rows is None else rows
    chunks = _Chunks(targets, weights, terms, held, across, softcap)
    with torch.autocast(device, enabled=False):
        total, plain = _LinearCrossEntropy.apply(features, weight, bias, chunks)
    return total, plain
