"""What can be learned, as settings: one type a goal. Each says which data it reads and which models can learn it.

A goal reads running text (`reads = "text"`), sentences in their documents (`"sentences"`), or rows with named columns
(`"rows"`): CSV, TSV, JSON lines, Parquet, or two text files whose lines belong together.
"""

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from weft.config import Config
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.objectives.losses import Objective

Reads = Literal["text", "sentences", "rows"]
Column = Annotated[str, Field(min_length=1)]
Smoothing = Annotated[float, Field(ge=0.0, lt=1.0)]
Rate = Annotated[float, Field(gt=0.0, lt=1.0)]
LABELLED = ("loss", "accuracy", "macro_f1", "matthews")  # what is measured of labels


class Goal(Config):
    """What every goal answers."""

    reads: ClassVar[Reads] = "rows"
    kinds: ClassVar[tuple[str, ...]] = ()  # of models that can learn it
    heads: ClassVar[tuple[str, ...]] = ("lm",)  # that such a Transformer needs; the first one is put there
    wants: ClassVar[str] = ""  # the same in words
    measured: ClassVar[tuple[str, ...]] = ("loss",)  # on the way; `evaluate.metric` names one of them

    def chance(self, vocab_size: int) -> float:
        """The loss of knowing nothing."""
        return math.log(vocab_size)

    def check(self, model: Any) -> None:
        """Refuse a model that can't learn this."""
        head = getattr(getattr(model, "head", None), "kind", "lm")
        if model.kind not in self.kinds or head not in self.heads:
            kind = f"model.kind = '{model.kind}'"
            raise ConfigError(
                f"{kind if model.kind not in self.kinds else f'model.head.kind = {head!r}'}: "
                f"the goal '{self.kind}' needs {self.wants}"  # type: ignore[attr-defined]
            )


class Words(Goal):
    """What goals share that learn to say the next word.

    `smoothing` moves that much probability from the target to all tokens alike (Szegedy et al. 2016);
    `z_loss` times log²Z keeps the softmax's normaliser near 1 (Chowdhery et al. 2022).
    """

    smoothing: Smoothing = 0.0
    z_loss: NonNegativeFloat = 0.0

    def build(self) -> "Objective":
        from weft.objectives.losses import next_token

        return next_token(self)


class NextToken(Words):
    """Each token from those before it: −log p, summed over the places that the loss mask keeps."""

    reads = "text"
    kinds = ("decoder", "recurrent", "ngram")
    wants = "a model that reads left to right and says words (a decoder with an lm head, recurrent, or ngram)"
    measured = ("loss", "perplexity", "bits_per_byte")

    kind: Literal["next-token"] = "next-token"


class Spans(Words):
    """Spans of the text are cut out, and told one after the other (T5; Raffel et al. 2020).

    `rate` of the tokens go, in spans of `mean` tokens.
    """

    reads = "text"
    kinds = ("encoder-decoder", "bahdanau")
    wants = "a model that reads one text and writes another (encoder-decoder or bahdanau)"

    kind: Literal["spans"] = "spans"
    rate: Rate = 0.15
    mean: Annotated[float, Field(ge=1.0)] = 3.0


class Pairs(Words):
    """One text from another: translation, summaries, answers. `source` and `target` are the columns' names."""

    kinds = ("encoder-decoder", "bahdanau")
    wants = "a model that reads one text and writes another (encoder-decoder or bahdanau)"
    measured = ("loss", "perplexity")

    kind: Literal["pairs"] = "pairs"
    source: Column = "source"
    target: Column = "target"


class Chat(Words):
    """Conversations: lists of messages in `column`. Only what the assistant says is learned; the rest is read."""

    kinds = ("decoder",)
    wants = "a decoder with an lm head"
    measured = ("loss", "perplexity")

    kind: Literal["chat"] = "chat"
    column: Column = "messages"


class _Masked(Goal):
    """What both ways to learn masked words share."""

    kinds = ("encoder",)

    rate: Rate = 0.15
    whole_words: bool = False

    def build(self) -> "Objective":
        from weft.objectives.losses import masked_words

        return masked_words()


class Masked(_Masked):
    """Words that were masked (BERT; Devlin et al. 2019, §3.1): `rate` of them, drawn anew each time they are read.

    Of these 80 % become [MASK], 10 % another word, 10 % stay. `whole_words` masks all pieces of a word together.
    """

    reads = "text"
    heads = ("mlm", "mlm+nsp")
    wants = "an encoder with a head of kind mlm"

    kind: Literal["masked"] = "masked"


class MaskedAndNext(_Masked):
    """Masked words, and whether the second sentence follows the first: both of BERT's tasks at once."""

    reads = "sentences"
    heads = ("mlm+nsp",)
    wants = "an encoder with a head of kind mlm+nsp"
    measured = ("loss", "next_accuracy")

    kind: Literal["masked+next"] = "masked+next"

    def chance(self, vocab_size: int) -> float:
        return math.log(vocab_size) + math.log(2)


class _Labelled(Goal):
    """What goals share that give a whole text, or a pair of texts, one answer."""

    kinds = ("encoder", "decoder")
    heads = ("sequence",)
    wants = "an encoder or decoder with a head of kind 'sequence'"

    text: Column = "text"
    second: Column | None = None
    pooling: Literal["first", "mean", "last"] | None = None

    @property
    def answer(self) -> str:
        """The column that holds what is to be found."""
        raise AssertionError("every labelled goal has one")


class Classify(_Labelled):
    """One of several labels for a text, or for a pair of texts if `second` names the other one's column.

    `labels` are found in the training rows unless they are given, and saved with the run.
    """

    measured = LABELLED

    kind: Literal["classify"] = "classify"
    label: Column = "label"
    labels: tuple[str, ...] | None = None

    @property
    def answer(self) -> str:
        return self.label

    def chance(self, vocab_size: int) -> float:
        return math.log(len(self.labels or (0, 1)))

    def build(self) -> "Objective":
        from weft.objectives.losses import classify

        return classify


class Score(_Labelled):
    """A number for a text, or for a pair of texts: regression with the squared error."""

    measured = ("loss", "pearson", "spearman")

    kind: Literal["score"] = "score"
    score: Column = "score"

    @property
    def answer(self) -> str:
        return self.score

    def chance(self, vocab_size: int) -> float:
        return math.inf  # the scale of the scores is the user's

    def build(self) -> "Objective":
        from weft.objectives.losses import score

        return score


class Tag(Goal):
    """One of several labels for every word: `words` and `tags` are columns with as many entries each."""

    kinds = ("encoder", "decoder")
    heads = ("token",)
    wants = "an encoder or decoder with a head of kind 'token'"
    measured = LABELLED

    kind: Literal["tag"] = "tag"
    words: Column = "words"
    tags: Column = "tags"
    labels: tuple[str, ...] | None = None

    def chance(self, vocab_size: int) -> float:
        return math.log(len(self.labels or (0, 1)))

    def build(self) -> "Objective":
        from weft.objectives.losses import tag

        return tag


class Twins(Goal):
    """Texts that belong together lie close, all others of the batch far (InfoNCE; van den Oord et al. 2018)."""

    kinds = ("encoder", "decoder")
    heads = ("embedding",)
    wants = "an encoder or decoder with a head of kind 'embedding'"

    kind: Literal["twins"] = "twins"
    first: Column = "first"
    second: Column = "second"
    temperature: PositiveFloat = 0.05

    def chance(self, vocab_size: int) -> float:
        return math.inf  # ln of the batch's size, which may vary

    def build(self) -> "Objective":
        from weft.objectives.losses import twins

        return twins(self.temperature)


AnyGoal = Annotated[
    NextToken | Spans | Pairs | Chat | Masked | MaskedAndNext | Classify | Score | Tag | Twins,
    Field(discriminator="kind"),
]
GOALS: dict[str, type[Goal]] = {
    goal.model_fields["kind"].default: goal
    for goal in (NextToken, Spans, Pairs, Chat, MaskedAndNext, Masked, Classify, Score, Tag, Twins)
}
