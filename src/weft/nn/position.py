"""Position encodings.

An encoding overrides up to four methods: `embed` adds to the token embeddings or extends them, `rotate` rotates
queries and keys, `scale_queries` scales queries, and `bias` adds to the attention scores. `Relative` (Shaw et al. 2018)
has tables in every layer, which the attention holds; its class here only computes distances.
"""

import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.nn import position_config as config
from weft.nn.init import Initialiser
from weft.nn.norm import LayerNorm
from weft.nn.position_config import DynamicNTK, LinearScaling, Llama3Scaling, LongRoPE, YaRN

Angles = tuple[Tensor, Tensor]  # cos and sin, each (batch or 1, 1, time, pairs)


class Position(nn.Module):
    """No position encoding, and the base class of all others. A subclass names its settings in its class statement
    (`settings=config.Learned`) and is built from them and the stack's `Sizes`. Its table, if any, is `weight`."""

    classes: ClassVar[dict[type[config.PositionConfig], type["Position"]]] = {}
    biases: ClassVar[bool] = False  # whether a subclass overrides `bias`
    heads_here: slice | None = None  # heads of this process, if tensor parallelism divides them
    switch: int | None = None  # texts longer than this have other angles, from their first token on
    weight: nn.Parameter

    def __init_subclass__(cls, settings: type[config.PositionConfig]) -> None:
        super().__init_subclass__()
        cls.classes[settings] = cls
        cls.biases = cls.bias is not Position.bias

    def __init__(self, settings: Any = None, sizes: config.Sizes | None = None):
        super().__init__()
        self.settings, self.sizes = settings, cast(config.Sizes, sizes)

    def reset_parameters(self, init: Initialiser) -> None:
        """Draw the table like the token embeddings."""
        init.table(self.weight)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the encoding of positions (batch or 1, time) to x (batch, time, d_model), or concatenate it to a
        narrower x."""
        return x

    def angles(self, positions: Tensor, longest: int | Tensor, dtype: torch.dtype) -> Angles | None:
        """cos and sin, each (batch or 1, 1, time, pairs), of the rotation angles of tokens at `positions`.

        `longest` is an upper bound of the sequence length, known without waiting for the device; or, if there is a
        `switch`, each row's length (batch,).
        """
        return None

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """Rotate x (batch, heads, time, d_head)."""
        raise AssertionError("an encoding with angles must override rotate")

    def scale_queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """Scale queries (batch, heads, time, d_head) by their positions (batch or 1, time)."""
        return q

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Bias to add to the scores, (batch or 1, heads, time, source time), from positions of queries and keys."""
        return None

    def local_bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Bias of the heads of this process."""
        bias = self.bias(queries, keys)
        return bias if bias is None or self.heads_here is None else bias[:, self.heads_here]

    def distances(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Row of the relative table for every pair of query and key, (batch or 1, time, source time)."""
        raise AssertionError("an encoding with relative vectors must override distances")


@torch.library.custom_op("weft::kept", mutates_args=())
def _kept(x: Tensor) -> Tensor:
    return x.clone()


@_kept.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def compute_once(x: Tensor) -> Tensor:
    """Return x, but keep a compiler from fusing its computation into every layer. Computing sines again in each layer
    costs many times what reading them does. Exported models do without: only weft has this operation."""
    return _kept(x) if torch.compiler.is_dynamo_compiling() else x


def sinusoids(positions: Tensor, d_model: int, layout: str = "interleaved", *, base: float = 10000.0) -> Tensor:
    """sin and cos of positions (…) at d_model/2 frequencies, (…, d_model) (Vaswani et al. 2017, §3.5)."""
    half = d_model // 2
    slowest = max(half - 1, 1) if layout == "tensor2tensor" else half
    k = torch.arange(half, device=positions.device, dtype=torch.float64)
    angles = positions[..., None].to(torch.float64) * base ** (-k / slowest)
    if layout == "interleaved":
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Tempered(Position, settings=config.Tempered):
    """Queries times 1 + growth · log(1 + ⌊(position + 1) / interval⌋); no position encoding."""

    def scale_queries(self, q: Tensor, positions: Tensor) -> Tensor:
        intervals = torch.floor((positions.float() + 1.0) / self.settings.interval)
        factors = torch.log1p(intervals) * self.settings.growth + 1.0
        return (q * factors[:, None, :, None]).to(q.dtype)


class Sinusoidal(Position, settings=config.Sinusoidal):
    """Sines and cosines added to the embeddings, computed on the fly: the length is not limited."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        shifted, layout = positions + self.settings.offset, self.settings.layout
        waves = sinusoids(shifted, self.sizes.d_model, layout, base=self.settings.base)
        return x + compute_once((self.settings.amplitude * waves).to(x.dtype))


class Concatenated(Position, settings=config.Concatenated):
    """[x_i ; p_i]: x (batch, time, d_model − width) and sines and cosines of its positions."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        waves = sinusoids(positions, self.sizes.d_model - x.shape[-1], base=self.settings.base)
        waves = compute_once((self.settings.amplitude * waves).to(x.dtype))
        return torch.cat((x, waves.expand(x.shape[0], -1, -1)), dim=-1)


class Learned(Position, settings=config.Learned):
    """Table of trained vectors, one per position."""

    def __init__(self, settings: config.Learned, sizes: config.Sizes):
        super().__init__(settings, sizes)
        self.weight = nn.Parameter(torch.empty(sizes.context + settings.offset, sizes.d_model))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        # Only the time is known on the host; with a cache, `Transformer.start` has checked the length.
        if x.shape[1] > self.sizes.context:
            learned = f"{self.sizes.context} positions that this model has learned (model.context)"
            raise ModelError(f"{x.shape[1]} tokens exceed the {learned}")
        return x + nn.functional.embedding(positions + self.settings.offset, self.weight)


class Rotary(Position, settings=config.Rotary):
    """Rotation of pairs of coordinates by position × frequency (Su et al. 2021)."""

    def __init__(self, settings: config.Rotary, sizes: config.Sizes):
        super().__init__(settings, sizes)
        self.rotated = settings.rotated(sizes.d_head)
        self.whole = self.rotated == sizes.d_head
        if isinstance(settings.scaling, LongRoPE):
            self.switch = settings.scaling.original_context

    def frequencies(self, longest: int | Tensor, device: torch.device) -> Tensor:
        """Radians per position of each rotated pair, scaled for texts of up to `longest` tokens: (pairs,), or
        (batch, 1, 1, pairs) if `longest` has each row's length."""
        base, width, scaling = self.settings.base, self.rotated, self.settings.scaling
        if isinstance(scaling, DynamicNTK) and not isinstance(longest, Tensor) and longest > self.sizes.context:
            growth = scaling.factor * longest / self.sizes.context - (scaling.factor - 1)
            base = base * growth ** (width / (width - 2))
        k = torch.arange(0, width, 2, device=device, dtype=torch.float32)
        theta = 1.0 / base ** (k / width)
        match scaling:
            case LinearScaling():
                return theta / scaling.factor
            case Llama3Scaling():
                periods = scaling.original_context * theta / (2 * math.pi)
                keep = ((periods - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
                return (1 - keep) * theta / scaling.factor + keep * theta
            case YaRN():
                keep = 1 - yarn_ramp(scaling, base, width, device=device)
                return (1 - keep) * theta / scaling.factor + keep * theta
            case LongRoPE():
                short, long = (torch.tensor(factors, device=device) for factors in (scaling.short, scaling.long))
                if isinstance(longest, Tensor):
                    return theta / torch.where(longest[:, None, None, None] > scaling.original_context, long, short)
                return theta / (long if longest > scaling.original_context else short)
            case _:
                return theta

    def angles(self, positions: Tensor, longest: int | Tensor, dtype: torch.dtype) -> Angles | None:
        """cos and sin (batch or 1, 1, time, pairs), computed in float32 because positions are large."""
        wide = torch.promote_types(dtype, torch.float32)
        angle = positions[:, None, :, None].to(wide) * self.frequencies(longest, positions.device).to(wide)
        cos, sin = angle.cos(), angle.sin()
        if isinstance(self.settings.scaling, YaRN | LongRoPE):  # scales queries and keys
            cos, sin = cos * self.settings.scaling.sharpening, sin * self.settings.scaling.sharpening
        return compute_once(cos.to(dtype)), compute_once(sin.to(dtype))

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """Map each pair (a, b) of x (batch, heads, time, d_head) to (a cos − b sin, b cos + a sin)."""
        # token-major like the projection's output: attention's output then has this layout too, and needs no copy
        x, cos, sin = (t.transpose(1, 2) for t in (x, *angles))
        if self.whole:
            return self._rotate_pairs(x, cos, sin).transpose(1, 2)
        x, rest = x.split([self.rotated, x.shape[-1] - self.rotated], dim=-1)
        return torch.cat((self._rotate_pairs(x, cos, sin), rest), dim=-1).transpose(1, 2)

    def _rotate_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (batch, time, heads, rotated)."""
        if self.settings.pairs == "halves":
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def yarn_ramp(scaling: YaRN, base: float, width: int, *, device: torch.device) -> Tensor:
    """Ramp (width/2,) from 0, pairs whose frequency is kept, to 1, stretched pairs (Peng et al. 2023, §3.2)."""

    def pair(turns: float) -> float:
        """Index of the pair that makes this many turns within the original context."""
        return width * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(scaling.fast), pair(scaling.slow)
    if scaling.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    steps = torch.arange(width // 2, device=device, dtype=torch.float32) - low
    return (steps / max(high - low, 0.001)).clamp(0, 1)


class Relative(Position, settings=config.Relative):
    """Clipped distances, key minus query, indexing 2 · max_distance + 1 vectors (Shaw et al. 2018, §3.2)."""

    def distances(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Distances (batch or 1, time, source time), shifted to 0 … 2 · max_distance."""
        distance, max_distance = keys[:, None, :] - queries[:, :, None], self.settings.max_distance
        return distance.clamp(-max_distance, max_distance) + max_distance


class Disentangled(Position, settings=config.Disentangled):
    """Table of 2 · buckets vectors of distances; every layer projects them to queries and keys (He et al. 2021)."""

    def __init__(self, settings: config.Disentangled, sizes: config.Sizes):
        super().__init__(settings, sizes)
        self.weight = nn.Parameter(torch.empty(2 * settings.buckets, sizes.d_model))
        self.norm = None if settings.norm_eps is None else LayerNorm(sizes.d_model, settings.norm_eps)

    def vectors(self) -> Tensor:
        """Vectors (2 · buckets, d_model), normalised if there is a norm."""
        return self.weight if self.norm is None else self.norm(self.weight)

    def distances(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Bucket of query minus key, (batch or 1, time, source time), from 0 to 2 · buckets − 1."""
        distance, buckets = queries[:, :, None] - keys[:, None, :], self.settings.buckets
        if not self.settings.logarithmic:
            return (distance + buckets).clamp(0, 2 * buckets - 1)
        middle = buckets // 2
        clamped = distance.abs().clamp(min=middle)
        ratio = torch.log(clamped / middle) / math.log((self.settings.max_distance - 1) / middle)
        far = distance.sign() * (torch.ceil(ratio * (middle - 1)).long() + middle)
        return (torch.where(distance.abs() <= middle, distance, far) + buckets).clamp(0, 2 * buckets - 1)


class T5Bias(Position, settings=config.T5Bias):
    """Trained bias per head and bucket of distances; half of the buckets are exact, the others logarithmic."""

    def __init__(self, settings: config.T5Bias, sizes: config.Sizes):
        super().__init__(settings, sizes)
        self.weight = nn.Parameter(torch.empty(settings.buckets, sizes.heads))

    def bucket(self, distance: Tensor) -> Tensor:
        """Bucket of each distance, key minus query."""
        buckets = self.settings.buckets
        if self.sizes.causal:
            first, magnitude = torch.zeros_like(distance), (-distance).clamp(min=0)
        else:
            buckets //= 2
            first, magnitude = (distance > 0).long() * buckets, distance.abs()
        exact = buckets // 2
        ratio = torch.log(magnitude.clamp(min=1).float() / exact) / math.log(self.settings.max_distance / exact)
        far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return first + torch.where(magnitude < exact, magnitude, far)

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        bucket = self.bucket(keys[:, None, :] - queries[:, :, None])
        return nn.functional.embedding(bucket, self.weight).permute(0, 3, 1, 2)


class LayeredT5(T5Bias, settings=config.LayeredT5):
    """Buckets of distances, whose biases are in every layer's attention."""

    bias = Position.bias

    def __init__(self, settings: config.LayeredT5, sizes: config.Sizes):
        Position.__init__(self, settings, sizes)

    def distances(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.bucket(keys[:, None, :] - queries[:, :, None])


class LearnedT5(Position, settings=config.LearnedT5):
    """`Learned` positions and a `T5Bias`, together."""

    def __init__(self, settings: config.LearnedT5, sizes: config.Sizes):
        super().__init__(settings, sizes)
        self.added, self.scored = Learned(settings.added, sizes), T5Bias(settings.scored, sizes)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.added.embed(x, positions)

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        return self.scored.bias(queries, keys)


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """Slopes (heads,): the geometric sequence from 2^(−8/n), with n the largest power of two ≤ `heads`, then every
    other element of the sequence for 2n."""
    power = 2 ** math.floor(math.log2(heads))
    first = torch.arange(1, power + 1, device=device, dtype=torch.float32) * (-8 / power)
    rest = (2 * torch.arange(heads - power, device=device, dtype=torch.float32) + 1) * (-4 / power)
    return torch.cat((first, rest)).exp2()


class ALiBi(Position, settings=config.ALiBi):
    """−slope · |distance| on every score (Press et al. 2022)."""

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        slopes = alibi_slopes(self.sizes.heads, keys.device)
        if self.settings.rounded:  # key positions serve as distances: a query's position is the same for all its keys
            slopes, positions = (x.bfloat16().float() for x in (slopes[:, None], keys[:, None]))
            penalties = (slopes * positions).bfloat16().float() * self.settings.factor
            return penalties[:, :, None].expand(-1, -1, queries.shape[1], -1)
        slopes = slopes * self.settings.factor
        return -slopes[:, None, None] * (keys[:, None, :] - queries[:, :, None]).abs()[:, None]


def build(settings: config.PositionConfig, sizes: config.Sizes) -> Position:
    """Build the position encoding that `settings` describe, for a stack of these sizes."""
    kind = Position if isinstance(settings, config.NoPosition) else Position.classes[type(settings)]
    return kind(settings, sizes)
