"""One token on its way through a model, with the model's values at each stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.decode.config import Sampling
from weft.errors import ConfigError, DataError, ModelError
from weft.explain.reading import Reading
from weft.explain.step.head import Candidates, head_stages
from weft.explain.step.ngram import ngram_stages
from weft.explain.step.passing import FollowedToken, watched
from weft.explain.step.recurrent import bahdanau_stages, bengio_stages, elmo_stages, recurrent_stages
from weft.explain.step.stage import StageList, StepStage
from weft.explain.step.threads import transformer_threads
from weft.explain.step.transformer import stack_stages
from weft.explain.texts import TEXTS
from weft.figures.charts import Chart, Charts
from weft.figures.picture import COLOURS
from weft.figures.shaded import drawable, percent
from weft.figures.tables import Table
from weft.models import heads
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel, evaluating
from weft.models.bengio import Bengio
from weft.models.elmo import ELMo
from weft.models.ngram import NGram
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer

FAMILIES: dict[type[LanguageModel], tuple[str, Callable[..., Candidates]]] = {
    Bengio: ("bengio", bengio_stages),
    Recurrent: ("recurrent", recurrent_stages),
    ELMo: ("elmo", elmo_stages),
    Bahdanau: ("bahdanau", bahdanau_stages),
    NGram: ("ngram", ngram_stages),
}
MAX_TOKENS = 256  # longest text whose step is shown
SHOWN_CANDIDATES = 12  # candidates in a picture


@dataclass(frozen=True)
class StepPicture(Charts):
    """Stages of one token: the reading, the `position` that is followed, and the final choice.

    For a masked model, the token at the position is masked, and `masked` is the original. In an encoder, the token of
    the source at `source_position` is followed.
    """

    kind: str
    input_text: str
    reading: Reading
    position: int
    stages: Sequence[StepStage]
    choice: Candidates | None
    masked: str | None = None
    source_position: int | None = None
    threads: dict[str, Any] | None = None

    title = "Inside a step"
    about = TEXTS["step"]

    def answer(self) -> dict[str, Any]:
        """Return the step as JSON data."""
        reading = self.reading
        return {
            "kind": self.kind,
            "text": self.input_text,
            "pieces": reading.pieces,
            "ids": list(reading.ids),
            "source_pieces": reading.source_pieces,
            "source_ids": None if reading.source is None else list(reading.source),
            "place": self.position,
            "masked": self.masked,
            "source_place": self.source_position,
            "stages": [vars(stage) for stage in self.stages],
            "threads": self.threads,
            "choice": None if self.choice is None else self.choice.answer(),
        }

    def charts(self) -> list[Chart]:
        if self.choice is None:
            norms = [(stage.id, stage.norm) for stage in self.stages if stage.norm is not None]
            return [_bars("Norm of each stage's result", norms)]
        names = map(drawable, self.choice.pieces)
        rows = list(zip(names, self.choice.final[self.choice.ids].tolist(), strict=True))
        return [_bars("Probability of the next token", rows[:SHOWN_CANDIDATES])]

    def tables(self) -> list[Table]:
        rows = [
            (s.id, s.title, " × ".join(map(str, s.result["shape"])), "" if s.norm is None else f"{s.norm:.4g}")
            for s in self.stages
        ]
        title = f"Path of token {self.position}, {self.masked or self.reading.pieces[self.position]}"
        tables = [Table(("stage", "", "shape", "norm"), rows, title, text=(0, 1), spare=(1,))]
        if self.choice is not None:
            values = (self.choice.logits, self.choice.probability, self.choice.final)
            columns = [each[self.choice.ids].tolist() for each in values]
            likely = [
                (piece, f"{logit:.4g}", percent(p), percent(final))
                for piece, logit, p, final in zip(self.choice.pieces, *columns, strict=True)
            ]
            header = ("", "logit", "probability", "after the cut")
            tables.append(Table(header, likely[:SHOWN_CANDIDATES], "Candidates for the next token"))
        return tables


def _bars(title: str, rows: Sequence[tuple[str, float]]) -> Chart:
    def draw(axes: Any) -> None:
        names, values = zip(*rows, strict=True)
        axes.barh(range(len(rows)), values, color=COLOURS[0])
        axes.set_yticks(range(len(rows)), names, fontsize=9 if len(rows) <= SHOWN_CANDIDATES else 5, parse_math=False)
        axes.invert_yaxis()

    return Chart(title, draw)


@torch.no_grad()
def step(
    reading: Reading,
    *,
    text: str = "",
    position: int | None = None,
    source_position: int | None = None,
    layer: int | None = None,
    sampling: Sampling | None = None,
    labels: Sequence[str] = (),
    threads: Sequence[int] = (),
) -> StepPicture:
    """Follow one token of a reading of `text` through its model.

    By default the last position is followed, of ELMo the middle one, and the first layer is opened. In the encoder of
    an encoder–decoder, the token at `source_position` is followed, by default the one that the decoder's last block
    attends to most. `labels` are the names of a classifier's labels. Of a long text, the tokens in `threads` are shown
    beside the followed one, or else the most relevant.
    """
    for ids, name in ((reading.ids, "the text"), (reading.source or (), "the source")):
        if len(ids) > MAX_TOKENS:
            raise DataError(f"{name} has {len(ids)} tokens; a step is shown of at most {MAX_TOKENS}. Shorten it")
    model, size, stages, settings = reading.model, len(reading.ids), StageList(), sampling or Sampling()
    if position is not None and not -size <= position < size:
        raise ConfigError(f"place = {position}: the text has {size} tokens, which are counted from 0")
    # The last token of a translation is its end, after which nothing is predicted.
    last = size - 1 if reading.source is None or size < 2 else size - 2
    last = size // 2 if isinstance(model, ELMo) else last  # which has tokens on both sides
    at, masked = last if position is None else position % size, None
    choice: Candidates | None
    with evaluating(model):
        if isinstance(model, Transformer):
            kind = "encoder" if model.decoder is None else "decoder" if model.encoder is None else "encoder_decoder"
            if kind == "encoder":
                at, reading, masked = _masked_reading(model, reading, at, by_default=position is None)
            token = _followed_token(stages, model, reading, position=at, layer=layer or 0)
            source = _source_token(token, source_position, layer=layer or 0)
            stages.threads = transformer_threads(token, threads)
            if source is not None:
                source_position = source.position
                stack_stages(source)
                stages.threads["source"]["encoder"] = transformer_threads(source)
            stack_stages(token, stages.last if stages else None)
            choice = head_stages(token, reading, settings=settings, labels=labels)
        else:
            if layer is not None:
                raise ConfigError(f"layer = {layer}: only a Transformer has a layer to open; leave it out")
            if type(model) not in FAMILIES:
                raise ModelError("there is no step to follow: word vectors are looked up, not computed")
            kind, record = FAMILIES[type(model)]
            choice = record(stages, reading, at, settings=settings, threads=threads)
    outcome: dict[str, Any] = {"choice": choice, "masked": masked, "source_position": source_position}
    outcome["threads"] = stages.threads
    return StepPicture(kind, text, reading, position=at, stages=stages, **outcome)


def _followed_token(
    stages: StageList, model: Transformer, reading: Reading, *, position: int, layer: int
) -> FollowedToken:
    """Run the model, and return the token to follow through its decoder, or its only stack."""
    layers = max(len(stack.layers) for stack in (model.encoder, model.decoder) if stack is not None)
    if not 0 <= layer < layers:
        raise ConfigError(f"layer = {layer}: the model has {layers} layers, counted from 0")
    with watched(model) as (captured, arguments):
        model.features(reading.tokens, **reading.model_kwargs)
    name = "encoder" if model.decoder is None else "decoder"
    opened = min(layer, len(getattr(model, name).layers) - 1)
    return FollowedToken(stages, reading, captured, arguments=arguments, name=name, position=position, opened=opened)


def _source_token(token: FollowedToken, position: int | None, *, layer: int) -> FollowedToken | None:
    """Return the token to follow through the encoder of an encoder–decoder; None for other models."""
    model, size = token.model, len(token.source_pieces)
    if model.encoder is None or model.decoder is None:
        return None
    if position is None:
        cross = token.captured[f"decoder.{len(model.decoder.layers) - 1}.cross.probabilities"][0, :, token.position]
        position = int(cross.mean(0).argmax())
    elif not 0 <= position < size:
        raise ConfigError(f"source_place = {position}: the source has {size} tokens, which are counted from 0")
    return replace(token, name="encoder", position=position, opened=min(layer, len(model.encoder.layers) - 1))


def _masked_reading(
    model: Transformer, reading: Reading, position: int, *, by_default: bool
) -> tuple[int, Reading, str | None]:
    """Return the position to follow in an encoder, the text with the token there masked, and that token."""
    special, mask = set(reading.tokenizer.special_tokens.values()), reading.tokenizer.mask_id
    if isinstance(model.output, heads.Classifier | heads.Embedder):
        first = getattr(model.output, "pooling", "first") == "first"
        return (0 if first and by_default else position), reading, None
    if by_default:  # the text's first mask, else its longest token
        tokens = [n for n, id in enumerate(reading.ids) if id not in special]
        middle = len(reading.ids) // 2
        longest = max(tokens, key=lambda n: (len(reading.pieces[n]), -abs(n - middle)), default=position)
        position = reading.ids.index(mask) if mask in reading.ids else longest
    if mask is None or model.token_head is None or reading.ids[position] == mask:
        return position, reading, None
    ids = (*reading.ids[:position], mask, *reading.ids[position + 1 :])
    return position, replace(reading, ids=ids), reading.pieces[position]
