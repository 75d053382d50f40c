"""Every split of a layer's matrices over processes: what each process sends, computes and holds.

An MLP and an attention block have one form: Dropout(f(norm(x) A) B). A is split by columns or by rows, and so is B
(Shoeybi et al. 2019, §3). The output of A and the input of f decide which collectives are needed between them. With
sequence parallelism, each process has a slice of the tokens in the norm before the block and in everything after it
(Korthikanti et al. 2022, §4.2.2).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
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

SplitBy = Literal["columns", "rows"]
DROPOUT = 0.1
WHOLE, TOKENS, FEATURES = Replicate(), Shard(1), Shard(2)  # placements of activations, (batch, time, width)


class BlockSizes(Config):
    """Sizes of the blocks, by default those of gpt-tiny, and the number of tokens; `block` selects one of them."""

    d_model: PositiveInt = 128
    d_ff: PositiveInt = 512
    heads: PositiveInt = 4
    tokens: PositiveInt = 32
    block: Literal["mlp", "attention"] | None = None

    def check(self, ranks: int) -> None:
        """Raise if the sizes cannot be divided evenly between this many processes."""
        if ranks < 2:
            raise ConfigError(f"--ranks {ranks}: a matrix is split over at least 2 processes")
        if self.d_model % self.heads:
            raise ConfigError(f"heads={self.heads}: they don't divide d_model={self.d_model}")
        sizes = self.model_dump(exclude={"block"})
        common = math.gcd(*sizes.values())
        divisors = [str(n) for n in range(2, common + 1) if common % n == 0]
        for name, size in sizes.items():
            if size % ranks:
                advice = f"these sizes can be split over {' or '.join(divisors)}" if divisors else "choose another size"
                raise ConfigError(f"--ranks {ranks}: {name}={size} isn't a multiple of {ranks}; {advice}")


class SplitScheme(NamedTuple):
    """Splits of A and B; None: every process has the full matrix."""

    first: SplitBy | None
    second: SplitBy | None
    sequence: bool = False

    def placements(self) -> list[Placement]:
        """Return the placements of the activations that the norm, A, f, B and the end of the block require."""
        outside = TOKENS if self.sequence else WHOLE
        # f is not linear, so it reads complete sums. It reads slices if A gives them or B needs them.
        between = FEATURES if self.first == "columns" or self.second == "rows" else WHOLE
        reads: dict[SplitBy | None, Placement] = {"columns": WHOLE, "rows": FEATURES, None: WHOLE}
        return [outside, reads[self.first], between, reads[self.second], outside]


BY: tuple[SplitBy, SplitBy] = ("columns", "rows")
SCHEMES = [SplitScheme(a, b, sequence) for a in BY for b in BY for sequence in (False, True)]
SCHEMES.append(SplitScheme(None, None))


@dataclass(frozen=True)
class TwoMatrixBlock:
    """f(norm(x) A) B with its biases. Weights are stored as in nn.Linear: a column of A is a row of `first`."""

    name: str
    names: tuple[str, str, str]  # of A, f and B
    norm: nn.LayerNorm
    module: Callable[[Tensor], Tensor]  # the block after the norm, unsplit
    first: nn.Linear
    second: nn.Linear
    function: Callable[[Tensor], Tensor]  # f, for whole heads or any columns
    order: Tensor  # permutation of A's columns that puts those of one process together

    @property
    def parameters(self) -> list[Tensor]:
        """Gain and bias of the norm, A and its bias, B and its bias."""
        parts = [self.norm.weight, self.norm.bias, self.first.weight, self.first.bias]
        return [*parts, self.second.weight, self.second.bias]

    def ordered(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return parameters, or their gradients, with the columns of A in order."""
        gain, shift, first, bias, *rest = tensors
        return [gain, shift, first[self.order], bias[self.order], *rest]


Collectives = tuple[tuple[Collective, ...], ...]  # before A, before f, before B, and at the end


@dataclass(frozen=True)
class MeasuredSplit:
    """Measured cost of one split, per process."""

    scheme: SplitScheme
    forward: Collectives
    backward: Collectives
    deferred: tuple[Collective, ...]  # sums of gradients that can wait until the end of a step
    flops: int  # operations of matrix products, forward and backward
    weights: int
    activations: int  # elements of the inputs of norm, A, f and B, which the backward pass reads again
    placements: tuple[tuple[Placement, Placement], ...]  # of the activations before and after each group of collectives
    differences: tuple[float, float, float]  # from the unsplit block: result, gradient of x, gradients of weights

    def sent(self, ranks: int) -> tuple[float, float]:
        """Return the elements that a process sends, forward and backward."""
        forward, backward = (chain.from_iterable(groups) for groups in (self.forward, self.backward))
        return sum(each.sent(ranks) for each in forward), sum(each.sent(ranks) for each in backward)


@dataclass(frozen=True)
class BlockSplits:
    """All splits of a block, the best first; the last one splits nothing."""

    block: TwoMatrixBlock
    sizes: BlockSizes
    ranks: int
    splits: tuple[MeasuredSplit, ...]
    partial_sum_error: float  # error of applying f to partial sums, relative to the largest result


def measure(sizes: BlockSizes, ranks: int) -> list[BlockSplits]:
    """Run every split of an MLP and an attention block over this many processes in float64, and compare them."""
    sizes.check(ranks)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, upstream = torch.randn(2, 1, sizes.tokens, sizes.d_model, dtype=torch.float64)
        blocks = [block for block in (_mlp(sizes), _attention(sizes)) if sizes.block in (None, block.name.lower())]
        kept = F.dropout(torch.ones_like(x), DROPOUT)  # the mask of dropout, divided by the share that is kept
    x, results = x.clone().requires_grad_(), []
    for block in blocks:
        out = kept * block.module(block.norm(x))
        of_x, *of_weights = torch.autograd.grad(out, [x, *block.parameters], upstream)
        expected = [out.detach(), of_x, *block.ordered(of_weights)]
        with simulated(ranks) as mesh:
            runs: dict[str, Any] = {"x": x.detach(), "kept": kept, "upstream": upstream, "expected": expected}
            splits = [_run(block, scheme, mesh, **runs) for scheme in SCHEMES]
        calls = {split.scheme: sum(map(len, (*split.forward, *split.backward))) for split in splits}
        splits.sort(key=lambda split: (split.flops, sum(split.sent(ranks)), calls[split.scheme], split.activations))
        error = _partial_sum_error(block, x, ranks)
        results.append(BlockSplits(block, sizes, ranks, splits=tuple(splits), partial_sum_error=error))
    return results


def _run(
    block: TwoMatrixBlock,
    scheme: SplitScheme,
    mesh: DeviceMesh,
    *,
    x: Tensor,
    kept: Tensor,
    upstream: Tensor,
    expected: Sequence[Tensor],
) -> MeasuredSplit:
    """Run both passes, stage by stage: norm, A, f, B and the end. Collectives are at the beginning of a stage.

    `kept` is the mask of dropout, the same on every process; `upstream` is the gradient of the result; `expected` are
    the result, the gradient of x and those of the parameters.
    """
    required, stages = scheme.placements(), _stages(block, scheme, mesh, kept=kept)
    inputs: list[Any] = []
    outputs, forward, placements = [], [], []
    flops = activations = 0
    value: Any = distribute_tensor(x, mesh, [required[0]])
    for (_, compute), placement in zip(stages, required, strict=True):
        inputs.append(value.detach().requires_grad_())
        with Meter() as meter:
            moved = inputs[-1].redistribute(mesh, [placement])
            value = compute(moved)
        outputs.append(value)
        forward.append(tuple(meter.collectives))
        placements.append((inputs[-1].placements[0], placement))
        flops += meter.flops
        activations += moved.to_local().numel() if len(outputs) < len(stages) else 0
    backward: list[tuple[Collective, ...]] = []
    deferred: list[Collective] = []
    gradients: list[Any] = []
    gradient: Any = distribute_tensor(upstream, mesh, [required[-1]])
    for (weights, _), read, out in zip(stages[::-1], inputs[::-1], outputs[::-1], strict=True):
        with Meter() as meter:
            both: Any = torch.autograd.grad(out, [read, *weights], gradient)
        gradient, *of_weights = both
        backward.insert(0, tuple(meter.collectives))
        flops += meter.flops
        with Meter() as meter:  # each process used a replicated weight on its tokens only
            pairs = zip(of_weights, weights, strict=True)
            gradients[:0] = [each.redistribute(mesh, weight.placements) for each, weight in pairs]
        deferred += meter.collectives
    results = [gathered(each) for each in (outputs[-1], gradient, *gradients)]
    errors = [float((one - other).abs().max()) for one, other in zip(results, expected, strict=True)]
    assert not forward[0] and not backward[0], "nothing is sent before the norm"
    return MeasuredSplit(
        scheme=scheme,
        forward=tuple(forward[1:]),
        backward=tuple(backward[1:]),
        deferred=tuple(deferred),
        flops=flops,
        weights=sum(weight.to_local().numel() for weights, _ in stages for weight in weights),
        activations=activations,
        placements=tuple(placements[1:]),
        differences=(errors[0], errors[1], max(errors[2:])),
    )


def _stages(
    block: TwoMatrixBlock, scheme: SplitScheme, mesh: DeviceMesh, *, kept: Tensor
) -> list[tuple[list[Any], Callable[[Any], Any]]]:
    """Return norm, A, f, B and the end: the weights of each, split by the scheme, and the function that applies them.

    A bias is added to complete sums, so it belongs to the next stage and is split like that stage's input. (torch's
    types do not distinguish DTensors from tensors.)
    """
    _, _, middle, _, end = scheme.placements()
    biases: list[SplitBy | None] = ["columns" if placement == FEATURES else None for placement in (middle, end)]
    split_by = [None, None, scheme.first, biases[0], scheme.second, biases[1]]
    with torch.no_grad():
        parameters = block.ordered(block.parameters)
    weights: list[Any] = []
    for parameter, by in zip(parameters, split_by, strict=True):  # nn.Linear stores a matrix's columns as rows
        placement = Replicate() if by is None else Shard(0 if by == "columns" else 1)
        weights.append(distribute_tensor(parameter, mesh, [placement]).requires_grad_())
    gain, shift, first, bias, second, last = weights
    mask: Any = distribute_tensor(kept, mesh, [end])

    def function(x: DTensor) -> DTensor:  # f of each process's shard, which has everything that f needs
        assert not isinstance(x.placements[0], Partial)
        return DTensor.from_local(block.function(x.to_local()), x.device_mesh, x.placements)

    return [
        ([gain, shift], lambda x: F.layer_norm(x, gain.shape, gain, shift, block.norm.eps)),
        ([first], lambda x: F.linear(x, first)),
        ([bias], lambda x: function(x + bias)),
        ([second], lambda x: F.linear(x, second)),
        ([last], lambda x: mask * (x + last)),
    ]


def _partial_sum_error(block: TwoMatrixBlock, x: Tensor, ranks: int) -> float:
    """Return the relative error of f(x₁A₁) + f(x₂A₂) instead of f(x₁A₁ + x₂A₂)."""
    with torch.no_grad():
        _, _, first, bias, *_ = block.ordered(block.parameters)
        shards = zip(block.norm(x).chunk(ranks, -1), first.chunk(ranks, -1), strict=True)
        sums = [x_shard @ a_shard.T + bias / ranks for x_shard, a_shard in shards]
        exact = block.function(torch.stack(sums).sum(0))
        return float((sum(map(block.function, sums)) - exact).abs().max() / exact.abs().max())


def _mlp(sizes: BlockSizes) -> TwoMatrixBlock:
    module = Plain(config.Plain(d_ff=sizes.d_ff, activation="gelu-tanh"), sizes.d_model).double()
    parts: dict[str, Any] = {"first": module.up, "second": module.down, "function": module.activation}
    norm, order = LayerNorm(sizes.d_model).double(), torch.arange(sizes.d_ff)
    return TwoMatrixBlock("MLP", ("A", "GeLU", "B"), norm, module=module, order=order, **parts)


def _attention(sizes: BlockSizes) -> TwoMatrixBlock:
    """Return GPT's self-attention, with the columns of A ordered by heads, so that a process has whole heads."""
    d_head = sizes.d_model // sizes.heads
    module = SelfAttention(config.Attention(heads=sizes.heads, bias="all"), sizes.d_model, d_head).double()
    indices = torch.arange(sizes.tokens)[None]
    shape = position_config.Sizes(sizes.d_model, sizes.heads, d_head, sizes.tokens, causal=True, layers=1)
    unpositioned = position.build(position_config.NoPosition(), shape)
    mask = AttentionMask(Mask(causal=True), unpositioned, indices, keys=indices)

    def attend(u: Tensor) -> Tensor:
        """(batch, time, heads · 3 · d_head) → (batch, time, heads · d_head), for any number of heads."""
        q, k, v = u.unflatten(-1, (-1, 3, d_head)).permute(3, 0, 2, 1, 4)
        return reference_attention(QKV(q, k, v), module.scale, mask.dense())[0].transpose(1, 2).flatten(2)

    order = torch.arange(3 * sizes.d_model).view(3, sizes.heads, d_head).transpose(0, 1).flatten()
    parts: dict[str, Any] = {"first": module.qkv, "second": module.out, "function": attend, "order": order}
    norm = LayerNorm(sizes.d_model).double()
    return TwoMatrixBlock("Attention", ("QKV", "attention", "O"), norm, module=lambda x: module(x, mask), **parts)
