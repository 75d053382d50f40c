"""Stages of a token in recurrent models: gates and states of every layer, Bahdanau's alignment with the source, and
the mix of ELMo's layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.decode.config import Sampling
from weft.errors import ModelError
from weft.explain.capture import capture
from weft.explain.interventions.cells import CELLS, GATES, STATES, UnrolledLayer, cell_kind, elman_activation, unrolled
from weft.explain.reading import Reading
from weft.explain.reading import pieces as pieces_of
from weft.explain.step.head import Candidates, logit_stage, token_stages
from weft.explain.step.stage import StageList, cost, linear_cost, rounded, sent
from weft.explain.step.threads import MAX_SIDED_THREADS, shown_threads
from weft.models.bahdanau import AdditiveAttention, Bahdanau
from weft.models.bengio import Bengio
from weft.models.elmo import ELMo
from weft.models.recurrent import Recurrent
from weft.nn.recurrent import read

CAPTURED = ("encoder", "bridge", "embedding", "attention.probabilities", "attention.scores", "attention", "maxout")


def _cell_stages(
    stages: StageList, layer: UnrolledLayer, id: str, *, position: int, pieces: Sequence[str], source: str | None = None
) -> str:
    """Record a layer at a position, with its gates and states over the whole text; return the id of its new state.

    `source` is the stage whose result it reads, by default the last.
    """
    kind, read_from, time = cell_kind(layer.stack), source or stages.last, ("token", pieces)
    gates, states, by = ("gate", GATES[kind]), STATES[: layer.states.shape[1]], CELLS[kind]
    words = {"f": elman_activation(layer.stack), "states": "h₋₁, c₋₁" if len(states) == 2 else "h₋₁"}
    old = [sent(name, part, "unit") for name, part in zip(states, layer.previous(position), strict=True)]
    text = "state-before" if position else "first-state"
    previous = stages.record(f"{id}.previous", *old, text=text, words=words, inputs=(), by=read)
    W, U = layer.weights[:2]
    stages.record(
        f"{id}.before",
        sent("before activation", layer.before[position], gates, "unit"),
        text=f"sums-{kind}",
        numbers={"d_input": W.shape[1], "d_model": U.shape[1], "gates": len(GATES[kind])},
        inputs=(read_from, previous),
        by=by,
        cost=cost(2 * (W.numel() + U.numel()), *layer.weights),
    )
    tensors = [
        sent("gates", layer.gates[position], gates, "unit"),
        sent("gates over time, mean", layer.gates.mean(-1), time, gates),
        sent("gates over time", layer.gates, time, gates, "unit"),
    ]
    last = stages.record(f"{id}.gates", *tensors, text=f"gates-{kind}", words=words, by=by)
    new = [sent(name, part, "unit") for name, part in zip(states, layer.states[position], strict=True)]
    new += [sent(f"{name} over time", layer.states[:, n], time, "unit") for n, name in enumerate(states)]
    inputs = (last, previous) if kind != "elman" else (last,)
    return stages.record(f"{id}.state", *new, text=f"state-{kind}", words=words, inputs=inputs, by=by)


def _embedding_stage(stages: StageList, model: Recurrent | Bahdanau | ELMo, id: int, *, x: Tensor) -> str:
    """Record the embedding x (width,) of a token."""
    return stages.record(
        "embedding.row",
        sent("embedding", x, "coordinate"),
        text="embedding",
        words={"id": id, "factors": "", "more": ""},
        numbers={"vocab_size": model.embedding.num_embeddings, "width": len(x)},
        by=type(model).forward_features,
        cost=cost(0, model.embedding),
    )


def _layer_threads(layer: UnrolledLayer, rows: Sequence[int], position: int) -> dict[str, Any]:
    """Return a layer along the tokens: its gates' means and states, and all its values at the position."""
    kind = cell_kind(layer.stack)
    return {
        "cell": kind,
        "activation": elman_activation(layer.stack),
        "gates": GATES[kind],
        "means": rounded(layer.gates[rows].mean(-1)),
        "states": rounded(layer.states[rows, 0]),
        "norms": rounded(layer.states[rows, 0].norm(dim=-1)),
        "before": rounded(layer.before[position]),
        "values": rounded(layer.gates[position]),
        "previous": rounded(layer.previous(position)),
        "state": rounded(layer.states[position]),
    }


def recurrent_stages(
    stages: StageList, reading: Reading, position: int, *, settings: Sampling, threads: Sequence[int] = ()
) -> Candidates:
    """Record every layer of a recurrent model at a position, and the choice of the next token."""
    model = reading.model
    assert isinstance(model, Recurrent)
    with capture(model, "embedding") as captured:
        features = model.features(reading.tokens)
    inputs = captured["embedding"][0]
    stages.record_tokens("embedding", reading.ids, reading.pieces, position=position)
    _embedding_stage(stages, model, reading.ids[position], x=inputs[position])
    layers, rows = unrolled(model.recurrence, inputs), shown_threads(len(reading.ids), position, requested=threads)
    for number, layer in enumerate(layers):
        _cell_stages(stages, layer, f"recurrence.{number}", position=position, pieces=reading.pieces)
    stages.threads = {"rows": rows, "embedding": {"x": rounded(inputs[rows])}}
    stages.threads["layers"] = [_layer_threads(layer, rows, position) for layer in layers]
    return token_stages(stages, reading, features[0, position], settings=settings)


def elmo_stages(
    stages: StageList, reading: Reading, position: int, *, settings: Sampling, threads: Sequence[int] = ()
) -> Candidates:
    """Record the layers of both directions of ELMo at a position, their mean, and the prediction of the next token.

    Of the backward direction, which predicts the token before the position, the threads have the likeliest.
    """
    model, size = reading.model, len(reading.ids)
    assert isinstance(model, ELMo)
    rows, end = shown_threads(size, position, requested=threads), size - 1
    if model.config.d_cell:
        raise ModelError("there is no step to follow: only cells without a projection are shown, and d_cell is set")
    states = model.layer_states(reading.tokens)[:, 0]  # (layers + 1, time, 2 · d_model)
    x, here = states[0, :, : model.config.d_model], states[:, position]
    stages.record_tokens("embedding", reading.ids, reading.pieces, position=position)
    row, layers, tops = _embedding_stage(stages, model, reading.ids[position], x=x[position]), [], []
    directions = (
        ("forward", model.ahead, position, rows, reading.pieces, x),
        ("backward", model.back, end - position, [end - n for n in rows], reading.pieces[::-1], x.flip(0)),
    )
    for name, stack, at, order, pieces, below in directions:
        source = row
        for number, cell in enumerate(stack):
            assert isinstance(cell, nn.RNNBase)
            (layer,) = unrolled(cell, below)
            source = _cell_stages(stages, layer, f"{name}.{number}", position=at, pieces=pieces, source=source)
            below = below + layer.states[:, 0] if number else layer.states[:, 0]
            layers.append({"direction": name, **_layer_threads(layer, order, at)})
        tops.append(source)
    names = ["embedding", *(f"layer {n}" for n in range(model.config.layers))]
    mix = sent("mean", here.mean(0), "coordinate"), sent("layers", here, ("layer", names), "coordinate")
    stages.record("mix.mean", *mix, text="elmo-mix", words={"count": len(names)}, inputs=tops, by=ELMo.layer_states)
    stages.threads = {"rows": rows, "embedding": {"x": rounded(x[rows])}, "layers": layers}
    stages.threads["mix"] = {"names": names, "layers": rounded(here), "mean": rounded(here.mean(0))}
    ahead, back = model.directions(here[-1])
    before = model.readout(back).logits().softmax(-1)[: reading.tokenizer.vocab_size]
    likeliest = pieces_of(reading.tokenizer, [int(before.argmax())])[0]
    stages.threads["before"] = {"piece": likeliest, "probability": rounded(before.max())}
    choice = logit_stage(stages, reading, ahead, settings=Sampling(), inputs=tops[:1])
    stages.record("output.probabilities", choice.sent("probability", choice.probability, "probability"))
    return choice


def bengio_stages(
    stages: StageList, reading: Reading, position: int, *, settings: Sampling, threads: Sequence[int] = ()
) -> Candidates:
    """Record the context and the hidden layer of a neural n-gram at a position, and the choice of the next token."""
    model = reading.model
    assert isinstance(model, Bengio)
    with capture(model, "dropout") as captured:
        features = model.features(reading.tokens)[0, position]
    width, own = model.config.order - 1, min(model.config.order - 1, position + 1)
    stages.threads = {"rows": shown_threads(len(reading.ids), position, requested=threads), "order": width + 1}
    stages.record_tokens("context", reading.ids, reading.pieces, position=position)
    names = ["–"] * (width - own) + reading.pieces[position + 1 - own : position + 1]
    x = sent("embeddings", captured["dropout"][0, position].view(width, -1), ("token", names), "coordinate")
    words = {"width": width, "own": own}
    by, weights = Bengio._hidden, cost(0, model.embedding)
    stages.record("context.embeddings", x, text="bengio-context", words=words, by=by, cost=weights)
    hidden = sent("hidden layer", features[: model.config.d_model], "unit")
    stages.record("hidden.tanh", hidden, text="bengio-hidden", by=by, cost=linear_cost(model.hidden))
    return token_stages(stages, reading, features, settings=settings)


def bahdanau_stages(
    stages: StageList, reading: Reading, position: int, *, settings: Sampling, threads: Sequence[int] = ()
) -> Candidates:
    """Record how a Bahdanau model predicts the token after a position, from a source and the target so far."""
    model = reading.model
    assert isinstance(model, Bahdanau) and reading.source is not None and reading.source_pieces is not None
    with capture(model, *CAPTURED) as captured:
        features = model.features(reading.tokens, **reading.model_kwargs)
    source, target = ("source", reading.source_pieces), ("token", reading.pieces[: position + 1])
    attention, attend, decode = model.attention, AdditiveAttention.forward, Bahdanau._decode
    stages.record_tokens("source_embedding", reading.source, reading.source_pieces, position=None)
    forward, backward = captured["encoder"][0].chunk(2, dim=-1)
    states = [sent("forward", forward, source, "unit"), sent("backward", backward, source, "unit")]
    products = sum(2 * weight.numel() for weight in model.encoder.parameters() if weight.ndim > 1)
    weights = cost(products, model.encoder)
    annotations = stages.record("encoder.annotations", *states, by=Bahdanau.encode, cost=weights)
    first = torch.tanh(captured["bridge"][0]).unflatten(-1, (-1, model.config.layers, model.config.d_model))
    state = sent("first state", first[0, -1], "unit")
    bridge = stages.record("encoder.bridge", state, by=Bahdanau.encode, cost=linear_cost(model.bridge))
    stages.record_tokens("embedding", reading.ids, reading.pieces, position=position)
    embedded = captured.calls("embedding")[-1][0]
    row = _embedding_stage(stages, model, reading.ids[position], x=embedded[position])
    contexts = torch.cat(captured.calls("attention"))
    layers = unrolled(model.decoder, torch.cat([embedded, contexts], dim=-1), first)
    state = sent("state", layers[-1].previous(position)[0], "unit")
    query = stages.record("attention.query", state, inputs=() if position else (bridge,), by=decode)
    energies = torch.stack([each[0, :, 0] for each in captured.calls("attention.scores")])
    scores = [sent("energies", energies[position], source)]
    scores.append(sent("energies so far", energies[: position + 1], target, source))
    products = 2 * (attention.queries.weight.numel() + attention.scores.weight.numel() * len(reading.source))
    inputs, weights = (query, annotations), cost(products, attention)
    stages.record("attention.energies", *scores, inputs=inputs, by=attend, cost=weights)
    p = captured["attention.probabilities"][0]
    alignment = [sent("alignment", p[position], source, scale="probability")]
    alignment.append(sent("alignment so far", p[: position + 1], target, source, scale="probability"))
    inputs = (stages.record("attention.alignment", *alignment, by=attend), annotations)
    mean, flops = sent("context", contexts[position], "unit"), cost(2 * contexts.shape[1] * len(reading.source))
    context = stages.record("attention.context", mean, inputs=inputs, by=attend, cost=flops)
    joined = sent("input", torch.cat([embedded[position], contexts[position]]), "coordinate")
    stages.record("decoder.input", joined, text="decoder-input", inputs=(row, context), by=decode)
    for number, layer in enumerate(layers):
        _cell_stages(stages, layer, f"decoder.{number}", position=position, pieces=reading.pieces)
    limit, source_size = MAX_SIDED_THREADS, len(reading.source)
    rows = shown_threads(len(reading.ids), position, requested=threads, limit=limit)
    keys = shown_threads(source_size, int(p[position].argmax()), p[position], causal=False, limit=limit)
    stages.threads = {"rows": rows, "embedding": {"x": rounded(embedded[rows])}}
    stages.threads["layers"] = [_layer_threads(layer, rows, position) for layer in layers]
    stages.threads["source"] = {
        "rows": keys,
        "memory": rounded(captured["encoder"][0, keys]),
        "scores": rounded(energies[rows][:, keys]),
        "weights": rounded(p[rows][:, keys]),
        "context": rounded(contexts[position]),
    }
    readout = [sent("readout", features[0, position], "unit"), sent("before", captured["maxout"][0, position], "unit")]
    weights = linear_cost(model.maxout)
    stages.record("output.maxout", *readout, inputs=(stages.last, context, row), by=decode, cost=weights)
    return token_stages(stages, reading, features[0, position], settings=settings)
