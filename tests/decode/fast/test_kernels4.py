"""Products with 4-bit weights on a GPU equal those with the dequantised weights."""

import pytest
import torch
from tests.decode.fast.test_kernels8 import assert_near
from torch import Tensor
from torch.nn import functional as F

from weft.decode.fast.matmul import TritonInt4
from weft.decode.fast.quantized_weights import quantize_groups, quantize_symmetric

pytestmark = pytest.mark.gpu
SHAPES = [(64, 128), (6, 96), (258, 1056), (4096, 4096)]


def build(N: int, K: int, centred: bool = True) -> tuple[TritonInt4, Tensor]:
    """A product, and its weights (N, K) dequantised with scales and centres in bf16."""
    torch.manual_seed(N)
    weight = torch.randn(N, K, device="cuda") + 0.3 * centred
    quantized = (quantize_groups if centred else quantize_symmetric)(weight)
    if quantized.centres is not None:
        quantized = quantized._replace(centres=quantized.centres.bfloat16().float())
    return TritonInt4(quantized.pack("int4")), quantized.dequantize().double()


def quantize_x(x: Tensor) -> Tensor:
    """Round x (1, K) as the product of one row does: to 8 bits, in groups of 32."""
    groups = x.float().view(-1, 32)
    peak = groups.abs().amax(dim=1, keepdim=True)
    return ((groups * (127 / peak)).round().double() * (peak.double() / 127)).view(1, -1)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_few_and_many_rows(shape: tuple[int, int], centred: bool) -> None:
    matmul, weight = build(*shape, centred)
    for rows in (1, 2, 17, 64, 256, 300):
        x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
        assert_near(matmul(x), F.linear(x.double(), weight), 0.006)  # weights and sums in bf16
    x = torch.randn(3, shape[1], device="cuda")
    assert_near(matmul(x), F.linear(x.double(), weight), 0.002)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fused", ["nothing", "norm", "gate", "norm and gate", "residual"])
def test_one_row_with_fused_operations(shape: tuple[int, int], fused: str) -> None:
    from weft.decode.fast import kernels

    matmul, weight = build(*shape)
    N, K = shape
    x = torch.randn(1, K, device="cuda")
    gain = torch.randn(K, device="cuda") if "norm" in fused else None
    residual, gated = torch.randn(1, N, device="cuda") if fused == "residual" else None, "gate" in fused
    root = (x.double().square().mean() + 1e-5).rsqrt() if gain is not None else 1.0
    expected = F.linear(quantize_x(x if gain is None else x * gain) * root, weight)
    if gated:
        expected = F.silu(expected[:, : N // 2]) * expected[:, N // 2 :]
    if residual is not None:
        expected = expected + residual.double()
    # a value may be rounded the other way
    for dtype, tolerance in ((torch.float32, 3e-4), (torch.bfloat16, 0.02)):
        tensors = [None if tensor is None else tensor.to(dtype) for tensor in (gain, residual)]
        found = kernels.matvec(x.to(dtype), matmul.numbers, matmul.scales, tensors[0], 1e-5, tensors[1], gated)
        assert_near(found, expected, tolerance)
