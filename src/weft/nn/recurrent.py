"""Recurrent stacks: Elman (1990), LSTM (Hochreiter and Schmidhuber 1997) and GRU (Cho et al. 2014), of any depth.

A stack is one of PyTorch's recurrent modules, for their fused kernels. All of them name their weights in one way:
layer l has `weight_ih_l{l}` (W_ax of the lecture), `weight_hh_l{l}` (W_ah) and two biases, `bias_ih_l{l}` and
`bias_hh_l{l}`, whose sum is the lecture's b_a. Both are kept, and counted as parameters, so that weights can be
exchanged with PyTorch; for Elman and LSTM the second one is redundant.

The state of a stack is one tensor (parts, layers, batch, d_model): hidden and cell state of an LSTM, else the hidden
state alone.
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
Weights = Callable[[int, Tensor], Tensor]  # the recurrent matrix of the layer with this index, as a pass uses it
Sigma = Literal["tanh", "relu", "sigmoid"]
Drop = Callable[[int, Tensor], Tensor]  # dropout of the input (batch, time, d_model) of the layer with this index


class SigmoidElman(nn.RNNBase):
    """Elman network with the logistic function, for which PyTorch has no kernel: the lecture's loop, written out."""

    def __init__(self, d_input: int, d_model: int, layers: int, **options: Any):
        # The mode only determines the number of gates: one, as for tanh.
        super().__init__("RNN_TANH", d_input, d_model, layers, batch_first=True, **options)

    def forward(self, inputs: Any, state: Tensor | None = None) -> tuple[Any, Tensor]:
        """Hidden states (batch, time, d_model), and the last of each layer (layers, batch, d_model).

        h_t = σ(W_ah h_{t−1} + W_ax x_t + b_a). inputs (batch, time, d_input) or packed. Packed rows are sorted by
        length, longest first: at time t, row i is read if i < the size of step t; shorter rows keep their last state.
        """
        packed, last = isinstance(inputs, PackedSequence), []
        steps: Sequence[Tensor] = inputs.data.split(inputs.batch_sizes.tolist()) if packed else inputs.unbind(1)
        for layer, (W_ax, W_ah, b_ax, b_ah) in enumerate(self.all_weights):
            h = steps[0].new_zeros(len(steps[0]), self.hidden_size) if state is None else state[layer]
            outputs = []
            for x in steps:
                new = torch.sigmoid(F.linear(h[: len(x)], W_ah, b_ah) + F.linear(x, W_ax, b_ax))
                h = new if len(new) == len(h) else torch.cat([new, h[len(new) :]])
                outputs.append(new)
            steps = outputs
            last.append(h)
        hidden = PackedSequence(torch.cat(list(steps)), inputs.batch_sizes) if packed else torch.stack(list(steps), 1)
        return hidden, torch.stack(last)


class TaperedLSTM(nn.LSTM):
    """LSTM whose last layer is narrower than the others, as wide as the embeddings that its output is multiplied by
    (Merity et al. 2018, §4). Its states are padded with zeros to the width of the other layers."""

    def __init__(self, d_input: int, d_model: int, layers: int, *, d_last: int, **options: Any):
        super().__init__(d_input, d_model, layers, **options)
        self.d_last = d_last
        d_below = d_model if layers > 1 else d_input
        for name, inputs in {"weight_ih": (d_below,), "weight_hh": (d_last,), "bias_ih": (), "bias_hh": ()}.items():
            setattr(self, f"{name}_l{layers - 1}", nn.Parameter(torch.empty(4 * d_last, *inputs)))

    def flatten_parameters(self) -> None:
        """Leave the weights where they are: cuDNN flattens those of equal layers."""

    def forward(self, inputs: Any, state: Any = None) -> Any:  # its layers differ, so no kernel runs all of them
        raise AssertionError("`read` and `read_documents` run the layers one by one")


def recurrence(
    cell: Cell,
    d_input: int,
    d_model: int,
    *,
    layers: int = 1,
    activation: Sigma = "tanh",
    bidirectional: bool = False,
    d_projection: int = 0,
    d_last: int | None = None,
) -> nn.RNNBase:
    """Build a stack that reads left to right, or in both directions (Schuster and Paliwal 1997), d_model wide in each.
    `activation` is Elman's σ; with `d_projection`, an LSTM's hidden states are projected to this width; with `d_last`,
    its last layer is this wide."""
    kind: Callable[..., nn.RNNBase] = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[cell]
    options: dict[str, Any] = {"batch_first": True, "bidirectional": bidirectional}
    if activation == "sigmoid":
        kind, options = SigmoidElman, {}
    elif cell == "elman":
        options["nonlinearity"] = activation
    elif d_projection:
        options["proj_size"] = d_projection
    elif d_last not in (None, d_model):
        kind, options["d_last"] = TaperedLSTM, d_last
    return kind(d_input, d_model, layers, **options)


def state_parts(stack: nn.RNNBase) -> int:
    """Number of vectors in a layer's state."""
    return 2 if isinstance(stack, nn.LSTM) else 1


class InterLayerDropout(nn.ModuleList):
    """Dropouts between the layers of a stack. PyTorch's kernels would draw them from their own generator."""

    def __init__(self, layers: int, p: float, variational: bool = False):
        super().__init__(Dropout(p, variational) for _ in range(layers - 1))

    def drop(self, rng: RowRng | None, on_gpu: bool, begin: int = 0) -> Drop | None:
        """Dropout function of a pass whose time counts from `begin`; None if the stack can run in one call.

        On a GPU, evaluation runs layer by layer like training, though it drops nothing: cuDNN needs the weights of one
        layer, or of the whole stack, contiguous, and switching between the two would copy them.
        """
        if not any(dropout.p and (dropout.training or on_gpu) for dropout in self):
            return None
        return lambda layer, x: self[layer - 1](x, rng, begin)


def read(
    stack: nn.RNNBase,
    inputs: Tensor,
    state: Tensor | None = None,
    *,
    drop: Drop | None = None,
    weights: Weights | None = None,
) -> tuple[Tensor, Tensor]:
    """Read inputs (batch, time, d_input) from a state (parts, layers, batch, d_model), zeros by default. Return the
    hidden states of the top layer (batch, time, d_model), and the state after the last token. `weights` are the
    recurrent matrices of a pass, if they are not the parameters themselves."""
    if drop is not None or weights is not None or isinstance(stack, TaperedLSTM):
        x, last = inputs, []
        for number, layer in enumerate(_prepared_layers(stack)):
            x = drop(number, x) if number and drop is not None else x
            before = None if state is None else state[:, number : number + 1, :, : layer.hidden_size]
            if weights is None:
                x, after = read(layer, x, before)
            else:
                x, after = _read_with(layer, x, before, W_ah=weights(number, layer.all_weights[0][1]))
            last.append(F.pad(after, (0, stack.hidden_size - layer.hidden_size)))
        return x, torch.cat(last, dim=1)
    if isinstance(stack, nn.LSTM):
        hidden, last = stack(inputs, None if state is None else (state[0].contiguous(), state[1].contiguous()))
        return hidden, torch.stack(last)
    hidden, last = stack(inputs, None if state is None else state[0].contiguous())
    return hidden, last[None]


def _read_with(layer: nn.RNNBase, x: Tensor, state: Tensor | None, *, W_ah: Tensor) -> tuple[Tensor, Tensor]:
    """Read x with another recurrent matrix than the layer's, by the kernel that its module calls."""
    W_ax, _, *biases = layer.all_weights[0]
    if state is None:
        state = x.new_zeros(state_parts(layer), 1, len(x), layer.hidden_size)
    before = tuple(part.contiguous() for part in state)
    kernel: Callable[..., Any] = getattr(torch, layer.mode.lower())
    start = before if isinstance(layer, nn.LSTM) else before[0]
    hidden, *last = kernel(x, start, (W_ax, W_ah, *biases), True, 1, 0.0, True, False, True)
    return hidden, torch.stack(last)


def layer_width(stack: nn.RNNBase, number: int) -> int:
    """Number of units of a layer."""
    return stack.d_last if isinstance(stack, TaperedLSTM) and number == stack.num_layers - 1 else stack.hidden_size


def single_layers(stack: nn.RNNBase, directions: Sequence[str] = ("",)) -> list[nn.RNNBase]:
    """Layers of a stack as separate modules over the same weights, so that dropout can run between them; with the
    directions ("", "_reverse"), each direction of each layer. They are kept in the stack's `__dict__`, outside its
    submodules and state dict."""
    layers: list[nn.RNNBase] = vars(stack).setdefault("single_layers", [])
    if len(layers) != stack.num_layers * len(directions) or layers[0].weight_hh_l0 is not stack.weight_hh_l0:
        both = stack.bidirectional and len(directions) == 1
        pairs = [(number, direction) for number in range(stack.num_layers) for direction in directions]
        layers[:] = [_single_layer(stack, number, direction, both=both) for number, direction in pairs]
        if len(directions) == 1:
            layers[-1]._forward_hooks = stack._forward_hooks  # hooks on the stack's output see it here too
    return layers


def _prepared_layers(stack: nn.RNNBase, directions: Sequence[str] = ("",)) -> list[nn.RNNBase]:
    """`single_layers` in the stack's mode, with weights as cuDNN wants them."""
    layers = single_layers(stack, directions)
    for layer in layers:
        layer.training = stack.training
        if layer.all_weights[0][1].is_cuda and vars(layer).get("flattened") != _storage(layer):
            layer.flatten_parameters()  # otherwise cuDNN copies the weights in every call
            vars(layer)["flattened"] = _storage(layer)
    return layers


def _storage(layer: nn.RNNBase) -> tuple[int, int]:
    """Address and size of a layer's weights. Moving the model, or flattening the whole stack, changes them."""
    storage = layer.all_weights[0][1].untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _single_layer(stack: nn.RNNBase, number: int, direction: str, *, both: bool) -> nn.RNNBase:
    options: dict[str, Any] = {"bidirectional": True} if both else {}
    if type(stack) is nn.RNN:
        options["nonlinearity"] = stack.nonlinearity
    if not isinstance(stack, SigmoidElman):
        options["batch_first"] = True
    d_input = (1 + stack.bidirectional) * stack.hidden_size if number else stack.input_size
    kind: Callable[..., nn.RNNBase] = nn.LSTM if isinstance(stack, TaperedLSTM) else type(stack)
    layer = kind(d_input, layer_width(stack, number), 1, device="meta", **options)
    for name, _ in list(layer.named_parameters()):
        setattr(layer, name, getattr(stack, name.replace("_l0", f"_l{number}{direction}")))
    return layer


@dataclass
class CarriedState:
    """State (parts, layers, batch, d_model) that a pass continues, zeros if None; replaced by its last, detached."""

    state: Tensor | None = None


def read_documents(stack: nn.RNNBase, inputs: Tensor, documents: Tensor, *, drop: Drop | None) -> Tensor:
    """Hidden states (batch, time, d_model) of rows of packed documents, each read from zeros. inputs (batch, time,
    d_input); documents (batch, time) are ids: a document ends where the id changes."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    sequence = starts.flatten().cumsum(0) - 1
    indices = torch.arange(sequence.numel(), device=sequence.device)
    return _read_packed(stack, inputs, (indices, sequence), drop=drop)


def read_masked(stack: nn.RNNBase, inputs: Tensor, mask: Tensor, *, drop: Drop | None) -> Tensor:
    """Hidden states (batch, time, …) of padded rows; padding is skipped, and its hidden states are zeros. inputs
    (batch, time, d_input); mask (batch, time), True where a token is real; padding may be on either side."""
    if inputs.is_cuda:
        return _read_padded(stack, inputs, mask, drop=drop)
    indices = mask.flatten().nonzero().squeeze(1)
    return _read_packed(stack, inputs, (indices, indices // mask.shape[1]), drop=drop)


def _read_padded(stack: nn.RNNBase, inputs: Tensor, mask: Tensor, *, drop: Drop | None) -> Tensor:
    """Compute `read_masked` for a stack in both directions without waiting for a GPU to count the tokens of its rows:
    padding is read after the tokens of a row, whose backward direction reads them reversed within their length."""
    order = (~mask).byte().argsort(dim=1, stable=True)[..., None]
    (T, lengths), back = (mask.shape[1], mask.sum(1, keepdim=True)), order.argsort(dim=1)
    time = torch.arange(T, device=mask.device)
    reverse = torch.where(time < lengths, lengths - 1 - time, time)[..., None]
    x, layers = inputs, _prepared_layers(stack, ("", "_reverse"))
    for number, (ahead, behind) in enumerate(zip(layers[::2], layers[1::2], strict=True)):
        x = (drop(number, x) if number and drop is not None else x).take_along_dim(order, 1)
        backward = behind(x.take_along_dim(reverse, 1))[0].take_along_dim(reverse, 1)
        x = torch.cat([ahead(x)[0], backward], dim=-1).take_along_dim(back, 1)
    x = x.masked_fill(~mask[..., None], 0.0)
    for hook in stack._forward_hooks.values():  # hooks on the stack's output, which no module computes
        replaced = hook(stack, (inputs,), (x, None))
        x = x if replaced is None else replaced[0]
    return x


def _read_packed(stack: nn.RNNBase, inputs: Tensor, tokens: tuple[Tensor, Tensor], *, drop: Drop | None) -> Tensor:
    """Read the sequences of a batch as a `PackedSequence`, without padding. tokens: indices (tokens,) into the
    flattened batch in reading order, and the sequence (tokens,) each belongs to."""
    (B, T), (indices, sequence) = inputs.shape[:2], tokens
    lengths = sequence.bincount()
    step = torch.arange(len(indices), device=indices.device) - (lengths.cumsum(0) - lengths)[sequence]
    longest_first = lengths.argsort(descending=True, stable=True)
    rank = longest_first.argsort()
    order = indices[(step * len(lengths) + rank[sequence]).argsort()]
    x, sizes = inputs.flatten(0, 1)[order], step.bincount().cpu()
    whole = drop is None and not isinstance(stack, TaperedLSTM)
    for number, layer in enumerate([stack] if whole else _prepared_layers(stack)):
        if number and drop is not None:
            unpacked = x.new_zeros(B * T, x.shape[-1]).index_copy(0, order, x).unflatten(0, (B, T))
            x = drop(number, unpacked).flatten(0, 1)[order]
        x = layer(PackedSequence(x, sizes, longest_first, rank))[0].data
    return x.new_zeros(B * T, x.shape[-1]).index_copy(0, order, x).unflatten(0, (B, T))
