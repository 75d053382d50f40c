"""A token's way through a recurrent model: the embedding, the gates and states of every layer, logits."""

from torch import Tensor

from weft.decode.config import Sampling
from weft.explain.capture import capture
from weft.explain.reading import Reading
from weft.explain.step.cells import cell_stages, unrolled
from weft.explain.step.choice import Choice
from weft.explain.step.head import word_stages
from weft.explain.step.stage import Way, cost, shown, token_stage
from weft.models.bahdanau import Bahdanau
from weft.models.recurrent import Recurrent


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
