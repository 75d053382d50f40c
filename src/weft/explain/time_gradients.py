"""Gradient on its way back through time, in a recurrent model: ∂loss/∂h_t of the last token's loss at every time step.

Each step back multiplies the gradient by the Jacobian of one step, so it shrinks or grows exponentially (Bengio et al.
1994). For an Elman network the Jacobian is σ′ W_ah: over n steps the gradient is at most (max σ′ · ‖W_ah‖)ⁿ times the
last one (Pascanu et al. 2013). For an LSTM the cell state is multiplied by the forget gate instead: 1/2 at the usual
initialisation, so that the gradient vanishes too, and closer to 1 if a bias opens the gate (Jozefowicz et al. 2015).
For an LSTM h_t stands for both parts of the state. ELMo has two LSTMs, of which one reads from the last token to the
first: its loss is that of the first token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.explain.texts import TEXTS
from weft.figures.charts import Charts
from weft.figures.formats import table_number
from weft.figures.plot import LOOKS, Axis, Plot, Series, integer_axis, lines
from weft.figures.tables import Table
from weft.models.bahdanau import Bahdanau
from weft.models.base import EncoderInput, evaluating
from weft.models.build import build
from weft.models.config import Recurrent as RecurrentConfig
from weft.models.elmo import ELMo
from weft.models.recurrent import Recurrent
from weft.nn.recurrent import SigmoidElman

BATCH, TIME = 8, 40
MAX_WIDTH = 128  # of the untrained models
STEPS_BACK = (0, 1, 2, 4, 8, 16, 32)  # columns of a table
RADII = (0.7, 1.0, 1.3)  # spectral radius of W_ah of the lines
FORGET_BIAS = 1.0  # opens the gate: σ(1) = 73 % of a cell state passes, instead of σ(0) = 50 %
MAX_BOUND = 100  # a bound is drawn up to this multiple of the largest norm
SMALL_INPUTS = 1e-4  # standard deviation of the embeddings: tanh stays in its linear range


@dataclass(frozen=True)
class StateGradients:
    """Norm of the gradient with respect to each state h_0, h_1 …, and its bound where one is known."""

    norms: tuple[float, ...]
    bound: tuple[float, ...] = ()


Steps = list[tuple[Tensor, ...]]  # output and parts of the state after every step


def state_gradients(
    model: Recurrent | Bahdanau | ELMo, tokens: Tensor, *, source: EncoderInput | None = None, backward: bool = False
) -> tuple[StateGradients, Tensor]:
    """Return ‖∂loss/∂h_t‖ for tokens (batch, time), and the loss: −log p of the last token, the mean over the rows.

    ELMo's `backward` direction reads the tokens in reverse, and its last token is the first of the text.
    """
    tokens = tokens.flip(1) if backward else tokens
    # cuDNN has no backward pass in evaluation mode
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        if isinstance(model, ELMo):
            steps, features = _elmo_steps(model, tokens[:, :-1], model.back if backward else model.ahead)
        else:
            steps, features = _steps(model, tokens, source)
        loss = torch.nn.functional.cross_entropy(model.readout(features[:, -1]).logits().float(), tokens[:, -1])
        every = torch.autograd.grad(loss, [t for step in steps for t in step], allow_unused=True, retain_graph=True)
    size, norms = len(steps[0]), []
    for start in range(0, len(every), size):
        of_output, *states = every[start : start + size]
        # the output of a step is the hidden state of the top layer
        parts = [torch.zeros_like(t) if g is None else g for g, t in zip(states, steps[start // size][1:], strict=True)]
        parts[0] = torch.cat([parts[0][:-1], parts[0][-1:] + (0 if of_output is None else of_output.transpose(0, 1))])
        norms.append(sum(float(part.float().square().sum()) for part in parts) ** 0.5)
    bound = () if isinstance(model, ELMo) else _bound(_stack(model), norms)
    return StateGradients(tuple(norms), bound), loss


def _stack(model: Recurrent | Bahdanau) -> nn.RNNBase:
    return model.recurrence if isinstance(model, Recurrent) else model.decoder


def _steps(model: Recurrent | Bahdanau, tokens: Tensor, source: EncoderInput | None) -> tuple[Steps, Tensor]:
    """Return the steps of a recurrent decoder over tokens (batch, time), all but the last, and its features."""
    steps: Steps = []

    def keep(module: nn.Module, inputs: Any, outputs: tuple[Tensor, Any]) -> None:
        output, state = outputs
        steps.append((output, *(state if isinstance(state, tuple) else (state,))))

    hook = _stack(model).register_forward_hook(keep)
    try:
        # `advance` reads one token after the other, and its graph has every state
        return steps, model.advance(tokens[:, :-1], model.start(len(tokens), tokens.shape[1], source))
    finally:
        hook.remove()


def _elmo_steps(model: ELMo, tokens: Tensor, layers: nn.ModuleList) -> tuple[Steps, Tensor]:
    """Return the steps of one direction over tokens (batch, time), the top layer's state first, and its features."""
    steps, features, states = Steps(), list[Tensor](), list[Any]([None] * len(layers))
    for x in model.embedding(tokens).split(1, dim=1):
        for number, layer in enumerate(layers):
            h, states[number] = layer(x, states[number])
            x = x + h if number else h
        steps.append((h, *(part for state in reversed(states) for part in state)))
        features.append(x)
    return steps, torch.cat(features, dim=1)


def _bound(stack: nn.RNNBase, norms: list[float]) -> tuple[float, ...]:
    """Return the largest possible norms by the last one, for an Elman network of one layer."""
    if not isinstance(stack, nn.RNN | SigmoidElman) or stack.num_layers > 1:
        return ()
    factor = float(torch.linalg.matrix_norm(stack.all_weights[0][1].detach().float(), 2))
    factor *= 0.25 if isinstance(stack, SigmoidElman) else 1.0
    return tuple(norms[-1] * factor**steps for steps in reversed(range(len(norms))))


@dataclass(frozen=True)
class TimeGradients(Charts):
    """Gradients of untrained recurrent models through time, relative to the last step's; by cell and by radius."""

    d_model: int
    clip: float
    cells: dict[str, StateGradients]
    radii: dict[float, StateGradients]
    weights: dict[float, float]  # norm of the gradient of all weights, by the radius of W_ah

    title = "Gradients through time"
    about = TEXTS["time-gradients"]

    def charts(self) -> list[Plot]:
        """Return the charts of cells, of spectral radii with their bounds, and of clipping."""
        y = Axis("‖∂loss/∂h_t‖ / the last step's", log=True, format="scientific")
        radii = {f"radius {radius:g}": each for radius, each in self.radii.items()}
        charts = [state_chart(self.cells, "cells at initialisation", y)]
        charts.append(state_chart(radii, "Elman, by spectral radius", y))
        clipped = {"gradient": self.weights.values(), f"clipped to {self.clip:g}": self._clipped().values()}
        radius, norm = Axis("spectral radius of W_ah"), Axis("norm of the weights' gradient", log=True)
        return [*charts, lines("clipping", clipped, list(self.weights), x=radius, y=norm)]

    def _clipped(self) -> dict[float, float]:
        return {radius: min(norm, self.clip) if self.clip else norm for radius, norm in self.weights.items()}

    def tables(self) -> list[Table]:
        named = {**self.cells, **{f"Elman, radius {radius:g}": found for radius, found in self.radii.items()}}
        title = f"‖∂loss/∂h_t‖ relative to the last step's, untrained models of width {self.d_model}"
        rows = [(str(r), *map(table_number, (norm, self._clipped()[r]))) for r, norm in self.weights.items()]
        clipping = Table(("radius", "norm", "clipped"), rows, "Norm of the weights' gradient, by spectral radius")
        return [state_table(named, title, [TEXTS["time-gradients-table"]]), clipping]


def state_table(named: Mapping[str, StateGradients], title: str = "", remarks: Sequence[str] = ()) -> Table:
    """Return the norms a few steps before the last, and their bounds."""
    time = min(len(each.norms) for each in named.values())
    steps = [each for each in STEPS_BACK if each < time]
    rows = []
    for name, each in named.items():
        rows.append((name, *(table_number(each.norms[-1 - n]) for n in steps)))
        if each.bound:
            rows.append(("  at most", *(table_number(each.bound[-1 - n]) for n in steps)))
    title = title or "‖∂loss/∂h_t‖ of the last token's loss, by the number of steps back in time"
    return Table(("steps back", *map(str, steps)), rows, title, remarks)


def state_chart(named: dict[str, StateGradients], title: str = "of the hidden states", y: Axis | None = None) -> Plot:
    """Plot the norms against time, each with its bound as a dotted line."""
    time, series = max(len(each.norms) for each in named.values()), []
    for index, (name, each) in enumerate(named.items()):
        look = LOOKS[index % len(LOOKS)]._replace(marker="")
        look = look._replace(dash="") if each.bound else look  # a dotted line is a bound
        series.append(Series(name, list(enumerate(each.norms)), look))
        bound = [point for point in enumerate(each.bound) if point[1] <= MAX_BOUND * max(each.norms)]
        if bound:
            named_before = any(drawn.name == "bound" for drawn in series)
            series.append(Series("" if named_before else "bound", bound, look._replace(dash="1.5 3", width=1.2)))
    y = y or Axis("‖∂loss/∂h_t‖, the last token's loss", log=True, format="scientific")
    return Plot(title, series, integer_axis("time step t", time), y)


def time_gradients(config: RecurrentConfig, *, clip: float = 1.0, seed: int = 0) -> TimeGradients:
    """Return the gradients through time of untrained models with a preset's width, layers and initial weights."""
    small = config.replace(vocab_size=64, d_model=min(config.d_model, MAX_WIDTH), d_embedding=None, dropout=0.0)
    lstm = _with_cell(small, "lstm")
    models = {"Elman": _with_cell(small, "elman"), "LSTM": lstm, "GRU": _with_cell(small, "gru")}
    found = {name: _untrained(model, seed) for name, model in models.items()}
    found[f"LSTM, forget bias {FORGET_BIAS:g}"] = _untrained(lstm, seed, change=_open_forget_gate)
    cells = {name: StateGradients(gradients.norms) for name, (gradients, _) in found.items()}
    elman = _with_cell(small, "elman").replace(layers=1)
    scan = [n / 10 for n in range(5, 17)]
    scanned = {radius: _untrained(elman, seed, change=partial(_scale, radius=radius)) for radius in {*scan, *RADII}}
    radii = {radius: scanned[radius][0] for radius in RADII}
    weights = {radius: scanned[radius][1] for radius in scan}
    return TimeGradients(small.d_model, clip, cells, radii=radii, weights=weights)


def _with_cell(config: RecurrentConfig, cell: str) -> RecurrentConfig:
    return config.replace(cell=cell, activation=config.activation if cell == config.cell == "elman" else "tanh")


def _untrained(
    config: RecurrentConfig, seed: int, *, change: Callable[[Recurrent], None] | None = None
) -> tuple[StateGradients, float]:
    """Return the gradients of the states relative to the last one's, and the norm of the weights' gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config)
        assert isinstance(model, Recurrent)
        tokens = torch.randint(0, config.vocab_size, (BATCH, TIME + 1))
        if change is not None:
            change(model)
    with evaluating(model):
        found, loss = state_gradients(model, tokens)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    relative = (tuple(value / found.norms[-1] for value in values) for values in (found.norms, found.bound))
    return StateGradients(*relative), float(sum(gradient.square().sum() for gradient in gradients) ** 0.5)


@torch.no_grad()
def _open_forget_gate(model: Recurrent) -> None:
    width = model.config.d_model
    for layer in range(model.config.layers):
        model.recurrence.all_weights[layer][2][width : 2 * width] = FORGET_BIAS


@torch.no_grad()
def _scale(model: Recurrent, radius: float) -> None:
    """Make W_ah an orthogonal matrix times `radius`, which is then its spectral radius and its norm."""
    _, W_ah, b_ax, b_ah = model.recurrence.all_weights[0]
    nn.init.orthogonal_(W_ah, radius)
    model.embedding.weight.normal_(std=SMALL_INPUTS)
    b_ax.zero_()
    b_ah.zero_()
