"""The parts a model is made of, as settings: choosing a config type is choosing the part.

No torch is imported here, so that presets can be listed, checked and counted at once. The `build` beside each part's
classes makes the part.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from weft.config import AnyKind, Config
from weft.nn.scaling import DynamicNTK, LongRoPE, Scaling

Activation = Literal["relu", "gelu", "gelu-tanh", "silu", "sigmoid", "tanh"]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


# ---- norms


class LayerNorm(Config):
    """Zero mean, unit deviation, then gain and bias (Ba et al. 2016); without a gain there is no bias either."""

    kind: Literal["layer"] = "layer"
    eps: PositiveFloat = 1e-5
    bias: bool = True
    gain: bool = True

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
    eps: PositiveFloat = 1e-5
    offset: float = 0.0


Norm = Annotated[LayerNorm | RMSNorm, Field(discriminator="kind")]


# ---- positions


@dataclass(frozen=True)
class Sizes:
    """What a position encoding has to know of its stack; `d_model` is the width of what it adds to, the embeddings."""

    d_model: int
    heads: int
    d_head: int
    context: int
    causal: bool
    layers: int


class PositionConfig(Config):
    """How a model knows the positions of its tokens. A subclass with a `kind` is a variant that recipes can name.

    `nn/position.py` has a class for each variant, which names its settings. What a variant costs is given here, so
    that it can be counted without building a model; by default it costs nothing.
    """

    bounded: ClassVar[bool] = False  # positions end at `context`
    rotates: ClassVar[bool] = False  # queries and keys are rotated, layer by layer
    kind: str

    def check(self, d_model: int, d_head: int) -> None:
        """Raise ValueError if the sizes do not fit."""

    def changes_after(self, context: int) -> int | None:
        """The length of a text from which on what is done at each position depends on it; None where it never does."""
        return None

    def parameters(self, sizes: Sizes) -> int:
        """Weights that it adds to a stack."""
        return 0

    def flops(self, sizes: Sizes, length: int, keys: int) -> int:
        """Operations that it adds to a stack's forward pass, for `length` queries that see `keys` keys each."""
        return 0

    def activations(self, sizes: Sizes, length: int) -> int:
        """Numbers a token that the backward pass keeps in each layer, at `length` tokens a sequence."""
        return 0


class NoPosition(PositionConfig):
    """No positions; from a causal mask alone a decoder can infer some of them."""

    kind: Literal["none"] = "none"


class Sinusoidal(PositionConfig):
    """Sines and cosines added to the embeddings (Vaswani et al. 2017, §3.5).

    `interleaved` is the formula's layout; `halves` puts all sines first with the same wavelengths (Marian);
    `tensor2tensor` puts sines first and stretches the slowest wavelength to exactly 2π · base. Waves of `amplitude` 1
    go with embeddings that are multiplied by √d_model (§3.4); beside others 1/√d_model keeps the same proportion.
    Positions are counted from `offset`, 2 in fairseq's models.
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "halves", "tensor2tensor"] = "interleaved"
    base: PositiveFloat = 10000.0
    amplitude: PositiveFloat = 1.0
    offset: NonNegativeInt = 0

    def check(self, d_model: int, d_head: int) -> None:
        """Sines and cosines come in pairs."""
        if d_model % 2:
            raise ValueError(f"sinusoidal positions pair sines with cosines, but d_model = {d_model} is odd")


class Learned(PositionConfig):
    """One trained vector a position, added to the embeddings; `context` positions and not one more.

    The table begins with `offset` unused rows, as RoBERTa's and BART's do.
    """

    bounded: ClassVar[bool] = True
    kind: Literal["learned"] = "learned"
    offset: NonNegativeInt = 0

    def parameters(self, sizes: Sizes) -> int:
        """The table."""
        return (sizes.context + self.offset) * sizes.d_model


class Relative(PositionConfig):
    """Trained vectors for clipped distances, added to keys and values in every layer (Shaw et al. 2018)."""

    kind: Literal["relative"] = "relative"
    max_distance: PositiveInt = 16

    @property
    def rows(self) -> int:
        """Distinct distances, from −max_distance to max_distance."""
        return 2 * self.max_distance + 1

    def parameters(self, sizes: Sizes) -> int:
        """Two tables a layer."""
        return sizes.layers * 2 * self.rows * sizes.d_head

    def flops(self, sizes: Sizes, length: int, keys: int) -> int:
        """As much as attention itself: each query with the vectors of its distances, and each weight with them."""
        return 4 * sizes.layers * length * keys * sizes.heads * sizes.d_head

    def activations(self, sizes: Sizes, length: int) -> int:
        """The probabilities, before and after dropout, and both vectors of every pair."""
        return length * (2 * sizes.heads + 2 * sizes.d_head)


class Rotary(PositionConfig):
    """Queries and keys rotated by their position, so that products see distances only (Su et al. 2021).

    `pairs`: which coordinates are rotated together, neighbours as in the paper or the two halves as in LLaMA
    checkpoints. Of each head the first `fraction` is rotated, and the rest stays as it is (Black et al. 2022).
    """

    rotates: ClassVar[bool] = True
    kind: Literal["rotary"] = "rotary"
    base: PositiveFloat = 10000.0
    pairs: Literal["adjacent", "halves"] = "halves"
    fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    scaling: Scaling | None = None

    def rotated(self, d_head: int) -> int:
        """How many coordinates of a head are rotated."""
        return int(d_head * self.fraction + 1e-9)  # 25 · 0.28 is 7, also where floats say 6.999…

    def changes_after(self, context: int) -> int | None:
        """Where angles depend on the length of the whole text."""
        if isinstance(self.scaling, LongRoPE):
            return self.scaling.original_context
        return context if isinstance(self.scaling, DynamicNTK) else None

    def check(self, d_model: int, d_head: int) -> None:
        """Coordinates are rotated in pairs."""
        rotated = self.rotated(d_head)
        if d_head % 2 and self.fraction == 1.0:
            raise ValueError(f"rotary positions rotate pairs of coordinates, but d_head = {d_head} is odd")
        if rotated % 2 or not rotated:
            raise ValueError(
                f"rotary positions rotate pairs of coordinates, but fraction = {self.fraction} of d_head = {d_head}"
                f" is {rotated}"
            )
        if isinstance(self.scaling, LongRoPE) and {len(self.scaling.short), len(self.scaling.long)} != {rotated // 2}:
            raise ValueError(f"longrope scaling has a factor for each of the {rotated // 2} pairs in short and in long")


class T5Bias(PositionConfig):
    """A trained number a head for each bucket of distances, added to the scores (Raffel et al. 2020)."""

    kind: Literal["t5"] = "t5"
    buckets: PositiveInt = 32
    max_distance: PositiveInt = 128

    def parameters(self, sizes: Sizes) -> int:
        """The table."""
        return self.buckets * sizes.heads


class LearnedT5(PositionConfig):
    """A trained vector a position, and a trained number a head for each bucket of distances (Song et al. 2020)."""

    bounded: ClassVar[bool] = True
    kind: Literal["learned+t5"] = "learned+t5"
    offset: NonNegativeInt = 0
    buckets: PositiveInt = 32
    max_distance: PositiveInt = 128

    @property
    def added(self) -> Learned:
        """What the embeddings get."""
        return Learned(offset=self.offset)

    @property
    def scored(self) -> T5Bias:
        """What the scores get."""
        return T5Bias(buckets=self.buckets, max_distance=self.max_distance)

    def parameters(self, sizes: Sizes) -> int:
        """Both tables."""
        return self.added.parameters(sizes) + self.scored.parameters(sizes)


class ALiBi(PositionConfig):
    """A penalty on the scores that grows with distance, steeper in some heads (Press et al. 2022)."""

    kind: Literal["alibi"] = "alibi"


Position = Annotated[PositionConfig, AnyKind()]


# ---- attention and feed-forward


class Attention(Config):
    """Multi-head attention (Vaswani et al. 2017, §3.2); fewer `kv_heads` than `heads` is grouped-query attention.

    `d_head` defaults to d_model / heads, `scale` to 1/√d_head. With `window`, a token sees only the last so many.
    `bias`: which projections have one. `softcap` c makes of each score s c · tanh(s/c) (Gemma 2). `qk_norm` normalises
    queries and keys, each head by itself or all `heads` of a token together.
    """

    heads: PositiveInt
    kv_heads: PositiveInt | None = None
    d_head: PositiveInt | None = None
    bias: Literal["none", "qkv", "out", "all"] = "none"
    qk_norm: Norm | None = None
    qk_norm_over: Literal["head", "heads"] = "head"
    window: PositiveInt | None = None
    scale: PositiveFloat | None = None
    softcap: PositiveFloat | None = None
    dropout: Probability = 0.0

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
    d_ff: PositiveInt
    activation: Activation = "relu"
    bias: bool = True
    dropout: Probability = 0.0


class Gated(Config):
    """(f(x W_g) ⊙ x W_u) W_d: GLU with sigmoid, GEGLU with gelu, SwiGLU with silu (Shazeer 2020)."""

    kind: Literal["gated"] = "gated"
    d_ff: PositiveInt
    activation: Activation = "silu"
    bias: bool = False
    dropout: Probability = 0.0


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

    d_model: PositiveInt
    attention: Attention
    feedforward: FeedForward
    norm: Norm
    placement: Literal["pre", "post", "res-post", "sandwich", "none"] = "pre"
    sublayers: Literal["sequential", "parallel", "parallel-two-norms"] = "sequential"
    residual: bool = True
    residual_scale: PositiveFloat = 1.0
    position: Position
    dropout: Probability = 0.0

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
        """Coordinates a head."""
        return self.attention.d_head or self.d_model // self.attention.heads


# ---- initial weights


class NormalInit(Config):
    """Normal weights; those that write into the residual stream times 1/√(2·layers) if `depth_scaled` (GPT-2)."""

    kind: Literal["normal"] = "normal"
    std: PositiveFloat = 0.02
    depth_scaled: bool = True


class XavierInit(Config):
    """Uniform weights that keep the variance (Glorot and Bengio 2010); embeddings normal, deviation d_model^-0.5."""

    kind: Literal["xavier"] = "xavier"


Init = Annotated[NormalInit | XavierInit, Field(discriminator="kind")]


# ---- losses


@dataclass(frozen=True)
class LossTerms:
    """What is added to −log p: label smoothing ε (Szegedy et al. 2016) and z-loss ζ (Chowdhery et al. 2022, §5)."""

    smoothing: float = 0.0
    z_loss: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.smoothing or self.z_loss)


# ---- adapters


class LoRA(Config):
    """Low-rank additions to frozen matrices: W x + (alpha / rank) B A x (Hu et al. 2022).

    `targets` are patterns of the names of linear layers in blocks, such as "*.attention.qkv" or "*.feedforward.*";
    by default, all those of attention. `head` trains the head as well, as a new head needs.
    """

    kind: Literal["lora"] = "lora"
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    targets: tuple[str, ...] | None = None
    dropout: Probability = 0.0
    head: bool = False
