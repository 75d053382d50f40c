"""How a model knows the positions of its tokens.

A position encoding acts in up to three places, and each kind fills in its own:
`embed` adds to the token embeddings, `rotate` rotates queries and keys, `bias` adds to the attention scores.
`Relative` (Shaw et al. 2018) has tables in every layer, so the attention holds them; here it only gives distances.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.nn import position_config as config
from weft.nn.init import Initialiser
from weft.nn.norm import LayerNorm
from weft.nn.position_config import DynamicNTK, LinearScaling, Llama3Scaling, LongRoPE, YaRN


class Position(nn.Module):
    """No position at all, and the default wherever a kind does not act.

    A kind names its settings, `class Learned(Position, settings=config.Learned)`, is built from them and the stack's
    `Sizes`; its table, if it has one, is its `weight`.
    """

    classes: ClassVar[dict[type[config.PositionConfig], Callable[[Any, config.Sizes], "Position"]]] = {
        config.NoPosition: lambda settings, sizes: Position()
    }
    biases: ClassVar[bool] = False  # whether a kind has a `bias` of its own
    heads_here: slice | None = None  # where several processes divide the heads: which of them are here
    switch: int | None = None  # a text that is longer than this is read by other angles from its first token on
    weight: nn.Parameter

    def __init_subclass__(cls, settings: type[config.PositionConfig]) -> None:
        super().__init_subclass__()
        cls.classes[settings] = cls
        cls.biases = cls.bias is not Position.bias

    def reset_parameters(self, init: Initialiser) -> None:
        """Draw the table as the tokens' embeddings are drawn."""
        init.table(self.weight)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (batch, time, d_model) plus what positions (batch or 1, time) add to it."""
        return x

    def angles(self, positions: Tensor, longest: int | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """cos and sin, each (batch or 1, 1, time, pairs), of how far tokens at `positions` are rotated.

        `longest` is an upper bound of the sequence's length, known without waiting for the device; or, where there is a
        `switch`, each row's length (batch,).
        """
        return None

    def rotate(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x (batch, heads, time, d_head), rotated."""
        raise AssertionError("a position that gives angles rotates by them")

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """What to add to the scores: (batch or 1, heads, time, source time) from both sides' positions."""
        return None

    def heads_bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """The same for the heads of this process."""
        found = self.bias(queries, keys)
        return found if found is None or self.heads_here is None else found[:, self.heads_here]

    def distances(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Row of each layer's relative table for every pair: (batch or 1, time, source time)."""
        raise AssertionError("a position with relative vectors knows their distances")


@torch.library.custom_op("weft::kept", mutates_args=())
def _kept(x: Tensor) -> Tensor:
    return x.clone()


@_kept.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def once(x: Tensor) -> Tensor:
    """x, computed once even under a compiler that fuses: else every layer would compute the same sines again. That
    costs many times what reading them does. Exported models go without: the operation exists in weft alone."""
    return _kept(x) if torch.compiler.is_dynamo_compiling() else x


def sinusoids(positions: Tensor, d_model: int, layout: str = "interleaved", base: float = 10000.0) -> Tensor:
    """sin and cos of positions (…) at d_model/2 frequencies: (…, d_model) (Vaswani et al. 2017, §3.5)."""
    half = d_model // 2
    slowest = max(half - 1, 1) if layout == "tensor2tensor" else half
    k = torch.arange(half, device=positions.device, dtype=torch.float64)
    angles = positions[..., None].to(torch.float64) * base ** (-k / slowest)
    if layout == "interleaved":
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Sinusoidal(Position, settings=config.Sinusoidal):
    """Fixed waves added to the embeddings. They are computed for the positions at hand, so no length is too long."""

    def __init__(self, settings: config.Sinusoidal, sizes: config.Sizes):
        super().__init__()
        self.settings, self.d_model = settings, sizes.d_model

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        waves = sinusoids(positions + self.settings.offset, self.d_model, self.settings.layout, self.settings.base)
        return x + once((self.settings.amplitude * waves).to(x.dtype))


class Learned(Position, settings=config.Learned):
    """A table of vectors, one a position."""

    def __init__(self, settings: config.Learned, sizes: config.Sizes):
        super().__init__()
        self.offset, self.context = settings.offset, sizes.context
        self.weight = nn.Parameter(torch.empty(sizes.context + settings.offset, sizes.d_model))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        # Only the time is known on the host; with a cache, `start` has checked the length (`models/transformer.py`).
        if x.shape[1] > self.context:
            exceeded = f"{self.context} positions that this model has learned (model.context)"
            raise ModelError(f"{x.shape[1]} tokens exceed the {exceeded}")
        return x + nn.functional.embedding(positions + self.offset, self.weight)


class Rotary(Position, settings=config.Rotary):
    """Pairs of coordinates rotated by position × frequency (Su et al. 2021)."""

    def __init__(self, settings: config.Rotary, sizes: config.Sizes):
        super().__init__()
        self.settings, self.context = settings, sizes.context
        self.rotated = settings.rotated(sizes.d_head)
        self.whole = self.rotated == sizes.d_head
        if isinstance(settings.scaling, LongRoPE):
            self.switch = settings.scaling.original_context

    def frequencies(self, longest: int | Tensor, device: torch.device) -> Tensor:
        """Radians a position, one for each pair that is rotated, after scaling for up to `longest` tokens. (pairs,), or
        (batch, 1, 1, pairs) by each row's length."""
        base, width, scaling = self.settings.base, self.rotated, self.settings.scaling
        if isinstance(scaling, DynamicNTK) and not isinstance(longest, Tensor) and longest > self.context:
            growth = scaling.factor * longest / self.context - (scaling.factor - 1)
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
                keep = 1 - yarn_ramp(scaling, base, width, device)
                return (1 - keep) * theta / scaling.factor + keep * theta
            case LongRoPE():
                short, long = (torch.tensor(own, device=device) for own in (scaling.short, scaling.long))
                if isinstance(longest, Tensor):
                    return theta / torch.where(longest[:, None, None, None] > scaling.original_context, long, short)
                return theta / (long if longest > scaling.original_context else short)
            case _:
                return theta

    def angles(self, positions: Tensor, longest: int | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """cos and sin (batch or 1, 1, time, pairs); computed in float32, for positions are large."""
        wide = torch.promote_types(dtype, torch.float32)
        angle = positions[:, None, :, None].to(wide) * self.frequencies(longest, positions.device).to(wide)
        cos, sin = angle.cos(), angle.sin()
        if isinstance(self.settings.scaling, YaRN | LongRoPE):  # queries and keys are multiplied while they are rotated
            cos, sin = cos * self.settings.scaling.sharpening, sin * self.settings.scaling.sharpening
        return once(cos.to(dtype)), once(sin.to(dtype))

    def rotate(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x (batch, heads, time, d_head), each pair (a, b) → (a cos − b sin, b cos + a sin)."""
        # token by token, as the projection left them: what attention gives then lies the same way, and needs no copy
        x, cos, sin = (t.transpose(1, 2) for t in (x, *angles))
        if self.whole:
            return self._pairs(x, cos, sin).transpose(1, 2)
        x, rest = x.split([self.rotated, x.shape[-1] - self.rotated], dim=-1)
        return torch.cat((self._pairs(x, cos, sin), rest), dim=-1).transpose(1, 2)

    def _pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (batch, time, heads, rotated)."""
        if self.settings.pairs == "halves":
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def yarn_ramp(scaling: YaRN, base: float, width: int, device: torch.device) -> Tensor:
    """(width/2,): 0 for the pairs whose frequency is kept, 1 for those that are stretched (Peng et al. 2023, §3.2)."""

    def pair(turns: float) -> float:
        """The pair that turns so many times within the original context."""
        return width * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(scaling.fast), pair(scaling.slow)
    if scaling.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    steps = torch.arange(width // 2, device=device, dtype=torch.float32) - low
    return (steps / max(high - low, 0.001)).clamp(0, 1)


class Relative(Position, settings=config.Relative):
    """Clipped distances, key minus query, as rows of a table of 2 · max_distance + 1 (Shaw et al. 2018, §3.2)."""

    def __init__(self, settings: config.Relative, sizes: config.Sizes):
        super().__init__()
        self.max_distance = settings.max_distance

    def distances(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(batch or 1, time, source time), each from 0 to 2 · max_distance."""
        distance = keys[:, None, :] - queries[:, :, None]
        return distance.clamp(-self.max_distance, self.max_distance) + self.max_distance


class Disentangled(Position, settings=config.Disentangled):
    """A table of 2 · buckets vectors, by distances from query to key; the layers make queries and keys of them."""

    def __init__(self, settings: config.Disentangled, sizes: config.Sizes):
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.empty(2 * settings.buckets, sizes.d_model))
        self.norm = None if settings.norm_eps is None else LayerNorm(sizes.d_model, settings.norm_eps)

    def vectors(self) -> Tensor:
        """(2 · buckets, d_model), normed."""
        return self.weight if self.norm is None else self.norm(self.weight)

    def distances(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(batch or 1, time, source time), each from 0 to 2 · buckets − 1: query minus key, in buckets."""
        distance, buckets = queries[:, :, None] - keys[:, None, :], self.settings.buckets
        middle = buckets // 2
        away = distance.abs().clamp(min=middle)
        share = torch.log(away / middle) / math.log((self.settings.max_distance - 1) / middle)
        far = distance.sign() * (torch.ceil(share * (middle - 1)).long() + middle)
        return (torch.where(distance.abs() <= middle, distance, far) + buckets).clamp(0, 2 * buckets - 1)


class T5Bias(Position, settings=config.T5Bias):
    """A number for each head and bucket of distances; half of the buckets exact, the rest logarithmic."""

    def __init__(self, settings: config.T5Bias, sizes: config.Sizes):
        super().__init__()
        self.settings, self.causal = settings, sizes.causal
        self.weight = nn.Parameter(torch.empty(settings.buckets, sizes.heads))

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, key minus query."""
        buckets = self.settings.buckets
        if self.causal:
            first, away = torch.zeros_like(distance), (-distance).clamp(min=0)
        else:
            buckets //= 2
            first, away = (distance > 0).long() * buckets, distance.abs()
        exact = buckets // 2
        ratio = torch.log(away.clamp(min=1).float() / exact) / math.log(self.settings.max_distance / exact)
        far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return first + torch.where(away < exact, away, far)

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        bucket = self.bucket(keys[:, None, :] - queries[:, :, None])
        return nn.functional.embedding(bucket, self.weight).permute(0, 3, 1, 2)


class LearnedT5(Position, settings=config.LearnedT5):
    """A table of vectors, one a position, and a number for each head and bucket of distances."""

    def __init__(self, settings: config.LearnedT5, sizes: config.Sizes):
        super().__init__()
        self.added, self.scored = Learned(settings.added, sizes), T5Bias(settings.scored, sizes)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.added.embed(x, positions)

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        return self.scored.bias(queries, keys)


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """(heads,): a geometric row from 2^(−8/n), n the power of two below `heads`, then every other of the next row."""
    power = 2 ** math.floor(math.log2(heads))
    first = torch.arange(1, power + 1, device=device, dtype=torch.float32) * (-8 / power)
    rest = (2 * torch.arange(heads - power, device=device, dtype=torch.float32) + 1) * (-4 / power)
    return torch.cat((first, rest)).exp2()


class ALiBi(Position, settings=config.ALiBi):
    """−slope · |distance| on every score (Press et al. 2022)."""

    def __init__(self, settings: config.ALiBi, sizes: config.Sizes):
        super().__init__()
        self.settings, self.heads = settings, sizes.heads

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        slopes = alibi_slopes(self.heads, keys.device)
        if self.settings.rounded:  # positions do as well as distances: a query's own is the same for all its keys
            slopes, places = (each.bfloat16().float() for each in (slopes[:, None], keys[:, None]))
            penalties = (slopes * places).bfloat16().float() * self.settings.factor
            return penalties[:, :, None].expand(-1, -1, queries.shape[1], -1)
        slopes = slopes * self.settings.factor
        return -slopes[:, None, None] * (keys[:, None, :] - queries[:, :, None]).abs()[:, None]


def build(settings: config.PositionConfig, sizes: config.Sizes) -> Position:
    """The position that `settings` describe, for a stack of these sizes."""
    return Position.classes[type(settings)](settings, sizes)
