"""How a model knows the positions of its tokens, as settings; `nn/position.py` has the class of each."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from weft.config import AnyKind, Config


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
    projected: ClassVar[bool] = False  # every layer makes queries and keys of its vectors, as of tokens
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
    layout: Literal["interleaved", "halves", "tensor2tensor"] = Field(
        "interleaved", description="how sines and cosines are arranged"
    )
    base: PositiveFloat = Field(10000.0, description="the slowest wavelength over 2π, about")
    amplitude: PositiveFloat = Field(1.0, description="of the waves")
    offset: NonNegativeInt = Field(0, description="the number of the first position")

    def check(self, d_model: int, d_head: int) -> None:
        if d_model % 2:
            raise ValueError(f"sinusoidal positions pair sines with cosines, but d_model = {d_model} is odd")


class Learned(PositionConfig):
    """One trained vector a position, added to the embeddings; `context` positions and not one more.

    The table begins with `offset` unused rows, as RoBERTa's and BART's do.
    """

    bounded: ClassVar[bool] = True
    kind: Literal["learned"] = "learned"
    offset: NonNegativeInt = Field(0, description="unused rows at the beginning of the table")

    def parameters(self, sizes: Sizes) -> int:
        return (sizes.context + self.offset) * sizes.d_model


class Relative(PositionConfig):
    """Trained vectors for clipped distances, added to keys and values in every layer (Shaw et al. 2018)."""

    kind: Literal["relative"] = "relative"
    max_distance: PositiveInt = Field(16, description="beyond which all distances are alike")

    @property
    def rows(self) -> int:
        """Distinct distances, from −max_distance to max_distance."""
        return 2 * self.max_distance + 1

    def parameters(self, sizes: Sizes) -> int:
        return sizes.layers * 2 * self.rows * sizes.d_head

    def flops(self, sizes: Sizes, length: int, keys: int) -> int:
        """As much as attention itself: each query with the vectors of its distances, and each weight with them."""
        return 4 * sizes.layers * length * keys * sizes.heads * sizes.d_head

    def activations(self, sizes: Sizes, length: int) -> int:
        """The probabilities, before and after dropout, and both vectors of every pair."""
        return length * (2 * sizes.heads + 2 * sizes.d_head)


class Disentangled(PositionConfig):
    """A trained vector for each bucket of distances, of which every layer makes queries and keys as it does of tokens:
    contents are compared with distances and distances with contents (He et al. 2021, §3.1).

    `buckets` on either side, the nearer half of them one for each distance, the rest logarithmic up to `max_distance`
    (v2 of the paper's models). The vectors are normed where there is a `norm_eps`. Three products make a score, so
    attention.scale is 1/√(3 d_head) there.
    """

    projected: ClassVar[bool] = True
    kind: Literal["disentangled"] = "disentangled"
    buckets: int = Field(default=256, ge=4, description="of distances, on either side")
    max_distance: PositiveInt = Field(512, description="from which on all distances share a bucket")
    norm_eps: PositiveFloat | None = Field(None, description="of the norm of the vectors; absent: no norm")

    def check(self, d_model: int, d_head: int) -> None:
        if self.max_distance - 1 <= self.buckets // 2:
            raise ValueError(f"max_distance = {self.max_distance} lies within the buckets of single distances")

    def parameters(self, sizes: Sizes) -> int:
        return (2 * self.buckets + (2 if self.norm_eps is not None else 0)) * sizes.d_model

    def flops(self, sizes: Sizes, length: int, keys: int) -> int:
        """The table's projections, the same for all rows of a batch, and all tokens' queries and keys with these."""
        wide = sizes.layers * 2 * self.buckets * sizes.heads * sizes.d_head
        return 2 * wide * (3 * sizes.d_model + 2 * length)

    def activations(self, sizes: Sizes, length: int) -> int:
        """The probabilities, before and after dropout, and both products with the table."""
        return sizes.heads * (2 * length + 4 * self.buckets)


MAX_STRETCH = 1e6  # a model that reads 2,048 tokens would read two billion; powers of much more are no floats
Stretch = Annotated[float, Field(gt=0.0, le=MAX_STRETCH)]


class LinearScaling(Config):
    """Positions divided by `factor` (Chen et al. 2023)."""

    kind: Literal["linear"] = "linear"
    factor: Stretch = Field(description="what positions are stretched by")


class DynamicNTK(Config):
    """The base grows with the sequence once it is longer than the trained context."""

    kind: Literal["dynamic-ntk"] = "dynamic-ntk"
    factor: Stretch = Field(description="what positions are stretched by")


class Llama3Scaling(Config):
    """Slow wavelengths divided by `factor`, fast ones kept, a ramp between (LLaMA 3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: Stretch = Field(8.0, description="what positions are stretched by")
    low: PositiveFloat = Field(1.0, description="turns within the original context below which a wave is slow")
    high: PositiveFloat = Field(4.0, description="turns above which it is fast")
    original_context: PositiveInt = Field(8192, description="tokens the model was first trained with")


class YaRN(Config):
    """The same with the ramp over pairs of coordinates, and sharper scores (Peng et al. 2023).

    What turns more than `fast` times within the original context is kept, what turns less than `slow` times is divided
    by `factor`; the ramp begins and ends at whole pairs if `whole_pairs`. Queries and keys are multiplied by
    `attention_factor`, 0.1 ln(factor) + 1 where it is not given.
    """

    kind: Literal["yarn"] = "yarn"
    factor: Stretch = Field(description="what positions are stretched by")
    original_context: PositiveInt = Field(description="tokens the model was first trained with")
    fast: PositiveFloat = Field(32.0, description="turns above which a wave is kept")
    slow: PositiveFloat = Field(1.0, description="turns below which it is divided by `factor`")
    whole_pairs: bool = Field(True, description="begin and end the ramp at whole pairs")
    attention_factor: PositiveFloat | None = Field(
        None, description="what queries and keys are multiplied by; absent: 0.1 ln(factor) + 1"
    )

    @property
    def sharpening(self) -> float:
        """What queries and keys are multiplied by."""
        return self.attention_factor or max(1.0, 0.1 * math.log(self.factor) + 1.0)


class LongRoPE(Config):
    """Each pair's frequency divided by a factor of its own, of `long` once a text exceeds the original context (Ding
    et al. 2024); queries and keys are multiplied by `attention_factor`."""

    kind: Literal["longrope"] = "longrope"
    short: tuple[PositiveFloat, ...] = Field(description="a factor for each pair, within the original context")
    long: tuple[PositiveFloat, ...] = Field(description="a factor for each pair, beyond it")
    original_context: PositiveInt = Field(description="tokens the model was first trained with")
    attention_factor: PositiveFloat = Field(1.0, description="what queries and keys are multiplied by")

    @property
    def sharpening(self) -> float:
        return self.attention_factor


Scaling = Annotated[LinearScaling | DynamicNTK | Llama3Scaling | YaRN | LongRoPE, Field(discriminator="kind")]


class Rotary(PositionConfig):
    """Queries and keys rotated by their position, so that products see distances only (Su et al. 2021).

    `pairs`: which coordinates are rotated together, neighbours as in the paper or the two halves as in LLaMA
    checkpoints. Of each head the first `fraction` is rotated, and the rest stays as it is (Black et al. 2022).
    """

    rotates: ClassVar[bool] = True
    kind: Literal["rotary"] = "rotary"
    base: PositiveFloat = Field(10000.0, description="how the wavelengths of the pairs spread")
    pairs: Literal["adjacent", "halves"] = Field("halves", description="which coordinates are rotated together")
    fraction: float = Field(default=1.0, gt=0.0, le=1.0, description="the part of each head that is rotated")
    scaling: Scaling | None = Field(None, description="how a model reads longer texts than it was trained with")

    def rotated(self, d_head: int) -> int:
        """How many coordinates of a head are rotated."""
        return int(d_head * self.fraction + 1e-9)  # 25 · 0.28 is 7, also where floats say 6.999…

    def changes_after(self, context: int) -> int | None:
        """Where angles depend on the length of the whole text."""
        if isinstance(self.scaling, LongRoPE):
            return self.scaling.original_context
        return context if isinstance(self.scaling, DynamicNTK) else None

    def check(self, d_model: int, d_head: int) -> None:
        rotated = self.rotated(d_head)
        if d_head % 2 and self.fraction == 1.0:
            raise ValueError(f"rotary positions rotate pairs of coordinates, but d_head = {d_head} is odd")
        if rotated % 2 or not rotated:
            raise ValueError(
                f"rotary positions rotate pairs of coordinates, but fraction = {self.fraction} of d_head = {d_head}"
                f" is {rotated}"
            )
        if isinstance(self.scaling, DynamicNTK) and rotated == 2:  # the base grows to the rotated / (rotated − 2)
            raise ValueError("dynamic-ntk scaling needs two pairs of coordinates that are rotated, but there is one")
        if isinstance(self.scaling, LongRoPE) and {len(self.scaling.short), len(self.scaling.long)} != {rotated // 2}:
            raise ValueError(f"longrope scaling has a factor for each of the {rotated // 2} pairs in short and in long")


class T5Bias(PositionConfig):
    """A trained number a head for each bucket of distances, added to the scores (Raffel et al. 2020)."""

    kind: Literal["t5"] = "t5"
    buckets: PositiveInt = Field(32, description="of distances")
    max_distance: PositiveInt = Field(128, description="from which on all distances share a bucket")

    def parameters(self, sizes: Sizes) -> int:
        return self.buckets * sizes.heads


class LearnedT5(PositionConfig):
    """A trained vector a position, and a trained number a head for each bucket of distances (Song et al. 2020)."""

    bounded: ClassVar[bool] = True
    kind: Literal["learned+t5"] = "learned+t5"
    offset: NonNegativeInt = Field(0, description="unused rows at the beginning of the table")
    buckets: PositiveInt = Field(32, description="of distances")
    max_distance: PositiveInt = Field(128, description="from which on all distances share a bucket")

    @property
    def added(self) -> Learned:
        return Learned(offset=self.offset)

    @property
    def scored(self) -> T5Bias:
        return T5Bias(buckets=self.buckets, max_distance=self.max_distance)

    def parameters(self, sizes: Sizes) -> int:
        return self.added.parameters(sizes) + self.scored.parameters(sizes)


class ALiBi(PositionConfig):
    """A penalty on the scores that grows with distance, steeper in some heads (Press et al. 2022).

    The penalties are multiplied by `factor`. `rounded` ones are products of key positions and slopes in bfloat16, as
    Falcon's are: each key's is the same for all queries, and from position 256 on several keys have the same.
    """

    kind: Literal["alibi"] = "alibi"
    factor: PositiveFloat = Field(1.0, description="what the penalties are multiplied by")
    rounded: bool = Field(False, description="compute them in bfloat16, as Falcon does")


Position = Annotated[PositionConfig, AnyKind()]
