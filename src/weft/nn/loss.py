"""Cross-entropy with label smoothing and z-loss, in two equivalent forms.

`cross_entropy` reads logits that exist. `linear_cross_entropy` reads features and the output table, and never holds the
logits of a whole batch: it processes rows in chunks and computes the gradient of each chunk while its logits are in
memory, which then grows with batch + vocabulary instead of their product.

For logits z of a row with target t, Z = Σ exp z, smoothing ε and z-loss weight ζ:

    loss = log Z − (1 − ε) z_t − ε mean(z) + ζ log²Z
    ∂loss/∂z = softmax(z) · (1 + 2ζ log Z) − (1 − ε) onehot(t) − ε/V
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.machine import has_triton
from weft.nn.activations import apply_softcap
from weft.nn.config import LossTerms

# Logits held at a time: few enough to be negligible, many enough for efficient products.
CPU_LOGITS = 1 << 22  # 16 MiB in fp32
GPU_BYTES_PER_LOGIT = 128  # of GPU memory: 16-bit logits take 1/64 of it, and their gradient overwrites them
GPU_TABLE_ROWS = 128  # the table is padded to a multiple of this on a GPU: odd sizes have slow products

PLAIN = LossTerms()


class VocabShard(Protocol):
    """Local shard of a vocabulary that tensor parallelism divides: the ids from `first` on; it all-reduces in place."""

    @property
    def first(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def sum_(self, tensor: Tensor) -> None: ...
    def max_(self, tensor: Tensor) -> None: ...
    def local(self, table: Tensor) -> Tensor: ...
    def gather(self, logits: Tensor) -> Tensor: ...


class Readout(NamedTuple):
    """Factors of the logits, c · tanh(product/c) with `softcap` c: features (…, D), weight (V, D), bias (V,)."""

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    shard: VocabShard | None = None
    softcap: float | None = None

    def local(self) -> "Readout":
        """Select this process's rows of whole tables, if there is a `shard`."""
        if self.shard is None:
            return self
        bias = None if self.bias is None else self.shard.local(self.bias)
        return self._replace(weight=self.shard.local(self.weight), bias=bias)

    def logits(self) -> Tensor:
        """Logits (…, vocab_size)."""
        local = apply_softcap(F.linear(self.features, self.weight, self.bias), self.softcap)
        return local if self.shard is None else self.shard.gather(local)


def cross_entropy(logits: Tensor, targets: Tensor, terms: LossTerms = PLAIN) -> Tensor:
    """Loss of each row, (N,) in fp32, of logits (N, V) and targets (N,)."""
    logits = logits.float()
    log_z = logits.logsumexp(-1)
    loss = log_z - (1.0 - terms.smoothing) * logits.gather(-1, targets[:, None]).squeeze(-1)
    if terms.smoothing:
        loss = loss - terms.smoothing * logits.mean(-1)
    if terms.z_loss:
        loss = loss + terms.z_loss * log_z.square()
    return loss


def chunk_loss(
    logits: Tensor, targets: Tensor, weights: Tensor, *, vocab_size: int, terms: LossTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ weights · loss, Σ weights · −log p, and the gradient of the first with respect to the logits, in their dtype.

    logits (N, V or more) are overwritten; targets and weights (N,). Columns from `vocab_size` on are padding, with
    gradient 0. One exponential serves the loss and its gradient. On a GPU, `kernels/loss.py` computes this.
    """
    smoothing = terms.smoothing
    exact = logits.float()
    real = torch.arange(logits.shape[-1], device=logits.device) < vocab_size if logits.shape[-1] > vocab_size else None
    at_target = exact.gather(-1, targets[:, None])
    mean = (exact if real is None else exact * real).sum(-1, keepdim=True) / vocab_size if smoothing else None
    if real is not None:
        exact = exact.masked_fill(~real, float("-inf"))
    top = exact.amax(-1, keepdim=True)
    powers = exact.sub_(top).exp_()
    total = powers.sum(-1, keepdim=True)
    nll, loss, slope = _row_losses(top, total, at_target, mean=mean, terms=terms)
    scale = weights[:, None]
    slope, uniform = slope * scale, scale * (smoothing / vocab_size)
    gradient = powers.mul_(slope)
    if smoothing:
        gradient = gradient.sub_(uniform if real is None else uniform * real)
    gradient = gradient.to(logits.dtype)
    target_gradient = (at_target - top).exp() * slope - uniform - (1.0 - smoothing) * scale
    gradient.scatter_(-1, targets[:, None], target_gradient.to(logits.dtype))
    return (loss * scale).sum(), (nll * scale).sum(), gradient


def _row_losses(
    top: Tensor, total: Tensor, at_target: Tensor, *, mean: Tensor | None, terms: LossTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """−log p, the loss, and the factor of exp(z − top) in its gradient, (N, 1) each."""
    log_z = top + total.log()
    nll = log_z - at_target
    loss, slope = nll, 1.0 / total
    if terms.smoothing and mean is not None:
        loss = loss + terms.smoothing * (at_target - mean)
    if terms.z_loss:
        loss = loss + terms.z_loss * log_z.square()
        slope = slope * (1.0 + 2.0 * terms.z_loss * log_z)
    return nll, loss, slope


def sharded_chunk_loss(
    logits: Tensor, targets: Tensor, weights: Tensor, *, shard: VocabShard, terms: LossTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """`chunk_loss` of local logits (N, local size) of a sharded vocabulary; targets are ids of the whole vocabulary.
    Two all-reduces: the largest logit of each row, then its sums (Shoeybi et al. 2019, §3)."""
    smoothing, exact, size = terms.smoothing, logits.float(), logits.shape[-1]
    is_local = (targets >= shard.first) & (targets < shard.first + size)
    column = (targets - shard.first).clamp(0, size - 1)[:, None]
    top = exact.amax(-1, keepdim=True)
    shard.max_(top)
    local_target = torch.where(is_local[:, None], exact.gather(-1, column), 0.0)
    powers = (exact - top).exp_()
    sums = torch.stack([powers.sum(-1, keepdim=True), local_target, exact.sum(-1, keepdim=True)])
    shard.sum_(sums)
    total, at_target, mean = sums[0], sums[1], sums[2] / shard.vocab_size
    nll, loss, slope = _row_losses(top, total, at_target, mean=mean, terms=terms)
    scale = weights[:, None]
    gradient = powers.mul_(slope * scale)
    if smoothing:
        gradient = gradient.sub_(scale * (smoothing / shard.vocab_size))
    gradient.scatter_add_(-1, column, torch.where(is_local[:, None], (smoothing - 1.0) * scale, 0.0))
    return (loss * scale).sum(), (nll * scale).sum(), gradient.to(logits.dtype)


@cache
def gpu_chunk_loss() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Triton kernel of `chunk_loss` if Triton is installed, else `chunk_loss`."""
    if not has_triton():
        return chunk_loss
    from weft.nn.kernels.loss import fused_chunk_loss

    return fused_chunk_loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over chunks of `rows` rows; backward scales the gradients in place, once."""

    @staticmethod
    def forward(  # noqa: PLR0913 — autograd.Function takes no keywords
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabShard | None,
        softcap: float | None, targets: Tensor, weights: Tensor, terms: LossTerms, rows: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        need_features, need_weight, need_bias = ctx.needs_input_grad[:3]
        vocab_size = weight.shape[0]
        compute = gpu_chunk_loss() if features.is_cuda else chunk_loss
        padding = _table_padding(vocab_size, features) if shard is None else 0
        table = _pad_rows(weight, padding, features.dtype)
        offset = None if bias is None else _pad_rows(bias, padding, features.dtype)
        d_features = torch.empty_like(features) if need_features else None
        d_weight: Tensor | None = None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and need_bias else None
        total, total_nll = (features.new_zeros((), dtype=torch.float32) for _ in range(2))
        for begin in range(0, features.shape[0], rows):
            part = slice(begin, begin + rows)
            logits = F.linear(features[part], table, offset)
            slope = None
            if softcap is not None:
                bounded = logits.div_(softcap).tanh_()
                slope = bounded.square().neg_().add_(1.0)
                logits = bounded.mul_(softcap)
            chunk = logits, targets[part], weights[part]
            if shard is None:
                loss, nll, gradient = compute(*chunk, vocab_size=vocab_size, terms=terms)
            else:
                loss, nll, gradient = sharded_chunk_loss(*chunk, shard=shard, terms=terms)
            if slope is not None:
                gradient = gradient.mul_(slope)
            total += loss
            total_nll += nll
            if d_bias is not None:
                d_bias += gradient.sum(0, dtype=torch.float32)[:vocab_size]
            if d_features is not None:
                torch.mm(gradient, table, out=d_features[part])
            if need_weight:
                d_weight = _add_product(d_weight, gradient.T, features[part])
        if shard is not None and d_features is not None:
            shard.sum_(d_features)  # each process has the gradient through its own logits
        ctx.gradients = d_features, None if d_weight is None else d_weight[:vocab_size], d_bias
        ctx.dtypes = features.dtype, weight.dtype, bias.dtype if bias is not None else None
        ctx.mark_non_differentiable(total_nll)
        return total, total_nll

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "gradients are scaled in place: each backward pass needs a forward pass"
        scaled = (None if d is None else d.mul_(upstream[0]).to(t) for d, t in zip(gradients, ctx.dtypes, strict=True))
        return *scaled, *[None] * 6


def _table_padding(vocab_size: int, features: Tensor) -> int:
    return -vocab_size % GPU_TABLE_ROWS if features.is_cuda else 0


def _pad_rows(table: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Table (V, …) in `dtype` with this many rows of zeros appended, in one pass over it or none."""
    if not rows:
        return table.to(dtype)
    padded = table.new_empty(table.shape[0] + rows, *table.shape[1:], dtype=dtype)
    padded[: table.shape[0]] = table
    padded[table.shape[0] :] = 0.0
    return padded


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a · b in fp32, overwriting `total`; a CPU rounds products of narrower dtypes to their dtype first."""
    if a.dtype == torch.float32:
        return a @ b if total is None else total.addmm_(a, b)
    product = torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a, b)
    return product.float() if total is None else total.add_(product)


def chunk_rows(features: Tensor, vocab_size: int) -> int:
    """Number of rows of logits to hold at a time, a power of two."""
    memory = torch.cuda.get_device_properties(features.device).total_memory if features.is_cuda else 0
    logits = memory // GPU_BYTES_PER_LOGIT if features.is_cuda else CPU_LOGITS
    return 1 << max(0, (logits // vocab_size).bit_length() - 1)


def linear_cross_entropy(
    readout: Readout, targets: Tensor, mask: Tensor | None = None, *, terms: LossTerms = PLAIN, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Summed loss of the logits of `readout` where `mask` is true, and summed −log p.

    features (…, D); targets (…,); mask (…,) bool. `rows` rows of logits are held at a time. Only the first result has a
    gradient, and its backward pass can run only once.
    """
    features, targets = readout.features.flatten(0, -2), targets.flatten()
    device = features.device.type
    if torch.is_autocast_enabled(device):  # as a linear layer would
        features = features.to(torch.get_autocast_dtype(device))
    weights = targets.new_ones(targets.shape, dtype=torch.float32)
    if mask is not None:
        weights = mask.flatten().float()
        features = features.masked_fill(~mask.flatten()[:, None], 0.0)  # infinite features would make 0 · inf = NaN
    rows = chunk_rows(features, readout.weight.shape[0]) if rows is None else rows
    readout = readout._replace(features=features)
    with torch.autocast(device, enabled=False):
        total, total_nll = _LinearCrossEntropy.apply(*readout, targets, weights, terms, rows)
    return total, total_nll
