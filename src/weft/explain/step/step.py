"""Inside a step: one token's way through a model, with the model's own numbers at each stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weft.decode.config import Sampling
from weft.errors import ConfigError, DataError
from weft.explain.reading import Reading
from weft.explain.step.head import Choice, head_stages
from weft.explain.step.ngram import ngram_stages
from weft.explain.step.passing import Followed, watched
from weft.explain.step.recurrent import bahdanau_stages, recurrent_stages
from weft.explain.step.stage import Stage, Way
from weft.explain.step.transformer import stack_stages
from weft.explain.texts import TEXTS
from weft.figures.charts import Chart, Charts
from weft.figures.picture import COLOURS
from weft.figures.shaded import drawable, percent
from weft.figures.tables import Table
from weft.models import heads
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel, evaluating
from weft.models.ngram import NGram
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer

FAMILIES: dict[type[LanguageModel], tuple[str, Callable[[Way, Reading, int, Sampling], Choice]]] = {
    Recurrent: ("recurrent", recurrent_stages),
    Bahdanau: ("bahdanau", bahdanau_stages),
    NGram: ("ngram", ngram_stages),
}
MAX_TOKENS = 256  # of a text whose step is shown
SHOWN_CANDIDATES = 12  # in a picture


@dataclass(frozen=True)
class Step(Charts):
    """One token's way: what was read, the `place` that is followed, the stages and the choice they end in.

    Of a masked model the token at the place is hidden from it: `masked` is what stands there in the text. An
    encoder's own way is that of the token of the source at `source_place`.
    """

    kind: str
    given: str
    reading: Reading
    place: int
    stages: list[Stage]
    choice: Choice | None
    masked: str | None = None
    source_place: int | None = None

    title = "Inside a step"
    about = TEXTS["step"]

    def answer(self) -> dict[str, Any]:
        """As plain lists and numbers."""
        read = self.reading
        return {
            "kind": self.kind,
            "text": self.given,
            "pieces": read.pieces,
            "ids": list(read.ids),
            "source_pieces": read.source_pieces,
            "source_ids": None if read.source is None else list(read.source),
            "place": self.place,
            "masked": self.masked,
            "source_place": self.source_place,
            "stages": [vars(stage) for stage in self.stages],
            "choice": None if self.choice is None else self.choice.answer(),
        }

    def charts(self) -> list[Chart]:
        if self.choice is None:
            norms = [(stage.id, stage.norm) for stage in self.stages if stage.norm is not None]
            return [_bars("Norm of what each stage gives", norms)]
        rows = zip(self.choice.pieces, self.choice.final[self.choice.ids].tolist(), strict=True)
        return [
            _bars(
                "Probability of what may come next",
                [(drawable(piece), share) for piece, share in rows][:SHOWN_CANDIDATES],
            )
        ]

    def tables(self) -> list[Table]:
        rows = [
            (s.id, s.title, " × ".join(map(str, s.tensors[0]["shape"])), "" if s.norm is None else f"{s.norm:.4g}")
            for s in self.stages
        ]
        title = f"The way of token {self.place}, {self.masked or self.reading.pieces[self.place]}"
        tables = [Table(("stage", "", "shape", "norm"), rows, title, text=(0, 1), spare=(1,))]
        if self.choice is not None:
            numbers = (self.choice.logits, self.choice.probability, self.choice.final)
            columns = [each[self.choice.ids].tolist() for each in numbers]
            likely = [
                (piece, f"{logit:.4g}", percent(share), percent(final))
                for piece, logit, share, final in zip(self.choice.pieces, *columns, strict=True)
            ]
            header = ("", "logit", "probability", "after the cut")
            tables.append(Table(header, likely[:SHOWN_CANDIDATES], "What may come next"))
        return tables


def _bars(title: str, rows: Sequence[tuple[str, float]]) -> Chart:
    def draw(axes: Any) -> None:
        names, values = zip(*rows, strict=True)
        axes.barh(range(len(rows)), values, color=COLOURS[0])
        axes.set_yticks(range(len(rows)), names, fontsize=8 if len(rows) <= SHOWN_CANDIDATES else 5, parse_math=False)
        axes.invert_yaxis()

    return Chart(title, draw)


@dataclass(frozen=True)
class Asked:
    """What a step is asked for: the place (default: the last), the layer that is opened (default: the first), how the
    token is chosen, and the names of labels."""

    text: str = ""
    place: int | None = None
    layer: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    labels: Sequence[str] = ()


@torch.no_grad()
def step(reading: Reading, asked: Asked) -> Step:
    """Follow one token of a reading through its model."""
    for ids, what in ((reading.ids, "the text"), (reading.source or (), "the source")):
        if len(ids) > MAX_TOKENS:
            raise DataError(f"{what} has {len(ids)} tokens; a step is shown of at most {MAX_TOKENS}. Shorten it")
    model, place, way = reading.model, _place(reading, asked.place), Way()
    with evaluating(model):
        if isinstance(model, Transformer):
            return _transformer(model, reading, place, asked)
        if asked.layer is not None:
            raise ConfigError(f"layer = {asked.layer}: only of a Transformer one layer is opened; leave it out")
        kind, stages = FAMILIES[type(model)]
        choice = stages(way, reading, place, asked.sampling)
        return Step(kind, asked.text, reading, place, way.stages, choice)


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
    return Step(kind, asked.text, reading, place, way.stages, choice, masked, source_place)


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
