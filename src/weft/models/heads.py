"""Heads of a Transformer: from features to tokens, classes, tags or vectors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.models import config, head_config
from weft.nn import norm
from weft.nn.activations import activations
from weft.nn.config import Activation
from weft.nn.dropout import Dropout, RowRng
from weft.nn.init import Initialiser
from weft.nn.linear import Linear
from weft.nn.loss import Readout, VocabShard


class Pretraining(NamedTuple):
    """Logits of BERT's two pretraining tasks."""

    words: Tensor  # (batch, time, vocab_size)
    next_sentence: Tensor  # (batch, 2)


class TokenHead(nn.Module):
    """Token logits: `prepare`, then a product with a (vocab_size, width) table, the embeddings if tied."""

    vocab_shard: VocabShard | None = None  # set if tensor parallelism divides the vocabulary

    def __init__(self, model: config.TransformerConfig, tied: bool, bias: bool):
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(model.vocab_size, model.width))
        self.bias = nn.Parameter(torch.empty(model.vocab_size)) if bias else None
        self.softcap: float | None = None

    def reset_parameters(self, init: Initialiser) -> None:
        """Draw the table if it is not tied, and zero the bias."""
        if self.weight is not None:
            init.table(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def prepare(self, features: Tensor) -> Tensor:
        """Transform (batch, time, d_model) to (batch, time, width) for the product with the table."""
        return features

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None, *, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → logits (batch, time, vocab_size)."""
        return self.readout(x, table).logits()

    def readout(self, features: Tensor, table: Tensor) -> Readout:
        """Factors of the logits."""
        table = table if self.weight is None else self.weight
        features = self.prepare(features)
        return Readout(features, table, self.bias, shard=self.vocab_shard, softcap=self.softcap).local()


class LMHead(TokenHead):
    """Logits of the next token; features may pass a transform, are projected to the embeddings' width if it differs,
    and may be scaled."""

    def __init__(self, settings: head_config.LMHead, model: config.TransformerConfig):
        super().__init__(model, settings.tied, settings.bias)
        self.scale, self.softcap = settings.scale, settings.softcap
        self.transform = _transform(settings.transform, model)
        self.dense = Linear(model.d_model, model.width, bias=False) if model.projects_output else None

    def prepare(self, features: Tensor) -> Tensor:
        features = features if self.transform is None else self.transform(features)
        features = features if self.dense is None else self.dense(features)
        return features if self.scale is None else features * self.scale


class MaskedLMHead(TokenHead):
    """Logits of masked tokens: dense, activation and norm before the table, and a bias (Devlin et al. 2019)."""

    def __init__(
        self, settings: head_config.MaskedLMHead | head_config.PretrainingHead, model: config.TransformerConfig
    ):
        super().__init__(model, settings.tied, settings.bias)
        self.dense = Linear(model.d_model, model.width, bias=settings.dense_bias) if settings.dense else None
        self.norm = norm.build(model.norm, model.width) if settings.dense else None
        self.activation = activations[settings.activation]

    def prepare(self, features: Tensor) -> Tensor:
        if self.dense is None or self.norm is None:
            return features
        return self.norm(self.activation(self.dense(features)))


def pool(features: Tensor, mask: Tensor | None, pooling: head_config.Pooling) -> Tensor:
    """One vector per sequence, (batch, time, d_model) → (batch, d_model); mask (batch, time), True where real.

    `mean-sqrt` divides the sum by √length; `weighted-mean` weights the tokens by their numbers, 1 … length.
    """
    if pooling == "first":
        return features[:, 0]
    if pooling in ("last", "next-to-last"):
        length = torch.full_like(features[:, 0, 0], features.shape[1]) if mask is None else mask.sum(dim=1)
        index = (length - (1 if pooling == "last" else 2)).clamp(min=0)
        return features[torch.arange(features.shape[0], device=features.device), index.long()]
    if pooling == "max":
        return (features if mask is None else features.masked_fill(~mask[..., None], -torch.inf)).amax(dim=1)
    if mask is None and pooling == "mean":
        return features.mean(dim=1)
    weights = features.new_ones(*features.shape[:2], 1) if mask is None else mask[..., None].to(features.dtype)
    if pooling == "weighted-mean":
        weights = weights * torch.arange(1, features.shape[1] + 1, device=features.device)[:, None]
    total = weights.sum(dim=1).clamp(min=1)
    return (features * weights).sum(dim=1) / (total.sqrt() if pooling == "mean-sqrt" else total)


class Transform(nn.Module):
    """f(dense(x)), BERT's pooler with tanh; or norm(f(dense(x))), before every head in ModernBERT."""

    def __init__(self, d_model: int, activation: Activation, *, bias: bool = True, norm: nn.Module | None = None):
        super().__init__()
        self.dense = Linear(d_model, d_model, bias=bias)
        self.norm = norm
        self.activation = activations[activation]

    def forward(self, x: Tensor) -> Tensor:
        """(…, d_model) → (…, d_model)."""
        x = self.activation(self.dense(x))
        return x if self.norm is None else self.norm(x)


def _transform(settings: head_config.Transform | None, model: config.TransformerConfig) -> Transform | None:
    if settings is None:
        return None
    last = norm.build(model.norm, model.d_model)
    return Transform(model.d_model, settings.activation, bias=settings.bias, norm=last)


NEXT_SENTENCE = head_config.ClassificationHead(labels=2, dropout=0.0)  # whether the second sentence follows the first


class Classifier(nn.Module):
    """One label for the whole sequence."""

    def __init__(self, settings: head_config.ClassificationHead, model: config.TransformerConfig):
        super().__init__()
        self.pooling, self.pooled_late = settings.pooling, settings.pooled_late
        self.pooler = Transform(model.d_model, settings.activation) if settings.pooler else None
        self.transform = _transform(settings.transform, model)
        self.dropout = Dropout(settings.dropout)
        self.out = Linear(model.d_model, settings.labels, bias=settings.bias)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None, *, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → logits (batch, labels)."""
        x = x if self.pooled_late else pool(x, mask, self.pooling)
        for part in (self.pooler, self.transform):
            x = x if part is None else part(x)
        return self.out(self.dropout(pool(x, mask, self.pooling) if self.pooled_late else x, rng))


class PretrainingPair(nn.Module):
    """Masked tokens and next sentence: BERT's two pretraining heads."""

    def __init__(self, settings: head_config.PretrainingHead, model: config.TransformerConfig):
        super().__init__()
        self.words = MaskedLMHead(settings, model)
        self.next_sentence = Classifier(NEXT_SENTENCE, model)

    def forward(
        self, x: Tensor, table: Tensor, mask: Tensor | None = None, *, rng: RowRng | None = None
    ) -> Pretraining:
        """(batch, time, d_model) → logits of both tasks."""
        return Pretraining(self.words(x, table), self.next_sentence(x, table, rng=rng))


class Tagger(nn.Module):
    """One label for every token, or whether an answer begins or ends at it."""

    def __init__(
        self, settings: head_config.TaggingHead | head_config.SpanHead, model: config.TransformerConfig, labels: int
    ):
        super().__init__()
        self.transform = _transform(settings.transform, model)
        self.dropout = Dropout(settings.dropout)
        self.out = Linear(model.d_model, labels)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None, *, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → logits (batch, time, labels)."""
        return self.out(self.dropout(x if self.transform is None else self.transform(x), rng))


class Detector(nn.Module):
    """One logit per token, above 0 if it was replaced."""

    def __init__(self, settings: head_config.ReplacedHead, d_model: int):
        super().__init__()
        self.dense = Linear(d_model, d_model)
        self.activation = activations[settings.activation]
        self.out = Linear(d_model, 1)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None, *, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → logits (batch, time)."""
        return self.out(self.activation(self.dense(x))).squeeze(-1)


class Embedder(nn.Module):
    """One vector per sequence."""

    def __init__(self, settings: head_config.EmbeddingHead):
        super().__init__()
        self.settings = settings

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None, *, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → (batch, d_model)."""
        pooled = pool(x, mask, self.settings.pooling)
        return F.normalize(pooled, dim=-1) if self.settings.normalise else pooled


MODULES: dict[type, Callable[[Any, config.TransformerConfig], nn.Module]] = {
    head_config.LMHead: LMHead,
    head_config.MaskedLMHead: MaskedLMHead,
    head_config.PretrainingHead: PretrainingPair,
    head_config.NextSentenceHead: lambda head, model: Classifier(NEXT_SENTENCE, model),
    head_config.ClassificationHead: Classifier,
    head_config.TaggingHead: lambda head, model: Tagger(head, model, head.labels),
    head_config.SpanHead: lambda head, model: Tagger(head, model, 2),
    head_config.ReplacedHead: lambda head, model: Detector(head, model.d_model),
    head_config.EmbeddingHead: lambda head, model: Embedder(head),
}


def build(model: config.TransformerConfig, head: head_config.Head) -> nn.Module:
    """Build the head that `head` describes, for this model."""
    return MODULES[type(head)](head, model)
