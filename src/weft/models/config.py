"""Whole models as settings; `models/build.py` makes the model, and a preset is one of these with a name."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from weft.config import Config
from weft.models.smoothing import ModifiedKneserNey, Smoothing
from weft.nn.config import Activation, Block, FanInInit, HashedNGrams, Init, NormalInit, Probability, RecurrentInit
from weft.nn.position_config import NoPosition, Position, Sizes


class LMHead(Config):
    """The next token: features times a (vocab_size, d_model) table, the embeddings' own if `tied`.

    The features are multiplied by `scale`; `softcap` c makes of each logit z c · tanh(z/c) (Gemma 2).
    """

    kind: Literal["lm"] = "lm"
    tied: bool = Field(True, description="use the embeddings as the table")
    bias: bool = Field(False, description="whether each token has a bias")
    scale: PositiveFloat | None = Field(None, description="what features are multiplied by")
    softcap: PositiveFloat | None = Field(None, description="logits z become c · tanh(z/c)")


class MaskedLMHead(Config):
    """The masked token: dense, activation and norm before the table (BERT's transform)."""

    kind: Literal["mlm"] = "mlm"
    tied: bool = Field(True, description="use the embeddings as the table")
    bias: bool = Field(True, description="whether each token has a bias")
    dense_bias: bool = Field(True, description="whether the dense layer has one")
    activation: Activation = Field("gelu", description="of the dense layer")


class NextSentenceHead(Config):
    """Does the second sentence follow the first? Two classes on the pooled first token."""

    kind: Literal["nsp"] = "nsp"


class PretrainingHead(Config):
    """Both of BERT's pretraining tasks at once (Devlin et al. 2019, §3.1)."""

    kind: Literal["mlm+nsp"] = "mlm+nsp"
    tied: bool = Field(True, description="use the embeddings as the table")
    bias: bool = Field(True, description="whether each token has a bias")
    dense_bias: bool = Field(True, description="whether the dense layer has one")
    activation: Activation = Field("gelu", description="of the dense layer")


class Transform(Config):
    """Dense, activation and norm between the features and the outputs of a head (ModernBERT)."""

    activation: Activation = Field("gelu", description="of the dense layer")
    bias: bool = Field(True, description="whether the dense layer has one")


class ClassificationHead(Config):
    """One of `labels` for a whole sequence; one label is a regression.

    `pooler` puts a dense layer with `activation` in front, tanh as in BERT or relu as in DistilBERT; `transform` one
    with a norm instead.
    """

    kind: Literal["sequence"] = "sequence"
    labels: PositiveInt = Field(description="how many there are")
    pooling: Literal["first", "mean", "last"] = Field("first", description="whose features stand for the sequence")
    pooler: bool = Field(True, description="put a dense layer in front")
    activation: Activation = Field("tanh", description="of the dense layer")
    transform: Transform | None = Field(None, description="a dense layer with a norm instead")
    bias: bool = Field(True, description="whether each label has one")
    dropout: Probability = Field(0.1, description="the part of the features that is dropped")

    @model_validator(mode="after")
    def _one_dense(self) -> Self:
        if self.pooler and self.transform is not None:
            raise ValueError("transform stands in place of the pooler, and needs pooler = false")
        return self


class TaggingHead(Config):
    """One of `labels` for every token."""

    kind: Literal["token"] = "token"
    labels: PositiveInt = Field(description="how many there are")
    transform: Transform | None = Field(None, description="a dense layer and a norm in front")
    dropout: Probability = Field(0.1, description="the part of the features that is dropped")


class SpanHead(Config):
    """Where an answer begins and where it ends: two logits a token (Devlin et al. 2019, §4.2)."""

    kind: Literal["span"] = "span"
    transform: Transform | None = Field(None, description="a dense layer and a norm in front")
    dropout: Probability = Field(0.0, description="the part of the features that is dropped")


class ReplacedHead(Config):
    """Whether a token was replaced: dense, activation, and one logit a token (Clark et al. 2020, §2)."""

    kind: Literal["replaced"] = "replaced"
    activation: Activation = Field("gelu", description="of the dense layer")


class EmbeddingHead(Config):
    """One vector a sequence, of length 1 if `normalise`."""

    kind: Literal["embedding"] = "embedding"
    pooling: Literal["first", "mean", "last"] = Field("mean", description="whose features stand for the sequence")
    normalise: bool = Field(True, description="make vectors of length 1")


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


def _factor(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r}: expected true, false, or a number above 0")
    return float(value)


class LayerKind(Config):
    """What the layers of one kind have of their own, where layers differ: `window` as attention has it, None for all of
    the past; and how they know positions, None for the model's way."""

    window: PositiveInt | None = Field(None, description="how many tokens back a token sees; absent: all")
    position: Position | None = Field(None, description="how positions are known; absent: the model's way")


class TransformerConfig(Block):
    """What encoders, decoders and encoder–decoders have in common.

    `context` is the longest sequence in training; only learned positions make it a hard limit.
    `embedding_scale` multiplies the embeddings by √d_model, or by the number given; `embedding_norm` normalises them
    (BERT), and `first_norm = false` leaves out the norm that would follow before the first attention (ModernBERT).
    Where layers differ, `pattern` lists their kinds from the lowest up, and is repeated over the depth: five with a
    window and one without, say (Gemma 3).
    """

    vocab_size: PositiveInt = Field(description="tokens in the vocabulary; the tokenizer decides")
    context: PositiveInt = Field(1024, description="the longest sequence in training")
    layers: Layers = Field(description="blocks")
    pattern: tuple[LayerKind, ...] = Field(
        (), description="kinds of layers from the lowest up, repeated over the depth"
    )
    embedding_scale: Annotated[bool | float, BeforeValidator(_factor)] = Field(
        False, description="multiply embeddings by √d_model, or by a number"
    )
    embedding_norm: bool = Field(False, description="normalise the embeddings")
    first_norm: bool = Field(True, description="whether a norm stands before the first attention")
    init: Init = Field(NormalInit(), description="how weights are drawn")

    @property
    def factorised(self) -> bool:
        """Whether embeddings have a width of their own, and a matrix leads from them to the layers."""
        return getattr(self, "d_embedding", None) is not None

    @property
    def width(self) -> int:
        """Of the tokens' embeddings."""
        return getattr(self, "d_embedding", None) or self.d_model

    @property
    def added_width(self) -> int:
        """Of what is added to embeddings, and of their norm."""
        return self.d_model

    @property
    def sharing(self) -> int:
        """Layers in a row that have the same weights."""
        return 1

    @property
    def divisible(self) -> bool:
        """Whether several processes can divide its weights among them."""
        alone = self.width == self.d_model and getattr(self, "ngrams", None) is None
        return self.sharing == 1 and alone and not self.position.projected

    @model_validator(mode="after")
    def _kinds(self) -> Self:
        if not self.first_norm and (self.placement, self.sublayers) != ("pre", "sequential"):
            raise ValueError("first_norm = false goes with placement = 'pre' and sublayers = 'sequential'")
        if self.pattern and self.attention.window is not None:
            raise ValueError("attention.window is every layer's, but there is a pattern: give its kinds their windows")
        for kind in self.pattern:
            for position in (self.position, kind.position) if kind.position is not None else ():
                if not (position.rotates or isinstance(position, NoPosition)):
                    raise ValueError(
                        f"pattern: a layer's own positions are rotary or none, beside rotary or none; not"
                        f" '{position.kind}'"
                    )
                position.check(self.d_model, self.d_head)
        return self

    def kinds(self) -> tuple[LayerKind, ...]:
        """The pattern with every kind's window and positions filled in; one kind where layers don't differ."""
        if not self.pattern:
            return (LayerKind(window=self.attention.window, position=self.position),)
        return tuple(LayerKind(window=kind.window, position=kind.position or self.position) for kind in self.pattern)

    def layer_kinds(self, layers: int) -> list[LayerKind]:
        """The kind of each of so many layers, from the lowest up."""
        kinds = self.kinds()
        return [kinds[layer % len(kinds)] for layer in range(layers)]

    @property
    def embedding_factor(self) -> float | None:
        """What the embeddings are multiplied by, if by anything."""
        if isinstance(self.embedding_scale, bool):
            return self.d_model**0.5 if self.embedding_scale else None
        return self.embedding_scale

    def sizes(self, layers: int, causal: bool) -> Sizes:
        """What a position encoding has to know of a stack of so many layers."""
        return Sizes(self.added_width, self.attention.heads, self.d_head, self.context, causal, layers)

    @property
    def longest(self) -> int | None:
        """The longest sequence the model can read, or None where nothing limits it."""
        return self.context if self.position.bounded else None


class Decoder(TransformerConfig):
    """A stack that sees the past only: GPT, LLaMA.

    With `d_embedding` the table of tokens is that wide; a matrix leads from it to d_model, where positions are added,
    and another back to it before the logits (Zhang et al. 2022, OPT-350m). With `ngrams` embeddings of the last tokens
    are added to each token's own.
    """

    kind: Literal["decoder"] = "decoder"
    d_embedding: PositiveInt | None = Field(None, description="the width of the embeddings; absent: d_model")
    ngrams: HashedNGrams | None = Field(None, description="embeddings of the last tokens, added to each token's own")
    head: Head = Field(LMHead(), description="what is made of the features")


class Encoder(TransformerConfig):
    """A stack that sees both sides: BERT. `segments` trained vectors distinguish first and second sentence.

    With `d_embedding` the tables of tokens, positions and segments are that wide, and a linear layer makes d_model
    numbers of each embedding. Of `distinct_layers` blocks each is run layers / distinct_layers times in a row, with the
    same weights. Both save parameters (Lan et al. 2020, §3.1).
    """

    kind: Literal["encoder"] = "encoder"
    segments: int = Field(default=0, ge=0, description="kinds of sentences that are told apart; BERT has 2")
    d_embedding: PositiveInt | None = Field(None, description="the width of the embeddings; absent: d_model")
    distinct_layers: Layers | None = Field(None, description="blocks with weights of their own; absent: all")
    head: Head = Field(MaskedLMHead(), description="what is made of the features")

    @model_validator(mode="after")
    def _savings(self) -> Self:
        if self.distinct_layers is not None and self.layers % self.distinct_layers:
            raise ValueError(f"distinct_layers = {self.distinct_layers} does not divide layers = {self.layers}")
        if self.distinct_layers is not None and self.pattern:
            raise ValueError("distinct_layers: layers that share their weights are of one kind, but there is a pattern")
        if self.d_embedding is not None:
            self.position.check(self.d_embedding, self.d_head)
            if self.position.projected:
                raise ValueError(f"d_embedding: '{self.position.kind}' positions are as wide as the layers")
        return self

    @property
    def added_width(self) -> int:
        return self.width

    @property
    def sharing(self) -> int:
        return self.layers // (self.distinct_layers or self.layers)


class EncoderDecoder(TransformerConfig):
    """The 2017 Transformer: an encoder, and a decoder that attends to it.

    `source_vocab_size` gives the source its own embeddings; without it one table serves both sides.
    """

    kind: Literal["encoder-decoder"] = "encoder-decoder"
    encoder_layers: Layers | None = Field(None, description="blocks of the encoder; absent: as many as `layers`")
    source_vocab_size: PositiveInt | None = Field(
        None, description="of a table of the source's own; absent: one table for both"
    )
    head: LMHead = Field(LMHead(), description="what is made of the features")

    @model_validator(mode="after")
    def _one_after_the_other(self) -> Self:
        if self.sublayers != "sequential":
            raise ValueError(f"sublayers = '{self.sublayers}' is for a stack without a source; here it is 'sequential'")
        return self


class Recurrent(Config):
    """A recurrent language model: Elman (1990), LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014)."""

    kind: Literal["recurrent"] = "recurrent"
    vocab_size: PositiveInt = Field(description="tokens in the vocabulary; the tokenizer decides")
    context: PositiveInt = Field(256, description="the longest sequence in training")
    cell: Literal["elman", "lstm", "gru"] = Field("lstm", description="the kind of cell")
    activation: Literal["tanh", "relu", "sigmoid"] = Field("tanh", description="of an elman cell")
    layers: PositiveInt = Field(1, description="cells on top of each other")
    d_model: PositiveInt = Field(description="the width of the states")
    d_embedding: PositiveInt | None = Field(None, description="the width of the embeddings; absent: d_model")
    tied: bool = Field(False, description="use the embeddings as the output table")
    dropout: Probability = Field(0.0, description="the part of what goes from layer to layer that is dropped")
    variational: bool = Field(False, description="drop the same at all places of a row (Gal and Ghahramani 2016)")
    init: RecurrentInit = Field(FanInInit(), description="how weights are drawn")

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
    vocab_size: PositiveInt = Field(description="tokens in the vocabulary; the tokenizer decides")
    source_vocab_size: PositiveInt | None = Field(
        None, description="of a table of the source's own; absent: one table for both"
    )
    context: PositiveInt = Field(256, description="the longest sequence in training")
    cell: Literal["elman", "lstm", "gru"] = Field("gru", description="the kind of cell")
    layers: PositiveInt = Field(1, description="cells on top of each other")
    d_model: PositiveInt = Field(description="the width of the states")
    d_embedding: PositiveInt | None = Field(None, description="the width of the embeddings; absent: d_model")
    d_attention: PositiveInt | None = Field(None, description="the width inside the attention; absent: d_model")
    dropout: Probability = Field(0.0, description="the part of what goes from layer to layer that is dropped")
    # PyTorch\'s: translators learn faster from it
    init: RecurrentInit = Field(FanInInit(embedding_std=1.0), description="how weights are drawn")


class NGram(Config):
    """Counts of `order` words in a row, smoothed."""

    kind: Literal["ngram"] = "ngram"
    vocab_size: PositiveInt = Field(description="tokens in the vocabulary; the tokenizer decides")
    order: PositiveInt = Field(3, description="words in a row that are counted")
    smoothing: Smoothing = Field(ModifiedKneserNey(), description="how counts become probabilities")


Model = Annotated[Decoder | Encoder | EncoderDecoder | Recurrent | Bahdanau | NGram, Field(discriminator="kind")]
