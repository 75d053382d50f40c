"""Muon: orthogonalised updates of the matrices in blocks, one by one; and every optimizer's state, bit for bit."""

import subprocess
import sys
from itertools import chain
from typing import Any

import pytest
import torch
from tests.training.small import same_parameters
from torch import nn

from weft.costs.memory import Workload, training_memory
from weft.errors import ConfigError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.presets import gpt, llama, vaswani
from weft.recipe.optimizer import SGD, Adam, AdamW, Muon, Optimizer
from weft.recipe.resolve import resolve
from weft.runs.snapshot import load_optimizer_state, optimizer_state
from weft.training.optimizer import block_matrices, orthogonalise, set_rate, update
from weft.training.optimizer import build as build_optimizer

ALL: list[Optimizer] = [AdamW(), Adam(), SGD(), Muon()]


def model() -> LanguageModel:
    torch.manual_seed(0)
    return build(llama(2, 16, 4, d_ff=24, context=16, vocab_size=11, kv_heads=2))


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def set_gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def take(optimizer: torch.optim.Optimizer, net: nn.Module, seed: int, divisor: torch.Tensor | None = None) -> None:
    """Update with random gradients."""
    set_gradients(net, seed)
    set_rate(optimizer, 0.01)
    update(optimizer, divisor)


def test_singular_values_are_near_one() -> None:
    torch.manual_seed(0)
    for rows, columns in ((16, 16), (8, 24), (24, 8)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(3, rows, columns)))
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_orthogonalising_keeps_singular_vectors() -> None:
    """The result is U S′ Vᵀ, so its product with the matrix's polar factor is symmetric."""
    matrix = torch.randn(6, 9, dtype=torch.float64).float()
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    product = orthogonalise(matrix[None])[0] @ (u @ vt).T
    assert torch.allclose(product, product.T, atol=1e-4)


@pytest.mark.parametrize("rounds", [1, 3, 5])
@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)])
def test_rounds_are_those_of_the_odd_polynomial(rounds: int, shape: tuple[int, int]) -> None:
    """A round maps each singular value s, initially s / Frobenius norm, to a s + b s³ + c s⁵ (Jordan et al. 2024)."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(rounds):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    assert torch.allclose(orthogonalise(matrix[None], rounds)[0], u @ values.diag() @ vt, atol=1e-4)


@pytest.mark.parametrize("rounds", [3, 5])
def test_each_part_of_a_fused_matrix_steps_as_torchs_muon(rounds: int) -> None:
    """qkv as three matrices, gate and up as two, each with torch.optim.Muon at AdamW's scale of updates."""
    net = model()
    settings = Muon(weight_decay=0.1, momentum=0.9, rounds=rounds)
    optimizer = build_optimizer(settings, net)
    heights = block_matrices(net)
    assert len(heights) == 2 * 4
    assert [16, 8, 8] in heights.values()
    assert [24, 24] in heights.values()
    pieces = {p: [nn.Parameter(part.clone()) for part in p.detach().split(sizes)] for p, sizes in heights.items()}
    options: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    theirs = torch.optim.Muon(chain(*pieces.values()), lr=0.01, ns_steps=rounds, **options)
    for seed in range(3):
        set_gradients(net, seed)
        for p, parts in pieces.items():
            for part, gradient in zip(parts, gradient_of(p).split(heights[p]), strict=True):
                part.grad = gradient.clone()
        set_rate(optimizer, 0.01)
        update(optimizer, None)
        theirs.step()
    before = dict(model().named_parameters())
    for name, p in net.named_parameters():
        if p in pieces:
            expected = torch.cat([part.detach() for part in pieces[p]])
            moved = (expected - before[name]).norm()
            assert (p - expected).norm() < 0.02 * moved  # torch's iteration is in bf16


def test_embeddings_heads_and_gains_step_as_adamw() -> None:
    ours, reference = model(), model()
    optimizers = build_optimizer(Muon(), ours), build_optimizer(AdamW(), reference)
    for seed in range(2):
        for net, optimizer in zip((ours, reference), optimizers, strict=True):
            take(optimizer, net, seed)
    matrices = block_matrices(ours)
    expected = dict(reference.named_parameters())
    others = [(name, p) for name, p in ours.named_parameters() if p not in matrices]
    assert {name for name, _ in others} >= {"embedding.weight", "output.weight"}
    for name, p in others:
        assert torch.equal(p, expected[name])


def test_every_block_of_an_encoder_decoder_is_found() -> None:
    net = build(vaswani(2, 16, 2, d_ff=32, dropout=0.0, vocab_size=11))
    sizes = list(block_matrices(net).values())
    assert len(sizes) == 2 * 4 + 2 * 7
    assert sizes.count([16, 16]) == 2  # keys and values of the source


@pytest.mark.parametrize("settings", ALL, ids=lambda s: s.kind)
def test_the_state_is_saved_and_loaded_bit_for_bit(settings: Optimizer) -> None:
    """Two updates, save, load into a fresh optimizer, two more: the same weights as four in a row."""
    straight, broken = model(), model()
    optimizer = build_optimizer(settings, straight)
    for seed in range(4):
        take(optimizer, straight, seed, torch.tensor(2.0))
    first = build_optimizer(settings, broken)
    for seed in range(2):
        take(first, broken, seed, torch.tensor(2.0))
    saved = {name: tensor.clone() for name, tensor in optimizer_state(first, broken).items()}
    assert len(saved) >= len(list(broken.parameters()))
    second = build_optimizer(settings, broken)
    load_optimizer_state(second, broken, saved)
    for seed in range(2, 4):
        take(second, broken, seed, torch.tensor(2.0))
    assert same_parameters(broken, straight)
    for name, tensor in optimizer_state(second, broken).items():
        assert torch.equal(tensor, optimizer_state(optimizer, straight)[name])


@pytest.mark.parametrize("settings", ALL, ids=lambda s: s.kind)
def test_dividing_in_the_update_is_dividing_before_it(settings: Optimizer) -> None:
    ours, reference = model(), model()
    for net, divisor in ((ours, torch.tensor(8.0)), (reference, None)):
        optimizer = build_optimizer(settings, net)
        set_gradients(net, 0)
        if divisor is None:
            for p in net.parameters():
                gradient_of(p).div_(8.0)
        set_rate(optimizer, 0.1)
        update(optimizer, divisor)
    assert same_parameters(ours, reference)


@pytest.mark.parametrize("settings", ALL, ids=lambda s: s.kind)
def test_a_skipped_update_leaves_no_trace(settings: Optimizer) -> None:
    """Even if gradients are NaN; the next update is as if there had been none."""
    ours, reference = model(), model()
    optimizers = build_optimizer(settings, ours), build_optimizer(settings, reference)
    for net, optimizer in zip((ours, reference), optimizers, strict=True):
        for seed in range(3):
            set_gradients(net, seed)
            skipped = seed == 1
            if skipped and net is reference:
                continue
            if skipped:
                for p in net.parameters():
                    gradient_of(p).fill_(float("nan"))
            set_rate(optimizer, 0.1)
            update(optimizer, torch.tensor(1.0), torch.tensor(float(skipped)))
    assert same_parameters(ours, reference)


def test_muon_stores_as_much_as_planned() -> None:
    """One value per weight inside blocks, two elsewhere."""
    settings = gpt(2, 32, 2, context=16, vocab_size=64)
    net = build(settings)
    optimizer = build_optimizer(Muon(), net)
    take(optimizer, net, 0)
    stored = sum(t.nbytes for name, t in optimizer_state(optimizer, net).items() if not name.startswith("step/"))
    assert training_memory(settings, Workload(1, 16, "fp32", "muon")).optimizer == pytest.approx(stored, rel=0.03)


def test_muon_needs_blocks() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.kind = 'muon': only for Transformer blocks"):
        resolve("lstm", ["optimizer=muon"])
    with pytest.raises(ConfigError, match=r"optimizer.kind = 'muon'"):
        build_optimizer(Muon(), nn.Linear(3, 2))


@pytest.mark.slow
def test_optimizers_start_without_the_compiler() -> None:
    code = """
import sys, torch
from weft.models.build import build as model
from weft.models.presets import gpt
from weft.recipe.optimizer import SGD, Adam, AdamW, Muon
from weft.training.optimizer import build, set_rate, update

net = model(gpt(1, 8, 2, context=8, vocab_size=11))
for settings in (AdamW(), Adam(), SGD(), Muon()):
    optimizer = build(settings, net)
    net(torch.zeros(1, 8, dtype=torch.long)).square().sum().backward()
    set_rate(optimizer, 0.1)
    update(optimizer, None)
    optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(("settings", "kind"), [(AdamW(), torch.optim.AdamW), (Adam(), torch.optim.Adam)])
def test_updates_are_those_of_torch(settings: Any, kind: Any) -> None:
    ours, theirs = model(), model()
    optimizer = build_optimizer(settings, ours)
    groups = [[p for p in theirs.parameters() if (p.dim() < 2) == vectors] for vectors in (False, True)]
    decay = getattr(settings, "weight_decay", 0.0)
    parts = [{"params": group, "weight_decay": rate} for group, rate in zip(groups, (decay, 0.0), strict=True)]
    other = kind(parts, lr=0.1, betas=settings.betas, eps=settings.eps, fused=True)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        set_rate(optimizer, 0.1)
        update(optimizer, None)
        other.step()
    assert same_parameters(ours, theirs)
