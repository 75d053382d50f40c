"""Activations, and a smooth bound on scores and logits.

GELU (Hendrycks and Gimpel 2016), x · Φ(x), and its tanh approximation are here in cheaper terms for ARM and compiled
GPUs. PyTorch's own backward pass has no vector code for ARM processors and takes as long as a matrix product there. The
functions below keep the share of x that was let through, which is most of the gradient already, and what came out;
x itself is their quotient. So no more is kept than for PyTorch's.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.machine import ON_ARM
from weft.nn import native
from weft.nn.config import Activation

SLOPE = 2.0 * math.sqrt(2.0 / math.pi)  # x · σ(SLOPE · (x + CUBE x³)) is the approximation
CUBE = 0.044715


def gelu(x: Tensor) -> Tensor:
    """x · Φ(x)."""
    if native.gelu_fits(x):
        return native.FusedGELU.apply(x, True)
    return _Exact.apply(x) if _by_hand(x) else F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π)(x + 0.044715 x³))), which is x · σ of twice the tanh's argument."""
    if x.is_cuda and torch.compiler.is_compiling():
        return by_sigmoid(x)
    if native.gelu_fits(x):
        return native.FusedGELU.apply(x, False)
    return _Tanh.apply(x) if _by_hand(x) else F.gelu(x, approximate="tanh")


def by_sigmoid(x: Tensor) -> Tensor:
    """`gelu_tanh` in terms that a compiler fuses: one exponential, where a GPU's tanh takes dozens of instructions."""
    wide = x.float()
    return (wide * torch.sigmoid(wide * (SLOPE + SLOPE * CUBE * wide * wide))).to(x.dtype)


def _by_hand(x: Tensor) -> bool:
    """Whether there will be a backward pass, eager and on ARM."""
    return ON_ARM and x.requires_grad and x.device.type == "cpu" and not torch.compiler.is_compiling()


def _before(out: Tensor, share: Tensor) -> Tensor:
    """x, from x · share; 0 where the share is 0, and so is the gradient."""
    return out / share.clamp(min=torch.finfo(share.dtype).tiny)


class _Exact(torch.autograd.Function):
    """d/dx x Φ(x) = Φ(x) + x · exp(−x²/2)/√2π."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        share = (x * 0.5**0.5).erf_().add_(1.0).mul_(0.5)
        out = x * share
        ctx.save_for_backward(out, share)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        out, share = ctx.saved_tensors
        x = _before(out, share)
        density = x.square().mul_(-0.5).exp_().mul_((2.0 * math.pi) ** -0.5)
        return density.mul_(x).add_(share).mul_(upstream[0])


class _Tanh(torch.autograd.Function):
    """d/dx x σ(u) = σ + x σ(1 − σ) u′ with u = SLOPE · (x + CUBE x³)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        share = x.square().mul_(SLOPE * CUBE).add_(SLOPE).mul_(x).sigmoid_()
        out = x * share
        ctx.save_for_backward(out, share)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        out, share = ctx.saved_tensors
        steepness = _before(out, share).square_().mul_(3.0 * SLOPE * CUBE).add_(SLOPE)
        # x σ (1 − σ) is what came out less its share
        return torch.addcmul(out, out, share, value=-1.0).mul_(steepness).add_(share).mul_(upstream[0])


activations: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """c · tanh(scores/c): no score is further from 0 than c (Bello et al. 2017, §2). None leaves them as they are."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
