"""Adapters on whole models: only they are trained, and merging them changes no output."""

import hashlib
from typing import Any

import pytest
import torch
from tests.training.small import CPU, next_token_loss
from torch import nn

from weft.config import Config
from weft.costs.count import count
from weft.costs.memory import Workload, training_memory
from weft.data.batch import Batch
from weft.errors import ConfigError, ModelError
from weft.models import config as models
from weft.models import head_config
from weft.models.build import build as build_model
from weft.models.presets import gpt, llama, vaswani
from weft.nn.config import LoRA
from weft.parallel.passes import Parallel
from weft.recipe.optimizer import AdamW, Muon
from weft.training.optimizer import block_matrices, decay_groups, layer_factors, set_rate
from weft.training.optimizer import build as build_optimizer
from weft.training.step import OptimisationStep
from weft.training.weights import add_adapters, merged

EVERYWHERE = LoRA(rank=3, alpha=9, targets=("*",))


def build(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build_model(config)


def decoder() -> Any:
    return llama(2, 16, 4, d_ff=24, context=16, vocab_size=11, kv_heads=2)


def train(model: Any, settings: AdamW | Muon, steps: int = 3) -> list[float]:
    take = OptimisationStep(Parallel(model), build_optimizer(settings, model), next_token_loss, CPU, clip=1.0)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(step % 2))
        losses.append(float(take([Batch(tokens[:, :-1], tokens[:, 1:])], 0.05).loss))
    return losses


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def digests(model: nn.Module) -> dict[str, str]:
    return {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in model.named_parameters()}


@pytest.mark.parametrize("settings", [AdamW(), Muon()], ids=lambda settings: settings.kind)
def test_training_moves_the_adapters_and_nothing_else(settings: AdamW | Muon) -> None:
    model = build(decoder())
    frozen = digests(model)
    add_adapters(model, EVERYWHERE)
    before = digests(model)
    losses = train(model, settings, steps=12)
    after = digests(model)
    assert {name: after[name] for name in frozen} == frozen
    moved = {name for name in after if after[name] != before[name]}
    assert moved == set(trainable(model)) == {name for name in after if name.endswith((".a", ".b"))}
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "config",
    [decoder(), gpt(2, 16, 2, context=8, vocab_size=11), vaswani(2, 16, 2, d_ff=32, dropout=0.0, vocab_size=11)],
)
def test_merged_weights_give_the_same_logits(config: Any) -> None:
    model = build(config).eval()
    tokens = torch.randint(0, 11, (3, 7))
    inputs: dict[str, Any] = {}
    if isinstance(config, models.EncoderDecoder):
        inputs["source"] = type("Source", (), {"tokens": torch.randint(0, 11, (3, 5)), "mask": None})()
    with torch.no_grad():
        begun = model(tokens, **inputs)
        names = add_adapters(model, EVERYWHERE)
        assert torch.equal(model(tokens, **inputs), begun)
        for name in names:
            model.get_submodule(name).b.normal_()
        learned = model(tokens, **inputs)
        plain = merged(model)
        assert (learned - begun).abs().max() > 0.1
        assert torch.allclose(plain(tokens, **inputs), learned, atol=1e-5)
        assert torch.equal(model(tokens, **inputs), learned)
    fresh = build(config)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in fresh.named_parameters()]
    assert len(trainable(plain)) == len(list(fresh.parameters()))
    fresh.load_state_dict(plain.state_dict())


def encoder(head: Config) -> models.Encoder:
    settings = gpt(2, 16, 2, context=8, vocab_size=11).model_dump(exclude={"kind", "head", "ngrams"})
    return models.Encoder(**settings, head=head)


def test_a_new_head_is_trained_with_the_adapter() -> None:
    model = build(encoder(head_config.ClassificationHead(labels=3)))
    add_adapters(model, LoRA(rank=2, head=True))
    head = {f"output.{name}" for name, _ in model.output.named_parameters()}
    assert {name for name in trainable(model) if name.startswith("output.")} == head
    tied = build(gpt(1, 16, 2, context=8, vocab_size=11))
    with pytest.raises(ModelError, match=r"adapter\.head: this head has no weights of its own"):
        add_adapters(tied, LoRA(head=True))
    assert all(p.requires_grad for p in tied.parameters())


def test_models_that_take_no_adapter() -> None:
    recurrent = models.Recurrent(vocab_size=5, d_model=4)
    with pytest.raises(ModelError, match="made of Transformer blocks"):
        add_adapters(build_model(recurrent), LoRA())
    with pytest.raises(ModelError, match="made of Transformer blocks, not a Recurrent"):
        count(recurrent, adapter=LoRA())
    model = build(decoder())
    with pytest.raises(ConfigError, match=r"'\*\.lstm' matches no layer"):
        add_adapters(model, LoRA(targets=("*.lstm",)))
    assert all(p.requires_grad for p in model.parameters())
    add_adapters(model, LoRA())
    with pytest.raises(ModelError, match="has adapters already"):
        add_adapters(model, LoRA())


def test_muon_takes_each_part_of_an_adapter() -> None:
    model = build(decoder())
    add_adapters(model, LoRA(rank=2, targets=("*.1.attention.qkv", "*.0.feedforward.down")))
    assert sorted(block_matrices(model).values()) == [[2], [2, 2, 2], [16], [16, 8, 8]]


# ---- counted from the config alone

SHAPES = [
    decoder(),
    gpt(2, 16, 2, context=8, vocab_size=11).replace(ngrams={"orders": [2, 3], "rows": 9, "width": 5}),
    vaswani(2, 16, 2, d_ff=32, dropout=0.0, vocab_size=11),
    encoder(head_config.PretrainingHead()),
]
TARGETS = [None, ("*",), ("*.1.*",), ("*.attention.qkv", "*.feedforward.down")]


@pytest.mark.parametrize("config", SHAPES, ids=lambda config: f"{config.kind}-{config.feedforward.kind}")
@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_counts_are_the_built_models(config: Any, targets: tuple[str, ...] | None, optimizer: str) -> None:
    adapter = LoRA(rank=3, targets=targets, head=config.kind == "encoder")
    model = build(config)
    add_adapters(model, adapter)
    cost = count(config, adapter=adapter)
    learning = sum(p.numel() for p in trainable(model).values())
    assert cost.trainable == learning
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    needed = training_memory(config, Workload(1, 8, "fp32", optimizer), adapter)
    assert needed.weights == 4 * cost.parameters
    assert needed.gradients == 4 * learning
    built = build_optimizer(AdamW() if optimizer == "adamw" else Muon(), model)
    for p in trainable(model).values():
        p.grad = torch.ones_like(p)
    built.step()
    moments = [t for state in built.state.values() for t in state.values() if t.dim()]
    assert needed.optimizer == sum(4 * t.numel() for t in moments)


def test_a_frozen_matrix_needs_half_the_backward_pass() -> None:
    cost, adapted = count(decoder(), 16), count(decoder(), 16, LoRA(rank=3))
    flops = {part.name: part.flops / 16 for part in adapted.components}
    products = flops["MHA projections"] + flops["FFN"] + flops["logits"]
    assert adapted.training() == 2 * products + 3 * (flops["attention"] + flops["adapter"])
    assert adapted.training(recompute=True) - adapted.training() == adapted.forward - flops["logits"]
    # two layers of d_model 16: qkv as 16 + 8 + 8 rows, out as 16
    assert flops["adapter"] == 2 * 2 * 3 * ((16 + 16) + (16 + 8) * 2 + (16 + 16))
    assert sum(adapted.share(part) for part in adapted.components) == pytest.approx(1.0)
    assert adapted.forward == cost.forward + flops["adapter"]


def saved_bytes(model: Any, time: int) -> int:
    """Return the bytes that autograd saves, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        features = model.train().features(torch.zeros(4, time, dtype=torch.long))
    assert features.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    "adapter",
    [LoRA(), LoRA(targets=("*",)), LoRA(targets=("*.feedforward.*",)), LoRA(targets=("*.3.*", "*.4.*"))],
    ids=lambda adapter: str(adapter.targets),
)
@pytest.mark.parametrize(
    "config",
    [llama(8, 64, 4, d_ff=96, context=32, vocab_size=16), gpt(8, 64, 4, context=32, vocab_size=16)],
    ids=["llama", "gpt"],
)
def test_activations_are_what_autograd_keeps(config: Config, adapter: LoRA, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.nn.activations.ON_ARM", False)  # those for ARM save what a product saves anyway
    model = build(config)
    add_adapters(model, adapter)
    predicted = training_memory(config, Workload(4, 32, "fp32"), adapter).activations
    assert predicted == pytest.approx(saved_bytes(model, 32), rel=0.1)


def test_dropout_saves_a_byte_per_value() -> None:
    adapter = LoRA(targets=("*.feedforward.*",))
    plain, dropped = (
        training_memory(gpt(6, 64, 4, context=32, vocab_size=16), Workload(4, 32, "bf16"), settings).activations
        for settings in (adapter, adapter.replace(dropout=0.1))
    )
    assert dropped - plain == 4 * 32 * 6 * (64 + 256)


# ---- layer-wise learning rates


def test_lower_layers_have_lower_learning_rates() -> None:
    model = build(vaswani(3, 16, 2, d_ff=32, dropout=0.0, vocab_size=11))
    factors = {name: layer_factors(model, 0.5)[p] for name, p in model.named_parameters()}
    assert factors["embedding.weight"] == 0.5**4
    for stack in ("encoder", "decoder"):
        assert [factors[f"{stack}.blocks.{n}.attention.qkv.weight"] for n in range(3)] == [0.125, 0.25, 0.5]
    decoder_only = build(decoder())
    of = {name: layer_factors(decoder_only, 0.5)[p] for name, p in decoder_only.named_parameters()}
    assert of["output.weight"] == of["decoder.norm.weight"] == 1.0
    assert of["embedding.weight"] == 0.125

    optimizer = build_optimizer(AdamW(layer_decay=0.5), decoder_only)
    set_rate(optimizer, 0.8)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates == {p: pytest.approx(0.8 * of[name]) for name, p in decoder_only.named_parameters()}
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all(decays[p] == (0.1 if p.dim() > 1 else 0.0) for p in decoder_only.parameters())
    assert len(decay_groups(decoder_only, 0.1)) == 2
    with pytest.raises(ConfigError, match=r"optimizer\.layer_decay: only a Transformer"):
        build_optimizer(AdamW(layer_decay=0.5), build_model(models.Recurrent(vocab_size=5, d_model=4)))
