"""What norms and skip connections do to the gradient on its way down a deep stack, before any training.

A random direction is put on the output of the top layer, and ‖∂/∂x_l‖ is read at the input x_l of every layer. There
are two such directions, because without skips two things can go wrong:

- `full` is any direction: the full gradient. Without skips and without norms it shrinks in every layer. Norms alone
  keep its size, for they divide by the size of what they are given.
- `token_specific` sums to zero over the tokens of a sequence: it is the part that distinguishes one token from another.
  Attention without skips makes all tokens alike (Dong et al. 2021), so this vanishes whatever the norms do.

A norm after the sum and a norm before it differ in what they leave of the skip (Xiong et al. 2020).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from weft.models.config import Decoder
from weft.models.transformer import Transformer
from weft.nn.config import Attention, LayerNorm, Learned, Plain, XavierInit

Placement = Literal["pre", "post", "none"]
PLACEMENTS: tuple[Placement, ...] = ("pre", "post", "none")
BATCH, TIME = 8, 32


@dataclass(frozen=True)
class GradientFlow:
    """One stack: where its norms stand, whether it has skips, and the gradient from layer 0 to the top, which is 1."""

    placement: Placement
    residual: bool
    full: tuple[float, ...]
    token_specific: tuple[float, ...]


def gradient_flow(
    placement: Placement, residual: bool, layers: int = 24, d_model: int = 64, seed: int = 0
) -> GradientFlow:
    """Build a stack with Xavier weights, as the 2017 Transformer has them, and read the gradient between its layers."""
    settings = Decoder(
        vocab_size=64,
        context=TIME,
        layers=layers,
        d_model=d_model,
        attention=Attention(heads=4),
        feedforward=Plain(d_ff=4 * d_model),
        norm=LayerNorm(),
        placement=placement,
        residual=residual,
        position=Learned(),
        init=XavierInit(),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(settings)
        words = torch.randint(0, settings.vocab_size, (BATCH, TIME))
        direction = torch.randn(BATCH, TIME, d_model)
    assert model.decoder is not None
    states: list[Tensor] = []  # x_0 … x_layers, (batch, time, d_model) each
    for block in model.decoder.blocks:
        block.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    model.decoder.blocks[-1].register_forward_hook(lambda _, inputs, output: states.append(output))
    model.features(words)
    between_tokens = direction - direction.mean(dim=1, keepdim=True)
    return GradientFlow(placement, residual, _norms(states, direction), _norms(states, between_tokens))


def _norms(states: list[Tensor], direction: Tensor) -> tuple[float, ...]:
    """‖∂/∂x_l‖ of the output's part along `direction`, for every l, against the top's."""
    gradients = torch.autograd.grad(states[-1], states, direction, retain_graph=True)
    return tuple(float(gradient.norm() / direction.norm()) for gradient in gradients)
