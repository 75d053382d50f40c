"""Mixtures of experts: the router's formula, both ways to multiply, the auxiliary losses, and what a step collects."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.spread import spread
from torch import Tensor
from torch.nn import functional as F

from weft.config import Config
from weft.costs.count import count
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.presets import preset
from weft.models.transformer import RowInputs
from weft.nn import feedforward
from weft.nn.config import Experts as Settings
from weft.nn.config import NormalInit
from weft.nn.experts import Choice, Experts, Router, RoutingSums, grouped_product, looped_product
from weft.nn.init import Initialiser

D = 16


def layer(**changes: Any) -> Experts:
    torch.manual_seed(0)
    built = feedforward.build(Settings(**{"experts": 8, "d_ff": 24, **changes}), D)
    assert isinstance(built, Experts)
    parts: list[Any] = [part for part in built.modules() if hasattr(part, "reset_parameters")]
    for part in parts:
        part.reset_parameters(Initialiser(NormalInit(std=0.3), D, 1))
    for name, parameter in built.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    return built


def by_token(module: Experts, x: Tensor) -> Tensor:
    """The definition, token by token and expert by expert."""
    settings, out = module.settings, []
    for row in x.flatten(0, 1):
        experts, weights = module.router.choose(module.router(row))
        total = torch.zeros(D)
        for e, weight in zip(experts.tolist(), weights, strict=True):
            inner = module.experts
            gate_up = inner.gate_up[e] @ (row * weight if settings.weighs == "input" else row)
            gate_up = gate_up if inner.gate_up_bias is None else gate_up + inner.gate_up_bias[e]
            gate, up = gate_up.chunk(2)
            if settings.limit is not None:
                gate, up = gate.clamp(max=settings.limit), up.clamp(-settings.limit, settings.limit)
            hidden = gate * torch.sigmoid(settings.beta * gate) * (up + settings.up_offset)
            y = inner.down[e] @ hidden
            y = y if inner.down_bias is None else y + inner.down_bias[e]
            total = total + (y if settings.weighs == "input" else weight * y)
        if module.shared is not None:
            gate = torch.sigmoid(module.shared_gate(row)) if module.shared_gate is not None else 1.0
            total = total + gate * module.shared(row)
        out.append(total)
    return torch.stack(out).view(x.shape)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"chosen": 1, "renormalised": False, "scale": 2.5},
    {"score": "softmax-chosen", "bias": True, "limit": 0.7, "up_offset": 1.0, "beta": 1.702, "router_bias": True},
    {"score": "sigmoid", "choice_bias": 0.001, "groups": 4, "kept_groups": 2, "shared": "added", "chosen": 3},
    {"score": "sigmoid", "chosen": 1, "renormalised": False, "weighs": "input", "shared": "gated", "shared_d_ff": 8},
    {"groups": 2, "kept_groups": 1, "group_score": "maximum", "chosen": 4},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_every_variant_is_its_definition(changes: dict[str, Any]) -> None:
    module, x = layer(**changes), torch.randn(2, 5, D)
    torch.testing.assert_close(module(x), by_token(module, x), atol=1e-5, rtol=1e-5)


def test_scores_before_and_after_the_choice() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])

    def weights(**changes: Any) -> list[float]:
        router = Router(Settings(experts=4, d_ff=8, **changes), D)
        return router.choose(logits).weights.tolist()

    every = logits.softmax(-1)
    assert weights(renormalised=False) == pytest.approx(every[:2].tolist())
    assert weights() == pytest.approx((every[:2] / every[:2].sum()).tolist())
    assert weights(score="softmax-chosen") == pytest.approx(logits[:2].softmax(-1).tolist())
    sigmoid = logits[:2].sigmoid()
    assert weights(score="sigmoid", scale=3.0) == pytest.approx((3 * sigmoid / sigmoid.sum()).tolist())


def test_the_choice_bias_changes_the_choice_but_no_weight() -> None:
    router = Router(Settings(experts=4, chosen=2, d_ff=8, score="sigmoid", choice_bias=0.5, renormalised=False), D)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    router.balance(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    assert router.choice_bias is not None and router.choice_bias.tolist() == [-0.5, -0.5, 0.5, 0.5]
    chosen = router.choose(logits)
    assert sorted(chosen.experts.tolist()) == [2, 3]
    assert sorted(chosen.weights.tolist()) == pytest.approx(sorted(logits[2:].sigmoid().tolist()))
    router.balance(torch.tensor([9.0, 9.0, 0.0, 0.0]), 0.0)  # a discarded step
    assert router.choice_bias.tolist() == [-0.5, -0.5, 0.5, 0.5]


def test_groups_are_ranked_by_their_best_or_their_best_two() -> None:
    logits = torch.tensor([3.0, -9.0, 2.0, 1.9])  # the best expert is in the first group, the best two in the second
    for group_score, group in (("maximum", {0, 1}), ("best-two", {2, 3})):
        settings = Settings(experts=4, d_ff=8, score="softmax-chosen", groups=2, kept_groups=1, group_score=group_score)
        assert set(Router(settings, D).choose(logits).experts.tolist()) == group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_products_equal_the_loop(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(1)
    ends = torch.tensor([3, 3, 20, 32], dtype=torch.int32)  # the second expert reads nothing
    results = []
    for product in (looped_product, grouped_product):
        torch.manual_seed(2)
        x, weight = torch.randn(32, D, dtype=dtype), torch.randn(4, 24, D, dtype=dtype)
        added = torch.randn(4, 24, dtype=dtype) if bias else None
        inputs = [each.requires_grad_() for each in (x, weight, added) if each is not None]
        y = product(x, weight, ends, bias=added)
        (y * torch.linspace(-1, 1, 24, dtype=dtype)).sum().backward()
        results.append([y, *(each.grad for each in inputs)])
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for looped, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, looped, atol=tolerance, rtol=tolerance)


def test_gradients_are_those_of_the_definition() -> None:
    module, x = layer(shared="gated", bias=True, router_bias=True), torch.randn(2, 4, D)
    gradients = []
    for function in (module, lambda x: by_token(module, x)):
        module.zero_grad()
        given = x.clone().requires_grad_()
        function(given).square().sum().backward()
        gradients.append([given.grad, *(p.grad for p in module.parameters())])
    for ours, defined in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, defined, atol=1e-4, rtol=1e-4)


def test_the_auxiliary_loss_pools_layers_and_leaves_padding_out() -> None:
    """Mixtral's definition, on the logits of all layers together."""
    module, E = layer(z_loss=0.5, balance_loss=2.0), 8
    real = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    routing: list[Tensor] = []
    logits = []
    for _ in range(2):
        x = torch.randn(2, 4, D)
        module(x, real=real, routing=routing)
        logits.append(module.router(x)[real])
    every = torch.cat(logits)
    probability = every.softmax(-1)
    chosen = F.one_hot(probability.topk(2).indices, E).float().mean(0)
    expected = 2.0 * E * (chosen * probability.mean(0)).sum() + 0.5 * every.logsumexp(-1).square().mean()
    sums = RoutingSums.stacked(torch.stack(routing))
    torch.testing.assert_close(sums.auxiliary_loss(module.settings, sums), expected)
    assert sums.tokens.tolist() == [5, 5] and sums.assigned.sum(-1).tolist() == [10, 10]


def test_metrics_of_a_collapsed_router() -> None:
    module = layer()
    with torch.no_grad():
        module.router.weight.zero_()[:2] = 1.0  # all tokens choose the first two
    routing: list[Tensor] = []
    module(torch.ones(1, 6, D), routing=routing)
    busiest, idle, _, dropped = RoutingSums.stacked(torch.stack(routing)).metrics().tolist()
    assert (busiest, idle, dropped) == (4.0, 0.75, 0.0)


def test_capacity_drops_later_tokens_in_training_alone() -> None:
    module = layer(chosen=1, capacity=1.0)
    with torch.no_grad():
        module.router.weight.zero_()[3] = 1.0
    x, routing = torch.ones(1, 16, D), list[Tensor]()
    y = module(x, routing=routing)
    assert y[0, :2].abs().sum(-1).gt(0).all() and y[0, 2:].abs().sum() == 0  # 16 tokens · 1 / 8 experts
    assert RoutingSums.stacked(torch.stack(routing)).dropped.tolist() == [14]
    assert module.eval()(x)[0].abs().sum(-1).gt(0).all()


def test_rows_keep_their_bits_whatever_is_beside_them() -> None:
    module, x = layer(), torch.randn(3, 7, D)
    choice = module.router.choose(module.router(x.flatten(0, 1)))
    whole = module.mix(x.flatten(0, 1), choice)
    torch.testing.assert_close(whole, module.mix(x.flatten(0, 1), Choice(*choice)), rtol=0, atol=0)
    torch.testing.assert_close(module(x)[:1], module(x[:1]), atol=1e-6, rtol=1e-6)


def test_recomputation_collects_nothing_twice() -> None:
    model, tokens = build(preset("moe-tiny").replace(vocab_size=64)), torch.randint(64, (2, 8))
    assert model.decoder is not None
    results = []
    for recompute in (False, True):
        model.decoder.recompute = recompute
        model.zero_grad()
        routing: list[Tensor] = []
        features = model.features(tokens, routing=routing)
        sums = RoutingSums.stacked(torch.stack(routing))
        (features.square().sum() + sums.auxiliary_loss(model.config.feedforward, sums)).backward()
        assert len(routing) == model.config.layers
        results.append([p.grad for p in model.parameters()])
    for plain, again in zip(*results, strict=True):
        torch.testing.assert_close(plain, again)


def small(**changes: Any) -> Decoder:
    inner = {"kind": "experts", "experts": 4, "d_ff": 16, "dense": {"kind": "gated", "d_ff": 40}, **changes}
    return preset("moe-tiny").replace(layers=4, d_model=32, vocab_size=64, feedforward=inner)


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"first_dense": 2}, [0, 1]),
        ({"every": 2}, [0, 2]),
        ({"dense_layers": [1, 3]}, [1, 3]),
        ({"shared": "gated", "bias": True, "router_bias": True, "choice_bias": 0.01}, []),
    ],
)
def test_dense_layers_are_built_and_counted(changes: dict[str, Any], dense: list[int]) -> None:
    settings = small(**changes)
    model: Any = build(settings)
    kinds = [type(block.feedforward).__name__ for block in model.decoder.blocks]
    assert [n for n, kind in enumerate(kinds) if kind == "Gated"] == dense
    cost = count(settings)
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    idle = sum(part.parameters for part in cost.components if part.name == "experts") // 2  # 2 of 4 are chosen
    assert cost.active == cost.parameters - idle
    experts = next(part for part in cost.components if part.name == "experts")
    assert experts.flops == 2 * cost.length * 2 * 3 * 32 * 16 * (4 - len(dense))


def test_decoding_steps_equal_the_whole_pass() -> None:
    torch.manual_seed(3)
    model, tokens = build(small(shared="added", first_dense=1)).eval(), torch.randint(64, (2, 9))
    state = model.start(2, 9)
    stepped = torch.cat(
        [model.step(tokens[:, :4], state), *(model.step(tokens[:, n : n + 1], state) for n in range(4, 9))], 1
    )
    torch.testing.assert_close(stepped, model(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen": 9}, "chosen = 9: a token can choose at most experts = 8"),
        ({"groups": 3}, "groups = 3 does not divide experts = 8"),
        ({"groups": 4, "kept_groups": 5}, "kept_groups = 5: there are groups = 4"),
        ({"groups": 8, "kept_groups": 2}, "'best-two' needs two experts in each group"),
        ({"groups": 4, "kept_groups": 1, "chosen": 3}, "chosen = 3: 1 kept groups of 2 have 2 experts"),
        ({"shared_d_ff": 8}, "shared_d_ff: there are no shared experts"),
        ({"every": 2}, "set dense, the feed-forward layer of dense layers"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    tree: dict[str, Any] = {"kind": "experts", "experts": 8, "d_ff": 16, **changes}
    with pytest.raises(ValidationError, match=message):
        preset("moe-tiny").replace(feedforward=tree)


def test_blocks_that_share_weights_are_refused() -> None:
    encoder: Config = preset("bert-tiny")
    with pytest.raises(ValidationError, match="layers of experts can't share weights"):
        encoder.replace(distinct_layers=1, feedforward={"kind": "experts", "experts": 4, "d_ff": 16})


@pytest.mark.slow
@pytest.mark.parametrize(("bf16", "recompute"), spread([(True, False), (True, True), (False, False)], 1))
def test_a_compiled_pass_collects_the_same_sums(bf16: bool, recompute: bool) -> None:
    """In bf16 the whole pass is one graph."""
    torch.manual_seed(4)
    model: Any = build(small(first_dense=1).replace(layers=2))
    tokens = torch.randint(64, (2, 8))
    model.decoder.recompute = recompute
    torch._dynamo.reset()

    def features(tokens: Tensor, routing: list[Tensor]) -> Tensor:
        return model.forward_rows(tokens, RowInputs(routing=routing))

    results = []
    for function in (features, torch.compile(features, backend="eager", fullgraph=bf16)):
        model.zero_grad()
        routing: list[Tensor] = []
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = function(tokens, routing).float().square().mean()
        sums = RoutingSums.stacked(torch.stack(routing))
        (loss + sums.auxiliary_loss(model.config.feedforward, sums)).backward()
        results.append([loss, *routing, *(p.grad for p in model.parameters())])
    assert len(results[0]) == len(results[1])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(plain, compiled, atol=1e-2 if bf16 else 1e-6, rtol=1e-2 if bf16 else 1e-5)
