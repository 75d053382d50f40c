"""Recurrent stacks: Elman (1990), LSTM (Hochreiter and Schmidhuber 1997) and GRU (Cho et al. 2014), any depth.

A stack is one of PyTorch's own recurrent modules, for their fused kernels. All of them name their weights alike:
layer l has `weight_ih_l{l}` (W_ax of the lecture), `weight_hh_l{l}` (W_ah) and two biases, `bias_ih_l{l}` and
`bias_hh_l{l}`, whose sum is the lecture's one b_a. Both are kept, and counted, so that weights
can be exchanged with PyTorch; for Elman and LSTM the second adds nothing but its parameters.

A stack passes one tensor on from one token to the next, its state (parts, layers, batch, d_model). An LSTM's has two
parts, the hidden and the cell state; the others' is the hidden state alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from weft.nn.dropout import Dropout, RowRng

Cell = Literal["elman", "lstm", "gru"]
Sigma = Literal["tanh", "relu", "sigmoid"]


class SigmoidElman(nn.RNNBase):
    """Elman's network with the logistic function, which PyTorch has no kernel for: the lecture's loop, written out."""

    def __init__(self, d_input: int, d_model: int, layers: int, **placed: Any):
        # The mode only determines how many gates the weights have: one, as for tanh.
        super().__init__("RNN_TANH", d_input, d_model, layers, batch_first=True, **placed)

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
    """So many recurrent layers of d_model coordinates over inputs of d_input."""

    d_input: int
    d_model: int
    layers: int = 1


def recurrence(cell: Cell, sizes: Layers, activation: Sigma = "tanh", bidirectional: bool = False) -> nn.RNNBase:
    """A stack that reads from left to right, or both ways (Schuster and Paliwal 1997): d_model coordinates each way.
    `activation` is Elman's σ."""
    kind: Callable[..., nn.RNNBase] = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[cell]
    options: dict[str, Any] = {"batch_first": True, "bidirectional": bidirectional}
    if activation == "sigmoid":
        kind, options = SigmoidElman, {}
    elif cell == "elman":
        options["nonlinearity"] = activation
    return kind(sizes.d_input, sizes.d_model, sizes.layers, **options)


def parts(stack: nn.RNNBase) -> int:
    """How many vectors a layer's state has."""
    return 2 if isinstance(stack, nn.LSTM) else 1


Drop = Callable[[int, Tensor], Tensor]  # what goes to a layer of this number, (batch, time, d_model), with some dropped


class Between(nn.ModuleList):
    """The dropouts between the layers of a stack, which PyTorch's kernels would draw in an order of their own."""

    def __init__(self, layers: int, p: float, variational: bool = False):
        super().__init__(Dropout(p, variational) for _ in range(layers - 1))

    def drop(self, rng: RowRng | None, on_gpu: bool, begin: int = 0) -> Drop | None:
        """What is done in a pass whose places count from `begin`; None where nothing is dropped.

        On a GPU evaluation reads layer by layer as training does, though it drops nothing: the weights of each layer,
        or of all together, lie in one piece of memory there, and would have to be moved between the two.
        """
        if not any(dropout.p and (dropout.training or on_gpu) for dropout in self):
            return None
        return lambda layer, x: self[layer - 1](x, rng, begin)


def read(
    stack: nn.RNNBase, inputs: Tensor, state: Tensor | None = None, drop: Drop | None = None
) -> tuple[Tensor, Tensor]:
    """Read inputs (batch, time, d_input) on from a state (parts, layers, batch, d_model), or from zeros. Hidden states
    of the top layer (batch, time, d_model), and the state after the last token."""
    if drop is not None:
        x, last = inputs, []
        for number, layer in enumerate(_single_layers(stack)):
            x = drop(number, x) if number else x
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
        kept[-1]._forward_hooks = stack._forward_hooks  # whoever looks at what the stack gives sees it here too
    for layer in kept:
        layer.training = stack.training
        if layer.all_weights[0][1].is_cuda and vars(layer).get("flattened") != _memory(layer):
            layer.flatten_parameters()  # or cuDNN would copy them into one piece in every call
            vars(layer)["flattened"] = _memory(layer)
    return kept


def _memory(layer: nn.RNNBase) -> tuple[int, int]:
    """Where a layer's weights lie: moving the model, or the whole stack's own flattening, changes that."""
    storage = layer.all_weights[0][1].untyped_storage()
    return storage.data_ptr(), storage.nbytes()


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


@dataclass
class Carried:
    """The state (parts, layers, batch, d_model) that a pass reads on from, zeros if None; afterwards, the one that it
    ended with. Gradients end there: back-propagation through time is truncated."""

    state: Tensor | None = None


def read_documents(stack: nn.RNNBase, inputs: Tensor, documents: Tensor, drop: Drop | None) -> Tensor:
    """Hidden states (batch, time, d_model) of rows that hold several documents: each is read from zeros. inputs (batch,
    time, d_input); documents (batch, time) numbers them, a change of number is a boundary."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    sequence = starts.flatten().cumsum(0) - 1
    places = torch.arange(sequence.numel(), device=sequence.device)
    return _read_side_by_side(stack, inputs, (places, sequence), drop)


def read_masked(stack: nn.RNNBase, inputs: Tensor, mask: Tensor, drop: Drop | None) -> Tensor:
    """Hidden states (batch, time, …) of padded rows: padding is skipped, and gets zeros. inputs (batch, time, d_input);
    mask (batch, time), True where a token is real, on whichever side the padding is."""
    places = mask.flatten().nonzero().squeeze(1)
    return _read_side_by_side(stack, inputs, (places, places // mask.shape[1]), drop)


def _read_side_by_side(
    stack: nn.RNNBase, inputs: Tensor, scattered: tuple[Tensor, Tensor], drop: Drop | None
) -> Tensor:
    """Read sequences that lie scattered over a batch side by side, the longest first, without any padding. scattered
    are places (tokens,) of the flattened batch in reading order, and the sequence that each belongs to (tokens,)."""
    (B, T), (places, sequence) = inputs.shape[:2], scattered
    lengths = sequence.bincount()
    age = torch.arange(len(places), device=places.device) - (lengths.cumsum(0) - lengths)[sequence]
    rank = lengths.argsort(descending=True, stable=True).argsort()[sequence]
    order = places[(age * len(lengths) + rank).argsort()]
    x, sizes = inputs.flatten(0, 1)[order], age.bincount().cpu()
    for number, layer in enumerate([stack] if drop is None else _single_layers(stack)):
        if number and drop is not None:
            spread = x.new_zeros(B * T, x.shape[-1]).index_copy(0, order, x).unflatten(0, (B, T))
            x = drop(number, spread).flatten(0, 1)[order]
        x = layer(PackedSequence(x, sizes))[0].data
    return x.new_zeros(B * T, x.shape[-1]).index_copy(0, order, x).unflatten(0, (B, T))
