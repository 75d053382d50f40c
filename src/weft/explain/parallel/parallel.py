"""Splitting a layer's matrices over processes, in every way there is: what each way sends, computes and holds.

An MLP and an attention block have one shape: f(norm(x) A) B. A is split by columns or by rows, and so is B (Shoeybi et
al. 2019, §3). What f needs and what A gives decide which collectives stand between them. With sequence parallelism the
norm before the block and all that follows it have a slice of the tokens each (Korthikanti et al. 2022, §4.2.2).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from weft.config import Config
from weft.errors import ConfigError
from weft.explain.parallel.ranks import Collective, Meter, gathered, simulated
from weft.nn import config, position, position_config
from weft.nn.attention import SelfAttention
from weft.nn.feedforward import Plain
from weft.nn.mask import AttentionMask, Mask
from weft.nn.norm import LayerNorm
from weft.nn.scaled_dot_product import QKV, reference_attention

Cut = Literal["columns", "rows"]
WHOLE, TOKENS, FEATURES = Replicate(), Shard(1), Shard(2)  # of activations, (batch, time, width)


class Sizes(Config):
    """The sizes of the blocks, by default those of gpt-tiny, and how many tokens pass through them."""

    d_model: PositiveInt = 128
    d_ff: PositiveInt = 512
    heads: PositiveInt = 4
    tokens: PositiveInt = 32

    def check(self, ranks: int) -> None:
        """Refuse sizes that so many processes can't divide evenly."""
        if ranks < 2:
            raise ConfigError(f"--ranks {ranks}: a matrix is split over at least 2 processes")
        if self.d_model % self.heads:
            raise ConfigError(f"heads={self.heads}: they don't divide d_model={self.d_model}")
        sizes = self.model_dump()
        common = math.gcd(*sizes.values())
        fitting = [str(each) for each in range(2, common + 1) if common % each == 0]
        for name, size in sizes.items():
            if size % ranks:
                advice = f"these sizes can be split over {' or '.join(fitting)}" if fitting else "choose another size"
                raise ConfigError(f"--ranks {ranks}: {name}={size} isn't a multiple of {ranks}; {advice}")


class Way(NamedTuple):
    """How A and B are split; both None where every process has the whole of them."""

    first: Cut | None
    second: Cut | None
    sequence: bool = False

    def needs(self) -> list[Placement]:
        """How the activations have to lie before the norm, A, f and B, and at the end."""
        outside = TOKENS if self.sequence else WHOLE
        # f is no sum's sum: what it reads is summed already. It reads slices where A gives them or B wants them
        between = FEATURES if self.first == "columns" or self.second == "rows" else WHOLE
        reads: dict[Cut | None, Placement] = {"columns": WHOLE, "rows": FEATURES, None: WHOLE}
        return [outside, reads[self.first], between, reads[self.second], outside]


WAYS = [
    *(Way(a, b, sequence) for a in ("columns", "rows") for b in ("columns", "rows") for sequence in (False, True)),
    Way(None, None),
]


@dataclass(frozen=True)
class Block:
    """f(norm(x) A) B with its biases. Weights lie as nn.Linear has them: a column of A is a row of `first`."""

    name: str
    names: tuple[str, str, str]  # of A, f and B
    norm: nn.LayerNorm
    module: Callable[[Tensor], Tensor]  # the block behind the norm, unsplit
    first: nn.Linear
    second: nn.Linear
    function: Callable[[Tensor], Tensor]  # f, of whole heads or of any columns
    order: Tensor  # of the columns of A, so that what one process needs stands together

    @property
    def parameters(self) -> list[Tensor]:
        """Gain and bias of the norm, A and its bias, B and its bias."""
        parts = [self.norm.weight, self.norm.bias, self.first.weight, self.first.bias]
        return [*parts, self.second.weight, self.second.bias]

    def ordered(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Parameters, or their gradients, with the columns of A in order."""
        gain, shift, first, bias, *rest = tensors
        return [gain, shift, first[self.order], bias[self.order], *rest]


@dataclass(frozen=True)
class Split:
    """What one way of splitting was measured to take; numbers are those of one process."""

    way: Way
    forward: tuple[tuple[Collective, ...], ...]  # at the four places: before A, before f, before B, at the end
    backward: tuple[tuple[Collective, ...], ...]  # the same places
    late: tuple[Collective, ...]  # sums of gradients that can wait for the end of a step
    flops: int  # of matrix products, forward and backward
    weights: int
    activations: int  # what the norm, A, f and B read, and the backward pass reads again
    layout: tuple[tuple[Placement, Placement], ...]  # of the activations at each place, before and after
    differences: tuple[float, float, float]  # from the unsplit block: result, gradient of x, gradients of weights

    def sent(self, ranks: int) -> tuple[float, float]:
        """Numbers that a process sends, forward and backward."""
        forward, backward = (
            sum(each.moved(ranks) for place in places for each in place) for places in (self.forward, self.backward)
        )
        return forward, backward


@dataclass(frozen=True)
class Splits:
    """All ways of splitting a block, the best first; the last one splits nothing."""

    block: Block
    sizes: Sizes
    ranks: int
    splits: tuple[Split, ...]
    wrong: float  # how far f of each process's own sum would be off, as a share of the largest result


def measure(sizes: Sizes, ranks: int) -> list[Splits]:
    """Every way of splitting an MLP and an attention block over so many processes, run in float64 and compared."""
    sizes.check(ranks)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, upstream = torch.randn(2, 1, sizes.tokens, sizes.d_model, dtype=torch.float64)
        blocks = [_mlp(sizes), _attention(sizes)]
    x, found = x.clone().requires_grad_(), []
    for block in blocks:
        out = block.module(block.norm(x))
        of_x, *of_weights = torch.autograd.grad(out, [x, *block.parameters], upstream)
        example = _Example(x.detach(), upstream, [out.detach(), of_x, *block.ordered(of_weights)])
        with simulated(ranks) as mesh:
            splits = [_run(block, way, mesh, example) for way in WAYS]
        calls = {split.way: sum(map(len, (*split.forward, *split.backward))) for split in splits}
        splits.sort(key=lambda split: (split.flops, sum(split.sent(ranks)), calls[split.way], split.activations))
        found.append(Splits(block, sizes, ranks, tuple(splits), _unsummed(block, x, ranks)))
    return found


class _Example(NamedTuple):
    """What goes into a block, the gradient that comes back to it, and what the unsplit block makes of them."""

    x: Tensor
    upstream: Tensor
    expected: Sequence[Tensor]  # the result, the gradient of x, and those of the parameters


def _run(block: Block, way: Way, mesh: DeviceMesh, example: _Example) -> Split:
    """Both passes, stage by stage: norm, A, f, B and the end. Processes talk at the beginning of a stage."""
    needs, stages = way.needs(), _stages(block, way, mesh)
    inputs: list[Any] = []
    outputs, forward, layout = [], [], []
    flops = activations = 0
    given: Any = distribute_tensor(example.x, mesh, [needs[0]])
    for stage, need in zip(stages, needs, strict=True):
        inputs.append(given.detach().requires_grad_())
        with Meter() as meter:
            moved = inputs[-1].redistribute(mesh, [need])
            given = stage.compute(moved)
        outputs.append(given)
        forward.append(tuple(meter.collectives))
        layout.append((inputs[-1].placements[0], need))
        flops += meter.flops
        activations += moved.to_local().numel() if stage is not stages[-1] else 0
    backward: list[tuple[Collective, ...]] = []
    late: list[Collective] = []
    gradients: list[Any] = []
    passed: Any = distribute_tensor(example.upstream, mesh, [needs[-1]])
    for stage, read, out in zip(stages[::-1], inputs[::-1], outputs[::-1], strict=True):
        with Meter() as meter:
            back: Any = torch.autograd.grad(out, [read, *stage.weights], passed)
        passed, *found = back
        backward.insert(0, tuple(meter.collectives))
        flops += meter.flops
        with Meter() as meter:  # each process used a weight that all have on its own tokens
            own = [weight.placements for weight in stage.weights]
            gradients[:0] = [each.redistribute(mesh, place) for each, place in zip(found, own, strict=True)]
        late += meter.collectives
    results = [gathered(each) for each in (outputs[-1], passed, *gradients)]
    off = [float((one - other).abs().max()) for one, other in zip(results, example.expected, strict=True)]
    assert not forward[0] and not backward[0], "nothing is sent before the norm"
    talked = tuple(forward[1:]), tuple(backward[1:]), tuple(late)
    weights = sum(weight.to_local().numel() for stage in stages for weight in stage.weights)
    differences = off[0], off[1], max(off[2:])
    return Split(way, *talked, flops, weights, activations, tuple(layout[1:]), differences)


class _Stage(NamedTuple):
    """A step of a block and the weights it uses. torch's types don't tell DTensors from tensors."""

    weights: list[Any]
    compute: Callable[[Any], Any]


def _stages(block: Block, way: Way, mesh: DeviceMesh) -> list[_Stage]:
    """norm, A, f, B and the end, with weights that are split in this way.

    A bias is added to what has been summed, so it belongs to the next stage, and is split as its input is.
    """
    _, _, middle, _, end = way.needs()
    along: list[Cut | None] = ["columns" if place == FEATURES else None for place in (middle, end)]
    cuts = [None, None, way.first, along[0], way.second, along[1]]
    with torch.no_grad():
        whole = block.ordered(block.parameters)
    held: list[Any] = []
    for weight, cut in zip(whole, cuts, strict=True):  # nn.Linear has a matrix's columns as rows
        place = Replicate() if cut is None else Shard(0 if cut == "columns" else 1)
        held.append(distribute_tensor(weight, mesh, [place]).requires_grad_())
    gain, shift, first, bias, second, last = held

    def function(x: DTensor) -> DTensor:  # of what each process has, which is all that f has to see
        assert not isinstance(x.placements[0], Partial)
        return DTensor.from_local(block.function(x.to_local()), x.device_mesh, x.placements)

    return [
        _Stage([gain, shift], lambda x: F.layer_norm(x, gain.shape, gain, shift, block.norm.eps)),
        _Stage([first], lambda x: F.linear(x, first)),
        _Stage([bias], lambda x: function(x + bias)),
        _Stage([second], lambda x: F.linear(x, second)),
        _Stage([last], lambda x: x + last),
    ]


def _unsummed(block: Block, x: Tensor, ranks: int) -> float:
    """What comes of f(x₁A₁) + f(x₂A₂) in the place of f(x₁A₁ + x₂A₂)."""
    with torch.no_grad():
        _, _, first, bias, *_ = block.ordered(block.parameters)
        pieces = zip(block.norm(x).chunk(ranks, -1), first.chunk(ranks, -1), strict=True)
        parts = [x_part @ a_part.T + bias / ranks for x_part, a_part in pieces]
        right = block.function(torch.stack(parts).sum(0))
        off = sum(map(block.function, parts)) - right
        return float(off.abs().max() / right.abs().max())


def _mlp(sizes: Sizes) -> Block:
    own = Plain(config.Plain(d_ff=sizes.d_ff, activation="gelu-tanh"), sizes.d_model).double()
    names, norm = ("A", "GeLU", "B"), LayerNorm(sizes.d_model).double()
    return Block("MLP", names, norm, own, own.up, own.down, own.activation, torch.arange(sizes.d_ff))


def _attention(sizes: Sizes) -> Block:
    """GPT's self-attention. The columns of A are put head by head, so that a process has whole heads of all three."""
    d_head = sizes.d_model // sizes.heads
    own = SelfAttention(config.Attention(heads=sizes.heads, bias="all"), sizes.d_model, d_head).double()
    places = torch.arange(sizes.tokens)[None]
    shape = position_config.Sizes(sizes.d_model, sizes.heads, d_head, sizes.tokens, causal=True, layers=1)
    where = AttentionMask(Mask(causal=True), position.build(position_config.NoPosition(), shape), places, keys=places)

    def attend(u: Tensor) -> Tensor:
        """(batch, time, heads · 3 · d_head) → (batch, time, heads · d_head), for any number of heads."""
        q, k, v = u.unflatten(-1, (-1, 3, d_head)).permute(3, 0, 2, 1, 4)
        return reference_attention(QKV(q, k, v), own.scale, where.dense())[0].transpose(1, 2).flatten(2)

    order = torch.arange(3 * sizes.d_model).view(3, sizes.heads, d_head).transpose(0, 1).flatten()
    names, norm = ("QKV", "attention", "O"), LayerNorm(sizes.d_model).double()
    return Block("Attention", names, norm, lambda x: own(x, where), own.qkv, own.out, attend, order)
