"""The parts a model is made of, as settings: choosing a config type is choosing the part.

No torch is imported here, so that presets can be listed, checked and counted at once. The `build` beside each part's
classes makes the part.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from weft.config import Config
from weft.errors import ConfigError
from weft.nn.position_config import Position

Activation = Literal["relu", "gelu", "gelu-tanh", "silu", "sigmoid", "tanh"]
MAX_NGRAM_ROWS = 1 << 30  # below the prime that hashes are taken by
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class LayerNorm(Config):
    """Zero mean, unit deviation, then gain and bias (Ba et al. 2016); without a gain there is no bias either."""

    kind: Literal["layer"] = "layer"
    eps: PositiveFloat = Field(1e-5, description="added to the variance")
    bias: bool = Field(True, description="whether a vector is added")
    gain: bool = Field(True, description="whether it is multiplied by a vector")

    @model_validator(mode="after")
    def _bias_after_gain(self) -> Self:
        if self.bias and not self.gain:
            raise ValueError("gain = false is a norm without weights, and needs bias = false as well")
        return self


class RMSNorm(Config):
    """LayerNorm without the mean and the bias (Zhang and Sennrich 2019).

    The gain is `offset` plus a trained vector; with 1 the vector is the gain's distance from 1, as in Gemma.
    """

    kind: Literal["rms"] = "rms"
    eps: PositiveFloat = Field(1e-5, description="added to the mean square")
    offset: float = Field(0.0, description="added to the trained gain; 1 in Gemma")


Norm = Annotated[LayerNorm | RMSNorm, Field(discriminator="kind")]


class Attention(Config):
    """Multi-head attention (Vaswani et al. 2017, §3.2); fewer `kv_heads` than `heads` is grouped-query attention.

    `d_head` defaults to d_model / heads, `scale` to 1/√d_head. With `window`, a token sees only the last so many.
    `bias`: which projections have one; queries, keys and values are cut off at ±`clip` (OLMo). `softcap` c makes of
    each score s c · tanh(s/c) (Gemma 2). `qk_norm` normalises queries and keys, each `head` by itself with gains that
    all share, each with its own (`each-head`; Bellagente et al. 2024), or all `heads` of a token together.
    """

    heads: PositiveInt = Field(description="heads of queries")
    kv_heads: PositiveInt | None = Field(None, description="heads of keys and values; absent: as many as `heads`")
    d_head: PositiveInt | None = Field(None, description="the width of a head; absent: d_model / heads")
    bias: Literal["none", "qkv", "out", "all"] = Field("none", description="which projections have a bias")
    clip: PositiveFloat | None = Field(None, description="queries, keys and values are cut off at ± this")
    qk_norm: Norm | None = Field(None, description="a norm of queries and keys")
    qk_norm_over: Literal["head", "each-head", "heads"] = Field("head", description="what `qk_norm` is taken over")
    window: PositiveInt | None = Field(None, description="how many tokens back a token sees; absent: all")
    scale: PositiveFloat | None = Field(None, description="what scores are multiplied by; absent: 1/√d_head")
    softcap: PositiveFloat | None = Field(None, description="scores s become c · tanh(s/c)")
    dropout: Probability = Field(0.0, description="the part of the attention probabilities that is dropped")

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        return self

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def biased(self) -> tuple[bool, bool]:
        """Whether the projections to queries, keys and values have biases, and whether the one back has."""
        return self.bias in ("qkv", "all"), self.bias in ("out", "all")


class Plain(Config):
    """f(x W₁ + b₁) W₂ + b₂ (Vaswani et al. 2017, §3.3)."""

    kind: Literal["plain"] = "plain"
    d_ff: PositiveInt = Field(description="the width inside")
    activation: Activation = Field("relu", description="f")
    bias: bool = Field(True, description="whether the matrices have biases")
    dropout: Probability = Field(0.0, description="the part of the numbers inside that is dropped")


class Gated(Config):
    """(f(x W_g) ⊙ x W_u) W_d: GLU with sigmoid, GEGLU with gelu, SwiGLU with silu (Shazeer 2020)."""

    kind: Literal["gated"] = "gated"
    d_ff: PositiveInt = Field(description="the width inside")
    activation: Activation = Field("silu", description="f")
    bias: bool = Field(False, description="whether the matrices have biases")
    dropout: Probability = Field(0.0, description="the part of the numbers inside that is dropped")


FeedForward = Annotated[Plain | Gated, Field(discriminator="kind")]


class Block(Config):
    """One layer of a Transformer: attention and feed-forward, each with its norm and its skip connection.

    `placement`: the norm comes before each sublayer (`pre`), after the sum (`post`), after the sublayer and before the
    sum (`res-post`; Liu et al. 2022), before and after the sublayer (`sandwich`; Ding et al. 2021), or not at all.
    `sublayers`: feed-forward reads what attention has added to, or both read the same numbers and are added at once,
    from one norm (`parallel`; Wang and Komatsuzaki 2021) or each its own (`parallel-two-norms`; Black et al. 2022).
    `residual = false` removes the skip connections, to show what they are for. What a sublayer adds is multiplied by
    `residual_scale`.
    """

    model_config = ConfigDict(defer_build=True)  # further positions may be declared below

    d_model: PositiveInt = Field(description="the width of the residual stream")
    attention: Attention = Field(description="how tokens read each other")
    feedforward: FeedForward = Field(description="what follows attention in each layer")
    norm: Norm = Field(description="the norm of each sublayer")
    placement: Literal["pre", "post", "res-post", "sandwich", "none"] = Field(
        "pre", description="where the norm stands"
    )
    sublayers: Literal["sequential", "parallel", "parallel-two-norms"] = Field(
        "sequential", description="whether feed-forward follows attention or stands beside it"
    )
    residual: bool = Field(True, description="whether there are skip connections")
    residual_scale: PositiveFloat = Field(1.0, description="what a sublayer's output is multiplied by")
    position: Position = Field(description="how positions are known")
    dropout: Probability = Field(0.0, description="the part of embeddings and of sublayers' outputs that is dropped")

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        heads = self.attention.heads
        if self.attention.d_head is None and self.d_model % heads:
            raise ValueError(
                f"attention.heads = {heads} does not divide d_model = {self.d_model}; set attention.d_head"
            )
        if self.sublayers != "sequential" and self.placement != "pre":
            raise ValueError(f"sublayers = '{self.sublayers}' goes with placement = 'pre', not '{self.placement}'")
        self.position.check(self.d_model, self.d_head)
        if self.position.projected and self.attention.groups != heads:
            raise ValueError(f"'{self.position.kind}' positions go with as many kv_heads as heads")
        return self

    @property
    def norms(self) -> int:
        """Norms around the sublayers of a block that has no source: 0 to 4."""
        if self.placement == "none":
            return 0
        return {"parallel": 1}.get(self.sublayers, 4 if self.placement == "sandwich" else 2)

    @property
    def last_norm(self) -> bool:
        """Whether a norm stands after the last block, as it does where sums are not normed."""
        return self.placement not in ("post", "none")

    @property
    def d_head(self) -> int:
        return self.attention.d_head or self.d_model // self.attention.heads


class NormalInit(Config):
    """Normal weights; those that write into the residual stream times 1/√(2·layers) if `depth_scaled` (GPT-2)."""

    kind: Literal["normal"] = "normal"
    std: PositiveFloat = Field(0.02, description="the deviation")
    depth_scaled: bool = Field(True, description="divide by √(2·layers) what writes into the residual stream")


class HashedNGrams(Config):
    """Embeddings of the last n tokens, for each n in `orders`, which are added to a token's own (Pagnoni et al. 2024).

    Each order has a table of `rows` rows, and a hash of the n tokens says which one is theirs; some share a row. The
    tables are as wide as the tokens' embeddings, or `width`: less to update, and a matrix leads up from there. This is
    for texts that are read about once: in several epochs large tables learn a text by heart.
    """

    orders: tuple[Annotated[int, Field(ge=2, le=16)], ...] = Field((2,), description="how many tokens an n-gram has")
    rows: Annotated[int, Field(gt=0, le=MAX_NGRAM_ROWS)] = Field(16_384, description="rows of each order's table")
    width: PositiveInt | None = Field(None, description="numbers a row; absent: as many as a token's embedding has")

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if not self.orders or len(set(self.orders)) < len(self.orders):
            raise ValueError(f"orders = {list(self.orders)}: expected different numbers, such as [2, 3]")
        return self

    @property
    def reach(self) -> int:
        """How many tokens before a token are read with it."""
        return max(self.orders) - 1


class XavierInit(Config):
    """Uniform weights that keep the variance (Glorot and Bengio 2010); embeddings normal, deviation d_model^-0.5."""

    kind: Literal["xavier"] = "xavier"


Init = Annotated[NormalInit | XavierInit, Field(discriminator="kind")]


class FanInInit(Config):
    """As PyTorch draws them, from ±1/√inputs, gates from ±1/√d_model; embeddings normal, deviation 1/√width if None."""

    kind: Literal["fan-in"] = "fan-in"
    embedding_std: PositiveFloat | None = Field(None, description="the deviation of embeddings; absent: 1/√width")


class UniformInit(Config):
    """Every weight, biases and tables too, from ±width (Zaremba et al. 2014; Sutskever et al. 2014)."""

    kind: Literal["uniform"] = "uniform"
    width: PositiveFloat = Field(0.05, description="weights lie between −width and width")


class OrthogonalInit(Config):
    """Recurrent matrices orthogonal (Saxe et al. 2014), others normal, biases 0; after Bahdanau et al. 2015, B.1."""

    kind: Literal["orthogonal"] = "orthogonal"
    std: PositiveFloat = Field(0.01, description="the deviation of what is not orthogonal")


RecurrentInit = Annotated[FanInInit | UniformInit | OrthogonalInit, Field(discriminator="kind")]


@dataclass(frozen=True)
class LossTerms:
    """What is added to −log p: label smoothing ε (Szegedy et al. 2016) and z-loss ζ (Chowdhery et al. 2022, §5)."""

    smoothing: float = 0.0
    z_loss: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.smoothing or self.z_loss)


class LoRA(Config):
    """Low-rank additions to frozen matrices: W x + (alpha / rank) B A x (Hu et al. 2022).

    `targets` are patterns of the names of linear layers in blocks, such as "*.attention.qkv" or "*.feedforward.*";
    by default, all those of attention. `head` trains the head as well, as a new head needs.
    """

    kind: Literal["lora"] = "lora"
    rank: PositiveInt = Field(8, description="of the additions")
    alpha: PositiveFloat = Field(16.0, description="over rank: what they are multiplied by")
    targets: tuple[str, ...] | None = Field(
        None, description="patterns of the layers that get one; absent: all of attention"
    )
    dropout: Probability = Field(0.0, description="the part of their inputs that is dropped")
    head: bool = Field(False, description="train the head as well")

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Of linear layers' names those of the targets, in order; a pattern that matches none is an error."""
        names = list(names)
        for pattern in self.targets or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                there = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
                raise ConfigError(f"adapter.targets: '{pattern}' matches no layer; there are {', '.join(there)}")
        patterns = ("*.attention.*", "*.cross.*") if self.targets is None else self.targets
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
