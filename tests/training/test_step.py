"""One step: dividing a batch never changes its gradient, nor does recomputing; clipping clips; fp16 is scaled."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.training.small import loader

from weft.data.batch import Batch, Source
from weft.errors import ConfigError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.presets import bert, gpt, llama, vaswani
from weft.nn.position_config import T5Bias
from weft.objectives.tokens import token_loss
from weft.parallel.passes import Parallel
from weft.recipe.objective import NextToken
from weft.recipe.optimizer import SGD, AdamW
from weft.recipe.resolve import resolve
from weft.runs.snapshot import optimizer_state
from weft.training import optimizer as optimizers
from weft.training.learner import fitted
from weft.training.optimizer import decay_groups
from weft.training.precision import autocast, use_eight_bits
from weft.training.step import FIRST_SCALE, OptimisationStep

CPU = torch.device("cpu")


def loss_of(**settings: float) -> Callable[..., Any]:
    """The loss of the next token with these settings."""
    return lambda model, features, batch: token_loss(NextToken(**settings), model, features, batch)


def backward(model, loss, parts, precision="fp32"):  # type: ignore[no-untyped-def]
    """The mean loss, the mean −log p and the count of targets; gradients are added up."""
    return OptimisationStep(Parallel(model), optimizers.build(AdamW(), model), loss, CPU, precision).backward(parts)


def gradients(model, loss, parts):  # type: ignore[no-untyped-def]
    model.zero_grad()
    mean, _, count = backward(model, loss, parts)
    return mean, count, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_splitting_a_batch_never_changes_the_gradient(recipe, corpus, parts, masked) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    settings = recipe("model.dropout=0.0")
    model = build(settings.model)
    (batch,) = loader(settings, corpus).parts(1)
    if masked:  # very unequal parts: the last row counts once, the others almost fully
        mask = torch.rand(batch.tokens.shape) < 0.8
        mask[-1] = False
        mask[-1, 0] = True
        batch = replace(batch, loss_mask=mask)
    loss = loss_of(smoothing=0.1, z_loss=1e-3)
    whole_loss, whole_count, whole = gradients(model, loss, [batch])
    split_loss, split_count, split = gradients(model, loss, batch.split(parts))
    assert split_count == whole_count
    assert torch.allclose(split_loss, whole_loss, atol=1e-6)
    for ours, theirs in zip(split, whole, strict=True):
        assert (ours - theirs).abs().max() <= 1e-6


def test_a_model_without_a_readout_learns_the_same(recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    """The loss through logits and the chunked loss agree."""
    settings = recipe("model.dropout=0.0")
    model = build(settings.model)
    (batch,) = loader(settings, corpus).parts(1)

    class Plain(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward_features(self, tokens, **given):  # type: ignore[no-untyped-def]
            return self.inner.features(tokens, **given)

        def head(self, features):  # type: ignore[no-untyped-def]
            return self.inner.head(features)

    loss, _, expected = gradients(model, loss_of(smoothing=0.1), [batch])
    plain_loss, _, plain = gradients(Plain(), loss_of(smoothing=0.1), [batch])
    assert torch.allclose(loss, plain_loss, atol=1e-5)
    for ours, theirs in zip(plain, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_matrices_decay_and_vectors_do_not(recipe) -> None:  # type: ignore[no-untyped-def]
    model = build(recipe().model)
    decaying, fixed = decay_groups(model, 0.5)
    assert decaying["weight_decay"] == 0.5
    assert fixed["weight_decay"] == 0.0
    assert all(p.dim() >= 2 for p in decaying["params"])
    assert all(p.dim() < 2 for p in fixed["params"])
    assert sum(len(group["params"]) for group in (decaying, fixed)) == len(list(model.parameters()))


def test_decay_shrinks_matrices_that_get_no_gradient() -> None:
    model = torch.nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizers.build(AdamW(weight_decay=0.1), model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    optimizer.step()
    assert torch.allclose(model.weight, before["weight"] * (1 - 0.5 * 0.1))
    assert torch.equal(model.bias, before["bias"])


def test_clipping_bounds_the_update_and_reports_the_norm_before(recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    settings = recipe("model.dropout=0.0")
    model = build(settings.model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optimizers.build(SGD(momentum=0.0, weight_decay=0.0), model)
    result = OptimisationStep(Parallel(model), optimizer, loss_of(), CPU, clip=0.01)(
        loader(settings, corpus).parts(1), 1.0
    )
    moved = torch.stack([(p - q).norm() for p, q in zip(model.parameters(), before, strict=True)]).norm()
    assert float(result.gradient_norm) > 0.01
    assert float(moved.detach()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bf16_is_close_to_fp32(recipe, corpus) -> None:  # type: ignore[no-untyped-def]
    settings = recipe("model.dropout=0.0")
    model = build(settings.model)
    parts = loader(settings, corpus).parts(1)
    exact, _, _ = backward(model, loss_of(), parts)
    rough, _, _ = backward(model, loss_of(), parts, "bf16")
    assert float(rough) == pytest.approx(float(exact), rel=0.02)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


# ---- fp16


def steps_in_fp16(model, optimizer, batch, count):  # type: ignore[no-untyped-def]
    step = OptimisationStep(Parallel(model), optimizer, loss_of(), CPU, "fp16", clip=1.0)
    return [step([batch], 1e-2) for _ in range(count)]


def tiny_gpt():  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model, tokens = build(gpt(1, 16, 2, context=8, vocab_size=16)), torch.randint(16, (2, 9))
    return model, Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def test_a_step_in_fp16_is_close_to_one_in_fp32() -> None:
    moved = []
    for precision in ("fp32", "fp16"):
        model, batch = tiny_gpt()
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        optimizer = optimizers.build(SGD(momentum=0.0), model)
        result = OptimisationStep(Parallel(model), optimizer, loss_of(), CPU, precision, clip=1.0)([batch], 0.1)
        moved.append((torch.cat([p.detach().flatten() for p in model.parameters()]) - before, result))
    (exact, expected), (rough, found) = moved
    assert (rough - exact).norm() / exact.norm() < 0.01
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=2e-3)
    assert float(found.gradient_norm) == pytest.approx(float(expected.gradient_norm), rel=0.01)  # without the scale


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale() -> None:
    model, batch = tiny_gpt()
    optimizer = optimizers.build(AdamW(), model)
    steps_in_fp16(model, optimizer, batch, 1)
    state = optimizer.state["loss"]
    state["scale"] = torch.tensor(2.0**40)  # beyond anything that fp16 holds
    before = [p.detach().clone() for p in model.parameters()]
    (result,) = steps_in_fp16(model, optimizer, batch, 1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert float(state["scale"]) == 2.0**39
    assert float(result.gradient_norm) == 0.0  # nothing that a guard should worry about
    steps_in_fp16(model, optimizer, batch, 40)
    assert float(state["scale"]) < 2.0**24
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_gradient_that_no_scale_can_mend_is_shown() -> None:
    model, batch = tiny_gpt()
    optimizer = optimizers.build(AdamW(), model)
    steps_in_fp16(model, optimizer, batch, 1)
    optimizer.state["loss"]["scale"] = torch.tensor(0.5)
    model.embedding.weight.register_hook(lambda gradient: gradient * float("nan"))
    (result,) = steps_in_fp16(model, optimizer, batch, 1)
    assert not result.gradient_norm.isfinite()


def test_the_scale_grows_in_calm_and_is_saved_with_the_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.training.step.GROWTH_INTERVAL", 3)
    model, batch = tiny_gpt()
    optimizer = optimizers.build(AdamW(), model)
    steps_in_fp16(model, optimizer, batch, 5)
    saved = optimizer_state(optimizer, model)
    assert float(saved["scale/loss"]) == 2 * FIRST_SCALE
    assert float(saved["calm/loss"]) == 2


# ---- blocks that run again in the backward pass

KINDS = {
    "gpt": gpt(2, 16, 2, context=8, vocab_size=16, dropout=0.2),
    "llama": llama(2, 16, 2, d_ff=24, context=8, vocab_size=16, kv_heads=1),
    "t5": llama(2, 16, 2, d_ff=24, context=8, vocab_size=16).replace(position=T5Bias(buckets=8)),
    "bert": bert(2, 16, 2, vocab_size=16, context=8),
    "vaswani": vaswani(2, 16, 2, d_ff=32, dropout=0.1, vocab_size=16, context=8),
}


def prepared(name: str, recompute: bool):  # type: ignore[no-untyped-def]
    """A tiny model, fit for a recipe, and what its `features` are given."""
    torch.manual_seed(0)
    model = build(KINDS[name]).train()
    recipe = resolve("gpt-tiny", ["precision=fp32", f"batch.recompute={str(recompute).lower()}"])
    fitted(model, recipe)
    tokens = torch.randint(16, (2, 8))
    mask = torch.arange(8) < torch.tensor([[8], [5]])
    given = {"vaswani": {"source": Source(tokens, mask)}, "bert": {"mask": mask}}.get(name, {})
    return model, tokens, given


@pytest.mark.parametrize("name", KINDS)
def test_recomputing_gives_the_same_gradient_and_keeps_less(name: str) -> None:
    """The same to the last bit, dropout and masks included."""
    gradients, kept = [], []
    for recompute in (False, True):
        model, tokens, given = prepared(name, recompute)
        bytes_of = {}

        def keep(tensor: torch.Tensor, seen: dict[int, int] = bytes_of) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            features = model.features(tokens, **given)
        kept.append(sum(bytes_of.values()))
        features.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    assert kept[1] < kept[0] / 2


def test_only_a_transformer_has_blocks_to_run_again() -> None:
    with pytest.raises(ConfigError, match=r"batch.recompute: only a Transformer"):
        resolve("lstm", ["batch.recompute=true"])


# ---- one graph for torch.compile


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "bf16") for name in ("gpt", "bert")),
        ("llama", "recompute"),
        pytest.param("gpt", "fp8", marks=pytest.mark.slow),
        *(pytest.param(name, "bf16", marks=pytest.mark.slow) for name in ("llama", "vaswani")),
        pytest.param("vaswani", "recompute", marks=pytest.mark.slow),  # two stacks of blocks
    ],
)
def test_features_are_traced_as_one_graph(name: str, how: str) -> None:
    model, tokens, given = prepared(name, how == "recompute")
    if how == "fp8":
        use_eight_bits(model)
    graphs = []

    def count(graph, inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    traced = torch.compile(model.forward_features, backend=count, fullgraph=True)
    with autocast("fp32" if how == "recompute" else "bf16", CPU):
        torch.manual_seed(1)
        found = traced(tokens, **given)
        torch.manual_seed(1)
        expected = model.features(tokens, **given)
    assert len(graphs) == 1
    tables = sum("weft.kept" in str(node.target) for node in graphs[0].graph.nodes)
    assert tables == {"gpt": 0, "llama": 2, "bert": 0, "vaswani": 2}[name]  # sines are found once, not once a layer
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    assert difference < (1e-5 if how == "recompute" else 0.02)
