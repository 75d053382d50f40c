"""Products with 4-bit weights on a GPU against what the weights stand for."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.decode.fast.products import Triton4
from weft.decode.fast.rounding import Packed, quantize_around_zero, quantize_groups

pytestmark = pytest.mark.gpu
SHAPES = [(64, 128), (6, 96), (258, 1056), (4096, 4096)]


def made(N: int, K: int, centred: bool = True) -> tuple[Triton4, Tensor]:
    """A product, and its weights as numbers (N, K): what its scales and centres in bf16 give."""
    torch.manual_seed(N)
    weight = torch.randn(N, K, device="cuda") + 0.3 * centred
    rounded = (quantize_groups if centred else quantize_around_zero)(weight)
    if rounded.centres is not None:
        rounded = rounded._replace(centres=rounded.centres.bfloat16().float())
    return Triton4(Packed.of(rounded, "int4")), rounded.dequantize().double()


def close(ours: Tensor, theirs: Tensor, by: float) -> None:
    assert float((ours.double() - theirs).norm() / theirs.norm()) < by


def in_eight_bits(x: Tensor) -> Tensor:
    """x (1, K) as the product of one row rounds it, in groups of 32."""
    groups = x.float().view(-1, 32)
    most = groups.abs().amax(dim=1, keepdim=True)
    return ((groups * (127 / most)).round().double() * (most.double() / 127)).view(1, -1)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_few_rows_and_many(shape: tuple[int, int], centred: bool) -> None:
    product, weight = made(*shape, centred)
    for rows in (1, 2, 17, 64, 256, 300):
        x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
        close(product(x), F.linear(x.double(), weight), 0.006)  # weights and sums in bf16
    x = torch.randn(3, shape[1], device="cuda")
    close(product(x), F.linear(x.double(), weight), 0.002)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("around", ["nothing", "norm", "gate", "norm and gate", "residual"])
def test_one_row_with_what_stands_around_it(shape: tuple[int, int], around: str) -> None:
    from weft.decode.fast import kernels

    product, weight = made(*shape)
    N, K = shape
    x = torch.randn(1, K, device="cuda")
    gain, residual = torch.randn(K, device="cuda"), torch.randn(1, N, device="cuda")
    normed, gated, added = "norm" in around, "gate" in around, around == "residual"
    root = (x.double().square().mean() + 1e-5).rsqrt() if normed else 1.0
    expected = F.linear(in_eight_bits(x * gain if normed else x) * root, weight)
    if gated:
        expected = F.silu(expected[:, : N // 2]) * expected[:, N // 2 :]
    if added:
        expected = expected + residual.double()
    given = gain if normed else None, 1e-5, residual if added else None, gated
    found = kernels.matvec(x, product.numbers, product.scales, *given)
    close(found, expected, 3e-4)  # a number may be rounded the other way
    in_half = [None if each is None else each.bfloat16() if isinstance(each, Tensor) else each for each in given]
    close(kernels.matvec(x.bfloat16(), product.numbers, product.scales, *in_half), expected, 0.02)
