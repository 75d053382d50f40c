"""The chunked loss against the plain one, and the plain one against torch's."""

import pytest
import torch
from torch.nn import functional as F

from weft.nn.config import LossTerms
from weft.nn.loss import (
    Readout,
    _add_product,
    chunk_loss,
    chunk_rows,
    cross_entropy,
    gpu_chunk_loss,
    linear_cross_entropy,
)


def test_plain_loss_is_torchs() -> None:
    logits, targets = torch.randn(9, 11), torch.randint(11, (9,))
    assert torch.allclose(cross_entropy(logits, targets), F.cross_entropy(logits, targets, reduction="none"), atol=1e-6)


def test_smoothing_is_torchs() -> None:
    logits, targets = torch.randn(9, 11), torch.randint(11, (9,))
    expected = F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    assert torch.allclose(cross_entropy(logits, targets, LossTerms(smoothing=0.1)), expected, atol=1e-6)


def test_z_loss_adds_the_squared_normaliser() -> None:
    logits, targets = torch.randn(9, 11), torch.randint(11, (9,))
    difference = cross_entropy(logits, targets, LossTerms(z_loss=0.5)) - cross_entropy(logits, targets)
    assert torch.allclose(difference, 0.5 * logits.logsumexp(-1).square(), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 7, 1000])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_loss_equals_plain(rows: int, smoothing: float, z_loss: float, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    N, D, V = 17, 5, 13
    features, weight, bias = (
        torch.randn(shape, generator=generator, requires_grad=True) for shape in ((N, D), (V, D), (V,))
    )
    targets, mask = torch.randint(V, (N,), generator=generator), torch.rand(N, generator=generator) < 0.7
    given = bias if with_bias else None
    leaves = [features, weight, bias] if with_bias else [features, weight]

    losses = cross_entropy(F.linear(features, weight, given), targets, LossTerms(smoothing, z_loss))
    expected = losses[mask].sum()
    expected_gradients = torch.autograd.grad(expected * 0.3, leaves)

    loss, nll = linear_cross_entropy(
        Readout(features, weight, given), targets, mask, LossTerms(smoothing, z_loss), rows
    )
    gradients = torch.autograd.grad(loss * 0.3, leaves)

    assert torch.allclose(loss, expected, rtol=1e-5)
    plain = F.cross_entropy(F.linear(features, weight, given), targets, reduction="none")[mask].sum()
    assert torch.allclose(nll, plain, rtol=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_capped_logits_have_the_slope_of_tanh() -> None:
    features, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((17, 5), (13, 5), (13,)))
    targets, leaves = torch.randint(13, (17,)), [features, weight, bias]
    capped = 2.0 * torch.tanh(F.linear(features, weight, bias) / 2.0)
    expected = F.cross_entropy(capped, targets, reduction="sum")
    readout = Readout(features, weight, bias, softcap=2.0)
    loss, nll = linear_cross_entropy(readout, targets, rows=4)
    torch.testing.assert_close(readout.logits(), capped)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nll, expected)
    for mine, other in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_masked_places_give_no_gradient_even_where_their_loss_is_infinite() -> None:
    features = torch.tensor([[1.0], [float("inf")]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    readout = Readout(features.nan_to_num(posinf=1e30), weight, None)
    loss, _ = linear_cross_entropy(readout, torch.tensor([0, 1]), torch.tensor([True, False]))
    (gradient,) = torch.autograd.grad(loss, weight)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_logits_of_the_whole_batch_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor with as many elements as batch × vocabulary is made, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    N, D, V, rows = 256, 4, 512, 16
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    features, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    with Watch():
        loss, _ = linear_cross_entropy(Readout(features, weight, None), torch.randint(V, (N,)), rows=rows)
        loss.backward()
    assert rows * V <= largest < N * V // 8


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.2, 0.0), (0.1, 1e-2)])
def test_columns_that_are_no_words_count_for_nothing(smoothing: float, z_loss: float) -> None:
    """A table filled up to an even size: whatever its extra rows say, loss and gradient are those of the words."""
    torch.manual_seed(0)
    logits, targets, weights = torch.randn(5, 11), torch.randint(11, (5,)), torch.rand(5)
    filled = torch.cat([logits, torch.full((5, 3), 7.0)], dim=1)
    loss, nll, gradient = chunk_loss(filled.clone(), targets, weights, 11, LossTerms(smoothing, z_loss))
    expected = chunk_loss(logits.clone(), targets, weights, 11, LossTerms(smoothing, z_loss))
    assert torch.allclose(loss, expected[0])
    assert torch.allclose(nll, expected[1])
    assert torch.allclose(gradient[:, :11], expected[2], atol=1e-7)
    assert torch.equal(gradient[:, 11:], torch.zeros(5, 3))


def test_a_table_that_is_filled_up_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's path, with the processor's arithmetic."""
    torch.manual_seed(0)
    features, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((9, 4), (11, 4), (11,)))
    targets = torch.randint(11, (9,))
    leaves = [features, weight, bias]
    expected, _ = linear_cross_entropy(Readout(*leaves), targets, terms=LossTerms(smoothing=0.1))
    wanted = torch.autograd.grad(expected, leaves)
    monkeypatch.setattr("weft.nn.loss._filling", lambda vocab_size, features: 5)
    loss, _ = linear_cross_entropy(Readout(*leaves), targets, terms=LossTerms(smoothing=0.1), rows=4)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_gradients_of_the_table_are_added_up_in_fp32() -> None:
    """In bf16 a sum over many chunks would stop growing; here each chunk adds 1/512 to a sum of 1."""
    features, weight = torch.ones(513, 1, dtype=torch.bfloat16), torch.zeros(2, 1, requires_grad=True)
    features[1:] = 2.0**-8
    loss, _ = linear_cross_entropy(Readout(features, weight, None), torch.zeros(513, dtype=torch.long), rows=1)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.dtype == torch.float32
    assert gradient.flatten().tolist() == pytest.approx([-1.5, 1.5])


def test_chunks_are_powers_of_two_that_shrink_as_the_vocabulary_grows() -> None:
    features = torch.zeros(1, 1)
    assert [chunk_rows(features, words) for words in (65, 8192, 50257, 1 << 30)] == [32768, 512, 64, 1]


def test_a_product_begins_a_sum_or_adds_to_it() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 5), torch.randn(5, 2)
    first = _add_product(None, a, b)
    assert torch.allclose(first, a @ b)
    assert torch.allclose(_add_product(first, a, b), 2 * a @ b)
    assert _add_product(None, a.bfloat16(), b.bfloat16()).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "width"), [(11, 11), (100, 128), (9000, 9088), (50257, 50304)])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.2, 1e-3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_chunk_loss(vocab_size: int, width: int, smoothing: float, z_loss: float, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    logits = (3 * torch.randn(33, width, device="cuda")).to(dtype)
    targets, weights = torch.randint(vocab_size, (33,), device="cuda"), torch.rand(33, device="cuda")
    weights[3] = 0.0
    given = targets, weights, vocab_size, LossTerms(smoothing, z_loss)
    expected = chunk_loss(logits.clone(), *given)
    found = gpu_chunk_loss()(logits, *given)
    assert gpu_chunk_loss() is not chunk_loss
    assert found[2] is logits  # no memory of its own
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5)
    assert torch.allclose(found[2].float(), expected[2].float(), rtol=1e-2, atol=1e-6)
    assert found[2][:, vocab_size:].eq(0).all()


@pytest.mark.gpu
def test_the_kernel_hides_no_trouble() -> None:
    logits = torch.zeros(2, 64, device="cuda")
    logits[0, 3] = float("nan")
    given = torch.zeros(2, dtype=torch.long, device="cuda"), torch.ones(2, device="cuda"), 64, LossTerms()
    assert gpu_chunk_loss()(logits, *given)[0].isnan()


@pytest.mark.gpu
def test_a_gpu_agrees_in_bf16() -> None:
    torch.manual_seed(0)
    features, weight = torch.randn(300, 64, requires_grad=True), torch.randn(1001, 64, requires_grad=True)
    targets, mask = torch.randint(1001, (300,)), torch.rand(300) < 0.7
    expected, _ = linear_cross_entropy(Readout(features, weight, None), targets, mask)
    wanted = torch.autograd.grad(expected, [features, weight])
    given = [t.detach().cuda().requires_grad_() for t in (features, weight)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss, _ = linear_cross_entropy(Readout(*given, None), targets.cuda(), mask.cuda(), rows=128)
    assert float(loss) == pytest.approx(float(expected), rel=5e-3)
    for ours, theirs in zip(torch.autograd.grad(loss, given), wanted, strict=True):
        assert (ours.cpu() - theirs).norm() / theirs.norm() < 0.02
