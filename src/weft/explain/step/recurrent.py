"""A token's way through recurrent models: gates and states of every layer, Bahdanau's alignment with the source."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.decode.config import Sampling
from weft.explain.capture import capture
from weft.explain.reading import Reading
from weft.explain.step.head import Choice, word_stages
from weft.explain.step.stage import Way, cost, products, shown, token_stage
from weft.models.bahdanau import AdditiveAttention, Bahdanau
from weft.models.recurrent import Recurrent
from weft.nn.recurrent import SigmoidElman, read, state_parts

GATES = {
    "lstm": ("input", "forget", "candidate", "output"),
    "gru": ("reset", "update", "candidate"),
    "elman": ("hidden",),
}


@dataclass(frozen=True)
class Unrolled:
    """A layer over a text: its gates before and after their activation (time, gates, d_model), its state after every
    token (time, parts, d_model), hidden and of an LSTM cell; `first` is the state before the first."""

    stack: nn.RNNBase
    before: Tensor
    gates: Tensor
    states: Tensor
    first: Tensor
    weights: tuple[Tensor, ...]

    @property
    def kind(self) -> str:
        return kind_of(self.stack)

    def previous(self, place: int) -> Tensor:
        return self.states[place - 1] if place else self.first


def kind_of(stack: nn.RNNBase) -> str:
    return "lstm" if isinstance(stack, nn.LSTM) else "gru" if isinstance(stack, nn.GRU) else "elman"


def activation(stack: nn.RNNBase) -> str:
    """Elman's; those of the other cells are always the same."""
    return "sigmoid" if isinstance(stack, SigmoidElman) else "relu" if stack.mode == "RNN_RELU" else "tanh"


def unrolled(stack: nn.RNNBase, inputs: Tensor, first: Tensor | None = None) -> list[Unrolled]:
    """Every layer of a stack over inputs (time, d_input), from the states (parts, layers, d_model), or from zeros."""
    step, layers = CELLS[kind_of(stack)], []
    for layer, weights in enumerate(stack.all_weights):
        zeros = inputs.new_zeros(state_parts(stack), stack.hidden_size)
        state = start = zeros if first is None else first[:, layer]
        found = []
        for x in inputs:
            before, gates, state = step(x, state, weights, activation(stack))
            found.append((before, gates, state))
        before, gates, states = (torch.stack(column) for column in zip(*found, strict=True))
        layers.append(Unrolled(stack, before, gates, states, start, tuple(weights)))
        inputs = states[:, 0]
    return layers


def _sums(x: Tensor, state: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """W x + b and U h + b, each (gates · d_model,)."""
    W, U, b_x, b_h = weights
    return F.linear(x, W, b_x), F.linear(state[0], U, b_h)


def _lstm(x: Tensor, state: Tensor, weights: Sequence[Tensor], f: str) -> tuple[Tensor, Tensor, Tensor]:
    new, old = _sums(x, state, weights)
    before = (new + old).view(4, -1)
    gates = torch.stack([before[0].sigmoid(), before[1].sigmoid(), before[2].tanh(), before[3].sigmoid()])
    i, forget, g, o = gates
    cell = forget * state[1] + i * g
    return before, gates, torch.stack([o * cell.tanh(), cell])


def _gru(x: Tensor, state: Tensor, weights: Sequence[Tensor], f: str) -> tuple[Tensor, Tensor, Tensor]:
    new, old = (each.view(3, -1) for each in _sums(x, state, weights))
    r, z = (new[:2] + old[:2]).sigmoid()
    candidate = new[2] + r * old[2]
    n = candidate.tanh()
    gates = torch.stack([r, z, n])
    return torch.stack([*(new[:2] + old[:2]), candidate]), gates, ((1 - z) * n + z * state[0])[None]


def _elman(x: Tensor, state: Tensor, weights: Sequence[Tensor], f: str) -> tuple[Tensor, Tensor, Tensor]:
    new, old = _sums(x, state, weights)
    before = (new + old)[None]
    after = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid}[f](before)
    return before, after, after


CELLS = {"lstm": _lstm, "gru": _gru, "elman": _elman}


def cell_stages(way: Way, layer: Unrolled, id: str, place: int, pieces: Sequence[str]) -> str:
    """A layer at a place, with its gates and states over the whole text."""
    kind, names, over = layer.kind, GATES[layer.kind], ("token", pieces)
    gates, kept, read_from = ("gate", names), ("hidden", "cell")[: layer.states.shape[1]], way.last
    words = {"f": activation(layer.stack), "states": "h₋₁, c₋₁" if len(kept) == 2 else "h₋₁"}
    before = way.add(
        f"{id}.previous",
        "state-before" if place else "first-state",
        *(shown(name, part, "unit") for name, part in zip(kept, layer.previous(place), strict=True)),
        words=words,
        inputs=(),
        by=read,
    )
    W, U = layer.weights[:2]
    way.add(
        f"{id}.before",
        f"sums-{kind}",
        shown("before activation", layer.before[place], gates, "unit"),
        numbers={"d_input": W.shape[1], "d_model": U.shape[1], "gates": len(names)},
        inputs=(read_from, before),
        by=CELLS[kind],
        cost=cost(2 * (W.numel() + U.numel()), *layer.weights),
    )
    way.add(
        f"{id}.gates",
        f"gates-{kind}",
        shown("gates", layer.gates[place], gates, "unit"),
        shown("gates over time, mean", layer.gates.mean(-1), over, gates),
        shown("gates over time", layer.gates, over, gates, "unit"),
        words=words,
        by=CELLS[kind],
    )
    return way.add(
        f"{id}.state",
        f"state-{kind}",
        *(shown(name, part, "unit") for name, part in zip(kept, layer.states[place], strict=True)),
        *(shown(f"{name} over time", layer.states[:, n], over, "unit") for n, name in enumerate(kept)),
        words=words,
        inputs=(way.last, before) if len(names) > 1 else (way.last,),
        by=CELLS[kind],
    )


def row_stage(way: Way, model: Recurrent | Bahdanau, id: int, x: Tensor) -> None:
    """The embedding x (width,) of a token."""
    way.add(
        "embedding.row",
        "embedding",
        shown("embedding", x, "coordinate"),
        words={"id": id, "factors": "", "more": ""},
        numbers={"vocab_size": model.embedding.num_embeddings, "width": len(x)},
        by=type(model).forward_features,
        cost=cost(0, model.embedding),
    )


def recurrent_stages(way: Way, reading: Reading, place: int, settings: Sampling) -> Choice:
    """Every layer of a recurrent model at a place, and the choice of the next token."""
    model = reading.model
    assert isinstance(model, Recurrent)
    with capture(model, "embedding") as seen:
        features = model.features(reading.tokens)
    inputs = seen["embedding"][0]
    token_stage(way, "embedding", reading.ids, reading.pieces, place)
    row_stage(way, model, reading.ids[place], inputs[place])
    for number, layer in enumerate(unrolled(model.recurrence, inputs)):
        cell_stages(way, layer, f"recurrence.{number}", place, reading.pieces)
    return word_stages(way, reading, features[0, place], settings)


SEEN = ("encoder", "bridge", "embedding", "attention.probabilities", "attention.scores", "attention", "maxout")


def bahdanau_stages(way: Way, reading: Reading, place: int, settings: Sampling) -> Choice:
    """How a Bahdanau model writes the token after a place, from a source and what it has written."""
    model = reading.model
    assert isinstance(model, Bahdanau) and reading.source is not None and reading.source_pieces is not None
    with capture(model, *SEEN) as seen:
        features = model.features(reading.tokens, **reading.given)
    source, written = ("source", reading.source_pieces), ("token", reading.pieces[: place + 1])
    token_stage(way, "source_embedding", reading.source, reading.source_pieces, None)
    forward, backward = seen["encoder"][0].chunk(2, dim=-1)
    annotations = way.add(
        "encoder.annotations",
        "annotations",
        shown("forward", forward, source, "unit"),
        shown("backward", backward, source, "unit"),
        by=Bahdanau.encode,
        cost=cost(sum(2 * each.numel() for each in model.encoder.parameters() if each.ndim > 1), model.encoder),
    )
    first = torch.tanh(seen["bridge"][0]).unflatten(-1, (-1, model.config.layers, model.config.d_model))
    began = way.add(
        "encoder.bridge",
        "bridge",
        shown("first state", first[0, -1], "unit"),
        by=Bahdanau.encode,
        cost=cost(products(model.bridge), model.bridge),
    )
    token_stage(way, "embedding", reading.ids, reading.pieces, place)
    embedded = seen.calls("embedding")[-1][0]
    row_stage(way, model, reading.ids[place], embedded[place])
    row = way.last
    contexts = torch.cat(seen.calls("attention"))
    layers = unrolled(model.decoder, torch.cat([embedded, contexts], dim=-1), first)
    way.add(
        "attention.query",
        "query",
        shown("state", layers[-1].previous(place)[0], "unit"),
        inputs=() if place else (began,),
        by=Bahdanau._decode,
    )
    attention, energies = model.attention, torch.stack([each[0, :, 0] for each in seen.calls("attention.scores")])
    way.add(
        "attention.energies",
        "energies",
        shown("energies", energies[place], source),
        shown("energies so far", energies[: place + 1], written, source),
        inputs=(way.last, annotations),
        by=AdditiveAttention.forward,
        cost=cost(products(attention.queries) + products(attention.scores) * len(reading.source), attention),
    )
    alignment = seen["attention.probabilities"][0]
    aligned = way.add(
        "attention.alignment",
        "alignment",
        shown("alignment", alignment[place], source, scale="probability"),
        shown("alignment so far", alignment[: place + 1], written, source, scale="probability"),
        by=AdditiveAttention.forward,
    )
    context = way.add(
        "attention.context",
        "context",
        shown("context", contexts[place], "unit"),
        inputs=(aligned, annotations),
        by=AdditiveAttention.forward,
        cost=cost(2 * contexts.shape[1] * len(reading.source)),
    )
    way.add(
        "decoder.input",
        "decoder-input",
        shown("input", torch.cat([embedded[place], contexts[place]]), "coordinate"),
        inputs=(row, context),
        by=Bahdanau._decode,
    )
    for number, layer in enumerate(layers):
        cell_stages(way, layer, f"decoder.{number}", place, reading.pieces)
    pairs = seen["maxout"][0, place]
    way.add(
        "output.maxout",
        "maxout",
        shown("readout", features[0, place], "unit"),
        shown("before", pairs, "unit"),
        inputs=(way.last, context, row),
        by=Bahdanau._decode,
        cost=cost(products(model.maxout), model.maxout),
    )
    return word_stages(way, reading, features[0, place], settings)
