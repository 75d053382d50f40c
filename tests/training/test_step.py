"""One step: neither dividing a batch nor recomputing changes its gradient; clipping clips; fp16 is scaled."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.spread import slow
from tests.training.small import CPU, Corpus, loader, next_token_loss, small

from weft.data.batch import Batch, Source
from weft.errors import ConfigError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.presets import bert, gpt, llama, vaswani
from weft.nn.position_config import T5Bias
from weft.objectives.tokens import token_loss
from weft.parallel.passes import LossFunction, Parallel
from weft.recipe.config import Precision
from weft.recipe.objective import NextToken
from weft.recipe.optimizer import SGD, AdamW
from weft.recipe.resolve import resolve
from weft.training import optimizer as optimizers
from weft.training.learner import Learner, prepare_model
from weft.training.optimizer import decay_groups
from weft.training.precision import autocast, use_eight_bits
from weft.training.step import FIRST_SCALE, OptimisationStep, StepResult, StepState

SMOOTH = partial(token_loss, settings=NextToken(smoothing=0.1, z_loss=1e-3))


def backward(
    model: LanguageModel, loss: LossFunction, parts: Sequence[Batch], precision: Precision = "fp32"
) -> tuple[torch.Tensor, int, list[torch.Tensor]]:
    """Return the mean loss, the number of targets, and the gradients."""
    model.zero_grad()
    step = OptimisationStep(Parallel(model), optimizers.build(AdamW(), model), loss, CPU, precision)
    count = sum(part.count for part in parts)
    mean, _ = step.backward(parts, count)
    return mean, count, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_splitting_a_batch_never_changes_the_gradient(corpus: Corpus, parts: int, masked: bool) -> None:
    torch.manual_seed(0)
    settings = small("model.dropout=0.0")
    model = build(settings.model)
    (batch,) = loader(settings, corpus).parts(1)
    if masked:  # the last row has one target, the others almost all
        mask = torch.rand(batch.tokens.shape) < 0.8
        mask[-1] = False
        mask[-1, 0] = True
        batch = replace(batch, loss_mask=mask)
    whole_loss, whole_count, whole = backward(model, SMOOTH, [batch])
    split_loss, split_count, split = backward(model, SMOOTH, batch.split(parts))
    assert split_count == whole_count
    assert torch.allclose(split_loss, whole_loss, atol=1e-6)
    for ours, theirs in zip(split, whole, strict=True):
        assert (ours - theirs).abs().max() <= 1e-6


def test_a_model_without_a_readout_has_the_same_gradient(corpus: Corpus) -> None:
    """The loss of all logits equals the chunked loss."""
    settings = small("model.dropout=0.0")
    model = build(settings.model)
    (batch,) = loader(settings, corpus).parts(1)

    class Plain(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward_features(self, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
            return self.inner.features(tokens, **inputs)

        def head(self, features: torch.Tensor) -> torch.Tensor:
            return self.inner.head(features)

    loss, _, expected = backward(model, SMOOTH, [batch])
    plain_loss, _, plain = backward(Plain(), SMOOTH, [batch])
    torch.testing.assert_close([plain_loss, *plain], [loss, *expected], atol=1e-5, rtol=1e-5)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = build(small().model)
    decaying, fixed = decay_groups(model, 0.5)
    assert (decaying["weight_decay"], fixed["weight_decay"]) == (0.5, 0.0)
    assert all(p.dim() >= 2 for p in decaying["params"])
    assert all(p.dim() < 2 for p in fixed["params"])
    assert sum(len(group["params"]) for group in (decaying, fixed)) == len(list(model.parameters()))


def test_decay_shrinks_matrices_without_a_gradient() -> None:
    model = torch.nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizers.build(AdamW(weight_decay=0.1), model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizers.set_rate(optimizer, 0.5)
    optimizer.step()
    assert torch.allclose(model.weight, before["weight"] * (1 - 0.5 * 0.1))
    assert torch.equal(model.bias, before["bias"])


def test_clipping_bounds_the_update_and_reports_the_norm_before(corpus: Corpus) -> None:
    settings = small("model.dropout=0.0")
    model = build(settings.model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optimizers.build(SGD(momentum=0.0, weight_decay=0.0), model)
    step = OptimisationStep(Parallel(model), optimizer, next_token_loss, CPU, clip=0.01)
    result = step(loader(settings, corpus).parts(1), 1.0)
    moved = torch.stack([(p - q).norm() for p, q in zip(model.parameters(), before, strict=True)]).norm()
    assert float(result.gradient_norm) > 0.01
    assert float(moved.detach()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bf16_is_close_to_fp32(corpus: Corpus) -> None:
    settings = small("model.dropout=0.0")
    model = build(settings.model)
    parts = loader(settings, corpus).parts(1)
    exact, _, _ = backward(model, next_token_loss, parts)
    rough, _, gradients = backward(model, next_token_loss, parts, "bf16")
    assert float(rough) == pytest.approx(float(exact), rel=0.02)
    assert len(gradients) == len(list(model.parameters()))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


# ---- fp16


def tiny_gpt() -> tuple[LanguageModel, Batch]:
    torch.manual_seed(0)
    model, tokens = build(gpt(1, 16, 2, context=8, vocab_size=16)), torch.randint(16, (2, 9))
    return model, Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def fp16_step(model: LanguageModel, **options: Any) -> OptimisationStep:
    optimizer = optimizers.build(AdamW(), model)
    return OptimisationStep(Parallel(model), optimizer, next_token_loss, CPU, "fp16", clip=1.0, **options)


def test_a_step_in_fp16_is_close_to_one_in_fp32() -> None:
    moved: list[tuple[torch.Tensor, StepResult]] = []
    precisions: tuple[Precision, ...] = ("fp32", "fp16")
    for precision in precisions:
        model, batch = tiny_gpt()
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer = optimizers.build(SGD(momentum=0.0), model)
        step = OptimisationStep(Parallel(model), optimizer, next_token_loss, CPU, precision, clip=1.0)
        result = step([batch], 0.1)
        moved.append((torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before, result))
    (exact, expected), (rough, result) = moved
    assert (rough - exact).norm() / exact.norm() < 0.01
    assert float(result.loss) == pytest.approx(float(expected.loss), rel=2e-3)
    assert float(result.gradient_norm) == pytest.approx(float(expected.gradient_norm), rel=0.01)  # unscaled


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale() -> None:
    model, batch = tiny_gpt()
    step = fp16_step(model)
    step([batch], 1e-2)
    step.state.scale = torch.tensor(2.0**40)  # beyond the range of fp16
    before = [p.detach().clone() for p in model.parameters()]
    result = step([batch], 1e-2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert float(step.state.scale) == 2.0**39
    assert float(result.gradient_norm) == 0.0  # nothing for the guard to react to
    for _ in range(40):
        step([batch], 1e-2)
    assert float(step.state.scale) < 2.0**24
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_gradient_that_no_scale_repairs_is_reported() -> None:
    model, batch = tiny_gpt()
    step = fp16_step(model, state=StepState(scale=torch.tensor(0.5)))
    model.get_parameter("embedding.weight").register_hook(lambda gradient: gradient * float("nan"))
    assert not step([batch], 1e-2).gradient_norm.isfinite()


def test_the_scale_grows_in_calm_and_is_saved_with_the_moments(tmp_path: Path) -> None:
    model, batch = tiny_gpt()
    step = fp16_step(model, growth_interval=3)
    learner = Learner(step.parallel, step.optimizer, step.state)
    for _ in range(5):
        step([batch], 1e-2)
    saved = learner.copy(5, {})
    assert (float(saved.moments["scale/loss"]), float(saved.moments["calm/loss"])) == (2 * FIRST_SCALE, 2.0)
    path = learner.write(tmp_path, saved, keep=1)
    step([batch], 1e-2)
    learner.load(path)
    assert step.state.calm is not None and float(step.state.calm) == 2.0
    learner.step_state.restore({})
    assert step.state.tensors() == {}


def test_other_weights_are_undone_even_if_their_evaluation_fails(tmp_path: Path) -> None:
    model, _ = tiny_gpt()
    learner = Learner(Parallel(model), optimizers.build(AdamW(), model))
    path = learner.write(tmp_path, learner.copy(1, {}), keep=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def fail() -> None:
        with learner.using_weights(path):
            assert not torch.equal(model.get_parameter("embedding.weight"), weights["embedding.weight"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


# ---- recomputation

KINDS: dict[str, Any] = {
    "gpt": gpt(2, 16, 2, context=8, vocab_size=16, dropout=0.2),
    "llama": llama(2, 16, 2, d_ff=24, context=8, vocab_size=16, kv_heads=1),
    "t5": llama(2, 16, 2, d_ff=24, context=8, vocab_size=16).replace(position=T5Bias(buckets=8)),
    "bert": bert(2, 16, 2, vocab_size=16, context=8),
    "vaswani": vaswani(2, 16, 2, d_ff=32, dropout=0.1, vocab_size=16, context=8),
}


def prepared(name: str, recompute: bool) -> tuple[LanguageModel, torch.Tensor, dict[str, Any]]:
    """Return a tiny model, and the inputs of its `features`."""
    torch.manual_seed(0)
    model = build(KINDS[name]).train()
    recipe = resolve("gpt-tiny", ["precision=fp32", f"batch.recompute={str(recompute).lower()}"])
    prepare_model(model, recipe)  # type: ignore[arg-type]
    tokens = torch.randint(16, (2, 8))
    mask = torch.arange(8) < torch.tensor([[8], [5]])
    inputs: dict[str, dict[str, Any]] = {"vaswani": {"source": Source(tokens, mask)}, "bert": {"mask": mask}}
    return model, tokens, inputs.get(name, {})


@pytest.mark.parametrize("name", KINDS)
def test_recomputing_gives_the_same_gradient_and_keeps_less(name: str) -> None:
    """Bit for bit, with dropout and masks."""
    gradients, kept = [], []
    for recompute in (False, True):
        model, tokens, inputs = prepared(name, recompute)
        bytes_of: dict[int, int] = {}

        def keep(tensor: torch.Tensor, seen: dict[int, int] = bytes_of) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            features = model.features(tokens, **inputs)
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("gpt", "bf16"),
        *(slow((name, "bf16")) for name in ("bert", "llama", "vaswani")),
        *(slow((name, "recompute")) for name in ("llama", "vaswani")),
        slow(("gpt", "fp8")),
    ],
)
def test_features_are_traced_as_one_graph(name: str, mode: str) -> None:
    model, tokens, inputs = prepared(name, mode == "recompute")
    if mode == "fp8":
        use_eight_bits(model)
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    traced = torch.compile(model.forward_features, backend=count, fullgraph=True)
    with autocast("fp32" if mode == "recompute" else "bf16", CPU):
        torch.manual_seed(1)
        found = traced(tokens, **inputs)
        torch.manual_seed(1)
        expected = model.features(tokens, **inputs)
    assert len(graphs) == 1
    tables = sum("weft.kept" in str(node.target) for node in graphs[0].graph.nodes)
    # sines are computed once, not in every layer
    assert tables == {"gpt": 0, "llama": 2, "bert": 0, "vaswani": 2}[name]
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    assert difference < (1e-5 if mode == "recompute" else 0.02)
