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
