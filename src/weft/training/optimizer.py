"""Optimizers built from their settings. Tensors of two or more dimensions decay; gains and biases do not."""

from collections.abc import Container, Mapping, Sequence
from typing import Any, assert_never

import torch
from torch import Tensor, nn, optim

from weft.errors import ConfigError
from weft.models.stack import Stack
from weft.nn.block import block_linears
from weft.nn.linear import LowRank
from weft.recipe import optimizer as config


def decay_groups(
    model: nn.Module, weight_decay: float, without: Container[Tensor] = (), layer_decay: float = 1.0
) -> list[dict[str, Any]]:
    """Trainable parameters in groups: matrices (embeddings among them) with decay, vectors and scalars without.

    Those in `without` are left out. With `layer_decay` below 1 each layer has groups of its own, with the `factor` of
    its learning rate.
    """
    factors = layer_factors(model, layer_decay) if layer_decay < 1.0 else {}
    groups: dict[tuple[bool, float], list[Tensor]] = {}
    for p in model.parameters():
        if p.requires_grad and p not in without:
            groups.setdefault((p.dim() < 2, factors.get(p, 1.0)), []).append(p)
    return [
        {"params": groups[vectors, factor], "weight_decay": 0.0 if vectors else weight_decay, "factor": factor}
        for vectors, factor in sorted(groups)
    ]


def layer_factors(model: nn.Module, decay: float) -> dict[Tensor, float]:
    """decay ** (depth from the top) for every parameter (Howard and Ruder 2018, §3.2; Clark et al. 2020, appendix A).

    The head and the norm before it have depth 0, the last block 1, and so on down; embeddings and positions lie below
    the first block. An encoder and a decoder are counted each from its own top.
    """
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    if not stacks:
        raise ConfigError("optimizer.layer_decay: only a Transformer has layers to tell apart; leave it out")
    below = decay ** (1 + max(len(stack.blocks) for stack in stacks))
    factors: dict[Tensor, float] = dict.fromkeys(model.parameters(), below)
    for stack in stacks:
        for depth, block in enumerate(reversed(stack.blocks), start=1):
            factors |= dict.fromkeys(block.parameters(), decay**depth)
        if stack.norm is not None:
            factors |= dict.fromkeys(stack.norm.parameters(), 1.0)
    return factors | dict.fromkeys(model.get_submodule("output").parameters(), 1.0)


def block_matrices(model: nn.Module) -> dict[Tensor, list[int]]:
    """The trainable matrices inside Transformer blocks, each with the heights of those that lie in it."""
    heights: dict[Tensor, list[int]] = {}
    for linear in block_linears(model).values():
        if isinstance(linear, LowRank):
            heights |= {linear.a: [linear.rank] * len(linear.heights), linear.b: linear.heights}
        if linear.weight.requires_grad:
            heights[linear.weight] = linear.heights
    return heights


def build(settings: config.Optimizer, model: nn.Module, local: Mapping[str, Tensor] | None = None) -> optim.Optimizer:
    """The optimizer of a model's trainable parameters; one fused kernel updates all. `set_rate` sets the learning rate.
    `local` has this process's part of each parameter by name, where several processes share them and update these."""
    here: dict[Tensor, Tensor] = {p: local[name] for name, p in model.named_parameters()} if local else {}

    def groups(decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
        found = decay_groups(model, decay, layer_decay=layer_decay)
        return [{**group, "params": [here.get(p, p) for p in group["params"]]} for group in found]

    match settings:
        case config.AdamW():
            some = groups(settings.weight_decay, settings.layer_decay)
            return optim.AdamW(some, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
        case config.Adam():
            return optim.Adam(groups(0.0), lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
        case config.SGD():
            optimizer = optim.SGD(groups(settings.weight_decay), lr=0.0, momentum=settings.momentum, fused=True)
            if settings.momentum:  # the fused kernel leaves them uninitialised where the first update is held back
                for parameter in parameters(optimizer):
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            return optimizer
        case config.Muon():
            matrices = block_matrices(model)
            if not matrices:
                raise ConfigError("optimizer.kind = 'muon': needs a model made of Transformer blocks; use adamw here")
            return Muon(settings, matrices, decay_groups(model, settings.weight_decay, without=matrices))
        case _:
            assert_never(settings)


class Muon(optim.Optimizer):
    """Momentum made orthogonal (Jordan et al. 2024), and a fused AdamW beside it, as one optimizer with one state.

    The first group holds the matrices; the others, and what is remembered of them, are shared with the AdamW inside.
    The gradients of the matrices are used up: the step leaves something else in their place.
    """

    # as torch.amp's gradient scaling hands them to a fused optimizer: a divisor, and 1 where the step must be skipped
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, settings: config.Muon, matrices: dict[Tensor, list[int]], rest: list[dict[str, Any]]):
        first = {"params": list(matrices), "weight_decay": settings.weight_decay, "momentum": settings.momentum}
        super().__init__([first, *rest], {"lr": 0.0})
        self.heights, self.rounds = list(matrices.values()), settings.rounds
        self.adamw = None  # where an adapter's matrices are all that is trained
        if rest:
            self.adamw = optim.AdamW(self.param_groups[1:], lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
            self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        if self.adamw is not None:
            self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
            self.adamw.step()
        group = self.param_groups[0]
        lr: float | Tensor = group["lr"]  # 0 for a step that is held back; the device is not asked which it is
        if self.found_inf is not None:
            lr = lr * (1.0 - self.found_inf)
        held = [
            (parameter, of)
            for parameter, of in zip(group["params"], self.heights, strict=True)
            if parameter.grad is not None
        ]
        if not held:
            return
        weights, heights = zip(*held, strict=True)
        directions = self._directions(weights, group["momentum"])
        torch._foreach_mul_(weights, 1.0 - lr * group["weight_decay"])
        alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}  # (weights, direction) by shape
        for parameter, direction, of in zip(weights, directions, heights, strict=True):
            for part, way in zip(parameter.split(of), direction.split(of), strict=True):
                alike.setdefault(tuple(way.shape), []).append((part, way))
        for shape, pairs in alike.items():
            # root mean square 0.2, what AdamW's steps have (Liu et al. 2025, §2.2)
            pace = lr * 0.2 * max(shape) ** 0.5
            count = max(1, AT_ONCE // (shape[0] * shape[1]))
            for begin in range(0, len(pairs), count):
                parts, ways = zip(*pairs[begin : begin + count], strict=True)
                updates = orthogonalise(torch.stack(ways), self.rounds).float() * pace
                torch._foreach_sub_(parts, updates.unbind())

    def _directions(self, matrices: Sequence[Tensor], momentum: float) -> list[Tensor]:
        """The momentum of each with Nesterov's look ahead, in the place of its gradient."""
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        memories = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        if self.grad_scale is not None:
            torch._foreach_div_(gradients, self.grad_scale)
        if self.found_inf is not None:  # then the gradients, be they what they may, leave the momentum as it is
            for memory, gradient in zip(memories, gradients, strict=True):
                torch.where(self.found_inf > 0, memory, gradient, out=gradient)
        torch._foreach_lerp_(memories, gradients, 1.0 - momentum)
        torch._foreach_lerp_(gradients, memories, momentum)
        return gradients


AT_ONCE = 1 << 26  # numbers in a batch of matrices
QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at 0: small singular values reach 1 in few rounds (Jordan et al. 2024)


def orthogonalise(matrices: Tensor, rounds: int = 5) -> Tensor:
    """The singular values of each matrix (count, rows, columns) brought near 1 by Newton and Schulz's iteration. After
    5 rounds they lie between about 0.7 and 1.2, which serves as well as 1. In bf16 on a GPU, in fp32 elsewhere."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def set_rate(optimizer: optim.Optimizer, lr: float) -> None:
    """The learning rate of the next update, for every group; one with a `factor` has its own."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("factor", 1.0)


def parameters(optimizer: optim.Optimizer) -> list[Tensor]:
    """What an update changes."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def update(optimizer: optim.Optimizer, divisor: Tensor | None, overflow: Tensor | None = None) -> None:
    """One update with gradients / divisor, or none where overflow is 1; both () on the device, which nobody waits for.

    The division happens inside the fused kernel, by the door that torch.amp's gradient scaling uses, so that clipping
    costs no pass over the gradients of its own.
    """
    optimizer.grad_scale, optimizer.found_inf = divisor, overflow  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    optimizer.zero_grad(set_to_none=True)
