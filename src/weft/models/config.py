"""Whole models as settings; `models/build.py` makes the model, and a preset is one of these with a name."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from weft.config import Config
from weft.nn.config import Activation, Block, Init, NormalInit, Probability, Sizes

# ---- what a Transformer's last layer is for


class LMHead(Config):
    """The next token: features times a (vocab_size, d_model) table, the embeddings' own if `tied`."""

    kind: Literal["lm"] = "lm"
    tied: bool = True
    bias: bool = False
    scale: PositiveFloat | None = None


class MaskedLMHead(Config):
    """The masked token: dense, activation and norm before the table (BERT's transform)."""

    kind: Literal["mlm"] = "mlm"
    tied: bool = True
    activation: Activation = "gelu"


class NextSentenceHead(Config):
    """Does the second sentence follow the first? Two classes on the pooled first token."""

    kind: Literal["nsp"] = "nsp"


class PretrainingHead(Config):
    """Both of BERT's pretraining tasks at once (Devlin et al. 2019, §3.1)."""

    kind: Literal["mlm+nsp"] = "mlm+nsp"
    tied: bool = True
    activation: Activation = "gelu"


class ClassificationHead(Config):
    """One of `labels` for a whole sequence; one label is a regression.

    `pooler` puts a dense layer with `activation` in front, tanh as in BERT or relu as in DistilBERT.
    """

    kind: Literal["sequence"] = "sequence"
    labels: PositiveInt
    pooling: Literal["first", "mean", "last"] = "first"
    pooler: bool = True
    activation: Activation = "tanh"
    dropout: Probability = 0.1


class TaggingHead(Config):
    """One of `labels` for every token."""

    kind: Literal["token"] = "token"
    labels: PositiveInt
    dropout: Probability = 0.1


class SpanHead(Config):
    """Where an answer begins and where it ends: two logits a token (Devlin et al. 2019, §4.2)."""

    kind: Literal["span"] = "span"
    dropout: Probability = 0.0


class ReplacedHead(Config):
    """Whether a token was replaced: dense, activation, and one logit a token (Clark et al. 2020, §2)."""

    kind: Literal["replaced"] = "replaced"
    activation: Activation = "gelu"


class EmbeddingHead(Config):
    """One vector a sequence, of length 1 if `normalise`."""

    kind: Literal["embedding"] = "embedding"
    pooling: Literal["first", "mean", "last"] = "mean"
    normalise: bool = True


Head = Annotated[
    LMHead
    | MaskedLMHead
    | NextSentenceHead
    | PretrainingHead
    | ClassificationHead
    | TaggingHead
    | SpanHead
    | ReplacedHead
    | EmbeddingHead,
    Field(discriminator="kind"),
]


# ---- Transformers

Layers = Annotated[int, Field(gt=0, le=10_000)]


class TransformerConfig(Block):
    """What encoders, decoders and encoder–decoders have in common.

    `context` is the longest sequence in training; only learned positions make it a hard limit.
    `embedding_scale` multiplies the embeddings by √d_model, `embedding_norm` normalises them (BERT).
    """

    vocab_size: PositiveInt
    context: PositiveInt = 1024
    layers: Layers
    embedding_scale: bool = False
    embedding_norm: bool = False
    init: Init = NormalInit()

    @property
    def width(self) -> int:
        """Of the embeddings, and of what is added to them."""
        return self.d_model

    @property
    def sharing(self) -> int:
        """Layers in a row that have the same weights."""
        return 1

    @property
    def divisible(self) -> bool:
        """Whether several processes can divide its weights among them."""
        return self.sharing == 1 and self.width == self.d_model

    def sizes(self, layers: int, causal: bool) -> Sizes:
        """What a position encoding has to know of a stack of so many layers."""
        return Sizes(self.width, self.attention.heads, self.d_head, self.context, causal, layers)

    @property
    def longest(self) -> int | None:
        """The longest sequence the model can read, or None where nothing limits it."""
        return self.context if self.position.bounded else None


class Decoder(TransformerConfig):
    """A stack that sees the past only: GPT, LLaMA."""

    kind: Literal["decoder"] = "decoder"
    head: Head = LMHead()


class Encoder(TransformerConfig):
    """A stack that sees both sides: BERT. `segments` trained vectors distinguish first and second sentence.

    With `d_embedding` the tables of tokens, positions and segments are that wide, and a linear layer makes d_model
    numbers of each embedding. Of `distinct_layers` blocks each is run layers / distinct_layers times in a row, with the
    same weights. Both save parameters (Lan et al. 2020, §3.1).
    """

    kind: Literal["encoder"] = "encoder"
    segments: int = Field(default=0, ge=0)
    d_embedding: PositiveInt | None = None
    distinct_layers: Layers | None = None
    head: Head = MaskedLMHead()

    @model_validator(mode="after")
    def _savings(self) -> Self:
        if self.distinct_layers is not None and self.layers % self.distinct_layers:
            raise ValueError(f"distinct_layers = {self.distinct_layers} does not divide layers = {self.layers}")
        if self.d_embedding is not None:
            self.position.check(self.d_embedding, self.d_head)
            if self.head.kind == "lm":
                raise ValueError("d_embedding: a head of kind 'lm' has no layer from d_model to it; 'mlm' has one")
        return self

    @property
    def width(self) -> int:
        """Of the embeddings, and of what is added to them."""
        return self.d_embedding or self.d_model

    @property
    def sharing(self) -> int:
        """Layers in a row that have the same weights."""
        return self.layers // (self.distinct_layers or self.layers)


class EncoderDecoder(TransformerConfig):
    """The 2017 Transformer: an encoder, and a decoder that attends to it.

    `source_vocab_size` gives the source its own embeddings; without it one table serves both sides.
    """

    kind: Literal["encoder-decoder"] = "encoder-decoder"
    encoder_layers: Layers | None = None
    source_vocab_size: PositiveInt | None = None
    head: LMHead = LMHead()


# ---- recurrent models


class Recurrent(Config):
    """A recurrent language model: Elman (1990), LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014)."""

    kind: Literal["recurrent"] = "recurrent"
    vocab_size: PositiveInt
    context: PositiveInt = 256
    cell: Literal["elman", "lstm", "gru"] = "lstm"
    activation: Literal["tanh", "relu", "sigmoid"] = "tanh"
    layers: PositiveInt = 1
    d_model: PositiveInt
    d_embedding: PositiveInt | None = None
    tied: bool = False
    dropout: Probability = 0.0
    variational: bool = False  # what is dropped is the same at all places of a row (Gal and Ghahramani 2016)

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if self.tied and self.d_embedding not in (None, self.d_model):
            raise ValueError(f"tied embeddings need d_embedding = d_model = {self.d_model}, not {self.d_embedding}")
        if self.cell != "elman" and self.activation != "tanh":
            raise ValueError(f"activation = '{self.activation}' is for the elman cell; {self.cell} fixes its own")
        return self


class Bahdanau(Config):
    """An RNN encoder and decoder with additive attention between them (Bahdanau et al. 2015)."""

    kind: Literal["bahdanau"] = "bahdanau"
    vocab_size: PositiveInt
    source_vocab_size: PositiveInt | None = None
    context: PositiveInt = 256
    cell: Literal["elman", "lstm", "gru"] = "gru"
    layers: PositiveInt = 1
    d_model: PositiveInt
    d_embedding: PositiveInt | None = None
    d_attention: PositiveInt | None = None
    dropout: Probability = 0.0


# ---- n-grams


class MaximumLikelihood(Config):
    """Relative frequencies: what was never seen has probability zero."""

    kind: Literal["mle"] = "mle"


class AddK(Config):
    """k added to every count (Laplace for k = 1)."""

    kind: Literal["add-k"] = "add-k"
    k: PositiveFloat = 1.0


class StupidBackoff(Config):
    """Relative frequency of the longest seen context, times alpha for each word dropped (Brants et al. 2007)."""

    kind: Literal["stupid-backoff"] = "stupid-backoff"
    alpha: PositiveFloat = 0.4


class KneserNey(Config):
    """Interpolated Kneser–Ney (Chen and Goodman 1999); without `discount`, n₁/(n₁ + 2n₂) is taken for each order."""

    kind: Literal["kneser-ney"] = "kneser-ney"
    discount: float | None = Field(default=None, gt=0.0, lt=1.0)


class ModifiedKneserNey(Config):
    """The same with three discounts an order, for n-grams that count one, two, and three or more."""

    kind: Literal["modified-kneser-ney"] = "modified-kneser-ney"


Smoothing = Annotated[
    MaximumLikelihood | AddK | StupidBackoff | KneserNey | ModifiedKneserNey, Field(discriminator="kind")
]


class NGram(Config):
    """Counts of `order` words in a row, smoothed."""

    kind: Literal["ngram"] = "ngram"
    vocab_size: PositiveInt
    order: PositiveInt = 3
    smoothing: Smoothing = ModifiedKneserNey()


Model = Annotated[
    Decoder | Encoder | EncoderDecoder | Recurrent | Bahdanau | NGram,
    Field(discriminator="kind"),
]
