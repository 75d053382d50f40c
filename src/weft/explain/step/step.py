"""Inside a step: one token's way through a model, with the model's own numbers at each stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.decode.config import Sampling
from weft.errors import ConfigError, DataError
from weft.explain.reading import Reading
from weft.explain.step.choice import Choice
from weft.explain.step.head import head_stages
from weft.explain.step.passing import Followed, watched
from weft.explain.step.stage import Stage, Way
from weft.explain.step.transformer import stack_stages
from weft.models import heads
from weft.models.base import evaluating
from weft.models.transformer import Transformer

MAX_TOKENS = 256  # of a text whose step is shown


@dataclass(frozen=True)
class Step:
    """One token's way: what was read, the `place` that is followed, the stages and the choice they end in.

    Of a masked model the token at the place is hidden from it: `masked` is what stands there in the text. An
    encoder's own way is that of the token of the source at `source_place`.
    """

    kind: str
    text: str
    pieces: list[str]
    ids: list[int]
    source_pieces: list[str] | None
    source_ids: list[int] | None
    place: int
    masked: str | None
    source_place: int | None
    stages: list[Stage]
    choice: Choice | None

    def answer(self) -> dict[str, Any]:
        """As plain lists and numbers."""
        told = {name: value for name, value in vars(self).items() if name not in ("stages", "choice")}
        stages = [vars(stage) for stage in self.stages]
        return {**told, "stages": stages, "choice": None if self.choice is None else self.choice.answer()}


@dataclass(frozen=True)
class Asked:
    """What a step is asked for: the place (default: the last), the layer that is opened (default: the first), how the
    token is chosen, and the names of labels."""

    text: str = ""
    place: int | None = None
    layer: int | None = None
    sampling: Sampling = Sampling()
    labels: Sequence[str] = ()


@torch.no_grad()
def step(reading: Reading, asked: Asked) -> Step:
    """Follow one token of a reading through its model."""
    for ids, what in ((reading.ids, "the text"), (reading.source or (), "the source")):
        if len(ids) > MAX_TOKENS:
            raise DataError(f"{what} has {len(ids)} tokens; a step is shown of at most {MAX_TOKENS}. Shorten it")
    model = reading.model
    place = _place(reading, asked.place)
    with evaluating(model):
        if isinstance(model, Transformer):
            return _transformer(model, reading, place, asked)
    raise AssertionError


def _place(reading: Reading, place: int | None) -> int:
    size = len(reading.ids)
    if place is None:
        # a translation's last token is its end, after which nothing is predicted
        return size - 1 if reading.source is None or size < 2 else size - 2
    if not -size <= place < size:
        raise ConfigError(f"place = {place}: the text has {size} tokens, which are counted from 0")
    return place % size


def _transformer(model: Transformer, reading: Reading, place: int, asked: Asked) -> Step:
    kind = "encoder" if model.decoder is None else "decoder" if model.encoder is None else "encoder_decoder"
    masked = None
    if kind == "encoder":
        place, reading, masked = _hidden(model, reading, asked.place, place)
    with watched(model) as (seen, given):
        model.features(reading.tokens, **reading.given)
    way, source, source_place = Way(), None, None
    stacks = {name: len(stack.layers) for name in ("encoder", "decoder") if (stack := getattr(model, name)) is not None}
    layer = 0 if asked.layer is None else asked.layer
    if not 0 <= layer < max(stacks.values()):
        raise ConfigError(f"layer = {layer}: the model has {max(stacks.values())} layers, counted from 0")
    own = "encoder" if kind == "encoder" else "decoder"
    followed = Followed(model, seen, given, own, reading.ids, reading.pieces, place, min(layer, stacks[own] - 1))
    if reading.source is not None and reading.source_pieces is not None:
        # of the source, the token that the last block looks at most
        last = seen[f"decoder.{stacks['decoder'] - 1}.cross.probabilities"][0, :, place]
        source_place = int(last.mean(0).argmax())
        encoder = replace(
            followed, name="encoder", ids=reading.source, pieces=reading.source_pieces, place=source_place,
            opened=min(layer, stacks["encoder"] - 1), embedding="source_embedding",
        )  # fmt: skip
        source = stack_stages(way, encoder)
        followed = replace(followed, other=reading.source_pieces)
    stack_stages(way, followed, source)
    choice = head_stages(way, reading, followed, asked.sampling, asked.labels)
    return _found(kind, reading, asked.text, place, way, choice, masked, source_place)


def _hidden(model: Transformer, reading: Reading, wanted: int | None, place: int) -> tuple[int, Reading, str | None]:
    """Of a masked model, the place that is followed, and the text with the token there masked, as in training."""
    special, mask = set(reading.tokenizer.special_tokens.values()), reading.tokenizer.mask_id
    if isinstance(model.output, heads.Classifier | heads.Embedder):
        first = getattr(model.output, "pooling", "first") == "first"
        return (0 if first and wanted is None else place), reading, None
    if wanted is None:  # the first mask that the text has, else its last word
        words = [at for at, id in enumerate(reading.ids) if id not in special]
        place = reading.ids.index(mask) if mask in reading.ids else (words or [place])[-1]
    if mask is None or model.token_head is None or reading.ids[place] == mask:
        return place, reading, None
    ids = (*reading.ids[:place], mask, *reading.ids[place + 1 :])
    return place, replace(reading, ids=ids), reading.pieces[place]


def _found(
    kind: str,
    reading: Reading,
    text: str,
    place: int,
    way: Way,
    choice: Choice | None,
    masked: str | None = None,
    source_place: int | None = None,
) -> Step:
    source = None if reading.source is None else list(reading.source)
    read = reading.pieces, list(reading.ids), reading.source_pieces, source
    return Step(kind, text, *read, place, masked, source_place, way.stages, choice)
