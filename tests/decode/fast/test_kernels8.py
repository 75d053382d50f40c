"""Products with 8-bit weights on a GPU equal those with the dequantised weights."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.decode.fast.matmul import TritonInt8
from weft.decode.fast.quantized_weights import quantize_rows

pytestmark = pytest.mark.gpu
SHAPES = [(64, 128), (6, 96), (258, 1056), (40, 100), (4096, 4096)]


def build(N: int, K: int) -> tuple[TritonInt8, Tensor]:
    """A product, and its weights (N, K) dequantised."""
    torch.manual_seed(N)
    quantized = quantize_rows(torch.randn(N, K, device="cuda") * torch.linspace(0.1, 3.0, N, device="cuda")[:, None])
    return TritonInt8(quantized.pack("int8")), quantized.dequantize().double()


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((found.double() - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("shape", SHAPES)
def test_few_and_many_rows(shape: tuple[int, int]) -> None:
    matmul, weight = build(*shape)
    for rows in (1, 2, 17, 64, 65, 256, 300):
        x = torch.randn(rows, shape[1], device="cuda")
        x[0] = 0
        x[-1, 3] = 60.0  # an outlier makes the scale of its row large
        assert_near(matmul(x), F.linear(x.double(), weight), 0.001)
        assert_near(matmul(x.bfloat16()), F.linear(x.bfloat16().double(), weight), 0.004)  # the sums are in bf16


@pytest.mark.parametrize("shape", SHAPES)
def test_fused_norm_gate_and_residual(shape: tuple[int, int]) -> None:
    from weft.decode.fast import kernels8

    (matmul, weight), (N, K) = build(*shape), shape
    x, both = torch.randn(5, 7, K, device="cuda"), torch.randn(5, 7, 2 * K, device="cuda")
    gain, residual = torch.randn(K, device="cuda"), torch.randn(5, 7, N, device="cuda")
    cases = [
        (kernels8.quantize(x, gain, 1e-5), F.rms_norm(x, (K,), gain, 1e-5)),
        (kernels8.quantize(both, gated=True), F.silu(both[..., :K]) * both[..., K:]),
    ]
    for quantized, activations in cases:
        for added in (None, residual):
            found = kernels8.matmul(quantized, matmul.numbers, matmul.scales, torch.float32, added)
            expected = F.linear(activations.double(), weight) + (0 if added is None else added.double())
            assert_near(found, expected, 0.001)
