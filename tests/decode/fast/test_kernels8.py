"""Products with 8-bit weights on a GPU against what the weights stand for."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.decode.fast.products import Triton8
from weft.decode.fast.rounding import Packed, quantize_rows

pytestmark = pytest.mark.gpu
SHAPES = [(64, 128), (6, 96), (258, 1056), (40, 100), (4096, 4096)]


def made(N: int, K: int) -> tuple[Triton8, Tensor]:
    """A product, and its weights as numbers (N, K)."""
    torch.manual_seed(N)
    rounded = quantize_rows(torch.randn(N, K, device="cuda") * torch.linspace(0.1, 3.0, N, device="cuda")[:, None])
    return Triton8(Packed.of(rounded, "int8")), rounded.dequantize().double()


def close(ours: Tensor, theirs: Tensor, by: float) -> None:
    assert float((ours.double() - theirs).norm() / theirs.norm()) < by


@pytest.mark.parametrize("shape", SHAPES)
def test_a_few_rows_and_many(shape: tuple[int, int]) -> None:
    product, weight = made(*shape)
    for rows in (1, 2, 17, 64, 65, 256, 300):
        x = torch.randn(rows, shape[1], device="cuda")
        x[0] = 0
        x[-1, 3] = 60.0  # an outlier, which makes the scale of its row large
        close(product(x), F.linear(x.double(), weight), 0.001)
        close(product(x.bfloat16()), F.linear(x.bfloat16().double(), weight), 0.004)  # the sums are in bf16


@pytest.mark.parametrize("shape", SHAPES)
def test_what_stands_around_it(shape: tuple[int, int]) -> None:
    from weft.decode.fast import kernels8

    (product, weight), (N, K) = made(*shape), shape
    x, both = torch.randn(5, 7, K, device="cuda"), torch.randn(5, 7, 2 * K, device="cuda")
    gain, residual = torch.randn(K, device="cuda"), torch.randn(5, 7, N, device="cuda")
    ways = {
        (gain, 1e-5, False): (x, F.rms_norm(x, (K,), gain, 1e-5)),
        (None, 0.0, True): (both, F.silu(both[..., :K]) * both[..., K:]),
    }
    for given, (read, expected) in ways.items():
        for added in (None, residual):
            found = kernels8.product(
                kernels8.rounded(read, *given), product.numbers, product.scales, torch.float32, added
            )
            wanted = F.linear(expected.double(), weight) + (0 if added is None else added.double())
            close(found, wanted, 0.001)
