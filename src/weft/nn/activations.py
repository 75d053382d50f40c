"""Activation functions, and soft-capping of scores and logits.

GELU (Hendrycks and Gimpel 2016), x · Φ(x), and its tanh approximation have cheaper forms here for ARM and for compiled
code on GPUs. PyTorch's backward pass of GELU is not vectorised on ARM and takes as long as a matrix product there. The
autograd function below saves the output and the gate (Φ(x), or its approximation), which is most of the gradient
already, and recovers x as their quotient. It saves no more than PyTorch's.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.machine import ON_ARM
from weft.nn import native
from weft.nn.config import Activation
from weft.nn.init import Initialiser

SLOPE = 2.0 * math.sqrt(2.0 / math.pi)  # the tanh approximation is x · σ(SLOPE · (x + CUBE x³))
CUBE = 0.044715


def gelu(x: Tensor) -> Tensor:
    """x · Φ(x)."""
    if native.gelu_fits(x):
        return native.FusedGELU.apply(x, True)
    return _GELU.apply(x, True) if _trains_on_arm(x) else F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π)(x + 0.044715 x³))), which is x · σ of twice the tanh's argument."""
    if x.is_cuda and torch.compiler.is_compiling():
        return gelu_by_sigmoid(x)
    if native.gelu_fits(x):
        return native.FusedGELU.apply(x, False)
    return _GELU.apply(x, False) if _trains_on_arm(x) else F.gelu(x, approximate="tanh")


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """`gelu_tanh` with one exponential, for a compiler to fuse: a GPU's tanh takes dozens of instructions."""
    wide = x.float()
    return (wide * torch.sigmoid(wide * (SLOPE + SLOPE * CUBE * wide * wide))).to(x.dtype)


def _trains_on_arm(x: Tensor) -> bool:
    return ON_ARM and x.requires_grad and x.device.type == "cpu" and not torch.compiler.is_compiling()


class _GELU(torch.autograd.Function):
    """d/dx x Φ(x) = Φ(x) + x · exp(−x²/2)/√2π if `exact`; else d/dx x σ(u) = σ + x σ(1 − σ) u′ with
    u = SLOPE · (x + CUBE x³)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exact: bool) -> Tensor:
        if exact:
            gate = (x * 0.5**0.5).erf_().add_(1.0).mul_(0.5)
        else:
            gate = x.square().mul_(SLOPE * CUBE).add_(SLOPE).mul_(x).sigmoid_()
        out = x * gate
        ctx.save_for_backward(out, gate)
        ctx.exact = exact
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        out, gate = ctx.saved_tensors
        x = out / gate.clamp(min=torch.finfo(gate.dtype).tiny)  # 0 where the gate is 0, as the gradient is
        if ctx.exact:
            density = x.square().mul_(-0.5).exp_().mul_((2.0 * math.pi) ** -0.5)
            return density.mul_(x).add_(gate).mul_(upstream[0]), None
        du = x.square_().mul_(3.0 * SLOPE * CUBE).add_(SLOPE)
        # x σ (1 − σ) = out − out · gate
        return torch.addcmul(out, out, gate, value=-1.0).mul_(du).add_(gate).mul_(upstream[0]), None


def swish(x: Tensor, beta: float) -> Tensor:
    """x · σ(βx) (Ramachandran et al. 2017); SiLU if β = 1."""
    return x * torch.sigmoid(beta * x)


def relu2(x: Tensor) -> Tensor:
    """relu(x)² (So et al. 2021)."""
    return F.relu(x).square()


class XIELU(nn.Module):
    """x/2 + α_p x² above 0, and x/2 + α_n (eˣ − 1 − x) below, with trained α_p > 0 and α_n > 1/2, stored as inverses of
    softplus (Huang and Schlag 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def reset_parameters(self, init: Initialiser) -> None:
        """Begin with both at 0.8."""
        for alpha, value in ((self.alpha_p, 0.8), (self.alpha_n, 0.3)):
            nn.init.constant_(alpha, math.log(math.expm1(value)))

    def forward(self, x: Tensor) -> Tensor:
        """(…) → (…)."""
        below = (0.5 + F.softplus(self.alpha_n)) * (torch.expm1(x.clamp(max=-1e-6)) - x)
        return torch.where(x > 0, F.softplus(self.alpha_p) * x * x, below) + 0.5 * x


activations: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": relu2,
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def build(name: Activation | Literal["xielu"], beta: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Return the activation function with this name; `beta` is that of silu as Swish."""
    if name == "xielu":
        return XIELU()
    return activations[name] if beta == 1.0 else partial(swish, beta=beta)


def apply_softcap(scores: Tensor, softcap: float | None) -> Tensor:
    """c · tanh(scores/c), which keeps scores within ±c (Bello et al. 2017, §2); None leaves them unchanged."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
