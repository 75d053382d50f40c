"""A token's way through a Bahdanau model: the source read both ways, the alignment, the decoder's state, the maxout."""

import torch

from weft.decode.config import Sampling
from weft.explain.capture import capture
from weft.explain.reading import Reading
from weft.explain.step.cells import cell_stages, unrolled
from weft.explain.step.choice import Choice
from weft.explain.step.head import word_stages
from weft.explain.step.recurrent import row_stage
from weft.explain.step.stage import Way, cost, products, shown, token_stage
from weft.models.bahdanau import AdditiveAttention, Bahdanau

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
        "Encoder",
        "The source is read from both sides; each of its tokens is described by the two states there.",
        "h_j = [→h_j ; ←h_j]",
        shown("forward", forward, source, "unit"),
        shown("backward", backward, source, "unit"),
        by=Bahdanau.encode,
        cost=cost(sum(2 * each.numel() for each in model.encoder.parameters() if each.ndim > 1), model.encoder),
    )
    first = torch.tanh(seen["bridge"][0]).unflatten(-1, (-1, model.config.layers, model.config.d_model))
    began = way.add(
        "encoder.bridge",
        "First state",
        "The decoder begins with what the backward encoder knows at the source's first token.",
        "s₀ = tanh(W ←h₁ + b)",
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
        "Query",
        "The decoder's state before this token asks where in the source to look.",
        "s₋₁",
        shown("state", layers[-1].previous(place)[0], "unit"),
        inputs=() if place else (began,),
        by=Bahdanau._decode,
    )
    attention, energies = model.attention, torch.stack([each[0, :, 0] for each in seen.calls("attention.scores")])
    way.add(
        "attention.energies",
        "Energies",
        "A small network says how well each token of the source fits the state.",
        "e_j = v · tanh(W_q s₋₁ + W_k h_j)",
        shown("energies", energies[place], source),
        shown("energies so far", energies[: place + 1], written, source),
        inputs=(way.last, annotations),
        by=AdditiveAttention.forward,
        cost=cost(products(attention.queries) + products(attention.scores) * len(reading.source), attention),
    )
    alignment = seen["attention.probabilities"][0]
    aligned = way.add(
        "attention.alignment",
        "Alignment",
        "Softmax makes probabilities of the energies. A row for each token written so far.",
        "a = softmax(e)",
        shown("alignment", alignment[place], source, scale="probability"),
        shown("alignment so far", alignment[: place + 1], written, source, scale="probability"),
        by=AdditiveAttention.forward,
    )
    context = way.add(
        "attention.context",
        "Context",
        "The mean of the source's descriptions, each as much as it is looked at.",
        "c = Σ a_j h_j",
        shown("context", contexts[place], "unit"),
        inputs=(aligned, annotations),
        by=AdditiveAttention.forward,
        cost=cost(2 * contexts.shape[1] * len(reading.source)),
    )
    way.add(
        "decoder.input",
        "Decoder's input",
        "The token's embedding and the context side by side.",
        "[x ; c]",
        shown("input", torch.cat([embedded[place], contexts[place]]), "coordinate"),
        inputs=(row, context),
        by=Bahdanau._decode,
    )
    for number, layer in enumerate(layers):
        cell_stages(way, layer, f"decoder.{number}", place, reading.pieces)
    pairs = seen["maxout"][0, place]
    way.add(
        "output.maxout",
        "Maxout",
        "New state, context and embedding together, times a matrix; of each pair of numbers the larger goes on.",
        "t = max of pairs of W [s ; c ; x] + b",
        shown("readout", features[0, place], "unit"),
        shown("before", pairs, "unit"),
        inputs=(way.last, context, row),
        by=Bahdanau._decode,
        cost=cost(products(model.maxout), model.maxout),
    )
    return word_stages(way, reading, features[0, place], settings)
