"""Cross entropy, with label smoothing and z-loss, in two forms that give the same numbers.

`cross_entropy` reads logits that exist. `linear_cross_entropy` reads features and the output table and never holds
the logits of a whole batch: it works through the rows in chunks and finds the gradient of each chunk while its logits
are there. Memory then grows with batch + vocabulary, not with their product.

For logits z of a row with target t, Z = Σ exp z, smoothing ε and z-loss weight ζ:

    loss = log Z − (1 − ε) z_t − ε mean(z) + ζ log²Z
    ∂loss/∂z = softmax(z) · (1 + 2ζ log Z) − (1 − ε) onehot(t) − ε/V
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Logits held at a time: small enough to be nothing, large enough for good matrix products.
CPU_ELEMENTS = 1 << 22  # 16 MiB in fp32
GPU_ELEMENTS = 1 << 27  # 512 MiB in fp32

ChunkLoss = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor, Tensor]]


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """The loss of each row. logits (N, V), targets (N,); gives (N,) in fp32."""
    logits = logits.float()
    log_z = logits.logsumexp(-1)
    loss = log_z - (1.0 - smoothing) * logits.gather(-1, targets[:, None]).squeeze(-1)
    if smoothing:
        loss = loss - smoothing * logits.mean(-1)
    if z_loss:
        loss = loss + z_loss * log_z.square()
    return loss


def chunk_loss(
    logits: Tensor, targets: Tensor, weights: Tensor, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ weights · loss, Σ weights · −log p, and the first one's gradient by the logits, in their type.

    logits (N, V), targets and weights (N,). One exponential serves both the loss and its gradient.
    """
    exact = logits.float()
    top = exact.amax(-1, keepdim=True)
    powers = (exact - top).exp()
    total = powers.sum(-1, keepdim=True)
    log_z = top + total.log()
    at_target = exact.gather(-1, targets[:, None])
    nll = log_z - at_target
    loss, slope = nll, 1.0 / total
    if smoothing:
        loss = loss + smoothing * (at_target - exact.mean(-1, keepdim=True))
    if z_loss:
        loss = loss + z_loss * log_z.square()
        slope = slope * (1.0 + 2.0 * z_loss * log_z)
    scale = weights[:, None]
    slope, even = slope * scale, scale * (smoothing / logits.shape[-1])
    gradient = powers * slope - even if smoothing else powers * slope
    gradient = gradient.to(logits.dtype)
    at_target_slope = (at_target - top).exp() * slope - even - (1.0 - smoothing) * scale
    gradient.scatter_(-1, targets[:, None], at_target_slope.to(logits.dtype))
    return (loss * scale).sum(), (nll * scale).sum(), gradient


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks; backward only scales what forward found."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        smoothing: float,
        z_loss: float,
        rows: int,
        chunk: ChunkLoss,
    ) -> tuple[Tensor, Tensor]:
        need_features, need_weight, need_bias = ctx.needs_input_grad[:3]
        table = weight.to(features.dtype)
        d_features = torch.empty_like(features) if need_features else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and need_bias else None
        total = features.new_zeros((), dtype=torch.float32)
        plain = features.new_zeros((), dtype=torch.float32)
        for begin in range(0, features.shape[0], rows):
            part = slice(begin, begin + rows)
            logits = features[part] @ table.T
            if bias is not None:
                logits = logits + bias.to(logits.dtype)
            loss, nll, gradient = chunk(logits, targets[part], weights[part], smoothing, z_loss)
            total += loss
            plain += nll
            if d_bias is not None:
                d_bias += gradient.sum(0, dtype=torch.float32)
            if d_features is not None:
                torch.mm(gradient, table, out=d_features[part])
            if d_weight is not None:
                d_weight += gradient.T @ features[part]
        ctx.save_for_backward(d_features, d_weight, d_bias)
        ctx.dtypes = weight.dtype, bias.dtype if bias is not None else None
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0]
        d_features, d_weight, d_bias = ctx.saved_tensors
        if d_features is not None:
            d_features = (d_features * scale).to(d_features.dtype)
        if d_weight is not None:
            d_weight = (d_weight * scale).to(ctx.dtypes[0])
        if d_bias is not None:
            d_bias = (d_bias * scale).to(ctx.dtypes[1])
        return d_features, d_weight, d_bias, None, None, None, None, None, None


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    mask: Tensor | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    rows: int | None = None,
    chunk: ChunkLoss = chunk_loss,
) -> tuple[Tensor, Tensor]:
    """The summed loss of logits = features · weightᵀ + bias where `mask` is true, and the summed plain −log p.

    features (N, D), weight (V, D), bias (V,), targets (N,), mask (N,) bool; `rows` logits are held at a time, and
    `chunk` finds their loss and gradient (`chunk_loss`, or the same compiled). Only the first result has a gradient.
    """
    if rows is None:
        rows = max(1, (GPU_ELEMENTS if features.is_cuda else CPU_ELEMENTS) // weight.shape[0])
    device = features.device.type
    if torch.is_autocast_enabled(device):  # what a linear layer would do
        features = features.to(torch.get_autocast_dtype(device))
    weights = targets.new_ones(targets.shape, dtype=torch.float32)
    if mask is not None:
        weights = mask.float()
        features = features.masked_fill(~mask[:, None], 0.0)  # whatever stands there, not even 0 · inf gets out
    with torch.autocast(device, enabled=False):
        total, plain = _LinearCrossEntropy.apply(
            features, weight, bias, targets, weights, smoothing, z_loss, rows, chunk
        )
    return total, plain
