"""Mixture of experts (Shazeer et al. 2017): a router and many gated layers, of which each token reads a few.

    s = softmax(W_r x) or σ(W_r x),   y = scale · Σ over the chosen e of sₑ (f(x W_gₑ) ⊙ x W_uₑ) W_dₑ

Tokens are sorted by expert, so that each expert multiplies its tokens as one matrix: a loop over experts is the
reference, and one grouped product the fast path. Sorting is stable and nothing is summed by atomic additions, so that
both give the same bits each time.

A pass that is trained collects the sums of its routers in a list (`RoutingSums`), one tensor per layer, from which
`auxiliary_loss` is computed. The loss of a step is the mean over its micro-batches, weighted by their targets: each is
balanced by itself, over all processes, so that dividing a batch into more of them asks for balance in smaller parts.
"""

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from weft.nn import activations, config
from weft.nn.dropout import RowRng
from weft.nn.init import Initialiser
from weft.nn.linear import Linear

UNIT = 8  # widths of grouped products must be multiples of it: 16 bytes


class Choice(NamedTuple):
    """Experts of each token and the factors of their outputs, both (…, chosen)."""

    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """Linear layer from tokens to logits of experts, computed in fp32."""

    choice_bias: Tensor | None

    def __init__(self, settings: config.Experts, d_model: int):
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.empty(settings.experts, d_model))
        self.bias = nn.Parameter(torch.empty(settings.experts)) if settings.router_bias else None
        # no gradient: `balance` updates it
        self.register_buffer("choice_bias", None if settings.choice_bias is None else torch.zeros(settings.experts))

    @torch.no_grad()
    def reset_parameters(self, init: Initialiser) -> None:
        """Draw the matrix and zero the biases."""
        init.matrix(self.weight)
        for bias in (self.bias, self.choice_bias):
            if bias is not None:
                bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(…, d_model) → logits (…, experts) in fp32."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probability of each expert, (…, experts), for the auxiliary loss."""
        if self.settings.score == "sigmoid":
            scores = logits.sigmoid()
            return scores / scores.sum(-1, keepdim=True)
        return logits.softmax(-1)

    def choose(self, logits: Tensor) -> Choice:
        """Choose experts by their logits (…, experts)."""
        settings = self.settings
        if settings.score == "sparse-mixer":
            return self._choose_in_turn(logits)
        scores = {"softmax": lambda: logits.softmax(-1), "sigmoid": logits.sigmoid}.get(
            settings.score, lambda: logits
        )()
        ranked = scores if self.choice_bias is None else scores + self.choice_bias
        kept = settings.kept_groups or settings.groups
        if kept < settings.groups:
            grouped = ranked.unflatten(-1, (settings.groups, -1))
            best = grouped.topk(2 if settings.group_score == "best-two" else 1).values.sum(-1)
            others = torch.ones_like(best, dtype=torch.bool).scatter(-1, best.topk(kept).indices, False)
            ranked = grouped.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(-2)
        experts = ranked.topk(settings.chosen).indices
        weights = scores.gather(-1, experts)
        if settings.score == "softmax-chosen":
            weights = weights.softmax(-1)
        elif settings.renormalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Choice(experts, weights * settings.scale)

    def _choose_in_turn(self, logits: Tensor) -> Choice:
        """Choose the best expert, then the best of the others, each weighted against those with similar logits."""
        left, experts, weights = logits, [], []
        for _ in range(self.settings.chosen):
            best, expert = left.max(-1, keepdim=True)
            far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * self.settings.jitter
            weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, expert))
            experts.append(expert)
            left = left.scatter(-1, expert, -torch.inf)
        return Choice(torch.cat(experts, -1), torch.cat(weights, -1) * self.settings.scale)

    @torch.no_grad()
    def balance(self, assigned: Tensor, factor: Tensor | float = 1.0) -> None:
        """Move the bias for the choice towards experts with less than the mean of `assigned` (experts,) tokens. With
        `factor` 0 nothing changes (DeepSeek-AI 2024, §2.1.2)."""
        if self.choice_bias is not None and self.settings.choice_bias:
            direction = torch.sign(assigned.mean() - assigned)
            self.choice_bias += self.settings.choice_bias * factor * direction.to(self.choice_bias.dtype)


class ExpertLayers(nn.Module):
    """Weights of all experts: `gate_up` (experts, 2 · d_ff, d_model), gate first, and `down` (experts, d_model, d_ff),
    with `gate_up_bias` (experts, 2 · d_ff) and `down_bias` (experts, d_model) if there are biases."""

    fused: ClassVar[bool] = True  # whether a matrix of all experts is one tensor

    def __init__(self, settings: config.Experts, d_model: int):
        super().__init__()
        self.settings, experts, d_ff = settings, settings.experts, settings.d_ff
        self.activation = activations.build(settings.activation, settings.beta)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * d_ff, d_model))
        self.down = nn.Parameter(torch.empty(experts, d_model, d_ff))
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * d_ff)) if settings.bias else None
        self.down_bias = nn.Parameter(torch.empty(experts, d_model)) if settings.bias else None
        self.exchange: Any = None  # set by expert parallelism: this process holds some of the experts

    @torch.no_grad()
    def reset_parameters(self, init: Initialiser) -> None:
        """Draw the matrices of each expert and zero the biases."""
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            for matrix in gate_up.chunk(2):
                init.matrix(matrix)
            init.matrix(down, into_residual=True)
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                bias.zero_()

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Rows (rows, d_model) sorted by expert, with the `ends` (experts,) int32 of the experts' rows → (rows,
        d_model)."""
        device = x.device.type
        x = x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
        return self._compute(x, ends) if self.exchange is None else self.exchange(x, ends, self._compute)

    def _compute(self, x: Tensor, ends: Tensor) -> Tensor:
        gate, up = self.product("gate_up", x, ends).chunk(2, dim=-1)
        if self.settings.limit is not None:
            gate, up = gate.clamp(max=self.settings.limit), up.clamp(-self.settings.limit, self.settings.limit)
        up = up + self.settings.up_offset if self.settings.up_offset else up
        return self.product("down", self.activation(gate) * up, ends)

    def product(self, name: Literal["gate_up", "down"], x: Tensor, ends: Tensor) -> Tensor:
        """Product of each expert's rows of x (rows, inputs) with its matrix → (rows, outputs)."""
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
        if self.exchange is not None:
            weight, bias = self.exchange.local(weight), None if bias is None else self.exchange.local(bias)
        return (grouped_product if self.groups_products(x) else looped_product)(x, weight, ends, bias=bias)

    def groups_products(self, x: Tensor) -> bool:
        """Whether one grouped product is used: in bf16 on a GPU, and in compiled code, which cannot loop over counts
        that it does not know."""
        fits = self.fused and x.dtype == torch.bfloat16 and not (x.shape[-1] % UNIT or self.settings.d_ff % UNIT)
        return fits and (x.is_cuda or torch.compiler.is_compiling())


def looped_product(x: Tensor, weight: Tensor, ends: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Product of each expert's rows of x (rows, inputs) with its matrix of `weight` (experts, outputs, inputs)."""
    if torch.compiler.is_compiling():  # or the counts of every step would be constants of another graph
        torch._dynamo.graph_break()
    if isinstance(ends, FakeTensor):  # a model without weights, whose graph is drawn: each expert reads as many
        ends = torch.arange(1, len(weight) + 1) * len(x) // len(weight)
    begin, parts = 0, []
    biases = [None] * len(weight) if bias is None else bias.to(x.dtype).unbind()
    for end, matrix, added in zip(ends.tolist(), weight.unbind(), biases, strict=True):
        if end > begin:
            parts.append(F.linear(x[begin:end], matrix.to(x.dtype), added))
        begin = end
    return torch.cat(parts) if parts else F.linear(x, weight[0].to(x.dtype), biases[0])  # so that gradients exist


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Product as `looped_product`, in one kernel and without waiting for the device."""
    y = F.grouped_mm(x, weight.to(x.dtype).mT, offs=ends)
    if bias is None:
        return y
    # a product instead of look-ups, whose gradients would be atomic additions
    begins = F.pad(ends[:-1], (1, 0))
    row = torch.arange(len(x), device=x.device)[:, None]
    return y + ((row >= begins) & (row < ends)).to(x.dtype) @ bias.to(x.dtype)


class Reordered(torch.autograd.Function):
    """Rows of x (rows, width), each repeated len(order) / rows times, in the order `order`; `inverse` undoes it. The
    gradient is a look-up and a sum too, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.repeats = len(order) // max(1, len(x))
        return x.index_select(0, order // max(1, ctx.repeats))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = upstream[0].index_select(0, inverse)
        return rows.unflatten(0, (-1, max(1, ctx.repeats))).sum(1), None, None


class Experts(nn.Module):
    """Router, experts, and shared experts if there are any; `shared` reads every token."""

    def __init__(self, settings: config.Experts, d_model: int, shared: nn.Module | None):
        super().__init__()
        self.settings = settings
        self.router = Router(settings, d_model)
        self.experts = ExpertLayers(settings, d_model)
        self.shared = shared
        self.shared_gate = Linear(d_model, 1, bias=False) if settings.shared == "gated" else None

    def forward(
        self,
        x: Tensor,
        rng: RowRng | None = None,
        *,
        real: Tensor | None = None,
        routing: list[Tensor] | None = None,
    ) -> Tensor:
        """(batch, time, d_model) → (batch, time, d_model). The sums of the router over the tokens that are `real`
        (batch, time) are appended to `routing`."""
        logits = self.router(x)
        experts, weights = self.router.choose(logits)
        kept = self._within_capacity(experts, real) if self.training and self.settings.capacity is not None else None
        if kept is not None:
            weights = weights * kept
        if routing is not None:
            routing.append(RoutingSums.of(self.router.probabilities(logits), logits, experts, kept=kept, real=real))
        y = self.mix(x.flatten(0, -2), Choice(experts.flatten(0, -2), weights.flatten(0, -2))).view(x.shape)
        if self.shared is None:
            return y
        shared = self.shared(x, rng)
        return y + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)

    def mix(self, x: Tensor, choice: Choice) -> Tensor:
        """Weighted sum of the chosen experts' outputs for tokens x (tokens, d_model)."""
        flat, chosen = choice.experts.flatten(), choice.experts.shape[-1]
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        numbers = torch.arange(self.settings.experts, device=flat.device)
        ends = torch.searchsorted(flat[order], numbers, right=True, out_int32=True)
        rows = Reordered.apply(x, order, inverse)
        by_input = self.settings.weighs == "input"
        if by_input:
            rows = (rows * choice.weights.flatten()[order, None]).to(rows.dtype)
        outputs = Reordered.apply(self.experts(rows, ends), inverse, order).unflatten(0, (-1, chosen))
        summed = outputs.sum(1) if by_input else (outputs * choice.weights.unsqueeze(-1)).sum(1)
        return summed.to(outputs.dtype)

    def _within_capacity(self, experts: Tensor, real: Tensor | None) -> Tensor:
        """Which choices (batch, time, chosen) an expert has room for: earlier tokens come first, and first choices of
        all tokens before second ones (Lepikhin et al. 2021, §2.2)."""
        settings = self.settings
        assert settings.capacity is not None
        one_hot = F.one_hot(experts, settings.experts)
        if real is not None:
            one_hot = one_hot * real[..., None, None]
        flat = one_hot.flatten(0, -3).transpose(0, 1).flatten(0, 1)  # (chosen · tokens, experts)
        earlier = (flat.cumsum(0) - flat).unflatten(0, (settings.chosen, -1)).transpose(0, 1).view_as(one_hot)
        rank = (earlier * one_hot).sum(-1)
        tokens = experts[..., 0].numel() if real is None else real.sum()
        return rank < settings.capacity * tokens * settings.chosen / settings.experts


class RoutingSums(NamedTuple):
    """Sums over the tokens that the routers of a pass read, by layer."""

    probability: Tensor  # (layers, experts), of each expert; with a gradient, as is `squared`
    squared: Tensor  # (layers,), squares of the logsumexp of a token's logits
    assigned: Tensor  # (layers, experts), tokens that chose each expert
    entropy: Tensor  # (layers,), of the tokens' probabilities, in nats
    dropped: Tensor  # (layers,), choices beyond an expert's capacity
    tokens: Tensor  # (layers,)

    @staticmethod
    def of(
        probabilities: Tensor, logits: Tensor, experts: Tensor, *, kept: Tensor | None, real: Tensor | None
    ) -> Tensor:
        """Sums of one layer as one tensor, (2 · experts + 4,)."""
        mask = torch.ones_like(logits[..., :1]) if real is None else real[..., None].to(logits)
        chosen = torch.zeros_like(logits).scatter(-1, experts, 1.0)
        detached = probabilities.detach()
        scalars = [
            logits.logsumexp(-1, keepdim=True).square(),
            -torch.special.xlogy(detached, detached).sum(-1, keepdim=True),
            torch.zeros_like(mask) if kept is None else (~kept).sum(-1, keepdim=True),
            torch.ones_like(mask),
        ]
        return (torch.cat([probabilities, chosen, *scalars], dim=-1) * mask).flatten(0, -2).sum(0)

    @classmethod
    def stacked(cls, layers: Tensor) -> "RoutingSums":
        """Sums of all layers from their tensors, (layers, 2 · experts + 4)."""
        experts = layers.shape[-1] // 2 - 2
        probability, assigned, scalars = layers.split([experts, experts, 4], dim=-1)
        squared, entropy, dropped, tokens = scalars.unbind(-1)
        return cls(probability, squared, assigned, entropy=entropy, dropped=dropped, tokens=tokens)

    def auxiliary_loss(self, settings: config.Experts, everywhere: "RoutingSums") -> Tensor:
        """Weighted sum of the balance loss, pooled over layers, and of the router's z-loss, (): the share of this
        process's tokens in that of all tokens, whose sums are `everywhere`."""
        tokens = everywhere.tokens.sum().clamp(min=1.0)
        fraction, mean = everywhere.assigned.sum(0) / tokens, self.probability.sum(0) / tokens
        balance = settings.experts * (fraction * mean).sum()
        return settings.balance_loss * balance + settings.z_loss * self.squared.sum() / tokens

    def metrics(self) -> Tensor:
        """Metrics of a step, (4,): tokens of the busiest expert as a multiple of the mean, in the layer where it is
        largest; fraction of experts without a token; mean entropy in nats; fraction of choices that were dropped."""
        tokens = self.tokens.clamp(min=1.0)
        load = self.assigned / self.assigned.mean(-1, keepdim=True).clamp(min=1e-9)
        choices = self.assigned.sum().clamp(min=1.0)
        idle = (self.assigned == 0).float().mean()
        return torch.stack([load.max(), idle, (self.entropy / tokens).mean(), self.dropped.sum() / choices])
