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
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from weft.errors import ConfigError, counted
from weft.figures.charts import Chart, Charts, grid, legend, line
from weft.figures.tables import Table
from weft.models.config import Decoder
from weft.models.transformer import Transformer
from weft.nn.config import Attention, LayerNorm, Plain, XavierInit
from weft.nn.position_config import Learned

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


# ---- drawn

NAMES = {"pre": "pre-norm", "post": "post-norm", "none": "no norm"}


@dataclass(frozen=True)
class GradientFlows(Charts):
    """What norms and skips do to the gradient: all six kinds of stack."""

    layers: int
    d_model: int
    flows: tuple[GradientFlow, ...]

    title = "What skips and norms do to the gradient"
    about = (
        "The norm of the gradient at the input of every layer of an untrained stack, relative to that at the top, on a"
        " logarithmic axis. Without skip connections its token-specific part vanishes on the way down."
    )

    def charts(self) -> list[Chart]:
        """With skips and without, the whole gradient and its token-specific part."""
        return [
            Chart(f"{what}, {'with' if residual else 'without'} skips", partial(self._draw, part, residual))
            for part, what in (("full", "full gradient"), ("token_specific", "token-specific part"))
            for residual in (True, False)
        ]

    def tables(self) -> list[Table]:
        """Both at some layers."""
        layers = self.layers
        depths = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers})
        rows = [
            (
                NAMES[found.placement],
                "yes" if found.residual else "no",
                f"{found.full[0]:.1e}",
                *(f"{found.token_specific[depth]:.1e}" for depth in depths),
            )
            for found in self.flows
        ]
        remark = (
            "'full' is the norm of the full gradient at layer 0; the columns after it are its token-specific part,"
            " which distinguishes one token from another, at the input of some layers and at the output of the last."
            " Each is divided by its norm at the top. Without skips the tokens become alike, and the token-specific"
            " part vanishes; without norms as well, everything does."
        )
        header = ("norm", "skips", "full", *(f"layer {depth}" if depth < layers else "top" for depth in depths))
        title = f"Gradient relative to the top's, {counted(layers, 'layer')} of width {self.d_model} at initialisation"
        return [Table(header, rows, title, [remark], text=(0, 1))]

    def _draw(self, part: str, residual: bool, axes: Any) -> None:
        shown = [flow for flow in self.flows if flow.residual == residual]
        for number, flow in enumerate(shown):
            line(axes, range(self.layers + 1), getattr(flow, part), number, NAMES[flow.placement])
        axes.set_yscale("log")
        # the same axis for all four, so that they can be compared
        values = [value for flow in self.flows for value in (*flow.full, *flow.token_specific) if value > 0]
        axes.set_ylim(max(min(values), 1e-24) / 3, max(values) * 10)
        axes.minorticks_off()
        axes.set_xlabel("layer", fontsize=9)
        axes.set_ylabel("‖gradient‖ / the top's", fontsize=9)
        grid(axes)
        legend(axes, loc="lower right" if not residual else "best")


def gradient_flows(layers: int = 24, d_model: int = 64, seed: int = 0) -> GradientFlows:
    """The gradient by layer of untrained stacks: norm before, after or not at all, with skips and without."""
    if d_model % 4:
        raise ConfigError(f"--d-model {d_model}: expected a multiple of 4, because the stack has 4 heads")
    kinds = [(placement, residual) for residual in (True, False) for placement in PLACEMENTS]
    return GradientFlows(layers, d_model, tuple(gradient_flow(*kind, layers, d_model, seed) for kind in kinds))
