"""Settings of position encodings; `nn/position.py` has the class of each."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from weft.config import AnyKind, Config


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stack that a position encoding is part of; `d_model` is the width of the embeddings it adds to."""

    d_model: int
    heads: int
    d_head: int
    context: int
    causal: bool
    layers: int


class PositionConfig(Config):
    """Settings of a position encoding. A subclass with a `kind` is a variant that recipes can name. Its costs are given
    here, so that they can be counted without building a model; the defaults are 0."""

    bounded: ClassVar[bool] = False  # positions end at `context`
    rotates: ClassVar[bool] = False  # every layer rotates queries and keys
    projected: ClassVar[bool] = False  # every layer projects its vectors to queries and keys, like tokens
    kind: str

    def check(self, d_model: int, d_head: int) -> None:
        """Raise ValueError if the sizes do not fit."""

    def concatenated_width(self, d_model: int) -> int:
        """Number of the d_model coordinates that hold the position; the others hold the token's embedding."""
        return 0

    def changes_after(self, context: int) -> int | None:
        """Length of a text above which the encoding of a position depends on the length; None: it never does."""
        return None

    def parameters(self, sizes: Sizes) -> int:
        """Number of parameters added to a stack."""
        return 0

    def flops(self, sizes: Sizes, length: int, keys: int) -> int:
        """FLOPs added to a stack's forward pass, for `length` queries that see `keys` keys each."""
        return 0

    def activations(self, sizes: Sizes, length: int) -> int:
        """Values per token and layer that the backward pass keeps, for sequences of `length` tokens."""
        return 0


class NoPosition(PositionConfig):
    """No position encoding; a decoder can infer some positions from the causal mask alone."""

    kind: Literal["none"] = "none"


class Tempered(PositionConfig):
    """No position encoding; queries grow with the position, which lowers the temperature of the softmax.

    The query of a token is multiplied by 1 + growth · log(1 + ⌊(position + 1) / interval⌋), so that attention to a few
    keys does not fade as their number grows (Nakanishi 2025; Llama 4).
    """

    kind: Literal["tempered"] = "tempered"
    growth: NonNegativeFloat = Field(0.1, description="growth of queries with the logarithm of the position")
    interval: PositiveInt = Field(8192, description="number of positions that share a factor")


class Sinusoidal(PositionConfig):
    """Sines and cosines added to the embeddings (Vaswani et al. 2017, §3.5).

    `interleaved` is the formula's layout; `halves` puts all sines first, with the same wavelengths (Marian);
    `tensor2tensor` puts sines first and stretches the slowest wavelength to exactly 2π · base. An `amplitude` of 1
    suits embeddings that are multiplied by √d_model (§3.4); without that factor, 1/√d_model keeps the proportion.
    Positions count from `offset`, 2 in fairseq's models.
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "halves", "tensor2tensor"] = Field(
        "interleaved", description="order of sines and cosines"
    )
    base: PositiveFloat = Field(10000.0, description="slowest wavelength over 2π, approximately")
    amplitude: PositiveFloat = Field(1.0, description="amplitude of the waves")
    offset: NonNegativeInt = Field(0, description="number of the first position")

    def check(self, d_model: int, d_head: int) -> None:
        if d_model % 2:
            raise ValueError(f"sinusoidal positions pair sines with cosines, but d_model = {d_model} is odd")


class Concatenated(PositionConfig):
    """Sines and cosines beside the embeddings, [x_i ; p_i], instead of added to them: the last `width` of the d_model
    coordinates are p_i, and the token embeddings x_i have the others."""

    kind: Literal["concatenated"] = "concatenated"
    width: PositiveInt | None = Field(None, description="width of p_i, an even number; absent: about d_model / 4")
    base: PositiveFloat = Field(10000.0, description="slowest wavelength over 2π, approximately")
    amplitude: PositiveFloat = Field(1.0, description="amplitude of the waves")

    def concatenated_width(self, d_model: int) -> int:
        return self.width or max(2, d_model // 8 * 2)

    def check(self, d_model: int, d_head: int) -> None:
        width = self.concatenated_width(d_model)
        if width % 2:
            raise ValueError(f"concatenated positions pair sines with cosines, but position.width = {width} is odd")
        if width >= d_model:
            raise ValueError(f"position.width = {width} leaves no coordinate of d_model = {d_model} for the embedding")


class Learned(PositionConfig):
    """One trained vector per position, added to the embeddings; no text can exceed `context` positions. The table
    begins with `offset` unused rows, as in RoBERTa and BART."""

    bounded: ClassVar[bool] = True
    kind: Literal["learned"] = "learned"
    offset: NonNegativeInt = Field(0, description="unused rows at the beginning of the table")

    def parameters(self, sizes: Sizes) -> int:
        return (sizes.context + self.offset) * sizes.d_model


class Relative(PositionConfig):
    """Trained vectors for clipped distances, added to keys and values in every layer (Shaw et al. 2018)."""

    kind: Literal["relative"] = "relative"
    max_distance: PositiveInt = Field(16, description="distance at which distances are clipped")

    @property
    def rows(self) -> int:
        """Number of distinct distances, −max_distance … max_distance."""
        return 2 * self.max_distance + 1

    def parameters(self, sizes: Sizes) -> int:
        return sizes.layers * 2 * self.rows * sizes.d_head

    def flops(self, sizes: Sizes, length: int, keys: int) -> int:
        """FLOPs of two more products per pair: the query, and the probability, with the vector of their distance."""
        return 4 * sizes.layers * length * keys * sizes.heads * sizes.d_head

    def activations(self, sizes: Sizes, length: int) -> int:
        """Probabilities, before and after dropout, and both vectors of every pair."""
        return length * (2 * sizes.heads + 2 * sizes.d_head)


class Disentangled(PositionConfig):
    """Trained vector per bucket of distances, projected to queries and keys in every layer: content is compared with
    distances, and distances with content (He et al. 2021, §3.1).

    There are `buckets` in each direction: the nearer half hold one distance each, the others are logarithmic up to
    `max_distance` (v2 of the paper's models); if not `logarithmic`, all hold one distance each (v1). The vectors are
    normalised if `norm_eps` is set, and projected by the weights of the tokens or, if `separate`, by others (v1). A
    score is the sum of three products, so these models have attention.scale = 1/√(3 d_head).
    """

    projected: ClassVar[bool] = True
    kind: Literal["disentangled"] = "disentangled"
    buckets: int = Field(default=256, ge=4, description="number of buckets of distances in each direction")
    max_distance: PositiveInt = Field(512, description="distance from which all share a bucket")
    logarithmic: bool = Field(True, description="make the farther half of the buckets logarithmic")
    separate: bool = Field(False, description="project the vectors by separate weights in every layer")
    norm_eps: PositiveFloat | None = Field(None, description="eps of the norm of the vectors; absent: no norm")

    def check(self, d_model: int, d_head: int) -> None:
        if self.logarithmic and self.max_distance - 1 <= self.buckets // 2:
            raise ValueError(f"max_distance = {self.max_distance} is within the buckets of single distances")

    def parameters(self, sizes: Sizes) -> int:
        width = sizes.heads * sizes.d_head
        projections = sizes.layers * (2 * sizes.d_model + 1) * width if self.separate else 0
        return (2 * self.buckets + (2 if self.norm_eps is not None else 0)) * sizes.d_model + projections

    def flops(self, sizes: Sizes, length: int, keys: int) -> int:
        """FLOPs of projecting the table, once per batch, and of its products with all tokens' queries and keys."""
        wide, matrices = sizes.layers * 2 * self.buckets * sizes.heads * sizes.d_head, 2 if self.separate else 3
        return 2 * wide * (matrices * sizes.d_model + 2 * length)

    def activations(self, sizes: Sizes, length: int) -> int:
        """Probabilities, before and after dropout, and both products with the table."""
        return sizes.heads * (2 * length + 4 * self.buckets)


MAX_STRETCH = 1e6  # bounds `factor`: 2,048 tokens become two billion; powers of much larger factors overflow
Stretch = Annotated[float, Field(gt=0.0, le=MAX_STRETCH)]


class LinearScaling(Config):
    """Positions divided by `factor` (Chen et al. 2023)."""

    kind: Literal["linear"] = "linear"
    factor: Stretch = Field(description="factor by which positions are stretched")


class DynamicNTK(Config):
    """A base that grows with the sequence once it exceeds the trained context."""

    kind: Literal["dynamic-ntk"] = "dynamic-ntk"
    factor: Stretch = Field(description="factor by which positions are stretched")


class Llama3Scaling(Config):
    """Frequencies of slow waves divided by `factor`, of fast ones kept, with a ramp between them (LLaMA 3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: Stretch = Field(8.0, description="factor by which positions are stretched")
    low: PositiveFloat = Field(1.0, description="turns within the original context below which a wave is slow")
    high: PositiveFloat = Field(4.0, description="turns above which a wave is fast")
    original_context: PositiveInt = Field(8192, description="context of the original training, in tokens")


class YaRN(Config):
    """Frequencies of slow pairs divided by `factor`, with a ramp over pairs, and sharper scores (Peng et al. 2023).

    Pairs that turn more than `fast` times within the original context are kept, those that turn less than `slow` times
    are divided by `factor`; with `whole_pairs`, the ramp begins and ends at whole pairs. Queries and keys are
    multiplied by `attention_factor`, by default 0.1 ln(factor) + 1.
    """

    kind: Literal["yarn"] = "yarn"
    factor: Stretch = Field(description="factor by which positions are stretched")
    original_context: PositiveInt = Field(description="context of the original training, in tokens")
    fast: PositiveFloat = Field(32.0, description="turns above which a pair is kept")
    slow: PositiveFloat = Field(1.0, description="turns below which a pair is divided by `factor`")
    whole_pairs: bool = Field(True, description="begin and end the ramp at whole pairs")
    attention_factor: PositiveFloat | None = Field(
        None, description="factor of queries and keys; absent: 0.1 ln(factor) + 1"
    )

    @property
    def sharpening(self) -> float:
        """Factor of queries and keys."""
        return self.attention_factor or max(1.0, 0.1 * math.log(self.factor) + 1.0)


class LongRoPE(Config):
    """Frequency of each pair divided by its factor in `short`, or in `long` once a text exceeds the original context
    (Ding et al. 2024); queries and keys are multiplied by `attention_factor`."""

    kind: Literal["longrope"] = "longrope"
    short: tuple[PositiveFloat, ...] = Field(description="factor of each pair, within the original context")
    long: tuple[PositiveFloat, ...] = Field(description="factor of each pair, beyond the original context")
    original_context: PositiveInt = Field(description="context of the original training, in tokens")
    attention_factor: PositiveFloat = Field(1.0, description="factor of queries and keys")

    @property
    def sharpening(self) -> float:
        return self.attention_factor


Scaling = Annotated[LinearScaling | DynamicNTK | Llama3Scaling | YaRN | LongRoPE, Field(discriminator="kind")]


class Rotary(PositionConfig):
    """Rotation of queries and keys by their positions, so that scores depend on distances only (Su et al. 2021).

    `pairs`: which coordinates are rotated together, adjacent ones as in the paper or the two halves as in LLaMA
    checkpoints. Only the first `fraction` of each head is rotated (Black et al. 2022).
    """

    rotates: ClassVar[bool] = True
    kind: Literal["rotary"] = "rotary"
    base: PositiveFloat = Field(10000.0, description="base of the pairs' wavelengths")
    pairs: Literal["adjacent", "halves"] = Field("halves", description="which coordinates are rotated together")
    fraction: float = Field(default=1.0, gt=0.0, le=1.0, description="fraction of each head to rotate")
    scaling: Scaling | None = Field(None, description="scaling for texts longer than in training")

    def rotated(self, d_head: int) -> int:
        """Number of rotated coordinates of a head."""
        return int(d_head * self.fraction + 1e-9)  # 25 · 0.28 is 7, not 6.999… as in floats

    def changes_after(self, context: int) -> int | None:
        if isinstance(self.scaling, LongRoPE):
            return self.scaling.original_context
        return context if isinstance(self.scaling, DynamicNTK) else None

    def check(self, d_model: int, d_head: int) -> None:
        rotated = self.rotated(d_head)
        if d_head % 2 and self.fraction == 1.0:
            raise ValueError(f"rotary positions rotate pairs of coordinates, but d_head = {d_head} is odd")
        if rotated % 2 or not rotated:
            part = f"fraction = {self.fraction} of d_head = {d_head} is {rotated}"
            raise ValueError(f"rotary positions rotate pairs of coordinates, but {part}")
        if isinstance(self.scaling, DynamicNTK) and rotated == 2:  # the exponent is rotated / (rotated − 2)
            raise ValueError("dynamic-ntk scaling needs at least two rotated pairs of coordinates, but there is one")
        if isinstance(self.scaling, LongRoPE) and {len(self.scaling.short), len(self.scaling.long)} != {rotated // 2}:
            raise ValueError(f"longrope scaling needs {rotated // 2} factors in short and in long, one for each pair")


class T5Bias(PositionConfig):
    """Trained bias per head and bucket of distances, added to the scores (Raffel et al. 2020)."""

    kind: Literal["t5"] = "t5"
    buckets: PositiveInt = Field(32, description="number of buckets of distances")
    max_distance: PositiveInt = Field(128, description="distance from which all share a bucket")

    def parameters(self, sizes: Sizes) -> int:
        return self.buckets * sizes.heads


class LayeredT5(PositionConfig):
    """`T5Bias` with a separate table in every layer (Chung et al. 2023)."""

    kind: Literal["layered-t5"] = "layered-t5"
    buckets: PositiveInt = Field(32, description="number of buckets of distances")
    max_distance: PositiveInt = Field(128, description="distance from which all share a bucket")

    def parameters(self, sizes: Sizes) -> int:
        return sizes.layers * self.buckets * sizes.heads

    def activations(self, sizes: Sizes, length: int) -> int:
        """Probabilities, before and after dropout."""
        return 2 * length * sizes.heads


class LearnedT5(PositionConfig):
    """Trained vector per position, and trained bias per head and bucket of distances (Song et al. 2020)."""

    bounded: ClassVar[bool] = True
    kind: Literal["learned+t5"] = "learned+t5"
    offset: NonNegativeInt = Field(0, description="unused rows at the beginning of the table")
    buckets: PositiveInt = Field(32, description="number of buckets of distances")
    max_distance: PositiveInt = Field(128, description="distance from which all share a bucket")

    @property
    def added(self) -> Learned:
        return Learned(offset=self.offset)

    @property
    def scored(self) -> T5Bias:
        return T5Bias(buckets=self.buckets, max_distance=self.max_distance)

    def parameters(self, sizes: Sizes) -> int:
        return self.added.parameters(sizes) + self.scored.parameters(sizes)


class ALiBi(PositionConfig):
    """Penalty on the scores that grows with distance, at a different slope in each head (Press et al. 2022).

    Penalties are multiplied by `factor`. If `rounded`, they are products of key positions and slopes in bfloat16, as in
    Falcon: a key has the same penalty for all queries, and from position 256 on several keys share a penalty.
    """

    kind: Literal["alibi"] = "alibi"
    factor: PositiveFloat = Field(1.0, description="factor of the penalties")
    rounded: bool = Field(False, description="compute the penalties in bfloat16, as Falcon does")


Position = Annotated[PositionConfig, AnyKind()]
