"""What can be learned, as settings: one type an objective. `weft.objectives` holds what each of them does.

An objective reads running text (`reads = "text"`), sentences in their documents (`"sentences"`), or rows with named
columns (`"rows"`): CSV, TSV, JSON lines, Parquet, or two text files whose lines belong together.

To add one, declare its settings here, write its class in `weft/objectives/` and name the class in the table there.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from weft.config import AnyKind, Config, Tree, kinds
from weft.errors import ConfigError

Reads = Literal["text", "sentences", "rows"]
Column = Annotated[str, Field(min_length=1)]
Rate = Annotated[float, Field(gt=0.0, lt=1.0)]


class ObjectiveConfig(Config):
    """What is known of every objective before anything is read."""

    reads: ClassVar[Reads] = "rows"
    kinds: ClassVar[tuple[str, ...]] = ("encoder", "decoder")  # of models that can learn it
    heads: ClassVar[tuple[str, ...]] = ("lm",)  # that such a Transformer needs; the first one is its default
    makes: ClassVar[str] = "a model of its own kind"  # what a model that has learned it is called
    metrics: ClassVar[tuple[str, ...]] = ("loss",)  # during training; `evaluate.metric` names one of them
    headline: ClassVar[str] = "loss"  # the metric that tells in one number how good a run is
    by_tokens: ClassVar[bool] = False  # whether a batch of rows is measured in tokens unless the recipe says otherwise
    divisible: ClassVar[bool] = True  # whether a batch may be divided: its rows are not compared with each other
    continues: ClassVar[bool] = False  # whether such a model continues a text
    has_source: ClassVar[bool] = False  # whether it writes one text from another
    marks: ClassVar[int] = 0  # special tokens that stand for something in the text

    kind: str

    def chance(self, vocab_size: int) -> float:
        """The loss of a model that has learned nothing."""
        return math.log(vocab_size)

    def outputs(self) -> int | None:
        """How many outputs the model's head needs; None where the vocabulary decides."""
        return None

    def check(self, model: Any) -> None:
        head = getattr(getattr(model, "head", None), "kind", "lm")
        needs = f"objective '{self.kind}' needs a model of kind {' or '.join(self.kinds)}"
        if {"encoder", "decoder"} & set(self.kinds):
            needs += f" with a head of kind {' or '.join(self.heads)}"
        if model.kind not in self.kinds:
            raise ConfigError(f"model.kind = '{model.kind}': {needs}")
        if head not in self.heads:
            raise ConfigError(f"model.head.kind = '{head}': {needs}")


class TokenObjective(ObjectiveConfig):
    """What objectives share whose targets are tokens that a decoder writes.

    `smoothing` moves that much probability from the target to all tokens alike (Szegedy et al. 2016);
    `z_loss` times log²Z keeps the softmax's normaliser near 1 (Chowdhery et al. 2022).
    """

    smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="probability that goes from the target to all tokens alike"
    )
    z_loss: NonNegativeFloat = Field(0.0, description="what log²Z is multiplied by before it is added to the loss")


class NextToken(TokenObjective):
    """Each token from those before it: −log p, summed over the places that the loss mask keeps."""

    makes = "a language model"
    reads = "text"
    kinds = ("decoder", "recurrent", "ngram")
    metrics = ("loss", "perplexity", "bits_per_byte")
    headline = "bits_per_byte"
    continues = True

    kind: Literal["next-token"] = "next-token"


class Spans(TokenObjective):
    """Spans of the text are cut out, and written one after the other (T5; Raffel et al. 2020).

    `rate` of the tokens are cut out, in spans of `mean` tokens.
    """

    makes = "a model that fills in spans of a text"
    reads = "text"
    kinds = ("encoder-decoder", "bahdanau")
    marks = 100

    kind: Literal["spans"] = "spans"
    rate: Rate = Field(0.15, description="the part of the tokens that is cut out")
    mean: Annotated[float, Field(ge=1.0)] = Field(3.0, description="tokens a span, on average")


class Languages(Config):
    """Tokens that name the languages of a model that knows several: `token` spells one, with {} for its code.

    That of the source stands "before" it or "after" its end, or the model isn't told ("none"). That of the target is
    what an answer "start"s from, what is written "first", or stands before the "source". The model `reads` and `writes`
    these languages where no others are asked for.
    """

    token: Annotated[str, Field(pattern=r"^[^{}]*\{\}[^{}]*$")] = Field(
        "{}", description="how a language's token is spelled, {} for its code"
    )
    source: Literal["before", "after", "none"] = Field("before", description="where the source's token stands")
    target: Literal["start", "first", "source"] = Field("first", description="where the target's token stands")
    reads: str | None = Field(None, description="the language of a source where none is asked for")
    writes: str | None = Field(None, description="the language of an answer where none is asked for")


class Pairs(TokenObjective):
    """One text from another: translation, summaries, answers. `source` and `target` name the columns.

    A model of several `languages` is told by special tokens which ones it reads and writes.
    """

    makes = "a model that writes one text from another"
    kinds = ("encoder-decoder", "bahdanau")
    metrics = ("loss", "perplexity")
    headline = "bleu"
    by_tokens = True
    has_source = True

    kind: Literal["pairs"] = "pairs"
    source: Column = Field("source", description="the column of the texts that are read")
    target: Column = Field("target", description="the column of the texts that are written")
    languages: Languages | None = Field(None, description="tokens that name the languages, where there are several")


class Chat(TokenObjective):
    """Conversations: lists of messages in `column`. Only the assistant's replies are targets."""

    makes = "a chat model"
    kinds = ("decoder",)
    metrics = ("loss", "perplexity")
    headline = "perplexity"
    by_tokens = True
    continues = True

    kind: Literal["chat"] = "chat"
    column: Column = Field("messages", description="the column with the lists of messages")


class MaskedObjective(ObjectiveConfig):
    """What both ways to learn masked words share."""

    makes = "a masked language model"
    kinds = ("encoder",)

    rate: Rate = Field(0.15, description="the part of the words that is masked")
    whole_words: bool = Field(False, description="mask all tokens of a word together")


class Masked(MaskedObjective):
    """Words that were masked (BERT; Devlin et al. 2019, §3.1): `rate` of them, drawn anew each time they are read.

    Of these 80 % become [MASK], 10 % another word, 10 % stay. `whole_words` masks all tokens of a word together.
    """

    reads = "text"
    heads = ("mlm", "mlm+nsp")

    kind: Literal["masked"] = "masked"


class MaskedNext(MaskedObjective):
    """Masked words, and whether the second sentence follows the first: both of BERT's tasks at once."""

    reads = "sentences"
    heads = ("mlm+nsp",)
    metrics = ("loss", "next_accuracy")

    kind: Literal["masked+next"] = "masked+next"

    def chance(self, vocab_size: int) -> float:
        return math.log(vocab_size) + math.log(2)


class SequenceObjective(ObjectiveConfig):
    """What objectives share that predict something about a whole text, or about a pair of texts."""

    heads = ("sequence",)

    text: Column = Field("text", description="the column of the texts")
    second: Column | None = Field(None, description="the column of the second texts, where there are pairs")
    pooling: Literal["first", "mean", "last"] | None = Field(
        None, description="whose features stand for the text; absent: first, or last in a decoder"
    )

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if self.second is None else (self.text, self.second)


class LabelObjective(ObjectiveConfig):
    """What objectives share that choose one of several `labels`: those of the training rows unless they are given."""

    metrics = ("loss", "accuracy", "macro_f1", "matthews")
    headline = "accuracy"

    labels: tuple[str, ...] | None = Field(None, description="all labels; absent: those of the training rows")

    @field_validator("labels")
    @classmethod
    def _distinct(cls, given: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if given is not None and (len(given) < 2 or len(set(given)) < len(given)):
            raise ValueError(f"{list(given)}: expected two or more labels, each of them once")
        return given

    def chance(self, vocab_size: int) -> float:
        return math.log(self.outputs() or 2)

    def outputs(self) -> int | None:
        return None if self.labels is None else len(self.labels)


class Classify(LabelObjective, SequenceObjective):
    """One of several labels for a text, or for a pair of texts if `second` names the other one's column."""

    makes = "a classifier"

    kind: Literal["classify"] = "classify"
    label: Column = Field("label", description="the column of the labels")


class Regress(SequenceObjective):
    """A number for a text, or for a pair of texts: regression with the squared error."""

    makes = "a regression model"
    metrics = ("loss", "pearson", "spearman")
    headline = "spearman"

    kind: Literal["regress"] = "regress"
    score: Column = Field("score", description="the column of the numbers")

    def chance(self, vocab_size: int) -> float:
        return math.inf  # the scale of the numbers is the user's

    def outputs(self) -> int | None:
        return 1


class Tag(LabelObjective):
    """One of several labels for every word: `words` and `tags` are columns with as many entries each."""

    makes = "a tagger"
    heads = ("token",)

    kind: Literal["tag"] = "tag"
    words: Column = Field("words", description="the column of the lists of words")
    tags: Column = Field("tags", description="the column of the lists of tags")


class Answer(ObjectiveConfig):
    """Where the answer to a question stands in a text: `question`, `context` and `answer` are columns.

    An answer has at most `longest` tokens.
    """

    makes = "a model that finds answers"
    heads = ("span",)
    metrics = ("loss", "exact")
    headline = "exact"

    kind: Literal["answer"] = "answer"
    question: Column = Field("question", description="the column of the questions")
    context: Column = Field("context", description="the column of the texts")
    answer: Column = Field("answer", description="the column of the answers")
    longest: PositiveInt = Field(30, description="tokens that an answer has at most")

    def chance(self, vocab_size: int) -> float:
        return math.inf  # ln of the length of a row, which varies


class Contrastive(ObjectiveConfig):
    """Texts that belong together lie close, all others of the batch far (InfoNCE; van den Oord et al. 2018)."""

    makes = "an embedding model"
    heads = ("embedding",)
    divisible = False

    kind: Literal["contrastive"] = "contrastive"
    first: Column = Field("first", description="the column of the one text")
    second: Column = Field("second", description="the column of the text that belongs to it")
    temperature: PositiveFloat = Field(0.05, description="what similarities are divided by")

    def chance(self, vocab_size: int) -> float:
        return math.inf  # ln of the batch's size, which may vary


OBJECTIVES: dict[str, type[ObjectiveConfig]] = {its.model_fields["kind"].default: its for its in kinds(ObjectiveConfig)}
AnyObjective = Annotated[ObjectiveConfig, AnyKind()]


# ---- names of earlier versions

RENAMED = {"score": "regress", "twins": "contrastive"}


def upgrade(tree: Mapping[str, object]) -> tuple[Tree, list[str]]:
    """A recipe's tables with today's names, and a message for each name that has changed since an earlier version."""
    objective = tree.get("objective")
    kind = objective.get("kind") if isinstance(objective, Mapping) else objective
    if not isinstance(kind, str) or kind not in RENAMED:
        return dict(tree), []
    new = RENAMED[kind]
    renamed = {**objective, "kind": new} if isinstance(objective, Mapping) else new
    return {**tree, "objective": renamed}, [f"objective.kind = '{kind}' is called '{new}' now; write that instead"]
