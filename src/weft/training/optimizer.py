"""Optimizers built from their settings. Weight decay applies to matrices; gains and biases do not decay."""

import inspect
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, assert_never

import torch
from torch import Tensor, nn, optim

from weft.errors import ConfigError
from weft.models.stack import Stack
from weft.nn.block import block_linears
from weft.nn.experts import ExpertLayers
from weft.nn.linear import LowRank
from weft.recipe import optimizer as config

if TYPE_CHECKING:  # takes a second to load
    from weft.parallel.apply import ShardedParallel
    from weft.parallel.sharding import MatrixExchange

EXPERT_BIASES = (".gate_up_bias", ".down_bias")  # a vector per expert


class Eager(optim.Optimizer):
    """Optimizer whose methods do not have torch's marks for torch.compile, which import the compiler. That takes
    seconds, and weft compiles only the passes of models."""

    add_param_group = inspect.unwrap(optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(optim.Optimizer.zero_grad)


class AdamW(Eager, optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(optim.AdamW.step))


class Adam(Eager, optim.Adam):
    step = torch.no_grad()(inspect.unwrap(optim.Adam.step))


class SGD(Eager, optim.SGD):
    step = torch.no_grad()(inspect.unwrap(optim.SGD.step))


def decay_groups(
    model: nn.Module, weight_decay: float, *, without: Container[Tensor] = (), layer_decay: float = 1.0
) -> list[dict[str, Any]]:
    """Return groups of trainable parameters: matrices and embeddings with weight decay, vectors and scalars without.

    Parameters in `without` are left out. With `layer_decay` each layer has groups with the `factor` of its rate.
    """
    factors = layer_factors(model, layer_decay) if layer_decay < 1.0 else {}
    groups: dict[tuple[bool, float], list[Tensor]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad and p not in without:
            vectors = p.dim() < 2 or name.endswith(EXPERT_BIASES)
            groups.setdefault((vectors, factors.get(p, 1.0)), []).append(p)
    return [
        {"params": groups[vectors, factor], "weight_decay": 0.0 if vectors else weight_decay, "factor": factor}
        for vectors, factor in sorted(groups)
    ]


def layer_factors(model: nn.Module, decay: float) -> dict[Tensor, float]:
    """Return decay ** depth of every parameter (Howard and Ruder 2018, §3.2; Clark et al. 2020, appendix A).

    The head and the norm before it have depth 0, the last block 1, and so on down; embeddings and positions are below
    the first block. The depths of an encoder and of a decoder are counted separately.
    """
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    if not stacks:
        raise ConfigError("optimizer.layer_decay: only a Transformer has layers to distinguish; leave it out")
    below = decay ** (1 + max(len(stack.blocks) for stack in stacks))
    factors: dict[Tensor, float] = dict.fromkeys(model.parameters(), below)
    for stack in stacks:
        for depth, block in enumerate(reversed(stack.blocks), start=1):
            factors |= dict.fromkeys(block.parameters(), decay**depth)
        if stack.norm is not None:
            factors |= dict.fromkeys(stack.norm.parameters(), 1.0)
    return factors | dict.fromkeys(model.get_submodule("output").parameters(), 1.0)


def block_matrices(model: nn.Module) -> dict[Tensor, list[int]]:
    """Return the trainable matrices of Transformer blocks, each with the heights of the matrices fused in it; those of
    experts have a third dimension."""
    heights: dict[Tensor, list[int]] = {}
    for linear in block_linears(model).values():
        if isinstance(linear, LowRank):
            heights |= {linear.a: [linear.rank] * len(linear.heights), linear.b: linear.heights}
        if linear.weight.requires_grad:
            heights[linear.weight] = linear.heights
    for experts in (module for module in model.modules() if isinstance(module, ExpertLayers)):
        count, d_model, d_ff = experts.down.shape
        if experts.down.requires_grad:
            heights |= {experts.gate_up: [d_ff] * (2 * count), experts.down: [d_model] * count}
    return heights


def build(settings: config.Optimizer, model: nn.Module, sharded: "ShardedParallel | None" = None) -> optim.Optimizer:
    """Build the optimizer of a model's trainable parameters, with fused kernels; `set_rate` sets its learning rate.
    If the model is `sharded`, the optimizer updates this process's part of each parameter."""
    parts: dict[Tensor, Tensor] = {}
    if sharded is not None:
        parts = {p: sharded.local[name] for name, p in model.named_parameters()}

    def groups(decay: float, **options: Any) -> list[dict[str, Any]]:
        full = decay_groups(model, decay, **options)
        return [{**group, "params": [parts.get(p, p) for p in group["params"]]} for group in full]

    match settings:
        case config.AdamW():
            decayed = groups(settings.weight_decay, layer_decay=settings.layer_decay)
            return AdamW(decayed, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
        case config.Adam():
            return Adam(groups(0.0), lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
        case config.SGD():
            optimizer = SGD(groups(settings.weight_decay), lr=0.0, momentum=settings.momentum, fused=True)
            if settings.momentum:  # the fused kernel would leave it uninitialised if the first update is skipped
                for parameter in parameters(optimizer):
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            return optimizer
        case config.Muon():
            matrices = block_matrices(model)
            if not matrices:
                reason = "needs a model made of Transformer blocks; use adamw instead"
                raise ConfigError(f"optimizer.kind = 'muon': {reason}")
            others = groups(settings.weight_decay, without=matrices)
            exchange = None if sharded is None else sharded.exchange(matrices)
            local = {parts.get(matrix, matrix): heights for matrix, heights in matrices.items()}
            return Muon(settings, local, others, exchange=exchange)
        case _:
            assert_never(settings)


MAX_STACKED = 1 << 26  # elements of the matrices that are orthogonalised in one batch
QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at 0: small singular values reach 1 in few rounds (Jordan et al. 2024)


class Muon(Eager):
    """Orthogonalised momentum (Jordan et al. 2024) for matrices, and a fused AdamW for the other parameters.

    The first group holds the matrices, whose gradients a step overwrites; AdamW shares the other groups and the state.
    With an `exchange` this process has parts of the matrices; it orthogonalises the momentum of some whole ones.
    """

    # set by `update`, as torch.amp's GradScaler does for a fused optimizer: a divisor, and 1 if the step is skipped
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        settings: config.Muon,
        matrices: dict[Tensor, list[int]],
        others: list[dict[str, Any]],
        *,
        exchange: "MatrixExchange | None" = None,
    ):
        first = {"params": list(matrices), "weight_decay": settings.weight_decay, "momentum": settings.momentum}
        super().__init__([first, *others], {"lr": 0.0})
        self.heights, self.rounds, self.exchange = list(matrices.values()), settings.rounds, exchange
        self.adamw = None  # if only the matrices of an adapter are trained
        if others:
            self.adamw = AdamW(self.param_groups[1:], lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
            self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        if self.adamw is not None:
            self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
            self.adamw.step()
        group = self.param_groups[0]
        lr: float | Tensor = group["lr"]
        if self.found_inf is not None:  # 0 if the step is skipped, without waiting for the device
            lr = lr * (1.0 - self.found_inf)
        weights = {number: matrix for number, matrix in enumerate(group["params"]) if matrix.grad is not None}
        directions: dict[int, Tensor] = {}
        if weights:
            directions = dict(zip(weights, self._directions([*weights.values()], group["momentum"]), strict=True))
            torch._foreach_mul_([*weights.values()], 1.0 - lr * group["weight_decay"])
        if self.exchange is None:
            self._subtract_updates(weights, directions, lr)
            return

        def changes(whole: dict[int, Tensor]) -> dict[int, Tensor]:
            zeros = {number: torch.zeros_like(direction) for number, direction in whole.items()}
            self._subtract_updates(zeros, whole, lr)
            return zeros

        for number, matrix in enumerate(group["params"]):  # processes exchange all matrices, updated or not
            if number not in directions:
                directions[number] = torch.zeros_like(matrix)
        local = [directions[number] for number in range(len(directions))]
        for number, change in enumerate(self.exchange.map(local, changes)):
            if number in weights:
                weights[number].add_(change)

    def _subtract_updates(self, weights: Mapping[int, Tensor], directions: Mapping[int, Tensor], lr: Any) -> None:
        """Orthogonalise the directions of whole matrices, by number, and subtract them from the weights times `lr`."""
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}  # (weights, direction)
        for number, direction in directions.items():
            heights = self.heights[number]
            stacked_pair = (matrices.flatten(0, -2).split(heights) for matrices in (weights[number], direction))
            for pair in zip(*stacked_pair, strict=True):
                by_shape.setdefault(tuple(pair[1].shape), []).append(pair)
        for shape, pairs in by_shape.items():
            # root mean square 0.2, as AdamW's updates have (Liu et al. 2025, §2.2)
            rate = lr * 0.2 * max(shape) ** 0.5
            count = max(1, MAX_STACKED // (shape[0] * shape[1]))
            for begin in range(0, len(pairs), count):
                parts, stacked = zip(*pairs[begin : begin + count], strict=True)
                updates = orthogonalise(torch.stack(stacked), self.rounds).float() * rate
                torch._foreach_sub_(parts, updates.unbind())

    def _directions(self, matrices: Sequence[Tensor], momentum: float) -> list[Tensor]:
        """Update the momentum of each matrix and return it with Nesterov's look-ahead, overwriting the gradients."""
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        buffers = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        if self.grad_scale is not None:
            torch._foreach_div_(gradients, self.grad_scale)
        if self.found_inf is not None:  # a skipped step leaves the momentum unchanged, even if gradients are NaN
            for buffer, gradient in zip(buffers, gradients, strict=True):
                torch.where(self.found_inf > 0, buffer, gradient, out=gradient)
        torch._foreach_lerp_(buffers, gradients, 1.0 - momentum)
        torch._foreach_lerp_(gradients, buffers, momentum)
        return gradients


def orthogonalise(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Bring the singular values of matrices (count, rows, columns) near 1, 0.7 to 1.2, by Newton–Schulz iteration."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()  # a CPU is fastest in fp32
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def set_rate(optimizer: optim.Optimizer, lr: float | Tensor) -> None:
    """Set the learning rate of the next update, times the `factor` of a group if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("factor", 1.0)


def parameters(optimizer: optim.Optimizer) -> list[Tensor]:
    """Return all parameters that the optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def update(optimizer: optim.Optimizer, divisor: Tensor | None, skip: Tensor | None = None) -> None:
    """Update the weights with gradients / divisor, unless `skip` is 1; both () on the device, without waiting for it.

    The fused kernel divides, through attributes that torch.amp's GradScaler uses: clipping needs no extra pass.
    """
    optimizer.grad_scale, optimizer.found_inf = divisor, skip  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    optimizer.zero_grad(set_to_none=True)
