"""Settings of a model's head: what it predicts, a token, a label, a tag, a span or a vector."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from weft.config import Config
from weft.nn.config import Activation, Probability

Pooling = Literal["first", "mean", "last", "next-to-last", "max", "mean-sqrt", "weighted-mean"]


class Transform(Config):
    """Dense layer, activation and norm between the features and the output of a head (ModernBERT)."""

    activation: Activation = Field("gelu", description="activation of the dense layer")
    bias: bool = Field(True, description="add a bias in the dense layer")


class LMHead(Config):
    """Next token: features times a (vocab_size, d_model) table. Features may pass a `transform` (BERT as a decoder) and
    are multiplied by `scale`; a `softcap` c replaces each logit z by c · tanh(z/c) (Gemma 2)."""

    kind: Literal["lm"] = "lm"
    transform: Transform | None = Field(None, description="dense layer with a norm in front")
    tied: bool = Field(True, description="use the embeddings as the table")
    bias: bool = Field(False, description="add a bias per token")
    scale: PositiveFloat | None = Field(None, description="factor of the features")
    softcap: PositiveFloat | None = Field(None, description="bound c of the logits: z becomes c · tanh(z/c)")


class TransformedLMHead(Config):
    """Dense layer, activation and norm before the table of tokens (BERT's transform), unless `dense` is false."""

    kind: str
    dense: bool = Field(True, description="put a dense layer and a norm in front; false in EuroBERT")
    tied: bool = Field(True, description="use the embeddings as the table")
    bias: bool = Field(True, description="add a bias per token")
    dense_bias: bool = Field(True, description="add a bias in the dense layer")
    activation: Activation = Field("gelu", description="activation of the dense layer")


class MaskedLMHead(TransformedLMHead):
    """Masked tokens (Devlin et al. 2019, §3.1)."""

    kind: Literal["mlm"] = "mlm"


class PretrainingHead(TransformedLMHead):
    """Both of BERT's pretraining tasks, masked tokens and next sentence (Devlin et al. 2019, §3.1)."""

    kind: Literal["mlm+nsp"] = "mlm+nsp"


class NextSentenceHead(Config):
    """Whether the second sentence follows the first: two classes on the pooled first token."""

    kind: Literal["nsp"] = "nsp"


class ClassificationHead(Config):
    """One of `labels` for a whole sequence; a single label is a regression. In front is a `pooler`, a dense layer with
    `activation` (tanh in BERT, relu in DistilBERT), or a `transform`; with `pooled_late`, it reads every token, and its
    outputs are pooled (EuroBERT)."""

    kind: Literal["sequence"] = "sequence"
    labels: PositiveInt = Field(description="number of labels")
    pooling: Pooling = Field("first", description="how tokens' features become one vector")
    pooled_late: bool = Field(False, description="pool after the dense layer instead of before")
    pooler: bool = Field(True, description="put a dense layer in front")
    activation: Activation = Field("tanh", description="activation of the dense layer")
    transform: Transform | None = Field(None, description="dense layer with a norm, instead of the pooler")
    bias: bool = Field(True, description="add a bias per label")
    dropout: Probability = Field(0.1, description="fraction of the features to drop")

    @model_validator(mode="after")
    def _check_pooler(self) -> Self:
        if self.pooler and self.transform is not None:
            raise ValueError("transform replaces the pooler, and needs pooler = false")
        return self


class TaggingHead(Config):
    """One of `labels` for every token."""

    kind: Literal["token"] = "token"
    labels: PositiveInt = Field(description="number of labels")
    transform: Transform | None = Field(None, description="dense layer with a norm in front")
    dropout: Probability = Field(0.1, description="fraction of the features to drop")


class SpanHead(Config):
    """Start and end of an answer: two logits per token (Devlin et al. 2019, §4.2)."""

    kind: Literal["span"] = "span"
    transform: Transform | None = Field(None, description="dense layer with a norm in front")
    dropout: Probability = Field(0.0, description="fraction of the features to drop")


class ReplacedHead(Config):
    """Whether a token was replaced: dense layer, activation, and one logit per token (Clark et al. 2020, §2)."""

    kind: Literal["replaced"] = "replaced"
    activation: Activation = Field("gelu", description="activation of the dense layer")


class EmbeddingHead(Config):
    """One vector per sequence."""

    kind: Literal["embedding"] = "embedding"
    pooling: Pooling = Field("mean", description="how tokens' features become one vector")
    normalise: bool = Field(True, description="scale vectors to length 1")


PretrainingHeads = LMHead | MaskedLMHead | NextSentenceHead | PretrainingHead
TaskHeads = ClassificationHead | TaggingHead | SpanHead | ReplacedHead | EmbeddingHead
Head = Annotated[PretrainingHeads | TaskHeads, Field(discriminator="kind")]
