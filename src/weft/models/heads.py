"""What is predicted from a Transformer's features: a token, a class, a tag, a vector."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.models import config
from weft.nn import norm
from weft.nn.activations import activations
from weft.nn.config import Activation
from weft.nn.dropout import Dropout, RowRng
from weft.nn.init import Initialiser
from weft.nn.linear import Linear
from weft.nn.loss import Across, Readout


class Pretraining(NamedTuple):
    """The two answers of BERT's pretraining."""

    words: Tensor  # (batch, time, vocab_size)
    next_sentence: Tensor  # (batch, 2)


class TokenHead(nn.Module):
    """Features to a token: `prepare`, then a product with a (vocab_size, width) table, the embeddings' if tied."""

    across: Across | None = None  # where processes divide the vocabulary among them

    def __init__(self, model: config.TransformerConfig, tied: bool, bias: bool):
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(model.vocab_size, model.width))
        self.bias = nn.Parameter(torch.empty(model.vocab_size)) if bias else None
        self.softcap: float | None = None

    def reset_parameters(self, init: Initialiser) -> None:
        """Draw the table, if it has one of its own; the bias becomes 0."""
        if self.weight is not None:
            init.table(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def prepare(self, features: Tensor) -> Tensor:
        """(batch, time, d_model) → (batch, time, width), ready for the product with the table."""
        return features

    def forward(self, features: Tensor, table: Tensor, mask: Tensor | None = None, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → logits (batch, time, vocab_size)."""
        return self.readout(features, table).logits()

    def readout(self, features: Tensor, table: Tensor) -> Readout:
        """What the logits are a product of."""
        table = table if self.weight is None else self.weight
        return Readout.of(self.prepare(features), table, self.bias, self.across, self.softcap)


class LMHead(TokenHead):
    """The next token: the features as they are, or scaled; of embeddings with a width of their own, made as wide."""

    def __init__(self, settings: config.LMHead, model: config.TransformerConfig):
        super().__init__(model, settings.tied, settings.bias)
        self.scale, self.softcap = settings.scale, settings.softcap
        self.dense = Linear(model.d_model, model.width, bias=False) if model.factorised else None

    def prepare(self, features: Tensor) -> Tensor:
        features = features if self.dense is None else self.dense(features)
        return features if self.scale is None else features * self.scale


class MaskedLMHead(TokenHead):
    """BERT's: dense, activation and norm before the table, and a bias after it (Devlin et al. 2019)."""

    def __init__(self, settings: config.MaskedLMHead | config.PretrainingHead, model: config.TransformerConfig):
        super().__init__(model, settings.tied, settings.bias)
        self.dense = Linear(model.d_model, model.width, bias=settings.dense_bias)
        self.norm = norm.build(model.norm, model.width)
        self.activation = activations[settings.activation]

    def prepare(self, features: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(features)))


def pool(features: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """One vector a sequence, (batch, time, d_model) → (batch, d_model); mask (batch, time) True where real."""
    if how == "first":
        return features[:, 0]
    if how == "last":
        last = torch.full_like(features[:, 0, 0], features.shape[1] - 1) if mask is None else mask.sum(dim=1) - 1
        return features[torch.arange(features.shape[0], device=features.device), last.long()]
    if mask is None:
        return features.mean(dim=1)
    kept = mask[..., None].to(features.dtype)
    return (features * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)


class Pooler(nn.Module):
    """f(dense(first token)), with tanh what BERT puts before every head for whole sequences."""

    def __init__(self, d_model: int, activation: Activation = "tanh"):
        super().__init__()
        self.dense = Linear(d_model, d_model)
        self.activation = activations[activation]

    def forward(self, pooled: Tensor) -> Tensor:
        """(batch, d_model) → (batch, d_model)."""
        return self.activation(self.dense(pooled))


class Transform(nn.Module):
    """norm(f(dense(x))), what ModernBERT puts before every head."""

    def __init__(self, settings: config.Transform, model: config.TransformerConfig):
        super().__init__()
        self.dense = Linear(model.d_model, model.d_model, bias=settings.bias)
        self.norm = norm.build(model.norm, model.d_model)
        self.activation = activations[settings.activation]

    def forward(self, x: Tensor) -> Tensor:
        """(…, d_model) → (…, d_model)."""
        return self.norm(self.activation(self.dense(x)))


# BERT's: the second sentence follows the first, or it does not
NEXT_SENTENCE = config.ClassificationHead(labels=2, dropout=0.0)


class Classifier(nn.Module):
    """One of a few labels for the whole sequence."""

    def __init__(self, settings: config.ClassificationHead, model: config.TransformerConfig):
        super().__init__()
        self.pooling = settings.pooling
        self.pooler = Pooler(model.d_model, settings.activation) if settings.pooler else None
        self.transform = None if settings.transform is None else Transform(settings.transform, model)
        self.dropout = Dropout(settings.dropout)
        self.out = Linear(model.d_model, settings.labels, bias=settings.bias)

    def forward(self, features: Tensor, table: Tensor, mask: Tensor | None = None, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → logits (batch, labels)."""
        pooled = pool(features, mask, self.pooling)
        for part in (self.pooler, self.transform):
            pooled = pooled if part is None else part(pooled)
        return self.out(self.dropout(pooled, rng))


class PretrainingPair(nn.Module):
    """Masked tokens and next sentence together."""

    def __init__(self, settings: config.PretrainingHead, model: config.TransformerConfig):
        super().__init__()
        self.words = MaskedLMHead(settings, model)
        self.next_sentence = Classifier(NEXT_SENTENCE, model)

    def forward(
        self, features: Tensor, table: Tensor, mask: Tensor | None = None, rng: RowRng | None = None
    ) -> Pretraining:
        """(batch, time, d_model) → both logits."""
        return Pretraining(self.words(features, table), self.next_sentence(features, table, rng=rng))


class Tagger(nn.Module):
    """One of a few labels for every token; of an answer, whether it begins or ends there."""

    def __init__(self, settings: config.TaggingHead | config.SpanHead, model: config.TransformerConfig, labels: int):
        super().__init__()
        self.transform = None if settings.transform is None else Transform(settings.transform, model)
        self.dropout = Dropout(settings.dropout)
        self.out = Linear(model.d_model, labels)

    def forward(self, features: Tensor, table: Tensor, mask: Tensor | None = None, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → logits (batch, time, labels)."""
        return self.out(self.dropout(features if self.transform is None else self.transform(features), rng))


class Detector(nn.Module):
    """Whether each token was replaced: a logit above 0 says so."""

    def __init__(self, settings: config.ReplacedHead, d_model: int):
        super().__init__()
        self.dense = Linear(d_model, d_model)
        self.activation = activations[settings.activation]
        self.out = Linear(d_model, 1)

    def forward(self, features: Tensor, table: Tensor, mask: Tensor | None = None, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → logits (batch, time)."""
        return self.out(self.activation(self.dense(features))).squeeze(-1)


class Embedder(nn.Module):
    """One vector a sequence."""

    def __init__(self, settings: config.EmbeddingHead):
        super().__init__()
        self.settings = settings

    def forward(self, features: Tensor, table: Tensor, mask: Tensor | None = None, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → (batch, d_model)."""
        pooled = pool(features, mask, self.settings.pooling)
        return F.normalize(pooled, dim=-1) if self.settings.normalise else pooled


MODULES: dict[type, Callable[[Any, config.TransformerConfig], nn.Module]] = {
    config.LMHead: LMHead,
    config.MaskedLMHead: MaskedLMHead,
    config.PretrainingHead: PretrainingPair,
    config.NextSentenceHead: lambda head, model: Classifier(NEXT_SENTENCE, model),
    config.ClassificationHead: Classifier,
    config.TaggingHead: lambda head, model: Tagger(head, model, head.labels),
    config.SpanHead: lambda head, model: Tagger(head, model, 2),
    config.ReplacedHead: lambda head, model: Detector(head, model.d_model),
    config.EmbeddingHead: lambda head, model: Embedder(head),
}


def build(model: config.TransformerConfig, head: config.Head) -> nn.Module:
    return MODULES[type(head)](head, model)
