"""Settings of whole models; `models/build.py` builds the model, and presets name some of them."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from weft.config import Config
from weft.models.head_config import ClassificationHead, Head, LMHead, MaskedLMHead, TransformedLMHead
from weft.models.smoothing import ModifiedKneserNey, Smoothing
from weft.nn.config import Block, Experts, FanInInit, HashedNGrams, Init, NormalInit, Probability, RecurrentInit
from weft.nn.position_config import LayeredT5, NoPosition, Position, Relative, Sizes, Tempered

# ---- Transformers
Layers = Annotated[int, Field(gt=0, le=10_000)]


def _factor(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r}: expected true, false, or a number above 0")
    return float(value)


Factor = Annotated[bool | float, BeforeValidator(_factor)]


class LayerKind(Config):
    """Window and position encoding of one kind of layer, where layers differ. With `chunk`, a text is read in chunks of
    this length, and a token attends only to its own chunk (Llama 4)."""

    window: PositiveInt | None = Field(
        None, description="attend only to tokens fewer than this many positions away; absent: all"
    )
    chunk: PositiveInt | None = Field(None, description="tokens per chunk, which attends only to itself; absent: all")
    position: Position | None = Field(None, description="position encoding; absent: the model's")

    @model_validator(mode="after")
    def _check_chunk(self) -> Self:
        if self.chunk is not None and self.window is not None:
            raise ValueError("chunk: a kind of layer has a window or chunks; leave out one of them")
        return self

    @property
    def reach(self) -> int | None:
        """Largest number of tokens, the last of them its own, that a token sees of the past; None: all."""
        return self.window or self.chunk


class TransformerConfig(Block):
    """Settings common to encoders, decoders and encoder–decoders.

    `context` is the longest sequence in training; only learned positions make it a hard limit. `embedding_norm`
    normalises the embeddings (BERT), and `first_norm = false` leaves out the norm before the first attention
    (ModernBERT). Where layers differ, `pattern` lists their kinds from the first layer on, and repeats over the depth:
    for example five with a window and one without (Gemma 3).
    """

    vocab_size: PositiveInt = Field(description="tokens in the vocabulary; the tokenizer decides")
    context: PositiveInt = Field(1024, description="longest sequence in training")
    layers: Layers = Field(description="number of layers")
    pattern: tuple[LayerKind, ...] = Field((), description="kinds of layers from the first on, repeated over the depth")
    embedding_scale: Factor = Field(False, description="multiply embeddings by √d_model, or by this number")
    embedding_norm: bool = Field(False, description="normalise the embeddings")
    first_norm: bool = Field(True, description="use a norm before the first attention")
    init: Init = Field(NormalInit(), description="initial weights")

    @property
    def factorised(self) -> bool:
        """Whether a matrix projects the embeddings, of width `d_embedding`, to d_model."""
        return getattr(self, "d_embedding", None) is not None

    @property
    def width(self) -> int:
        """Width of the token embeddings."""
        return getattr(self, "d_embedding", None) or self.d_model - self.position.concatenated_width(self.d_model)

    @property
    def projects_output(self) -> bool:
        """Whether an LM head projects features from d_model to the width of its table."""
        return self.factorised or self.width != self.d_model

    @property
    def added_width(self) -> int:
        """Width of the position and segment embeddings, and of the embedding norm."""
        return self.d_model

    @property
    def sharing(self) -> int:
        """Number of consecutive layers that share their weights."""
        return 1

    @property
    def divisible(self) -> bool:
        """Whether tensor parallelism can divide the weights."""
        plain = self.width == self.d_model and getattr(self, "ngrams", None) is None
        whole = self.position.projected or isinstance(self.position, LayeredT5)
        attention = self.attention
        whole = whole or attention.global_tokens is not None or attention.sinks or attention.latent is not None
        whole = whole or isinstance(self.feedforward, Experts) or self.feedforward.activation in ("xielu", "none")
        return self.sharing == 1 and plain and not whole

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        if not self.first_norm and (self.placement, self.sublayers) != ("pre", "sequential"):
            raise ValueError("first_norm = false needs placement = 'pre' and sublayers = 'sequential'")
        if self.pattern and self.attention.window is not None:
            raise ValueError("attention.window is for all layers; with a pattern, set the window of each of its kinds")
        if self.attention.global_tokens is not None:
            if isinstance(self, Decoder) or not all(kind.window for kind in self.kinds(causal=False)):
                raise ValueError("attention.global_tokens is for encoders with a window")
            if self.position.projected or isinstance(self.position, LayeredT5 | Relative):
                raise ValueError(f"attention.global_tokens does not work with '{self.position.kind}' positions")
        if self.factorised and self.position.concatenated_width(self.d_model):
            raise ValueError("d_embedding: 'concatenated' positions decide the width of the embeddings; leave it out")
        if self.attention.sinks or self.attention.latent is not None:
            name = "sinks" if self.attention.sinks else "latent"
            if not isinstance(self, Decoder):
                raise ValueError(f"attention.{name} is for decoders")
            if self.position.projected or isinstance(self.position, LayeredT5 | Relative):
                raise ValueError(f"attention.{name} does not work with '{self.position.kind}' positions")
            if self.attention.latent is not None and any(kind.position for kind in self.pattern):
                raise ValueError("attention.latent: all layers have the same positions; leave them out of the pattern")
        if not isinstance(self, Decoder) and any(kind.chunk for kind in self.pattern):
            raise ValueError("pattern: chunks are for decoders")
        norm, rotated = self.attention.qk_norm, all(kind.position.rotates for kind in self.kinds() if kind.position)
        if self.attention.qk_norm_rotated and not rotated and norm is not None and norm.gain:
            raise ValueError(
                "attention.qk_norm_rotated: layers without rotation have no such norm; set its gain = false"
            )
        for kind in self.pattern:
            for position in (self.position, kind.position) if kind.position is not None else ():
                if not (position.rotates or isinstance(position, NoPosition | Tempered)):
                    differing = f"only rotary or no positions can differ between layers, not '{position.kind}'"
                    raise ValueError(f"pattern: {differing}")
                position.check(self.d_model, self.d_head)
        return self

    def kinds(self, causal: bool = True) -> tuple[LayerKind, ...]:
        """Pattern with all windows and positions filled in; a single kind if layers don't differ. If not `causal`, that
        of an encoder."""
        pattern = self.pattern if causal else getattr(self, "encoder_pattern", ()) or self.pattern
        if not pattern:
            return (LayerKind(window=self.attention.window, position=self.position),)
        return tuple(kind.replace(position=kind.position or self.position) for kind in pattern)

    def layer_kinds(self, layers: int, causal: bool = True) -> list[LayerKind]:
        """Kind of each of `layers` layers."""
        kinds = self.kinds(causal)
        return [kinds[layer % len(kinds)] for layer in range(layers)]

    @property
    def embedding_factor(self) -> float | None:
        """Factor of the embeddings; None: 1."""
        if isinstance(self.embedding_scale, bool):
            return self.d_model**0.5 if self.embedding_scale else None
        return self.embedding_scale

    def sizes(self, layers: int, causal: bool) -> Sizes:
        """Sizes of a stack of `layers` layers, for its position encoding."""
        return Sizes(
            d_model=self.added_width,
            heads=self.attention.heads,
            d_head=self.d_head,
            context=self.context if causal else getattr(self, "source_context", None) or self.context,
            causal=causal,
            layers=layers,
        )

    @property
    def longest(self) -> int | None:
        """Longest sequence that the model can read; None: no limit."""
        return self.context if self.position.bounded else None


class Decoder(TransformerConfig):
    """Stack that sees only the past: GPT, LLaMA. With `d_embedding`, a matrix projects the token embeddings to d_model,
    where positions are added, and another projects back before the logits (Zhang et al. 2022, OPT-350m)."""

    kind: Literal["decoder"] = "decoder"
    segments: int = Field(default=0, ge=0, description="number of segment vectors; every token has the first")
    d_embedding: PositiveInt | None = Field(None, description="width of the embeddings; absent: d_model")
    ngrams: HashedNGrams | None = Field(None, description="embeddings of the last tokens, added to each token's")
    head: Head = Field(LMHead(), description="output head")


class Encoder(TransformerConfig):
    """Stack that sees both directions: BERT.

    With `d_embedding`, the embeddings of tokens, positions and segments have this width, and a linear layer projects
    their sum to d_model. With `distinct_layers`, each block runs layers / distinct_layers times in a row. Both save
    parameters (Lan et al. 2020, §3.1). With `dropped_token`, masked tokens embed to 0, and the embeddings of a text are
    divided by the fraction of the others, as dropout would (Lin et al. 2023).
    """

    kind: Literal["encoder"] = "encoder"
    segments: int = Field(default=0, ge=0, description="number of trained segment vectors; BERT has 2")
    d_embedding: PositiveInt | None = Field(None, description="width of the embeddings; absent: d_model")
    distinct_layers: Layers | None = Field(None, description="number of blocks with distinct weights; absent: all")
    dropped_token: NonNegativeInt | None = Field(None, description="id of a mask token that embeds to 0; absent: none")
    head: Head = Field(MaskedLMHead(), description="output head")

    @model_validator(mode="after")
    def _check_savings(self) -> Self:
        if self.distinct_layers is not None and self.layers % self.distinct_layers:
            raise ValueError(f"distinct_layers = {self.distinct_layers} does not divide layers = {self.layers}")
        if self.distinct_layers is not None and self.pattern:
            raise ValueError("distinct_layers: layers that share weights must be of one kind, but there is a pattern")
        if self.distinct_layers is not None and isinstance(self.feedforward, Experts):
            raise ValueError("distinct_layers: layers of experts can't share weights; leave it out")
        if self.d_embedding is not None:
            self.position.check(self.d_embedding, self.d_head)
            if self.position.projected:
                raise ValueError(f"d_embedding: '{self.position.kind}' positions need d_embedding = d_model")
        if isinstance(self.head, TransformedLMHead) and not self.head.dense and self.width != self.d_model:
            narrower = f"embeddings of width d_model = {self.d_model}, not {self.width}"
            raise ValueError(f"head.dense = false needs {narrower}: nothing else projects the features to the table")
        return self

    @property
    def added_width(self) -> int:
        return self.d_embedding or self.d_model

    @property
    def sharing(self) -> int:
        return self.layers // (self.distinct_layers or self.layers)


class EncoderDecoder(TransformerConfig):
    """2017 Transformer: an encoder, and a decoder that attends to its output.

    Where the two differ, the encoder has `source_context` and `encoder_pattern`. With a classification head, both read
    the same text, the decoder with `start` before it instead of its last token (Lewis et al. 2020, §3.1), or beginning
    with its last token if `start = "last"` (Liu et al. 2020).
    """

    kind: Literal["encoder-decoder"] = "encoder-decoder"
    encoder_layers: Layers | None = Field(None, description="layers of the encoder; absent: same as `layers`")
    source_vocab_size: PositiveInt | None = Field(None, description="rows of a separate source table; absent: shared")
    source_context: PositiveInt | None = Field(None, description="longest source; absent: same as `context`")
    encoder_pattern: tuple[LayerKind, ...] = Field((), description="kinds of the encoder's layers; absent: `pattern`")
    start: NonNegativeInt | Literal["last"] | None = Field(
        None, description="decoder's first token, if a head classifies texts"
    )
    head: Annotated[LMHead | ClassificationHead, Field(discriminator="kind")] = Field(
        LMHead(), description="output head"
    )

    @field_validator("head", mode="before")
    @classmethod
    def _lm_head_by_default(cls, head: Any) -> Any:
        return {"kind": "lm", **head} if isinstance(head, Mapping) else head

    @model_validator(mode="after")
    def _check_sublayers(self) -> Self:
        if (self.head.kind == "sequence") != (self.start is not None):
            raise ValueError("start: the decoder's first token is for a head of kind 'sequence', which needs it")
        if isinstance(self.start, int) and self.start >= self.vocab_size:
            raise ValueError(f"start = {self.start} is outside the vocabulary of {self.vocab_size}")
        if self.sublayers != "sequential":
            raise ValueError(f"sublayers = '{self.sublayers}' is for models without a source; use 'sequential'")
        return self


class Bengio(Config):
    """Neural n-gram: a feed-forward network over the embeddings of the last order − 1 words (Bengio et al. 2003)."""

    kind: Literal["bengio"] = "bengio"
    vocab_size: PositiveInt = Field(description="tokens in the vocabulary; the tokenizer decides")
    context: PositiveInt = Field(256, description="longest sequence in training")
    order: Annotated[int, Field(ge=2, le=1000)] = Field(
        5, description="tokens of an n-gram, the predicted one included"
    )
    d_model: PositiveInt = Field(description="width of the hidden layer")
    d_embedding: PositiveInt | None = Field(None, description="width of the embeddings; absent: d_model")
    direct: bool = Field(False, description="connect the embeddings to the output as well")
    dropout: Probability = Field(0.0, description="fraction of the embeddings and of the hidden layer to drop")
    init: RecurrentInit = Field(FanInInit(), description="initial weights")

    @property
    def d_input(self) -> int:
        """Width of the concatenated embeddings."""
        return (self.order - 1) * (self.d_embedding or self.d_model)


class Recurrent(Config):
    """Recurrent language model: Elman (1990), LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014).

    `word_dropout` and `weight_drop` are those of Merity et al. 2018: a step of training drops whole words from the
    embeddings, and single weights from the matrices between hidden states, the same ones in all rows.
    """

    kind: Literal["recurrent"] = "recurrent"
    vocab_size: PositiveInt = Field(description="tokens in the vocabulary; the tokenizer decides")
    context: PositiveInt = Field(256, description="longest sequence in training")
    cell: Literal["elman", "lstm", "gru"] = Field("lstm", description="kind of cell")
    activation: Literal["tanh", "relu", "sigmoid"] = Field("tanh", description="activation of an elman cell")
    layers: PositiveInt = Field(1, description="number of layers")
    d_model: PositiveInt = Field(description="width of the hidden states")
    d_embedding: PositiveInt | None = Field(None, description="width of the embeddings; absent: d_model")
    tied: bool = Field(False, description="use the embeddings as the output table")
    d_last: PositiveInt | None = Field(None, description="width of an lstm's last layer; absent: d_model")
    dropout: Probability = Field(0.0, description="fraction of the values between layers to drop")
    dropout_input: Probability | None = Field(None, description="fraction of the embeddings to drop; absent: dropout")
    dropout_output: Probability | None = Field(None, description="fraction of the output to drop; absent: dropout")
    variational: bool = Field(False, description="drop the same values at all times of a row (Gal and Ghahramani 2016)")
    word_dropout: Probability = Field(0.0, description="fraction of the vocabulary whose embeddings a step drops")
    weight_drop: Probability = Field(0.0, description="fraction of the recurrent weights that a step drops")
    init: RecurrentInit = Field(FanInInit(), description="initial weights")

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.d_last is not None and (self.cell != "lstm" or self.d_last > self.d_model):
            raise ValueError(f"d_last = {self.d_last}: only the last layer of an lstm is narrower, than {self.d_model}")
        if self.tied and self.width != (self.d_embedding or self.d_model):
            key = "d_model" if self.d_last is None else "d_last"
            raise ValueError(f"tied embeddings need d_embedding = {key} = {self.width}, not {self.d_embedding}")
        if self.weight_drop and self.activation == "sigmoid":
            raise ValueError("weight_drop: an elman cell with activation = 'sigmoid' has no kernel that takes it")
        if self.cell != "elman" and self.activation != "tanh":
            fixed = f"'{self.cell}' has fixed activations"
            raise ValueError(f"activation = '{self.activation}' is for the elman cell; {fixed}")
        return self

    @property
    def width(self) -> int:
        """Width of the features that the output table multiplies."""
        return self.d_last or self.d_model


class ELMo(Config):
    """Bidirectional language model: two stacks of LSTMs, which read a text forwards and backwards, over one table of
    embeddings and one softmax (Peters et al. 2018, §3).

    From the second layer on, a layer's input is added to its output. With `d_cell`, cells of this width are projected
    to d_model (Sak et al. 2014).
    """

    kind: Literal["elmo"] = "elmo"
    vocab_size: PositiveInt = Field(description="tokens in the vocabulary; the tokenizer decides")
    context: PositiveInt = Field(256, description="longest sequence in training")
    layers: Layers = Field(2, description="number of layers in each direction")
    d_model: PositiveInt = Field(description="width of the embeddings, and of the states in each direction")
    d_cell: PositiveInt | None = Field(None, description="width of the cells, projected to d_model; absent: d_model")
    dropout: Probability = Field(0.1, description="fraction of the values between layers to drop")
    init: RecurrentInit = Field(FanInInit(), description="initial weights")

    @model_validator(mode="after")
    def _check_projection(self) -> Self:
        if self.d_cell is not None and self.d_cell <= self.d_model:
            raise ValueError(
                f"d_cell = {self.d_cell}: cells that are projected are wider than d_model = {self.d_model}"
            )
        return self


class Bahdanau(Config):
    """RNN encoder and decoder with additive attention between them (Bahdanau et al. 2015)."""

    kind: Literal["bahdanau"] = "bahdanau"
    vocab_size: PositiveInt = Field(description="tokens in the vocabulary; the tokenizer decides")
    source_vocab_size: PositiveInt | None = Field(None, description="rows of a separate source table; absent: shared")
    context: PositiveInt = Field(256, description="longest sequence in training")
    cell: Literal["elman", "lstm", "gru"] = Field("gru", description="kind of cell")
    layers: PositiveInt = Field(1, description="number of layers")
    d_model: PositiveInt = Field(description="width of the hidden states")
    d_embedding: PositiveInt | None = Field(None, description="width of the embeddings; absent: d_model")
    d_attention: PositiveInt | None = Field(None, description="hidden width of the attention; absent: d_model")
    dropout: Probability = Field(0.0, description="fraction of the values between layers to drop")
    # PyTorch's default for embeddings: translation models learn faster from it
    init: RecurrentInit = Field(FanInInit(embedding_std=1.0), description="initial weights")


class NGram(Config):
    """Smoothed counts of n-grams of up to `order` tokens."""

    kind: Literal["ngram"] = "ngram"
    vocab_size: PositiveInt = Field(description="tokens in the vocabulary; the tokenizer decides")
    order: PositiveInt = Field(3, description="length of the longest n-grams, in tokens")
    smoothing: Smoothing = Field(ModifiedKneserNey(), description="smoothing of the counts")


class StaticVectors(Config):
    """Base of models that have one vector per word, whatever its context."""

    vocab_size: PositiveInt = Field(description="words in the vocabulary; the tokenizer decides")
    d_model: Annotated[int, Field(gt=0, le=2048)] = Field(100, description="width of the vectors")


class Word2Vec(StaticVectors):
    """Vectors that predict neighbouring words, trained with negative sampling (Mikolov et al. 2013)."""

    kind: Literal["word2vec"] = "word2vec"
    architecture: Literal["skip-gram", "cbow"] = Field(
        "skip-gram", description="predict from each word of the window, or from their mean"
    )
    window: PositiveInt = Field(5, description="largest distance of two words that predict each other")
    negatives: Annotated[int, Field(gt=0, lt=64)] = Field(5, description="random words per prediction")
    subsample: Annotated[float, Field(ge=0.0)] = Field(
        1e-3, description="leave out words of a higher frequency than this, at random; 0: none"
    )
    lr: PositiveFloat = Field(0.025, description="learning rate at the beginning")
    min_lr: PositiveFloat = Field(1e-4, description="learning rate at the end; it falls linearly")


class GloVe(StaticVectors):
    """Vectors whose products fit the logarithms of co-occurrence counts (Pennington et al. 2014)."""

    kind: Literal["glove"] = "glove"
    window: PositiveInt = Field(10, description="largest distance of two words that are counted together")
    x_max: PositiveFloat = Field(100.0, description="count from which all pairs have the same weight")
    alpha: Annotated[float, Field(ge=0.0, le=1.0)] = Field(0.75, description="weight of rarer pairs: (count / x_max)^α")
    lr: PositiveFloat = Field(0.05, description="learning rate of AdaGrad")


Model = Annotated[
    Decoder | Encoder | EncoderDecoder | Bengio | Recurrent | ELMo | Bahdanau | NGram | Word2Vec | GloVe,
    Field(discriminator="kind"),
]
