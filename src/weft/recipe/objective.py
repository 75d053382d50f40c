"""Training objectives as settings, one config type each; `weft.objectives` implements them.

An objective reads running text (`reads = "text"`), sentences within documents (`"sentences"`), or rows with named
columns (`"rows"`): CSV, TSV, JSON lines, Parquet, or two text files with parallel lines.

To add one, declare its settings here, write its class in `weft/objectives/` and add the class to the table there.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from weft.config import AnyKind, Config, Tree, kinds
from weft.errors import ConfigError
from weft.models.head_config import Pooling

Reads = Literal["text", "sentences", "rows"]
Column = Annotated[str, Field(min_length=1)]
Rate = Annotated[float, Field(gt=0.0, lt=1.0)]
Smoothing = Annotated[float, Field(ge=0.0, lt=1.0)]
LanguageToken = Annotated[str, Field(pattern=r"^[^{}]*\{\}[^{}]*$")]


class ObjectiveConfig(Config):
    """Base of all objectives: everything known about one before data is read."""

    reads: ClassVar[Reads] = "rows"
    kinds: ClassVar[tuple[str, ...]] = ("encoder", "decoder")  # kinds of models that can learn it
    heads: ClassVar[tuple[str, ...]] = ("lm",)  # heads such a Transformer may have; the first is the default
    makes: ClassVar[str] = "a model of another kind"  # what messages call a model trained on it
    metrics: ClassVar[tuple[str, ...]] = ("loss",)  # computed during training; valid values of `evaluate.metric`
    headline: ClassVar[str] = "loss"  # the one metric that summarises a run
    by_tokens: ClassVar[bool] = False  # whether a batch of rows is measured in tokens by default
    divisible: ClassVar[bool] = True  # whether a batch can be split into micro-batches without changing the loss
    continues: ClassVar[bool] = False  # whether the trained model continues a text
    has_source: ClassVar[bool] = False  # whether the trained model writes one text from another
    inputs: ClassVar[tuple[str, ...]] = ()  # settings that name the columns of the texts that a prediction is made from
    sentinels: ClassVar[int] = 0  # special tokens that mark masked spans

    kind: str

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns of the texts that a prediction is made from; empty if the model predicts tokens."""
        columns = (getattr(self, setting) for setting in self.inputs)
        return tuple(column for column in columns if column is not None)

    def chance(self, vocab_size: int) -> float:
        """Return the loss of a model that has learned nothing."""
        return math.log(vocab_size)

    def outputs(self) -> int | None:
        """Return the number of outputs of the model's head; None if the vocabulary decides."""
        return None

    def check(self, model: Any) -> None:
        """Raise a ConfigError unless a model of this kind, with this head, can learn the objective."""
        head = getattr(getattr(model, "head", None), "kind", "lm")
        needs = f"objective '{self.kind}' needs a model of kind {' or '.join(self.kinds)}"
        if {"encoder", "decoder"} & set(self.kinds):
            needs += f" with a head of kind {' or '.join(self.heads)}"
        if model.kind not in self.kinds:
            raise ConfigError(f"model.kind = '{model.kind}': {needs}")
        if head not in self.heads:
            raise ConfigError(f"model.head.kind = '{head}': {needs}")


class TokenObjective(ObjectiveConfig):
    """Base of objectives whose targets are tokens that a decoder writes.

    `smoothing` moves this much probability from the target to all tokens uniformly (Szegedy et al. 2016);
    `z_loss` times log²Z keeps the softmax's normaliser near 1 (Chowdhery et al. 2022).
    """

    smoothing: Smoothing = Field(0.0, description="label smoothing: probability moved from the target to all tokens")
    z_loss: NonNegativeFloat = Field(0.0, description="coefficient of log²Z, which is added to the loss; 0: none")


class NextToken(TokenObjective):
    """Predict each token from those before it: −log p, summed over the positions in the loss mask.

    The penalties are those of Merity et al. 2017: the mean square of a recurrent model's output, after dropout, and the
    mean square of its change from one token to the next.
    """

    makes = "a language model"
    reads = "text"
    kinds = ("decoder", "recurrent", "bengio", "ngram")
    metrics = ("loss", "perplexity", "bits_per_byte")
    headline = "bits_per_byte"
    continues = True

    kind: Literal["next-token"] = "next-token"
    activation_penalty: NonNegativeFloat = Field(0.0, description="coefficient of the mean square of hidden states")
    temporal_penalty: NonNegativeFloat = Field(0.0, description="coefficient of the mean square of their changes")

    @property
    def penalised(self) -> bool:
        return bool(self.activation_penalty or self.temporal_penalty)


class Bidirectional(TokenObjective):
    """Predict each token from those before it, and from those after it: the mean of both −log p (ELMo)."""

    makes = "a bidirectional language model"
    reads = "text"
    kinds = ("elmo",)
    metrics = ("loss", "perplexity", "forward_perplexity", "backward_perplexity")
    headline = "perplexity"

    kind: Literal["bidirectional"] = "bidirectional"


class WordVectors(ObjectiveConfig):
    """Learn a vector per word from the words around it, as the model's settings define (word2vec, GloVe)."""

    makes = "a table of word vectors"
    reads = "text"
    kinds = ("word2vec", "glove")

    kind: Literal["word-vectors"] = "word-vectors"

    def chance(self, vocab_size: int) -> float:
        return math.inf  # depends on the model's settings


class Spans(TokenObjective):
    """Span corruption: read a text with masked spans, write the spans (T5; Raffel et al. 2020)."""

    makes = "a model that fills in spans of a text"
    reads = "text"
    kinds = ("encoder-decoder", "bahdanau")
    sentinels = 100

    kind: Literal["spans"] = "spans"
    rate: Rate = Field(0.15, description="fraction of the tokens that is masked")
    mean: Annotated[float, Field(ge=1.0)] = Field(3.0, description="mean length of a span, in tokens")


class Languages(Config):
    """Language tokens of a multilingual model: `token` spells one, with {} for the language code.

    The source's token comes "before" the source or "after" its end, or there is none ("none"). The target's token is
    where decoding "start"s, the "first" token written, or comes before the "source". `reads` and `writes` are the
    default languages.
    """

    token: LanguageToken = Field("{}", description="spelling of a language token, with {} for the language code")
    source: Literal["before", "after", "none"] = Field("before", description="position of the source's language token")
    target: Literal["start", "first", "source"] = Field("first", description="position of the target's language token")
    reads: str | None = Field(None, description="default language of the source")
    writes: str | None = Field(None, description="default language of the target")


class Pairs(TokenObjective):
    """Write one text from another: translation, summaries, answers."""

    makes = "a model that writes one text from another"
    kinds = ("encoder-decoder", "bahdanau")
    metrics = ("loss", "perplexity")
    headline = "bleu"
    by_tokens = True
    has_source = True

    kind: Literal["pairs"] = "pairs"
    source: Column = Field("source", description="column of the texts to read")
    target: Column = Field("target", description="column of the texts to write")
    alignment: Column | None = Field(
        None, description="column of word alignments such as `0-0 1-2`, to evaluate attention with"
    )
    languages: Languages | None = Field(None, description="language tokens of a multilingual model")
    r_drop: NonNegativeFloat = Field(
        0.0,
        description="weight of the divergence between two passes with other dropout (R-Drop); 0: one pass",
    )


class Chat(TokenObjective):
    """Learn from conversations: lists of messages in `column`. Only the assistant's replies are targets."""

    makes = "a chat model"
    kinds = ("decoder",)
    metrics = ("loss", "perplexity")
    headline = "perplexity"
    by_tokens = True
    continues = True

    kind: Literal["chat"] = "chat"
    column: Column = Field("messages", description="column of the lists of messages")


class MaskedObjective(ObjectiveConfig):
    """Base of the masked-language-model objectives."""

    makes = "a masked language model"
    kinds = ("encoder",)

    rate: Rate = Field(0.15, description="fraction of the words that is masked")
    whole_words: bool = Field(False, description="mask all tokens of a word together")


class Masked(MaskedObjective):
    """Predict masked words (BERT; Devlin et al. 2019, §3.1): a fraction `rate`, drawn again each time a text is read.

    Of these, 80 % become [MASK], 10 % a random word, 10 % stay unchanged.
    """

    reads = "text"
    heads = ("mlm", "mlm+nsp")

    kind: Literal["masked"] = "masked"


class MaskedNext(MaskedObjective):
    """Predict masked words, and whether the second sentence follows the first: BERT's two tasks."""

    reads = "sentences"
    heads = ("mlm+nsp",)
    metrics = ("loss", "next_accuracy")

    kind: Literal["masked+next"] = "masked+next"

    def chance(self, vocab_size: int) -> float:
        return math.log(vocab_size) + math.log(2)


class SequenceObjective(ObjectiveConfig):
    """Base of objectives that predict something about a whole text, or about a pair of texts."""

    kinds = ("encoder", "decoder", "encoder-decoder")
    heads = ("sequence",)
    inputs = ("text", "second")

    text: Column = Field("text", description="column of the texts")
    second: Column | None = Field(None, description="column of the second texts of pairs; absent: single texts")
    pooling: Pooling | None = Field(None, description="hidden states to pool; absent: first, or last in a decoder")


class LabelObjective(ObjectiveConfig):
    """Base of objectives that choose one of several `labels`."""

    metrics = ("loss", "accuracy", "macro_f1", "matthews")
    headline = "accuracy"

    labels: tuple[str, ...] | None = Field(None, description="all labels, in order; absent: those of the training rows")

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if labels is not None and (len(labels) < 2 or len(set(labels)) < len(labels)):
            raise ValueError(f"{list(labels)}: expected two or more distinct labels")
        return labels

    def chance(self, vocab_size: int) -> float:
        return math.log(self.outputs() or 2)

    def outputs(self) -> int | None:
        return None if self.labels is None else len(self.labels)


class Classify(LabelObjective, SequenceObjective):
    """Predict the label of a text, or of a pair of texts if `second` is set."""

    makes = "a classifier"

    kind: Literal["classify"] = "classify"
    label: Column = Field("label", description="column of the labels")


class Regress(SequenceObjective):
    """Predict a number for a text, or for a pair of texts: regression with squared error."""

    makes = "a regression model"
    metrics = ("loss", "pearson", "spearman")
    headline = "spearman"

    kind: Literal["regress"] = "regress"
    score: Column = Field("score", description="column of the numbers to predict")

    def chance(self, vocab_size: int) -> float:
        return math.inf  # depends on the scale of the user's numbers

    def outputs(self) -> int | None:
        return 1


class Tag(LabelObjective):
    """Predict the label of every word. `words` and `tags` are columns of lists of equal length."""

    makes = "a tagger"
    heads = ("token",)
    inputs = ("words",)

    kind: Literal["tag"] = "tag"
    words: Column = Field("words", description="column of the lists of words")
    tags: Column = Field("tags", description="column of the lists of tags")


class Answer(ObjectiveConfig):
    """Find the answer to a question in a text: extractive question answering."""

    makes = "a model that finds answers"
    heads = ("span",)
    inputs = ("question", "context")
    metrics = ("loss", "exact")
    headline = "exact"

    kind: Literal["answer"] = "answer"
    question: Column = Field("question", description="column of the questions")
    context: Column = Field("context", description="column of the texts with the answers")
    answer: Column = Field("answer", description="column of the answers")
    longest: PositiveInt = Field(30, description="maximum length of an answer, in tokens")

    def chance(self, vocab_size: int) -> float:
        return math.inf  # depends on the lengths of the rows


class Contrastive(ObjectiveConfig):
    """Learn embeddings: matching texts close, all others in the batch far apart (InfoNCE; van den Oord et al. 2018)."""

    makes = "an embedding model"
    heads = ("embedding",)
    inputs = ("first",)
    divisible = False

    kind: Literal["contrastive"] = "contrastive"
    first: Column = Field("first", description="column of the first texts")
    second: Column = Field("second", description="column of the texts that match them")
    temperature: PositiveFloat = Field(0.05, description="divisor of the similarities")

    def chance(self, vocab_size: int) -> float:
        return math.inf  # depends on the size of the batch


OBJECTIVES = {str(kind.model_fields["kind"].default): kind for kind in kinds(ObjectiveConfig)}
AnyObjective = Annotated[ObjectiveConfig, AnyKind()]


# ---- names of earlier versions

RENAMED = {"score": "regress", "twins": "contrastive"}


def upgrade(tree: Mapping[str, object]) -> tuple[Tree, list[str]]:
    """Return a recipe's tables with current names, and a message for each name that has changed."""
    objective = tree.get("objective")
    kind = objective.get("kind") if isinstance(objective, Mapping) else objective
    if not isinstance(kind, str) or kind not in RENAMED:
        return dict(tree), []
    new = RENAMED[kind]
    renamed = {**objective, "kind": new} if isinstance(objective, Mapping) else new
    return {**tree, "objective": renamed}, [f"objective.kind = '{kind}' is now called '{new}'; write that instead"]
