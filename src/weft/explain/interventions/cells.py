"""Recurrent layers step by step, by their formulas, with all gates and states.

PyTorch's recurrent modules return hidden states only. These formulas also give the intermediate values, up to rounding,
and let a gate or a state be changed before the next one is computed from it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.recurrent import SigmoidElman, layer_width, state_parts

GATES = {
    "lstm": ["input", "forget", "candidate", "output"],
    "gru": ["reset", "update", "candidate"],
    "elman": ["hidden"],
}
STATES = ("hidden", "cell")

PartChange = Callable[[str, Tensor], Tensor]  # of a gate or state, by its name
LayerChange = Callable[[int, str, Tensor], Tensor]


class UnrolledLayer(NamedTuple):
    """Recurrent layer over a text: gates before and after their activation, (time, …, gates, d_model), and its states.

    `states` (time, parts, …, d_model) are hidden and, of an LSTM, cell states after every token; `first` is the state
    before the first token.
    """

    stack: nn.RNNBase
    before: Tensor
    gates: Tensor
    states: Tensor
    first: Tensor
    weights: tuple[Tensor, ...]

    def previous(self, position: int) -> Tensor:
        return self.states[position - 1] if position else self.first


def cell_kind(stack: nn.RNNBase) -> str:
    """Return "lstm", "gru" or "elman"."""
    return "lstm" if isinstance(stack, nn.LSTM) else "gru" if isinstance(stack, nn.GRU) else "elman"


def elman_activation(stack: nn.RNNBase) -> str:
    """Return the activation of an Elman network; gated cells always use tanh."""
    return "sigmoid" if isinstance(stack, SigmoidElman) else "relu" if stack.mode == "RNN_RELU" else "tanh"


def cell_parts(stack: nn.RNNBase) -> list[str]:
    """Return the names of a layer's gates and states in the order of their computation; none if they are not shown.

    Stacks that read in both directions or project their states are not unrolled.
    """
    if stack.bidirectional or stack.proj_size:
        return []
    return [*dict.fromkeys((*GATES[cell_kind(stack)], *reversed(STATES[: state_parts(stack)])))]


def unrolled(
    stack: nn.RNNBase, inputs: Tensor, first: Tensor | None = None, *, change: LayerChange = lambda layer, part, x: x
) -> list[UnrolledLayer]:
    """Return every layer of a stack over inputs (time, …, d_input), from states (parts, layers, …, d_model) or zeros.

    `change` gets the layer, the name and the value (…, d_model) of each gate and state, and returns the value to use.
    """
    cell, layers = CELLS[cell_kind(stack)], []
    if cell_kind(stack) == "elman":
        cell = partial(_elman, activation=elman_activation(stack))
    for layer, weights in enumerate(stack.all_weights):
        width = layer_width(stack, layer)
        zeros = inputs.new_zeros(state_parts(stack), *inputs.shape[1:-1], width)
        state = start = zeros if first is None else first[:, layer, ..., :width]
        steps = []
        for x in inputs:
            before, gates, state = cell(x, state, weights, change=partial(change, layer))
            steps.append((before, gates, state))
        before, gates, states = (torch.stack(column) for column in zip(*steps, strict=True))
        layers.append(UnrolledLayer(stack, before, gates, states=states, first=start, weights=tuple(weights)))
        inputs = states[:, 0]
    return layers


def _sums(x: Tensor, state: Tensor, weights: Sequence[Tensor], *, gates: int) -> tuple[Tensor, Tensor]:
    """Return W x + b and U h + b, each (…, gates, d_model)."""
    W, U, b_x, b_h = weights
    return F.linear(x, W, b_x).unflatten(-1, (gates, -1)), F.linear(state[0], U, b_h).unflatten(-1, (gates, -1))


def _lstm(x: Tensor, state: Tensor, weights: Sequence[Tensor], *, change: PartChange) -> tuple[Tensor, Tensor, Tensor]:
    """Return gates before and after activation, and the new state."""
    from_x, from_h = _sums(x, state, weights, gates=4)
    before = from_x + from_h
    activated = zip(GATES["lstm"], before.unbind(-2), strict=True)
    i, f, g, o = (change(name, x.tanh() if name == "candidate" else x.sigmoid()) for name, x in activated)
    cell = change("cell", f * state[1] + i * g)
    return before, torch.stack([i, f, g, o], dim=-2), torch.stack([change("hidden", o * cell.tanh()), cell])


def _gru(x: Tensor, state: Tensor, weights: Sequence[Tensor], *, change: PartChange) -> tuple[Tensor, Tensor, Tensor]:
    """Return gates before and after activation, and the new state."""
    (r_x, z_x, n_x), (r_h, z_h, n_h) = (each.unbind(-2) for each in _sums(x, state, weights, gates=3))
    r, z = change("reset", (r_x + r_h).sigmoid()), change("update", (z_x + z_h).sigmoid())
    candidate = n_x + r * n_h
    n = change("candidate", candidate.tanh())
    before, gates = torch.stack([r_x + r_h, z_x + z_h, candidate], dim=-2), torch.stack([r, z, n], dim=-2)
    return before, gates, change("hidden", (1 - z) * n + z * state[0])[None]


def _elman(
    x: Tensor, state: Tensor, weights: Sequence[Tensor], *, change: PartChange, activation: str = "tanh"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state before and after activation, as the only gate and as the new state."""
    from_x, from_h = _sums(x, state, weights, gates=1)
    before = from_x + from_h
    after = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid}[activation](before.squeeze(-2))
    after = change("hidden", after)
    return before, after.unsqueeze(-2), after[None]


CELLS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {"lstm": _lstm, "gru": _gru, "elman": _elman}
