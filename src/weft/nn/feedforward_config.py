"""Settings of feed-forward layers: plain, gated, a mixture of experts, or none."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from weft.config import Config

Activation = Literal["relu", "relu2", "gelu", "gelu-tanh", "silu", "sigmoid", "tanh"]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class Plain(Config):
    """f(x W₁ + b₁) W₂ + b₂ (Vaswani et al. 2017, §3.3)."""

    kind: Literal["plain"] = "plain"
    d_ff: PositiveInt = Field(description="hidden width")
    activation: Activation | Literal["xielu"] = Field("relu", description="activation function f")
    beta: PositiveFloat = Field(1.0, description="β of silu as Swish, x · σ(βx): from x/2 at 0 to relu at ∞")
    bias: bool = Field(True, description="add biases")
    dropout: Probability = Field(0.0, description="fraction of hidden values to drop")


class Gated(Config):
    """(f(x W_g) ⊙ x W_u) W_d: GLU with sigmoid, GEGLU with gelu, SwiGLU with silu (Shazeer 2020)."""

    kind: Literal["gated"] = "gated"
    d_ff: PositiveInt = Field(description="hidden width")
    activation: Activation = Field("silu", description="activation function f")
    beta: PositiveFloat = Field(1.0, description="β of silu as Swish, x · σ(βx): from x/2 at 0 to relu at ∞")
    bias: bool = Field(False, description="add biases")
    dropout: Probability = Field(0.0, description="fraction of hidden values to drop")


class NoFeedForward(Config):
    """Blocks of attention alone, whose few heads can be read as a circuit (Elhage et al. 2021)."""

    kind: Literal["none"] = "none"
    # sizes of a layer that is not there, for what is counted by size
    d_ff: ClassVar[int] = 0
    activation: ClassVar[str] = "none"
    beta: ClassVar[float] = 1.0
    bias: ClassVar[bool] = False
    dropout: ClassVar[float] = 0.0


class Experts(Config):
    """Mixture of experts: a router chooses some of many gated layers for each token and adds their weighted outputs
    (Shazeer et al. 2017). All experts take memory, but a token is multiplied by the chosen ones alone.

    `score`: the router's logits become weights by a softmax over all experts, by one over the chosen experts
    (`softmax-chosen`), or by a sigmoid each. A `sparse-mixer` chooses one expert after the other, with a softmax over
    the remaining logits within 2 · `jitter` of the best, relative to the larger (PhiMoE). `renormalised` divides the
    chosen weights by their sum, and `scale` multiplies them. With `weighs = "input"` they multiply the experts' input
    instead of the output (Llama 4).
    With `choice_bias`, a bias per expert is added to the scores for the choice alone. After each step of training it
    grows by this number for experts with fewer tokens than the mean and shrinks for the others (DeepSeek-AI 2024,
    §2.1.2). With `groups`, a token chooses among the experts of the `kept_groups` best groups, ranked by their best
    expert or by the sum of their best two. An expert computes (f(min(g, limit)) ⊙ (clamp(u, ±limit) + up_offset)) W_d
    of its gate g and up projection u; only GPT-OSS limits and offsets them.

    `shared` experts, fused to one gated layer of width `shared_d_ff`, read every token; their output is added,
    multiplied by a sigmoid of the token if `gated`. `balance_loss` is the coefficient of the auxiliary loss
    E · Σ fₑ pₑ over the layers' tokens, with the fraction f of tokens that an expert reads and its mean probability p
    (Fedus et al. 2022, §2.2), `z_loss` that of the mean squared logsumexp of the logits (Zoph et al. 2022).
    """

    kind: Literal["experts"] = "experts"
    experts: PositiveInt = Field(description="number of experts")
    chosen: PositiveInt = Field(2, description="experts that read a token")
    d_ff: PositiveInt = Field(description="hidden width of an expert")
    activation: Activation = Field("silu", description="activation function f")
    beta: PositiveFloat = Field(1.0, description="β of silu as Swish, x · σ(βx): from x/2 at 0 to relu at ∞")
    bias: bool = Field(False, description="add biases to the experts")
    limit: PositiveFloat | None = Field(None, description="upper bound of gates, and of ± up projections; absent: none")
    up_offset: float = Field(0.0, description="added to the up projection; 1 in GPT-OSS")
    score: Literal["softmax", "softmax-chosen", "sigmoid", "sparse-mixer"] = Field(
        "softmax", description="weights of the experts"
    )
    jitter: NonNegativeFloat = Field(0.01, description="sparse-mixer: relative distance from the best logit")
    renormalised: bool = Field(True, description="divide the weights of the chosen experts by their sum")
    scale: PositiveFloat = Field(1.0, description="factor of the weights")
    weighs: Literal["output", "input"] = Field("output", description="what the weights multiply")
    router_bias: bool = Field(False, description="add a trained bias to the router's logits")
    choice_bias: NonNegativeFloat | None = Field(
        None, description="step of the bias for the choice; 0: never updated; absent: no such bias"
    )
    groups: PositiveInt = Field(1, description="number of groups of experts")
    kept_groups: PositiveInt | None = Field(None, description="groups that a token chooses from; absent: all")
    group_score: Literal["maximum", "best-two"] = Field("best-two", description="how groups are ranked")
    shared: Literal["none", "added", "gated"] = Field("none", description="experts that read every token")
    shared_d_ff: PositiveInt | None = Field(None, description="hidden width of the shared experts; absent: d_ff")
    balance_loss: NonNegativeFloat = Field(0.01, description="coefficient of the auxiliary loss")
    z_loss: NonNegativeFloat = Field(0.0, description="coefficient of the router's z-loss")
    capacity: PositiveFloat | None = Field(
        None, description="tokens that an expert reads in training, as a multiple of the mean; absent: all"
    )
    dense: Annotated[Plain | Gated, Field(discriminator="kind")] | None = Field(
        None, description="feed-forward layer of dense layers"
    )
    first_dense: NonNegativeInt = Field(0, description="number of dense layers before the first mixture")
    every: PositiveInt = Field(1, description="only each n-th layer is a mixture; 1: every layer")
    dense_layers: tuple[NonNegativeInt, ...] = Field((), description="further dense layers, counted from 0")
    dropout: ClassVar[float] = 0.0  # inside experts

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if self.chosen > self.experts:
            raise ValueError(f"chosen = {self.chosen}: a token can choose at most experts = {self.experts}")
        if self.experts % self.groups:
            raise ValueError(f"groups = {self.groups} does not divide experts = {self.experts}")
        kept, size = self.kept_groups or self.groups, self.experts // self.groups
        if kept > self.groups:
            raise ValueError(f"kept_groups = {kept}: there are groups = {self.groups}")
        if self.chosen > kept * size:
            raise ValueError(f"chosen = {self.chosen}: {kept} kept groups of {size} have {kept * size} experts")
        if kept < self.groups and self.group_score == "best-two" and size < 2:
            raise ValueError("group_score = 'best-two' needs two experts in each group; use 'maximum'")
        if self.shared == "none" and self.shared_d_ff is not None:
            raise ValueError("shared_d_ff: there are no shared experts; set shared = 'added' or 'gated'")
        if (self.first_dense or self.every > 1 or self.dense_layers) and self.dense is None:
            raise ValueError("first_dense, every, dense_layers: set dense, the feed-forward layer of dense layers")
        return self

    def is_dense(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has the feed-forward layer `dense` instead of experts."""
        return layer < self.first_dense or (layer + 1) % self.every > 0 or layer in self.dense_layers

    @property
    def shared_width(self) -> int:
        """Hidden width of the shared experts; 0 if there are none."""
        return 0 if self.shared == "none" else self.shared_d_ff or self.d_ff


def with_width(settings: Plain | Gated | Experts, d_ff: int) -> Plain | Gated | Experts:
    """Return settings with another hidden width; the other widths of a mixture change in proportion."""
    if not isinstance(settings, Experts):
        return settings.replace(d_ff=d_ff)

    def scaled(width: int) -> int:
        return max(1, round(width * d_ff / settings.d_ff))

    shared = None if settings.shared_d_ff is None else scaled(settings.shared_d_ff)
    dense = None if settings.dense is None else settings.dense.replace(d_ff=scaled(settings.dense.d_ff)).model_dump()
    return settings.replace(d_ff=d_ff, shared_d_ff=shared, dense=dense)


FeedForward = Annotated[Plain | Gated | NoFeedForward | Experts, Field(discriminator="kind")]
