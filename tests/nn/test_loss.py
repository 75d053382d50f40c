"""The chunked loss equals the plain one, and the plain one equals torch's."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from weft.nn.config import LossTerms
from weft.nn.loss import Readout, chunk_loss, chunk_rows, cross_entropy, gpu_chunk_loss, linear_cross_entropy


def leaves(rows: int, d_model: int, vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random features, table and bias."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (rows, d_model), (vocab_size, d_model), (vocab_size,)
    features, weight, bias = (torch.randn(shape, generator=rng, requires_grad=True) for shape in shapes)
    return features, weight, bias


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_plain_loss_is_torchs(smoothing: float) -> None:
    logits, targets = torch.randn(9, 11), torch.randint(11, (9,))
    loss = cross_entropy(logits, targets, LossTerms(smoothing))
    expected = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
    with_z_loss = cross_entropy(logits, targets, LossTerms(smoothing, z_loss=0.5))
    torch.testing.assert_close(with_z_loss - loss, 0.5 * logits.logsumexp(-1).square(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 7, 1000])
@pytest.mark.parametrize("terms", [LossTerms(), LossTerms(0.1), LossTerms(z_loss=1e-2), LossTerms(0.2, 1e-3)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_loss_equals_plain(rows: int, terms: LossTerms, with_bias: bool) -> None:
    N, D, V = 17, 5, 13
    features, weight, bias = leaves(N, D, V, seed=rows)
    targets, mask = torch.randint(V, (N,)), torch.rand(N) < 0.7
    readout = Readout(features, weight, bias if with_bias else None)
    inputs = [features, weight, bias][: 3 if with_bias else 2]

    expected = cross_entropy(readout.logits(), targets, terms)[mask].sum()
    expected_gradients = torch.autograd.grad(expected * 0.3, inputs)
    loss, nll = linear_cross_entropy(readout, targets, mask, terms=terms, rows=rows)

    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nll, cross_entropy(readout.logits(), targets)[mask].sum())
    torch.testing.assert_close(torch.autograd.grad(loss * 0.3, inputs), expected_gradients, atol=1e-5, rtol=1e-5)


def test_softcapped_logits_have_the_slope_of_tanh() -> None:
    features, weight, bias = inputs = leaves(17, 5, 13)
    targets = torch.randint(13, (17,))
    capped = 2.0 * torch.tanh(F.linear(features, weight, bias) / 2.0)
    expected = F.cross_entropy(capped, targets, reduction="sum")
    readout = Readout(features, weight, bias, softcap=2.0)
    loss, nll = linear_cross_entropy(readout, targets, rows=4)
    torch.testing.assert_close(readout.logits(), capped)
    torch.testing.assert_close((loss, nll), (expected, expected))
    gradients = (torch.autograd.grad(total, inputs) for total in (loss, expected))
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_masked_rows_have_no_gradient_even_if_their_loss_is_infinite() -> None:
    features = torch.tensor([[1.0], [float("inf")]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    readout = Readout(features.nan_to_num(posinf=1e30), weight, None)
    loss, _ = linear_cross_entropy(readout, torch.tensor([0, 1]), torch.tensor([True, False]))
    (gradient,) = torch.autograd.grad(loss, weight)
    assert loss.isfinite() and gradient.isfinite().all()


def test_logits_of_the_whole_batch_never_exist() -> None:
    """No tensor as large as batch × vocabulary is allocated, forward or backward."""
    N, D, V, rows = 256, 4, 512, 16
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    features, weight, _ = leaves(N, D, V)
    with Watch():
        loss, _ = linear_cross_entropy(Readout(features, weight, None), torch.randint(V, (N,)), rows=rows)
        loss.backward()
    assert rows * V <= largest < N * V // 8


@pytest.mark.parametrize("terms", [LossTerms(), LossTerms(0.2), LossTerms(0.1, 1e-2)])
def test_padded_columns_are_ignored(terms: LossTerms) -> None:
    torch.manual_seed(0)
    logits, targets, weights = torch.randn(5, 11), torch.randint(11, (5,)), torch.rand(5)
    padded = torch.cat([logits, torch.full((5, 3), 7.0)], dim=1)
    loss, nll, gradient = chunk_loss(padded, targets, weights, vocab_size=11, terms=terms)
    expected = chunk_loss(logits, targets, weights, vocab_size=11, terms=terms)
    torch.testing.assert_close((loss, nll, gradient[:, :11]), expected, atol=1e-7, rtol=1e-5)
    assert torch.equal(gradient[:, 11:], torch.zeros(5, 3))


def test_a_padded_table_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of GPUs, with the CPU's arithmetic."""
    inputs, targets = leaves(9, 4, 11), torch.randint(11, (9,))
    expected, _ = linear_cross_entropy(Readout(*inputs), targets, terms=LossTerms(smoothing=0.1))
    expected_gradients = torch.autograd.grad(expected, inputs)
    monkeypatch.setattr("weft.nn.loss._table_padding", lambda vocab_size, features: 5)
    loss, _ = linear_cross_entropy(Readout(*inputs), targets, terms=LossTerms(smoothing=0.1), rows=4)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), expected_gradients, atol=1e-6, rtol=1e-5)


def test_gradients_of_the_table_are_summed_in_fp32() -> None:
    """In bf16 a sum over many chunks would stop growing: each chunk adds 1/512 to a sum of 1."""
    features, weight = torch.ones(513, 1, dtype=torch.bfloat16), torch.zeros(2, 1, requires_grad=True)
    features[1:] = 2.0**-8
    loss, _ = linear_cross_entropy(Readout(features, weight, None), torch.zeros(513, dtype=torch.long), rows=1)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.dtype == torch.float32 and gradient.flatten().tolist() == pytest.approx([-1.5, 1.5])


def test_chunks_are_powers_of_two_that_shrink_with_the_vocabulary() -> None:
    features = torch.zeros(1, 1)
    assert [chunk_rows(features, size) for size in (65, 8192, 50257, 1 << 30)] == [32768, 512, 64, 1]


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "width"), [(11, 11), (100, 128), (9000, 9088), (50257, 50304)])
@pytest.mark.parametrize("terms", [LossTerms(), LossTerms(0.1), LossTerms(0.2, 1e-3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_computes_chunk_loss(vocab_size: int, width: int, terms: LossTerms, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(33, width, device="cuda")).to(dtype)
    targets, weights = torch.randint(vocab_size, (33,), device="cuda"), torch.rand(33, device="cuda")
    weights[3] = 0.0
    expected = chunk_loss(logits.clone(), targets, weights, vocab_size=vocab_size, terms=terms)
    found = gpu_chunk_loss()(logits, targets, weights, vocab_size=vocab_size, terms=terms)
    assert gpu_chunk_loss() is not chunk_loss and found[2] is logits  # overwritten
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found[2].float(), expected[2].float(), rtol=1e-2, atol=1e-6)
    assert found[2][:, vocab_size:].eq(0).all()


@pytest.mark.gpu
def test_the_kernel_propagates_nan() -> None:
    logits = torch.zeros(2, 64, device="cuda")
    logits[0, 3] = float("nan")
    targets, weights = torch.zeros(2, dtype=torch.long, device="cuda"), torch.ones(2, device="cuda")
    assert gpu_chunk_loss()(logits, targets, weights, vocab_size=64, terms=LossTerms())[0].isnan()


@pytest.mark.gpu
def test_a_gpu_agrees_in_bf16() -> None:
    features, weight, _ = leaves(300, 64, 1001)
    targets, mask = torch.randint(1001, (300,)), torch.rand(300) < 0.7
    expected, _ = linear_cross_entropy(Readout(features, weight, None), targets, mask)
    expected_gradients = torch.autograd.grad(expected, [features, weight])
    on_gpu = features.detach().cuda().requires_grad_(), weight.detach().cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss, _ = linear_cross_entropy(Readout(*on_gpu, None), targets.cuda(), mask.cuda(), rows=128)
    assert float(loss) == pytest.approx(float(expected), rel=5e-3)
    for ours, theirs in zip(torch.autograd.grad(loss, on_gpu), expected_gradients, strict=True):
        assert (ours.cpu() - theirs).norm() / theirs.norm() < 0.02
