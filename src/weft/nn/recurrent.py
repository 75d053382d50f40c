"""Recurrent stacks: Elman (1990), LSTM (Hochreiter and Schmidhuber 1997) and GRU (Cho et al. 2014), any depth.

A stack is one of PyTorch's own recurrent modules, for their fused kernels. All of them name their weights alike:
layer l has `weight_ih_l{l}` (W_ax of the lecture), `weight_hh_l{l}` (W_ah) and two biases, `bias_ih_l{l}` and
`bias_hh_l{l}`, whose sum is the lecture's one b_a. Both are kept, and counted, so that weights
can be exchanged with PyTorch; for Elman and LSTM the second adds nothing but its parameters.

A stack passes one tensor on from one token to the next, its state (parts, layers, batch, d_model). An LSTM's has two
parts, the hidden and the cell state; the others' is the hidden state alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from weft.nn.dropout import dropped, dropped_alike, next_call, place_keys

Cell = Literal["elman", "lstm", "gru"]
Sigma = Literal["tanh", "relu", "sigmoid"]


class SigmoidElman(nn.RNNBase):
    """Elman's network with the logistic function, which PyTorch has no kernel for: the lecture's loop, written out."""

    def __init__(self, d_input: int, d_model: int, layers: int, dropout: float = 0.0, **where: Any):
        # The mode only determines how many gates the weights have: one, as for tanh.
        super().__init__("RNN_TANH", d_input, d_model, layers, batch_first=True, dropout=dropout, **where)

    def forward(
        self, inputs: Tensor | PackedSequence, state: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """inputs (batch, time, d_input) or packed → hidden states (batch, time, d_model), the last (layers, batch, …).

        h_t = σ(W_ah h_{t−1} + W_ax x_t + b_a). Packed rows are sorted, the longest first, so that row i is still
        being read at time t if i < the number of rows in step t; the others keep their last state.
        """
        steps: Sequence[Tensor]
        if isinstance(inputs, PackedSequence):
            steps = inputs.data.split(inputs.batch_sizes.tolist())
        else:
            steps = inputs.unbind(1)
        last = []
        for layer, (W_ax, W_ah, b_ax, b_ah) in enumerate(self.all_weights):
            h = steps[0].new_zeros(len(steps[0]), self.hidden_size) if state is None else state[layer]
            outputs = []
            for x in steps:
                new = torch.sigmoid(F.linear(h[: len(x)], W_ah, b_ah) + F.linear(x, W_ax, b_ax))
                h = new if len(new) == len(h) else torch.cat([new, h[len(new) :]])
                outputs.append(new)
            steps = outputs
            last.append(h)
        if isinstance(inputs, PackedSequence):
            return PackedSequence(torch.cat(list(steps)), inputs.batch_sizes), torch.stack(last)
        return torch.stack(list(steps), dim=1), torch.stack(last)


@dataclass(frozen=True)
class Layers:
    """So many recurrent layers of d_model coordinates over inputs of d_input; `dropout` falls between them."""

    d_input: int
    d_model: int
    layers: int = 1
    dropout: float = 0.0


def recurrence(cell: Cell, sizes: Layers, activation: Sigma = "tanh", bidirectional: bool = False) -> nn.RNNBase:
    """A stack that reads from left to right, or both ways (Schuster and Paliwal 1997): d_model coordinates each way.

    `activation` is Elman's σ.
    """
    kind: Callable[..., nn.RNNBase] = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[cell]
    options: dict[str, Any] = {"batch_first": True, "bidirectional": bidirectional}
    if activation == "sigmoid":
        kind, options = SigmoidElman, {}
    elif cell == "elman":
        options["nonlinearity"] = activation
    between = sizes.dropout if sizes.layers > 1 else 0.0
    return kind(sizes.d_input, sizes.d_model, sizes.layers, dropout=between, **options)


def parts(stack: nn.RNNBase) -> int:
    """How many vectors a layer's state has."""
    return 2 if isinstance(stack, nn.LSTM) else 1


@dataclass(frozen=True)
class Between:
    """The dropout between a stack's layers, from the `call`th of the pass on: inputs stand at time `begin` …

    With `variational` it is the same at all places of a row.
    """

    call: int
    begin: int = 0
    variational: bool = False

    def drop(self, x: Tensor, p: float, number: int) -> Tensor:
        """What goes from the layer before the `number`th to that, (batch, time, d_model)."""
        call = self.call + number - 1
        if self.variational:
            return dropped_alike(x, p, call)
        return dropped(x, p, place_keys(x.shape[:-1], call, (self.begin,), device=x.device))


def dropout_between(stack: nn.RNNBase, variational: bool = False) -> Between | None:
    """The next dropouts of the pass, one between each two layers; None where nothing is dropped."""
    if not stack.training or not stack.dropout:
        return None
    return Between(next_call(stack.num_layers - 1), variational=variational)


def read(
    stack: nn.RNNBase, inputs: Tensor, state: Tensor | None = None, between: Between | None = None
) -> tuple[Tensor, Tensor]:
    """Read inputs (batch, time, d_input) on from a state (parts, layers, batch, d_model), or from zeros.

    Hidden states of the top layer (batch, time, d_model), and the state after the last token.
    """
    if between is not None:
        x, last = inputs, []
        for number, layer in enumerate(_single_layers(stack)):
            if number:
                x = between.drop(x, stack.dropout, number)
            x, after = read(layer, x, None if state is None else state[:, number : number + 1])
            last.append(after)
        return x, torch.cat(last, dim=1)
    if isinstance(stack, nn.LSTM):
        hidden, last = stack(inputs, None if state is None else (state[0].contiguous(), state[1].contiguous()))
        return hidden, torch.stack(last)
    hidden, last = stack(inputs, None if state is None else state[0].contiguous())
    return hidden, last[None]


def _single_layers(stack: nn.RNNBase) -> list[nn.RNNBase]:
    """Each layer of a stack as a stack of its own, over the same weights: what lies between them can be dropped.

    PyTorch's kernels for several layers drop by numbers of their own. The parts are kept beside the stack's weights,
    not among its submodules.
    """
    kept: list[nn.RNNBase] = vars(stack).setdefault("single_layers", [])
    if not kept or kept[0].weight_hh_l0 is not stack.weight_hh_l0:
        kept[:] = [_single_layer(stack, layer) for layer in range(stack.num_layers)]
    for layer in kept:
        layer.training = stack.training
    return kept


def _single_layer(stack: nn.RNNBase, layer: int) -> nn.RNNBase:
    options: dict[str, Any] = {"bidirectional": True} if stack.bidirectional else {}
    if type(stack) is nn.RNN:
        options["nonlinearity"] = stack.nonlinearity
    ways = 1 + stack.bidirectional
    d_input = ways * stack.hidden_size if layer else stack.input_size
    if not isinstance(stack, SigmoidElman):
        options["batch_first"] = True
    kind: Callable[..., nn.RNNBase] = type(stack)
    one = kind(d_input, stack.hidden_size, 1, device="meta", **options)
    for name, _ in list(one.named_parameters()):
        setattr(one, name, getattr(stack, name.replace("_l0", f"_l{layer}")))
    return one


class Carried:
    """The state (parts, layers, batch, d_model) that a stack reads on from, and afterwards the one it ended with."""

    def __init__(self, state: Tensor | None):
        self.state = state


class _Now:
    carried: Carried | None = None


@contextmanager
def carrying(state: Tensor | None) -> Iterator[Carried]:
    """Inside, whole sequences are read on from `state`, or from zeros, and leave theirs in what this gives.

    Gradients end there: back-propagation through time is truncated.
    """
    before, _Now.carried = _Now.carried, Carried(state)
    try:
        yield _Now.carried
    finally:
        _Now.carried = before


def read_on(stack: nn.RNNBase, inputs: Tensor, between: Between | None = None) -> Tensor:
    """Hidden states (batch, time, d_model) of inputs (batch, time, d_input): from zeros, or as `carrying` says."""
    carried = _Now.carried
    hidden, last = read(stack, inputs, None if carried is None else carried.state, between)
    if carried is not None:
        carried.state = last.detach()
    return hidden


def read_documents(stack: nn.RNNBase, inputs: Tensor, documents: Tensor, between: Between | None = None) -> Tensor:
    """Hidden states (batch, time, d_model) of rows that hold several documents: each is read from zeros.

    inputs (batch, time, d_input); documents (batch, time) numbers them, a change of number is a boundary.
    """
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    sequence = starts.flatten().cumsum(0) - 1
    places = torch.arange(sequence.numel(), device=sequence.device)
    return _read_side_by_side(stack, inputs, (places, sequence), between)


def read_masked(stack: nn.RNNBase, inputs: Tensor, mask: Tensor) -> Tensor:
    """Hidden states (batch, time, …) of padded rows: padding is skipped, and gets zeros.

    inputs (batch, time, d_input); mask (batch, time), True where a token is real, on whichever side the padding is.
    """
    places = mask.flatten().nonzero().squeeze(1)
    return _read_side_by_side(stack, inputs, (places, places // mask.shape[1]), dropout_between(stack))


def _read_side_by_side(
    stack: nn.RNNBase, inputs: Tensor, scattered: tuple[Tensor, Tensor], between: Between | None
) -> Tensor:
    """Read sequences that lie scattered over a batch side by side, the longest first, without any padding.

    scattered are places (tokens,) of the flattened batch in reading order, and the sequence that each belongs to
    (tokens,).
    """
    (B, T), (places, sequence) = inputs.shape[:2], scattered
    lengths = sequence.bincount()
    age = torch.arange(len(places), device=places.device) - (lengths.cumsum(0) - lengths)[sequence]
    rank = lengths.argsort(descending=True, stable=True).argsort()[sequence]
    order = places[(age * len(lengths) + rank).argsort()]
    x, sizes = inputs.flatten(0, 1)[order], age.bincount().cpu()
    if between is None:
        hidden, _ = stack(PackedSequence(x, sizes))
    else:
        for number, layer in enumerate(_single_layers(stack)):
            if number:
                spread = x.new_zeros(B * T, x.shape[-1]).index_copy(0, order, x).unflatten(0, (B, T))
                x = between.drop(spread, stack.dropout, number).flatten(0, 1)[order]
            hidden, _ = layer(PackedSequence(x, sizes))
            x = hidden.data
    blank = hidden.data.new_zeros(B * T, hidden.data.shape[-1])
    return blank.index_copy(0, order, hidden.data).unflatten(0, (B, T))
