"""Settings of the parts of a model. Choosing a config type chooses the part; `build` beside its classes builds it.

torch is not imported here, so that presets can be listed, checked and counted quickly.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from weft.config import Config
from weft.errors import ConfigError
from weft.nn.feedforward_config import Activation as Activation
from weft.nn.feedforward_config import Experts as Experts
from weft.nn.feedforward_config import FeedForward, NoFeedForward, Probability
from weft.nn.feedforward_config import Gated as Gated
from weft.nn.feedforward_config import Plain as Plain
from weft.nn.position_config import Position, Relative, Rotary

MAX_NGRAM_ROWS = 1 << 30  # bounds the rows of an n-gram table; below the prime modulus of the hash


class LayerNorm(Config):
    """Zero mean and unit variance, then gain and bias (Ba et al. 2016); without a gain there is no bias either."""

    kind: Literal["layer"] = "layer"
    eps: PositiveFloat = Field(1e-5, description="added to the variance")
    bias: bool = Field(True, description="add a trained vector")
    gain: bool = Field(True, description="multiply by a trained vector")
    offset: float = Field(0.0, description="added to the trained gain; 1 in Nemotron")

    @model_validator(mode="after")
    def _check_bias(self) -> Self:
        if self.offset and not self.gain:
            raise ValueError("offset: it is added to the gain, and gain = false")
        if self.bias and not self.gain:
            raise ValueError("gain = false is a norm without weights, so it needs bias = false as well")
        return self


class RMSNorm(Config):
    """LayerNorm without mean and bias (Zhang and Sennrich 2019). The gain is `offset` plus a trained vector."""

    kind: Literal["rms"] = "rms"
    eps: PositiveFloat = Field(1e-5, description="added to the mean square")
    gain: bool = Field(True, description="multiply by a trained vector")
    offset: float = Field(0.0, description="added to the trained gain; 1 in Gemma")

    @model_validator(mode="after")
    def _check_offset(self) -> Self:
        if self.offset and not self.gain:
            raise ValueError("offset: it is added to the gain, and gain = false")
        return self


Norm = Annotated[LayerNorm | RMSNorm, Field(discriminator="kind")]


class Latent(Config):
    """Keys and values that are computed from one normalised vector of width `rank` per token, except for the rotated
    coordinates of keys, which all heads share (DeepSeek-AI 2024, §2.1). The KV cache holds these two alone. With
    `query_rank`, queries are computed from such a vector too."""

    rank: PositiveInt = Field(description="width of the vector from which keys and values are computed")
    query_rank: PositiveInt | None = Field(None, description="width of the vector of queries; absent: one projection")
    eps: PositiveFloat = Field(1e-6, description="eps of the norms of both vectors")


class Attention(Config):
    """Multi-head attention (Vaswani et al. 2017, §3.2); fewer `kv_heads` than `heads` is grouped-query attention.

    `d_head`, the width of queries and keys (d_k in the paper), defaults to d_model / heads, `d_v`, the width of values,
    to `d_head`, and `scale` to 1/√d_head. With `window`, a token attends only to itself and to tokens fewer than this
    many positions away. In an encoder, the first `global_tokens`, or all tokens before the first with the id
    `global_until`, attend to all others by separate projections, and are attended to by all (Beltagy et al. 2020).
    Queries, keys and values are clamped to ±`clip` (OLMo), after a `qk_norm` over all heads and before others. A
    `softcap` c replaces each score s by c · tanh(s/c) (Gemma 2). `qk_norm` normalises queries and keys: each `head`
    with shared gains, each head with its own gains (`each-head`; Bellagente et al. 2024), or all `heads` of a token
    together; with `qk_norm_rotated`, after rotary positions instead of before (Hunyuan), and not at all in layers
    without them (Llama 4). With `sinks`, the softmax of every head has one more score, which is trained and belongs to
    no key, so that a head can attend to nothing (GPT-OSS).
    """

    heads: PositiveInt = Field(description="number of query heads")
    kv_heads: PositiveInt | None = Field(None, description="number of key and value heads; absent: same as `heads`")
    d_head: PositiveInt | None = Field(None, description="width of a head; absent: d_model / heads")
    d_v: PositiveInt | None = Field(None, description="width of a head's values; absent: same as `d_head`")
    bias: Literal["none", "qkv", "out", "all"] = Field("none", description="which projections have a bias")
    clip: PositiveFloat | None = Field(None, description="clamp queries, keys and values to ± this")
    qk_norm: Norm | None = Field(None, description="norm of queries and keys")
    qk_norm_over: Literal["head", "each-head", "heads"] = Field("head", description="what `qk_norm` normalises over")
    qk_norm_rotated: bool = Field(False, description="apply `qk_norm` after the rotation by positions")
    window: PositiveInt | None = Field(
        None, description="attend only to tokens fewer than this many positions away; absent: all"
    )
    global_tokens: NonNegativeInt | None = Field(
        None, description="number of first tokens that are global; absent: no global attention"
    )
    global_until: NonNegativeInt | None = Field(None, description="id of the token before which all tokens are global")
    scale: PositiveFloat | None = Field(None, description="factor of the scores; absent: 1/√d_head")
    softcap: PositiveFloat | None = Field(None, description="bound c of the scores: s becomes c · tanh(s/c)")
    latent: Latent | None = Field(None, description="compute keys and values from one vector per token")
    sinks: bool = Field(False, description="add a trained score per head to the softmax, which belongs to no key")
    dropout: Probability = Field(0.0, description="fraction of attention probabilities to drop")

    @model_validator(mode="after")
    def _check_kv_heads(self) -> Self:
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        if self.global_until is not None and self.global_tokens is None:
            raise ValueError("global_until: global tokens have projections of their own; set global_tokens = 0")
        if self.qk_norm_rotated and (self.qk_norm is None or self.qk_norm_over == "heads"):
            raise ValueError("qk_norm_rotated needs a qk_norm, and qk_norm_over = 'head' or 'each-head'")
        if self.latent is not None and (self.groups != self.heads or self.qk_norm is not None or self.clip is not None):
            raise ValueError("latent has keys of its own in every head; leave out kv_heads, qk_norm and clip")
        return self

    @property
    def groups(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def biased(self) -> tuple[bool, bool]:
        """Whether the query, key and value projections have biases, and whether the output projection has one."""
        return self.bias in ("qkv", "all"), self.bias in ("out", "all")


class Block(Config):
    """One layer of a Transformer: attention and feed-forward, each with its norm and its skip connection.

    `placement`: the norm comes before each sublayer (`pre`), after the sum (`post`), after the sublayer and before the
    sum (`res-post`; Liu et al. 2022), before and after the sublayer (`sandwich`; Ding et al. 2021), or not at all.
    `sublayers`: feed-forward follows attention, or both read the same input, through one norm (`parallel`; Wang and
    Komatsuzaki 2021) or two (`parallel-two-norms`; Black et al. 2022). `residual = false` removes the skip connections,
    to show what they are for. A sublayer's output is multiplied by `residual_scale`.
    """

    model_config = ConfigDict(defer_build=True)  # position encodings may be declared later

    d_model: PositiveInt = Field(description="width of the residual stream")
    attention: Attention = Field(description="self-attention")
    feedforward: FeedForward = Field(description="feed-forward layer")
    norm: Norm = Field(description="norm of each sublayer")
    placement: Literal["pre", "post", "res-post", "sandwich", "none"] = Field("pre", description="where the norm is")
    sublayers: Literal["sequential", "parallel", "parallel-two-norms"] = Field(
        "sequential", description="whether feed-forward follows attention or runs in parallel to it"
    )
    residual: bool = Field(True, description="use skip connections")
    residual_scale: PositiveFloat = Field(1.0, description="factor of each sublayer's output")
    position: Position = Field(description="position encoding")
    dropout: Probability = Field(0.0, description="fraction of embeddings and sublayer outputs to drop")

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        heads = self.attention.heads
        if self.attention.d_head is None and self.d_model % heads:
            indivisible = f"attention.heads = {heads} does not divide d_model = {self.d_model}"
            raise ValueError(f"{indivisible}; set attention.d_head")
        if self.sublayers != "sequential" and self.placement != "pre":
            raise ValueError(f"sublayers = '{self.sublayers}' needs placement = 'pre', not '{self.placement}'")
        if self.sublayers != "sequential" and isinstance(self.feedforward, NoFeedForward):
            raise ValueError(f"sublayers = '{self.sublayers}' needs a feed-forward layer; feedforward.kind is 'none'")
        self.position.check(self.d_model, self.d_head)
        if self.position.projected and self.attention.groups != heads:
            raise ValueError(f"'{self.position.kind}' positions need attention.kv_heads = attention.heads")
        if self.attention.latent is not None and not 0 < self.rotated < self.d_head:
            raise ValueError(
                "attention.latent needs rotary positions of a part of each head: position.fraction below 1"
            )
        if self.feedforward.beta != 1.0 and self.feedforward.activation != "silu":
            given = f"feedforward.beta = {self.feedforward.beta}"
            raise ValueError(f"{given} needs feedforward.activation = 'silu', not '{self.feedforward.activation}'")
        if isinstance(self.position, Relative) and self.d_v != self.d_head:
            raise ValueError(f"'relative' positions need attention.d_v = d_head = {self.d_head}, not {self.d_v}")
        return self

    def feedforward_at(self, layer: int) -> Plain | Gated | NoFeedForward | Experts:
        """Feed-forward layer of a layer of the stack, counted from 0: some layers beside mixtures may be dense."""
        inner = self.feedforward
        return inner.dense if isinstance(inner, Experts) and inner.dense and inner.is_dense(layer) else inner

    @property
    def norms(self) -> int:
        """Number of norms around the sublayers of a block without cross-attention, 0 to 4."""
        if self.placement == "none":
            return 0
        count = {"parallel": 1}.get(self.sublayers, 4 if self.placement == "sandwich" else 2)
        return count // 2 if isinstance(self.feedforward, NoFeedForward) else count

    @property
    def last_norm(self) -> bool:
        """Whether a norm follows the last block: it does unless the blocks normalise their own output."""
        return self.placement not in ("post", "none")

    @property
    def d_head(self) -> int:
        return self.attention.d_head or self.d_model // self.attention.heads

    @property
    def d_v(self) -> int:
        return self.attention.d_v or self.d_head

    @property
    def rotated(self) -> int:
        """Number of rotated coordinates of a head."""
        return self.position.rotated(self.d_head) if isinstance(self.position, Rotary) else 0

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Number of vectors of the KV cache per token, layer and head (2: key and value), of heads, and their width."""
        if self.attention.latent is not None:
            return 1, 1, self.attention.latent.rank + self.rotated
        return 2, self.attention.groups, max(self.d_head, self.d_v)


class NormalInit(Config):
    """Normal weights; with `depth_scaled`, those that write into the residual stream times 1/√(2·layers) (GPT-2)."""

    kind: Literal["normal"] = "normal"
    std: PositiveFloat = Field(0.02, description="standard deviation")
    depth_scaled: bool = Field(True, description="divide weights that write into the residual stream by √(2·layers)")


class HashedNGrams(Config):
    """Embeddings of the last n tokens, for each n in `orders`, added to a token's embedding (Pagnoni et al. 2024).

    Each order has a table of `rows` rows, indexed by a hash of the n tokens, so that n-grams may share a row. With
    `width`, the tables are narrower than the token embeddings (less to update) and a matrix projects them up. Meant for
    text that is read about once: over several epochs, large tables memorise it.
    """

    orders: tuple[Annotated[int, Field(ge=2, le=16)], ...] = Field((2,), description="lengths of the n-grams")
    rows: Annotated[int, Field(gt=0, le=MAX_NGRAM_ROWS)] = Field(16_384, description="rows of each table")
    width: PositiveInt | None = Field(None, description="width of a row; absent: that of the token embeddings")

    @model_validator(mode="after")
    def _check_orders(self) -> Self:
        if not self.orders or len(set(self.orders)) < len(self.orders):
            raise ValueError(f"orders = {list(self.orders)}: expected distinct numbers, such as [2, 3]")
        return self

    @property
    def reach(self) -> int:
        """Number of preceding tokens in the longest n-gram."""
        return max(self.orders) - 1


class XavierInit(Config):
    """Uniform weights that preserve variance (Glorot and Bengio 2010); normal embeddings with std d_model^-0.5."""

    kind: Literal["xavier"] = "xavier"


Init = Annotated[NormalInit | XavierInit, Field(discriminator="kind")]


class FanInInit(Config):
    """PyTorch's defaults: uniform in ±1/√inputs, gates in ±1/√d_model; normal embeddings."""

    kind: Literal["fan-in"] = "fan-in"
    embedding_std: PositiveFloat | None = Field(None, description="standard deviation of embeddings; absent: 1/√width")


class UniformInit(Config):
    """All weights, including biases and tables, uniform in ±width (Zaremba et al. 2014; Sutskever et al. 2014)."""

    kind: Literal["uniform"] = "uniform"
    width: PositiveFloat = Field(0.05, description="bound: weights are between −width and width")


class OrthogonalInit(Config):
    """Orthogonal recurrent matrices (Saxe et al. 2014), other weights normal, biases 0 (Bahdanau et al. 2015, B.1)."""

    kind: Literal["orthogonal"] = "orthogonal"
    std: PositiveFloat = Field(0.01, description="standard deviation of the other weights")


RecurrentInit = Annotated[FanInInit | UniformInit | OrthogonalInit, Field(discriminator="kind")]


@dataclass(frozen=True)
class LossTerms:
    """Additions to −log p: label smoothing ε (Szegedy et al. 2016) and z-loss ζ (Chowdhery et al. 2022, §5)."""

    smoothing: float = 0.0
    z_loss: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.smoothing or self.z_loss)


class LoRA(Config):
    """Low-rank adapters of frozen matrices: W x + (alpha / rank) B A x (Hu et al. 2022).

    `targets` are patterns for names of linear layers in blocks, such as "*.attention.qkv" or "*.feedforward.*"; by
    default, all layers of attention. A new head needs `head = true`, which trains it too.
    """

    kind: Literal["lora"] = "lora"
    rank: PositiveInt = Field(8, description="rank of B A")
    alpha: PositiveFloat = Field(16.0, description="adapters are multiplied by alpha / rank")
    targets: tuple[str, ...] | None = Field(None, description="patterns of adapted layers' names; absent: attention")
    dropout: Probability = Field(0.0, description="fraction of the adapters' inputs to drop")
    head: bool = Field(False, description="train the head as well")

    def match_targets(self, names: Iterable[str]) -> list[str]:
        """Return the names that match `targets`, in order; raise ConfigError if a pattern matches none."""
        names = list(names)
        for pattern in self.targets or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                layers = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
                raise ConfigError(f"adapter.targets: '{pattern}' matches no layer; there are {', '.join(layers)}")
        patterns = ("*.attention.*", "*.cross.*") if self.targets is None else self.targets
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
